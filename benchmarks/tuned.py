"""What Triton's tuning found, in one small file: a rented machine then starts with it instead of tuning the rivals again."""

from __future__ import annotations

import json
import os
from pathlib import Path

SUFFIX = ".autotune.json"


def cache_folder() -> Path:
    """Where Triton keeps it."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def restore(file: Path) -> int:
    """Put the findings of a file into Triton's cache; how many there were."""
    if not file.exists():
        return 0
    found: dict[str, str] = json.loads(file.read_text())
    for name, text in found.items():
        path = cache_folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return len(found)


def save(file: Path) -> int:
    """Write the findings in Triton's cache to a file; how many there are."""
    folder = cache_folder()
    found = {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob(f"*{SUFFIX}"))}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found))
    return len(found)


def holds(kernel: str) -> bool:
    """Whether Triton's cache has findings about kernels whose names begin so."""
    return any(cache_folder().rglob(f"{kernel}*{SUFFIX}"))
