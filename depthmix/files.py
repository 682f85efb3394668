"""Read files, write them atomically, and explain errors of the system."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from depthmix.errors import CHECKPOINT, DISK, UserError

TEMPORARY = ".tmp-"  # prefix of the names of unfinished files


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically and durably; on an error the old one stays. Raises OSError, naming the file."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    try:
        with open(temporary, "wb", opener=open_no_link) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        # An error of writing has no file name, and the temporary name would mean nothing to a user.
        error.filename = str(path)
        raise
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_hashed(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file durably, chunk by chunk.

    Args:
        path: The file, which must not exist.
        chunks: Its content.

    Returns:
        {"size": bytes, "sha256": hexadecimal digits}, as a manifest lists them.

    Raises:
        OSError: The file cannot be written. The error names it.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with open(path, "xb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # an error of writing has no file name
        raise
    return {"size": size, "sha256": digest.hexdigest()}


def open_no_link(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=open_no_link)`, refusing symbolic links and pipes.

    Raises:
        OSError: ELOOP for a link, EINVAL for anything else that is not a plain file.
    """
    # Without O_NONBLOCK, opening a pipe that nobody reads would hang. Plain files ignore the flag.
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", path)
    return descriptor


def is_plain_file(path: Path) -> bool:
    """Tell whether a path is a plain file: not a link, folder or pipe, and not missing."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def write_text(path: Path, text: str) -> None:
    """Write a text with `write_file`, creating the folders above it. Raises UserError if it cannot be written."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode("utf-8"))


def check_writable(folder: Path) -> None:
    """Raise UserError if a folder cannot be written to. A folder created for the check is removed again."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"{TEMPORARY}{os.getpid()}"
        with open(probe, "xb"):
            pass
        probe.unlink()
    for path in made:
        with suppress(OSError):  # another process has put files into it
            path.rmdir()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal digits. Raises OSError if it cannot be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_bytes(value: Any) -> bytes:
    """Encode a value as indented JSON in ASCII. Raises ValueError for a number that is not finite."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode("ascii")


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises UserError if it cannot be read or is damaged."""
    with reading(path):
        raw = path.read_bytes()
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: it is not JSON ({error}).", CHECKPOINT) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object.", CHECKPOINT)
    return content


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Parse JSON that holds an object; return an empty one for anything else, as of a damaged file."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def find_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; return an empty one if the file is missing, unreadable or damaged."""
    with suppress(OSError):
        return parse_json_object(path.read_bytes() if path.is_file() else b"")
    return {}


def sync_folder(folder: Path) -> None:
    """Flush the file names in a folder to the disk, on systems that can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that do not sync folders
            raise
    finally:
        os.close(descriptor)


def reason(error: OSError, path: Path | None = None) -> str:
    """Describe a system error in words that a user can act on, with its path unless that is `path`."""
    where = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
    if error.errno == errno.ENOSPC:
        return f"the disk is full{where}"
    if error.errno == errno.EDQUOT:
        return f"the disk quota is used up{where}"
    if error.errno == errno.EFBIG:
        return f"the file is larger than a limit of this system allows{where}"
    if error.errno == errno.ELOOP:
        return f"it is a symbolic link, or a folder on the way is one that goes in a circle{where}"
    return f"{(error.strerror or str(error)).lower()}{where}"


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FAILING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO)


def remedy(error: OSError) -> str:
    """Return advice about a system error, a clause that ends in running the command again."""
    again = "then run the same command again"
    if error.errno in FULL:
        return f"make room, {again}"
    if error.errno in FAILING:
        return f"the disk or the connection to it is failing: see the system's log, {again}"
    if error.errno == errno.ENOMEM:
        return f"free memory or raise its limit, {again}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"raise the limit of open files (ulimit -n), {again}"
    if error.errno == errno.ENAMETOOLONG:
        return f"choose a shorter name, {again}"
    return f"make it writable, {again}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError while a path is written into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"Could not write {path}: {reason(error, path)}; {remedy(error)}.", DISK) from error


@contextmanager
def reading(path: Path, exit_code: int = CHECKPOINT) -> Iterator[None]:
    """Turn an OSError while a path is read into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"Cannot read {path}: {reason(error, path)}.", exit_code) from error


def check_above(path: Path) -> None:
    """Raise UserError for a path below a file."""
    above = next((p for p in path.parents if os.path.exists(p) and not os.path.isdir(p)), None)
    if above:
        raise UserError(f"{path} cannot be written: {above} is a file; choose another folder.", DISK)
