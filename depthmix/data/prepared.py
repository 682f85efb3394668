"""Open prepared data of either kind."""

from __future__ import annotations

from pathlib import Path

from depthmix.data.dataset import TokenData, read_meta
from depthmix.data.images import ImageData


def open_data(folder: str | Path) -> TokenData | ImageData:
    """Open what `depthmix data` wrote into a folder, text or images."""
    return (ImageData if "classes" in read_meta(Path(folder)) else TokenData).open(folder)
