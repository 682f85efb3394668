"""Checksums of the source files that a run's numbers depend on.

For each arm the files are found by following imports from the files that train any model (ROOTS) and from the arm's rule, so
the files of other rules are not among them. Comments, docstrings and blank lines do not count. Tests hold every kernel to its
reference: a changed kernel changes rounding and step times, but not the rule. So the operators' files share one checksum,
which matters only where arms get equal time.
"""

from __future__ import annotations

import ast
import functools
import gc
import hashlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import depthmix
from depthmix.mixers import OptionError, mixer_class

PACKAGE = Path(depthmix.__file__).parent
ROOTS = (
    "models/decoder.py",
    "train/loop.py",
    "train/optim.py",
    "train/evaluate.py",
    "train/graph.py",
    "data/dataset.py",
)
OF_IMAGES = {"models/decoder.py": "models/vit.py", "data/dataset.py": "data/images.py"}  # roots that are replaced
# Parts that count, of files that contain more than a training step needs.
TASK, TASK_OF_IMAGES = "train/task.py", ("Pictures", "normalised")
PARTS = {"train/loop.py": ("Trainer",), TASK: ("Text",)}
COUNTS = (
    "models/",
    "mixers/",
    "fast/",
    "ops/",
    "data/dataset.py",
    "data/images.py",
    "train/optim.py",
    "train/evaluate.py",
    "train/graph.py",
    "train/build.py",
    "train/loop.py",
    "train/task.py",
    "parallel/alone.py",
    "device.py",
    "schedule.py",
)
# Files that only measure or check, or serve the other kind of data: no result depends on them.
SILENT = ("mixers/mixing.py", "mixers/options.py")
SILENT_FOR_TEXT, SILENT_FOR_IMAGES = ("models/vit.py", "data/images.py"), ("models/decoder.py",)
# Files that define what an operator computes. All other files of operators make it fast.
SPECIFICATIONS = ("reference.py", "rules.py", "coefficients.py", "norm.py", "precision.py", "matmul.py")
# A hundred files are read before every run, and tokenize takes longer than all the rest of it.
STRING_OR_COMMENT = re.compile(
    r"""\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^\\\n"])*"|'(?:\\.|[^\\\n'])*'|\#[^\n]*""", re.DOTALL
)
KERNELS = "kernels of "  # prefix of an entry, before the name of a rule


def code_of(mixer: str, images: bool = False) -> dict[str, str]:
    """Return {file: checksum} for runs with a mixer, and one checksum of all the kernels they use."""
    rule = mixer_class(mixer)
    file = _file_of_class(rule)
    files = _files(file, images)
    meaning = {_name(path): checksum(path) for path in files if not _is_kernel(path)}
    if file is None:
        meaning[f"the class {rule.__name__}"] = _checksum_of_class(rule)
    if images:
        meaning[TASK] = _checksum(PACKAGE / TASK, TASK_OF_IMAGES)
    kernels = hashlib.sha256("".join(checksum(path) for path in files if _is_kernel(path)).encode())
    return {**meaning, KERNELS + mixer: kernels.hexdigest()[:12]}


def _file_of_class(rule: type) -> Path | None:
    """Return the file that defines a class; None for one defined in a notebook or by `python -c`."""
    try:
        file = Path(inspect.getfile(rule))
    except (OSError, TypeError):
        return None
    return file if file.is_file() else None


def _checksum_of_class(rule: type) -> str:
    """Hash the compiled methods of a class whose source is in no file."""
    digest = hashlib.sha256()
    for name, value in sorted(vars(rule).items()):
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if isinstance(function, FunctionType):
            digest.update(repr((name, function.__defaults__, function.__kwdefaults__)).encode())
            _hash_bytecode(function.__code__, digest)
    return digest.hexdigest()[:12]


def _hash_bytecode(code: CodeType, digest: Any) -> None:
    constants = [c for c in code.co_consts if not isinstance(c, CodeType)]
    # Sorted, because the order within a frozenset differs between processes.
    plain = [sorted(map(repr, c)) if isinstance(c, frozenset) else repr(c) for c in constants]
    digest.update(repr((code.co_code.hex(), code.co_names, code.co_varnames, plain)).encode())
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            _hash_bytecode(inner, digest)


def file_of_its_own(mixer: str) -> Path | None:
    """Return the file of a user-defined mixer; None for a mixer of the package, and for an unknown name."""
    try:
        file = _file_of_class(mixer_class(mixer))
    except OptionError:
        return None
    return None if file is None or file.is_relative_to(PACKAGE) else file


def code_id(table: Mapping[str, str]) -> str:
    """Return a short id of a table of checksums."""
    return hashlib.sha256(repr(sorted(table.items())).encode()).hexdigest()[:12]


def checksum(path: Path) -> str:
    """Hash a file, or its parts that count, without comments, docstrings and blank lines."""
    return _checksum(path, PARTS.get(_name(path)))


@functools.cache
def _checksum(path: Path, wanted: tuple[str, ...] | None) -> str:
    outline = _outline(path)
    lines = _without_comments(path.read_text(encoding="utf-8")).split("\n")  # as Python counts them
    for first, last in outline.docstrings:
        lines[first - 1 : last] = [""] * (last - first + 1)
    if wanted:
        lines = [line for name, first, last in outline.parts if name in wanted for line in lines[first - 1 : last]]
    text = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class _Outline(NamedTuple):
    """Keep of a file's syntax tree what checksums need. The trees of all files are 300,000 objects."""

    docstrings: list[tuple[int, int]]  # first and last line
    parts: list[tuple[str, int, int]]  # name, first and last line of each class and function outside any other
    imports: list[
        tuple[str, str | None]
    ]  # (module, None) for `import module`, (module, name) for `from module import name`
    reexports: list[tuple[str, str, str]]  # module, name and name here, of `from module import name` outside functions


@functools.cache
def _outline(path: Path) -> _Outline:
    source = path.read_text(encoding="utf-8")
    # Syntax trees have no cycles, and Python's collector would look through torch's objects for each few files.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _outline_of(ast.parse(source), named="depthmix.fast." in source)
    finally:
        if collects:
            gc.enable()


def _outline_of(tree: ast.Module, named: bool) -> _Outline:
    """Collect what checksums need from a tree; `named` says that it may name fast paths as strings, as rules do."""
    outline = _Outline([], [], [], [])
    for node in ast.walk(tree) if named else (tree, *_statements(tree)):
        if isinstance(node, ast.Import):
            outline.imports.extend((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            outline.imports.extend((node.module, alias.name) for alias in node.names if node.module)
        elif isinstance(node, ast.Constant):
            if str(node.value).startswith("depthmix.fast."):
                outline.imports.append((str(node.value).partition(":")[0], None))
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            outline.docstrings.append(_lines(node.body[0]))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            outline.reexports.extend((node.module, alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            outline.parts.append((node.name, *_lines(node)))
    return outline


def _lines(node: ast.stmt) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements inside a node. Their expressions, nine nodes in ten, are passed over."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        inner = getattr(node, name, ())
        for child in inner if isinstance(inner, list) else ():
            yield child
            yield from _statements(child)


def _without_comments(source: str) -> str:
    return STRING_OR_COMMENT.sub(lambda found: "" if found[0].startswith("#") else found[0], source)


# Comparisons ask for the same hundreds of names after every run.
@functools.cache
def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name


@functools.cache
def _is_kernel(path: Path) -> bool:
    """Tell whether a file implements a fast path or an operator, as opposed to the operator's specification."""
    return _name(path).startswith(("ops/", "fast/")) and path.name not in SPECIFICATIONS


@functools.cache
def _files(rule: Path | None, images: bool) -> list[Path]:
    roots = [OF_IMAGES.get(root, root) if images else root for root in ROOTS]
    needed = _closure([*([rule] if rule else []), *(PACKAGE / root for root in roots)])
    silent = (*SILENT, *(SILENT_FOR_IMAGES if images else SILENT_FOR_TEXT))
    return sorted(path for path in needed if _name(path) not in silent)


def _closure(start: Iterable[Path]) -> set[Path]:
    """Return the given files and, transitively, the files they import that count. Imports inside functions are followed, too."""
    reached: set[Path] = set()
    waiting = list(start)
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            waiting += [p for p in _imports(path) if _name(p).startswith(COUNTS)]
    return reached


@functools.cache
def _imports(path: Path) -> frozenset[Path]:
    imported: set[Path] = set()
    for module, name in _outline(path).imports:
        if name is not None:
            imported |= _named(module, name)
        elif (file := _file(module)) is not None:
            imported.add(file)
    return frozenset(imported)


def _named(module: str, name: str) -> set[Path]:
    """Return the file that `from module import name` takes the name from. A package's re-exports are followed."""
    if (submodule := _file(f"{module}.{name}")) is not None:
        return {submodule}
    file = _file(module)
    if file is None or file.name != "__init__.py":
        return {file} if file else set()
    for origin, named, here in _outline(file).reexports:
        if name == here:
            return _named(origin, named)
    return {file}


@functools.cache
def _file(module: str) -> Path | None:
    first, *rest = module.split(".")
    if first != PACKAGE.name:
        return None
    path = PACKAGE.joinpath(*rest)
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if rest and p.is_file()), None)


def differences(tables: Iterable[tuple[str, Mapping[str, str]]], kernels: bool) -> dict[str, set[str]]:
    """Find the files whose checksums differ between tables.

    Each table of a mixer must have the same files. A file missing in one of them has the checksum "none" there.

    Args:
        tables: (mixer, {file: checksum}) of each run.
        kernels: Whether the checksum of the kernels counts.

    Returns:
        {file: its checksums} of the files that differ.
    """
    tables = list(tables)
    checksums: dict[str, set[str]] = {}
    by_mixer: dict[str, list[Mapping[str, str]]] = {}
    for mixer, table in tables:
        by_mixer.setdefault(mixer, []).append(table)
        for file, digest in table.items():
            checksums.setdefault(file, set()).add(digest)
    for mixer_tables in by_mixer.values():
        for file in {file for table in mixer_tables for file in table}:
            if not all(file in table for table in mixer_tables):
                checksums[file].add("none")
    return {f: sums for f, sums in checksums.items() if len(sums) > 1 and (kernels or not f.startswith(KERNELS))}


def changed_since(
    runs: Iterable[tuple[Mapping[str, Any], Mapping[str, str]]], acceptances: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Describe the user-defined mixers whose file has changed since their runs were made.

    Only these files are compared. The package and its committed results change independently, but a user who tries a
    rule compares its own runs.

    Args:
        runs: Each with the checksums of its code.
        acceptances: Checksums that the user has declared comparable.

    Returns:
        One sentence per file.
    """
    arms_by_file: dict[str, list[str]] = {}
    for run, table in runs:
        file = file_of_its_own(run["config"].get("mixer", ""))
        if file is None or file.name not in table:
            continue
        if not accepted(file.name, {table[file.name], checksum(file)}, acceptances):
            arms_by_file.setdefault(file.name, []).append(run["arm"])
    return [
        f"{name} has changed since the runs of {', '.join(dict.fromkeys(arms))} were made; to make them again, remove their lines from the results, or give the study another name."
        for name, arms in arms_by_file.items()
    ]


def accepted(file: str, digests: set[str], acceptances: Iterable[Mapping[str, Any]]) -> bool:
    """Tell whether the user has declared all these versions of a file comparable, directly or in a chain."""
    groups = [set(a["files"].get(file, [])) for a in acceptances]
    joined = {min(digests)}
    while more := {d for group in groups if group & joined for d in group} - joined:
        joined |= more
    return digests <= joined
