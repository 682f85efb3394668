"""Checkpoints that survive a kill at any instant.

A checkpoint is a folder `step-00000400` of model.safetensors, optimizer.safetensors, state.json and manifest.json, which
holds the size and the SHA-256 of the others. It is written under a temporary name, fsynced and renamed, so that a name
without a dot is always a complete checkpoint. Nothing here unpickles. One process at a time may save into a folder
(`RunFolder.lock`); any number may read. Where many processes train, the optimizer lies in parts (sharded.py).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from depthmix.errors import CHECKPOINT, DISK, UserError
from depthmix.files import json_bytes, reason, remedy, sync_folder, write_hashed

FORMAT = "depthmix checkpoint"
VERSION = 1
VERSION_IN_PARTS = 2  # with a folder of the processes' parts instead of optimizer.safetensors
PARTS = "parts"
MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
NAME = re.compile(r"(?:\.old-)?step-([0-9]{8,})")
OF_MAPPING = re.compile(r"^unable to (?:open|mmap|stat|resize).* \((\d+)\)$", re.DOTALL)
PART = re.compile(rf"{PARTS}/[\w.-]+\.safetensors")
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass
class Checkpoint:
    """A loaded checkpoint, on the CPU, and its folder."""

    step: int
    state: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    path: Path


class _Broken(Exception):
    """Signals damaged content of a checkpoint; the message names the file."""


# Errors for a file that no longer exists: a training removes old checkpoints while others read them.
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def save_checkpoint(
    folder: str | Path,
    step: int,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: dict[str, Any],
    keep: int,
    announce: Callable[[Path], object] = lambda path: None,
) -> Path:
    """Write a checkpoint, announce it, then remove checkpoints older than the `keep` newest up to this step.

    When this returns, the checkpoint is complete and on the disk. Until then, and when it raises, every earlier
    checkpoint is untouched.

    Args:
        folder: Folder of checkpoints, whose parent must exist.
        step: Steps done.
        model: Tensors of the model.
        optimizer: Tensors of the optimizers.
        state: Anything else, as JSON.
        keep: Checkpoints to keep.
        announce: Called with the new checkpoint before older ones are removed. Files that name a checkpoint change
            here.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: The disk is full or not writable.
        ValueError: `state` does not survive a round trip through JSON.
    """
    folder = Path(folder)
    text = state_file(step, state)
    with writing_checkpoint(folder, step):
        temporary = begin(folder, step)
        files = {
            MODEL: write_hashed(temporary / MODEL, safetensors(model)),
            OPTIMIZER: write_hashed(temporary / OPTIMIZER, safetensors(optimizer)),
            STATE: write_hashed(temporary / STATE, [text]),
        }
        path = publish(temporary, folder, step, files, VERSION)
    announce(path)
    remove_old(folder, step, keep)
    return path


def state_file(step: int, state: dict[str, Any]) -> bytes:
    """Return the content of state.json. Raises ValueError for a state that does not survive a round trip through JSON."""
    try:
        survives = isinstance(state, dict) and json.loads(json_bytes(state)) == state
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the state of a checkpoint must be JSON: {error}") from error
    if not survives:  # tuples, or keys that are not strings
        raise ValueError(
            "the state of a checkpoint must be a dictionary that a round trip through JSON leaves unchanged"
        )
    return json_bytes({"step": step, "state": state})


@contextmanager
def writing_checkpoint(folder: Path, step: int) -> Iterator[None]:
    """Clean up after a failed write inside this context, and turn an OSError into one sentence."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            _tidy(folder)
        if isinstance(error, OSError):
            raise UserError(_not_written(error, step, folder), DISK) from error
        raise


def begin(folder: Path, step: int) -> Path:
    """Create a folder under a temporary name to write a checkpoint into."""
    if not folder.is_dir():
        folder.mkdir()
        sync_folder(folder.parent)
    _tidy(folder)
    temporary = folder / f".tmp-step-{step:08d}-{os.getpid()}"
    temporary.mkdir()
    return temporary


def publish(temporary: Path, folder: Path, step: int, files: dict[str, Any], version: int) -> Path:
    """Write a checkpoint's manifest and give the folder its final name."""
    path = folder / f"step-{step:08d}"
    write_hashed(temporary / MANIFEST, [json_bytes({"format": FORMAT, "version": version, "files": files})])
    sync_folder(temporary)
    if os.path.lexists(path):  # readers fall back on the name with the dot while the plain name is missing
        path.rename(folder / f".old-{path.name}")
    temporary.rename(path)
    sync_folder(folder)
    return path


def remove_old(folder: Path, step: int, keep: int) -> None:
    """Remove checkpoints older than the `keep` newest up to this step."""
    # The new checkpoint is complete. Failing to remove an old one only costs space, and the next save tries again.
    with suppress(OSError):
        _tidy(folder)
        for old in [p for p in list_checkpoints(folder) if _step(p) <= step][keep:]:
            # Renamed first, so that a kill halfway does not leave a broken checkpoint.
            doomed = folder / f".tmp-{old.name}-{os.getpid()}"
            old.rename(doomed)
            _remove(doomed)


def list_checkpoints(folder: str | Path) -> list[Path]:
    """List the checkpoints in a folder, newest first, unverified; none if the folder does not exist."""
    folder = Path(folder)
    by_step: dict[int, Path] = {}
    try:
        for path in folder.iterdir():
            if (match := NAME.fullmatch(path.name)) and path.is_dir():
                step = int(match[1])
                if step not in by_step or not path.name.startswith("."):
                    by_step[step] = path
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"Cannot read the checkpoints in {folder}: {reason(error)}.", CHECKPOINT) from error
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def load_checkpoint(path: str | Path, tensors: bool = True) -> Checkpoint:
    """Verify and read one checkpoint.

    Args:
        path: The checkpoint's folder.
        tensors: Whether to read the tensors, too. They are verified in any case.

    Raises:
        UserError: The checkpoint is broken; the message names the newest older good one.
    """
    path = Path(path)
    try:
        return _load(path, tensors)
    except _Broken as broken:
        raise _refusal(path, broken) from broken


def newest_checkpoint(folder: str | Path) -> Checkpoint | None:
    """Verify and read the newest checkpoint, for readers. An older one would be another model, so it is never used instead.

    A checkpoint that a training replaces or removes meanwhile is ignored.

    Returns:
        The checkpoint, or None if there is none at all.

    Raises:
        UserError: The newest checkpoint is broken or cannot be read; the message names the newest older good one.
    """
    while paths := list_checkpoints(folder):
        before = _inode(paths[0])
        try:
            return _load(paths[0])
        except _Broken as broken:
            if before is not None and _inode(paths[0]) == before:
                raise _refusal(paths[0], broken) from broken
    return None


def _refusal(path: Path, broken: _Broken) -> UserError:
    instead = ""
    if not path.exists() and (good := _newest_good(path.parent)):
        return UserError(f"There is no checkpoint {path} any more; the newest good one is {good}.", CHECKPOINT)
    if NAME.fullmatch(path.name):
        good = _newest_good(path.parent, below=_step(path))
        instead = f"; the newest older good one is {good}" if good else "; there is no older good one"
    return UserError(f"Cannot use the checkpoint {path}: {broken}{instead}.", CHECKPOINT)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def read_state_alone(path: Path) -> tuple[int, dict[str, Any]] | None:
    """Return the step and the state of a checkpoint without reading tensors; None if they are broken."""
    try:
        _verify(path, [STATE])
        return _read_state(path)
    except _Broken:
        return None


def is_sound(path: Path) -> bool:
    """Tell whether every file of a checkpoint matches its checksum."""
    try:
        _verify(path)
    except _Broken:
        return False
    return True


def latest_checkpoint(folder: str | Path, warn: Callable[[str], object], tensors: bool = True) -> Checkpoint | None:
    """Read the newest good checkpoint, for a training that resumes.

    Args:
        folder: Folder of checkpoints.
        warn: Called with one sentence for each newer broken checkpoint.
        tensors: Whether to read the tensors, too.

    Returns:
        The checkpoint, or None if there is none at all.

    Raises:
        UserError: All checkpoints are broken.
    """
    while paths := list_checkpoints(folder):
        problems = []
        for path in paths:
            try:
                return _load(path, tensors)
            except _Broken as broken:
                if path.exists():
                    problems.append(f"The checkpoint {path} is broken and was passed over: {broken}.")
                    warn(problems[-1])
        if problems and list_checkpoints(folder) == paths:
            advice = "move that folder away to start from the beginning"
            raise UserError(f"No checkpoint in {folder} can be used; {advice}. {problems[0]}", CHECKPOINT)
        # A training process has replaced the listed checkpoints: list them again.
    return None


def _not_written(error: OSError, step: int, folder: Path) -> str:
    try:
        good = _newest_good(folder)
    except UserError:  # the folder cannot even be read
        good = None
    last = f"the last good checkpoint is still there: {good}" if good else f"there is no earlier one in {folder}"
    advice = remedy(error)
    advice = advice[0].upper() + advice[1:]
    return f"Could not write the checkpoint of step {step}: {reason(error)}; {last}. {advice}."


def _step(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def _newest_good(folder: Path, below: int | None = None) -> Path | None:
    for path in list_checkpoints(folder):
        if below is None or _step(path) < below:
            with suppress(_Broken, UserError):
                _verify(path)
                return path
    return None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _tidy(folder: Path) -> None:
    """Remove leftovers of killed processes, and undo replacements that they did not finish."""
    for path in list(folder.iterdir()):
        if path.name.startswith(".tmp-step-"):
            _remove(path)
        elif path.name.startswith(".old-step-"):
            plain = folder / path.name.removeprefix(".old-")
            if os.path.lexists(plain):
                _remove(path)
            else:
                path.rename(plain)


def safetensors(
    tensors: Mapping[str, Tensor], fetch: Callable[[str], Tensor] | None = None
) -> Iterator[bytes | memoryview]:
    """Encode tensors in the safetensors format, one tensor at a time, so that memory holds one copy on the CPU.

    Args:
        tensors: By name.
        fetch: Returns a tensor when its turn comes, so that `tensors` may be on the meta device.

    Yields:
        Chunks of the file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Widest dtypes first keep every tensor aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for name in names:
        tensor = tensors[name]
        if name in header or tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise ValueError(f"a checkpoint cannot hold {name!r} ({tensor.dtype}, {tensor.layout})")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield (
            (tensors[name] if fetch is None else fetch(name))
            .detach()
            .cpu()
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .numpy()
            .data
        )


def _verify(path: Path, names: Collection[str] | None = None) -> None:
    """Check all files, or those named, against the manifest before parsing any of them."""
    try:
        if not path.is_dir():
            raise _Broken(f"{path} is a file, not a folder" if path.exists() else "there is no such folder")
        if not (path / MANIFEST).is_file():
            raise _Broken(f"it has no {MANIFEST}")
        with open(path / MANIFEST, "rb") as file:
            files = _manifest(file.read(65536))
        for name, entry in files.items():
            if names is not None and name not in names:
                continue
            if not (path / name).is_file():
                raise _Broken(f"{name} is missing")
            with open(path / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != entry["size"]:
                    raise _Broken(f"{name} has {size} bytes where {MANIFEST} says {entry['size']}")
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    raise _Broken(f"{name} does not match its checksum in {MANIFEST}")
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> Exception:
    """Return the exception for a system error. It says nothing about the content, so no older checkpoint is used
    instead.
    """
    if isinstance(error, FileNotFoundError) or error.errno in GONE:  # safetensors gives no number
        return _Broken(reason(error))
    if error.errno == errno.ENOMEM:
        return MemoryError(str(error))
    advice = "it may be whole: try again, or move it away to use an older one"
    return UserError(f"Cannot read the checkpoint {path}: {reason(error)}; {advice}.", CHECKPOINT)


def _system_error(error: RuntimeError, path: Path) -> OSError | None:
    """Extract the system error from one of torch's, which maps files into memory: `unable to mmap … (12)`."""
    match = OF_MAPPING.search(str(error))
    return OSError(int(match[1]), os.strerror(int(match[1])), str(path)) if match else None


def _manifest(raw: bytes) -> dict[str, dict[str, Any]]:
    manifest: Any
    try:
        manifest = json.loads(raw)
        canonical = json_bytes(manifest)
    except (ValueError, RecursionError) as error:
        raise _Broken(f"{MANIFEST} is damaged or was not written by depthmix") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _Broken(f"{MANIFEST} was not written by depthmix")
    version = manifest.get("version")
    if type(version) is not int or version not in (VERSION, VERSION_IN_PARTS):
        raise _Broken(f"{MANIFEST} has format version {version!r}, this depthmix reads up to {VERSION_IN_PARTS}")
    files: Any = manifest.get("files")
    entries = files.values() if isinstance(files, dict) and _right_names(list(files), version) else [None]
    known = list(manifest) == ["format", "version", "files"] and all(
        isinstance(entry, dict) and list(entry) == ["size", "sha256"] for entry in entries
    )
    if not known or canonical != raw:  # there is one encoding, so that no byte of the manifest can change unnoticed
        raise _Broken(f"{MANIFEST} is damaged")
    return files


def _right_names(names: list[str], version: int) -> bool:
    if version == VERSION:
        return names == [MODEL, OPTIMIZER, STATE]
    return names[:1] + names[-1:] == [MODEL, STATE] and all(PART.fullmatch(name) for name in names[1:-1])


def _load(path: Path, tensors: bool = True) -> Checkpoint:
    _verify(path)
    loaded: dict[str, dict[str, Tensor]] = {MODEL: {}, OPTIMIZER: {}}
    for name in loaded if tensors else ():
        try:
            # The loaded tensors are views of the mapped file. Copies stay valid if the file is removed.
            loaded[name] = {key: value.clone() for key, value in _read(path, name).items()}
        except OSError as error:
            raise _unreadable(path, error) from error
        except (SafetensorError, ValueError) as error:
            raise _Broken(f"{name} cannot be read as safetensors ({error})") from error
        except RuntimeError as error:
            if (refused := _system_error(error, path / name)) is None:
                raise
            raise _unreadable(path, refused) from error
    return Checkpoint(*_read_state(path), loaded[MODEL], loaded[OPTIMIZER], path)


def _read(path: Path, name: str) -> Mapping[str, Tensor]:
    if name == MODEL or not (path / PARTS).is_dir():
        return load_file(path / name)
    from depthmix.runs.parts import Parts  # slow to import

    parts = Parts(path / PARTS)
    return {key: parts.get(key) for key in parts.shapes if "/" in key}  # names of the model's parameters have dots


def _read_state(path: Path) -> tuple[int, dict[str, Any]]:
    try:
        content = json.loads((path / STATE).read_bytes(), parse_constant=_refuse)
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise _Broken(f"{STATE} cannot be read as JSON ({error})") from error
    step = content.get("step") if isinstance(content, dict) else None
    if type(step) is not int or step < 0 or not isinstance(content.get("state"), dict):
        raise _Broken(f"{STATE} does not hold a step and a state")
    if NAME.fullmatch(path.name) and _step(path) != step:
        raise _Broken(f"{STATE} is that of step {step}")
    return step, content["state"]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not allowed")
