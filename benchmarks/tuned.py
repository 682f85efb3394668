"""Triton's tuning results in one small file, so that a rented machine need not tune the rivals again."""

from __future__ import annotations

import json
import os
from pathlib import Path

SUFFIX = ".autotune.json"


def cache_folder() -> Path:
    """Return the folder of Triton's cache."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def restore(file: Path) -> int:
    """Put the tuning results of a file into Triton's cache. Return their number."""
    if not file.exists():
        return 0
    results: dict[str, str] = json.loads(file.read_text())
    for name, text in results.items():
        path = cache_folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return len(results)


def save(file: Path) -> int:
    """Write the tuning results in Triton's cache to a file. Return their number."""
    folder = cache_folder()
    results = {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob(f"*{SUFFIX}"))}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results))
    return len(results)


def holds(kernel: str) -> bool:
    """Tell whether Triton's cache has results for kernels whose names begin like this."""
    return any(cache_folder().rglob(f"{kernel}*{SUFFIX}"))
