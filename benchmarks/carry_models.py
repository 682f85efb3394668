"""Take the installed transformers along to a machine without a network that has an older one.

    python -m benchmarks.carry_models          copy what `accelerate` needs to build/carried/
    python -m benchmarks accelerate            prefers build/carried/ where that folder exists

Copied are transformers with the folders of the models that mix over depth, and Liger-Kernel where it is installed: plain files,
15 MB. The libraries below them are those of the other machine. The folder is not in the repository.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.depth_models import CLASSES

FOLDER = Path(__file__).parents[1] / "build" / "carried"
# Distributions and their packages; none has compiled parts.
DISTRIBUTIONS = {"transformers": "transformers", "liger-kernel": "liger_kernel"}


def carry_models(folder: Path = FOLDER) -> list[str]:
    """Copy the packages of DISTRIBUTIONS that are installed. Of transformers' models only those that the benchmark imports.

    Args:
        folder: Where the copies go. What is there already is replaced.

    Returns:
        The names and versions of what was copied.
    """
    importlib.import_module("depthmix.hf")
    for family in CLASSES:
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    models = {name.split(".")[2] for name in sys.modules if name.startswith("transformers.models.")}
    shutil.rmtree(folder, ignore_errors=True)
    copied = []
    for distribution, package in DISTRIBUTIONS.items():
        version = _version(distribution)
        spec = importlib.util.find_spec(package)
        if not version or spec is None or spec.origin is None:
            continue
        home = Path(spec.origin).parent
        shutil.copytree(home, folder / package, ignore=_unused(home / "models", models))
        about = f"{distribution.replace('-', '_')}-{version}.dist-info"
        (folder / about).mkdir()
        shutil.copy(home.parent / about / "METADATA", folder / about / "METADATA")
        copied.append(f"{distribution} {version}")
    return copied


def use_carried_models(folder: Path = FOLDER) -> str:
    """Let imports find the carried packages, where the folder exists and has another transformers than is installed.

    Call this before transformers is imported.

    Args:
        folder: The folder that `carry_models` wrote.

    Returns:
        The names and versions of the packages in use.
    """
    carried = [p.name.removesuffix(".dist-info") for p in folder.glob("*.dist-info")]
    if carried and f"transformers-{_version('transformers')}" not in carried and "transformers" not in sys.modules:
        sys.path.insert(0, str(folder))
    elif carried and str(folder) not in sys.path:
        sys.path.append(str(folder))
    return ", ".join(f"{name} {version}" for name in DISTRIBUTIONS if (version := _version(name)))


def _unused(models: Path, used: set[str]) -> Callable[[str, list[str]], list[str]]:
    """Return a filter for copytree that leaves out caches and other models."""

    def unused(folder: str, names: list[str]) -> list[str]:
        left = [name for name in names if name == "__pycache__"]
        if Path(folder) == models and models.parent.name == "transformers":
            left += [name for name in names if name not in used and (models / name).is_dir()]
        return left

    return unused


def _version(distribution: str) -> str:
    """Return the version of an importable distribution, or nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    print(f"{FOLDER.relative_to(FOLDER.parents[1])}: {', '.join(carry_models())}")
