"""Mechanisms that a study, or a command, brings along: Python files which register mixers and are part of no package.

A file is run as it is, so only what is named is loaded, and only from this machine's disk. It is counted among an
arm's code like any mechanism's own file (runs/code_checksums.py). It may add names, never take one that is there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import depthmix
from depthmix.errors import UserError
from depthmix.mixers import Mixer, OptionError, registry

_loaded: dict[Path, dict[str, type[Mixer]]] = {}  # by file: what it registers


def load_modules(folder: Path, said: Any, source: str) -> list[Path]:
    """Load Python files and folders of them, paths from a folder: the files, each once a process. source: who names them."""
    if not isinstance(said, list) or not all(isinstance(text, str) and text for text in said):
        raise UserError(f"{source} is a list of Python files, or of folders of them, got {said!r}")
    files = [file for text in said for file in _files(folder, text, source)]
    names = [file.name for file in dict.fromkeys(files)]
    own = Path(depthmix.__file__).parent
    for name in names:  # by which an arm's code is known, wherever the files lie
        if names.count(name) > 1 or (own / name).exists():
            other = "another" if names.count(name) > 1 else "a file of the package"
            raise UserError(f"{source}, {name} is called like {other}; rename it")
    for file in files:
        registry._MIXERS.update(_loaded[file] if file in _loaded else _load(file, source))
    return files


def _files(folder: Path, text: str, source: str) -> list[Path]:
    path = (folder / text).resolve()
    if path.is_file() and path.suffix == ".py":
        return [path]
    found = sorted(path.glob("[!_]*.py")) if path.is_dir() else []
    if not found:
        raise UserError(f"{source}, {text}: there is no Python file there")
    return found


def _load(file: Path, source: str) -> dict[str, type[Mixer]]:
    """Run a file and return the rules that it registers."""
    before = dict(registry._MIXERS)
    mark = hashlib.sha256(str(file).encode()).hexdigest()[:8]  # studies in two folders may have files of one name
    name = f"depthmix_study_{file.stem}_{mark}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where Python looks for the source of its classes
    try:
        spec.loader.exec_module(module)
        found = {n: c for n, c in registry._MIXERS.items() if before.get(n) is not c}
    except BaseException as error:
        registry._MIXERS.clear()
        registry._MIXERS.update(before)
        del sys.modules[name]
        if isinstance(error, SystemExit):
            code = "" if error.code is None else f" with {error.code!r}"
            what = f"{source}, {file.name} ends the program{code} instead of registering mixers"
            raise UserError(f"{what}; take the exit out, or put it under `if __name__ == '__main__':`") from error
        if isinstance(error, UserError) or not isinstance(error, Exception):
            raise
        what = " ".join(str(error).split())
        if isinstance(error, OptionError):  # of `register`
            raise UserError(f"{source}, {file.name}: {what}") from error
        raise UserError(f"{source}, {file.name} cannot be loaded: {type(error).__name__}: {what}") from error
    _loaded[file] = found
    return found
