"""Write prepared data completely or not at all, and delete only files that `depthmix data` wrote.

    .NAME.partial/   is filled first; the file .depthmix in it marks the folder as depthmix's
    NAME             is the final name; old data changes places with the new and is then removed file by file

An existing .NAME.partial is taken over only if a killed process left it. Links are never followed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from depthmix.data.integrity import VERIFIED
from depthmix.errors import DATA, DISK, USAGE, UserError
from depthmix.files import TEMPORARY, check_above, is_plain_file, sync_folder, write_file
from depthmix.ownership import META, check_new_folder, read_prepared

try:
    import fcntl
except ImportError:  # Windows: no lock, so two writers at a time are not noticed
    fcntl = None  # type: ignore[assignment]

MARKER = ".depthmix"  # in a folder that is being filled
MARK = b"`depthmix data` fills this folder and gives it its name at the end.\n"
# Files that are written before meta.json lists them: tokens, pixels, labels and the tokenizer.
UNLISTED = re.compile(r"(train|val)-[\w.-]+\.bin|tokenizer\.json")


@contextlib.contextmanager
def staged(target: Path, overwrite: bool) -> Iterator[Path]:
    """Provide a folder to fill, which replaces the target if the block succeeds and is removed if it fails.

    Args:
        target: Folder to write.
        overwrite: Whether to replace prepared data in the target.

    Raises:
        UserError: The target or the partial folder holds files that `depthmix data` did not write, or the disk is
            full.
    """
    _check_target(target, overwrite)
    folder = target.parent / f".{target.name}.partial"
    with _disk_errors(target), contextlib.ExitStack() as locks:
        target.parent.mkdir(parents=True, exist_ok=True)
        _take(folder, target, locks)
        rest = True
        try:
            yield folder
            _check_target(target, overwrite)  # again: it took a while
            (folder / MARKER).unlink()
            sync_folder(folder)
            if read_prepared(target) is not None:
                _lock(target, locks)  # it moves to where the next writer would look
                _exchange(folder, target)
            else:
                os.replace(folder, target)
                rest = False
            sync_folder(target.parent)
        finally:
            if rest:
                _remove(folder)
        if rest and folder.exists() and (name := foreign_file(folder)):  # put there while the new data took its place
            what = f"{target} is written, and {name}, which was in the old data and is not depthmix's"
            raise UserError(f"{what}, now lies in {folder}: move it to where you want it.", DATA)


def own_files(folder: Path) -> set[str]:
    """Return the names of the files in a folder that `depthmix data` wrote, according to its meta.json if it has one."""
    meta, names = read_prepared(folder), os.listdir(folder)
    if meta is None:
        listed = {name for name in names if UNLISTED.fullmatch(name)}
    else:
        listed = set(meta["sha256"] if isinstance(meta.get("sha256"), dict) else ())
    listed |= {META, VERIFIED, MARKER, *(name for name in names if name.startswith(TEMPORARY))}
    return {name for name in names if name in listed and is_plain_file(folder / name)}


def foreign_file(folder: Path) -> str | None:
    """Return the first name in a folder of a file that `depthmix data` did not write; None if there is none."""
    return min(set(os.listdir(folder)) - own_files(folder), default=None)


@contextlib.contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"The disk is full, so {target} was not written: free some space or choose another place."
        elif isinstance(e, FileExistsError | NotADirectoryError):
            message = f"{target} cannot be written: a folder on the way to it is a file."
        else:
            message = f"{target} cannot be written: {e.strerror or e}."
        raise UserError(message, DISK) from e


def _check_target(target: Path, overwrite: bool) -> None:
    if target.name in ("", ".."):
        raise UserError(f"{target} cannot be written: name a new folder.", USAGE)
    check_above(target)
    check_new_folder(target.parent, "the data")
    with _disk_errors(target):
        if not os.path.lexists(target):
            return
        if target.is_symlink() or not target.is_dir():
            raise UserError(f"{target} exists and is not a folder: choose another place.", DATA)
        if not any(target.iterdir()):
            return
        if read_prepared(target) is None:
            what = "exists and is not prepared data, so it is left alone"
            raise UserError(f"{target} {what}: choose another folder.", DATA)
        if not overwrite:
            raise UserError(f"{target} already holds prepared data: choose another folder or set overwrite.", DATA)
        if (name := foreign_file(target)) is not None:
            what = f"{target / name} is not a file that `depthmix data` wrote, and overwrite would delete it"
            raise UserError(f"{what}: move it away, or choose another folder.", DATA)


def _take(folder: Path, target: Path, locks: contextlib.ExitStack) -> None:
    """Make the folder, or take over and empty a folder that a killed process left."""
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        try:
            handle = _lock(folder, locks)
        except BlockingIOError as e:
            raise UserError(f"Another process is writing {target}: wait for it to end.", DATA) from e
        except FileNotFoundError:
            continue
        except OSError as e:
            if not os.path.lexists(folder) or (folder.is_dir() and not folder.is_symlink()):
                raise
            raise _not_ours(folder, target, "it is no folder of its own") from e
        # Between the two calls another process may have finished and renamed the folder away.
        if handle is None or (os.path.lexists(folder) and os.path.samestat(os.fstat(handle), os.lstat(folder))):
            break
    _check_left_over(folder, target)
    for name in os.listdir(folder):
        os.unlink(folder / name)
    write_file(folder / MARKER, MARK)


def _check_left_over(folder: Path, target: Path) -> None:
    """Refuse a folder whose contents no process of depthmix can have written."""
    names = os.listdir(folder)
    marked = is_plain_file(folder / MARKER) and (folder / MARKER).read_bytes() == MARK
    # A process killed right at the end leaves complete data, its own or the old one, without the marker.
    if names and not marked and read_prepared(folder) is None:
        raise _not_ours(folder, target, f"it holds {sorted(names)[0]} and no {MARKER}")
    if (name := foreign_file(folder)) is not None:
        raise _not_ours(folder, target, f"it holds {name}")


def _not_ours(folder: Path, target: Path, why: str) -> UserError:
    what = f"{folder}, in which {target} would be prepared, is not depthmix's ({why})"
    return UserError(f"{what}: move it away, or choose another folder.", DATA)


def _remove(folder: Path) -> None:
    """Remove depthmix's files from a folder, and the folder if it is empty then."""
    with contextlib.suppress(OSError):
        for name in own_files(folder):
            os.unlink(folder / name)
        folder.rmdir()


def _lock(folder: Path, locks: contextlib.ExitStack) -> int | None:
    """Lock a folder until the process ends, even by a kill. Returns None where the system has no such locks."""
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    locks.callback(os.close, handle)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders, atomically where the system can."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    current_folder, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2 and renameat2(current_folder, os.fsencode(new), current_folder, os.fsencode(old), exchange) == 0:
        return
    aside = new.with_name(new.name + "-old")
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except OSError:
        os.rename(aside, old)
        raise
    os.rename(aside, new)
