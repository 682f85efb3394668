"""Rules of the user's own: Python files outside the package that register rules.

Loading a file runs it, so only files are loaded that the recipe or the command names. A file may add names of rules but not replace
them. It counts as code of the runs of its rules (runs/code_checksums.py).
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

# Rules by the file that registers them.
_loaded: dict[Path, dict[str, type[Mixer]]] = {}


def load_modules(folder: Path, modules: Any, source: str) -> list[Path]:
    """Load Python files, each once per process.

    Args:
        folder: The folder that relative paths start from.
        modules: Paths of files, and of folders of files.
        source: The option that names them, for error messages.

    Returns:
        The files.

    Raises:
        UserError: There is no such file, two files have one name, or a file cannot be loaded.
    """
    if not isinstance(modules, list) or not all(isinstance(text, str) and text for text in modules):
        raise UserError(f"{source} is a list of Python files, or of folders of them, got {modules!r}")
    files = [file for text in modules for file in _files(folder, text, source)]
    names = [file.name for file in dict.fromkeys(files)]
    package = Path(depthmix.__file__).parent
    # Records of runs name files without their folders.
    for name in names:
        if names.count(name) > 1 or (package / name).exists():
            other = "another" if names.count(name) > 1 else "a file of the package"
            raise UserError(f"{source}, {name} is called like {other}; rename it")
    for file in files:
        registry._MIXERS.update(_loaded[file] if file in _loaded else _load(file, source))
    return files


def loaded_files() -> list[str]:
    """Return the files that this process has loaded, for a process that is to know the same rules."""
    return [str(file) for file in _loaded]


def _files(folder: Path, text: str, source: str) -> list[Path]:
    path = (folder / text).resolve()
    if path.is_file() and path.suffix == ".py":
        return [path]
    files = sorted(path.glob("[!_]*.py")) if path.is_dir() else []
    if not files:
        raise UserError(f"{source}, {text}: there is no Python file there")
    return files


def _load(file: Path, source: str) -> dict[str, type[Mixer]]:
    """Run a file and return the rules that it registers."""
    before = dict(registry._MIXERS)
    # Two folders may have files of one name.
    mark = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    name = f"depthmix_study_{file.stem}_{mark}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where Python looks for the source of its classes
    try:
        spec.loader.exec_module(module)
        registered = {n: c for n, c in registry._MIXERS.items() if before.get(n) is not c}
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
    _loaded[file] = registered
    return registered
