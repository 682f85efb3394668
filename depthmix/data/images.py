"""Prepared images: their files on disk, and the batches read from them.

A batch is one tensor of bytes [B, 4 + H W C]. A row holds a label of four bytes and the pixels of an image, so that a batch
can be moved to a GPU, split and recorded like a batch of tokens. `unpack` separates labels and pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from depthmix.data.dataset import SPLITS, Order, Prepared, is_count, is_name, map_file, read_meta
from depthmix.data.integrity import verify_files
from depthmix.errors import DATA, UserError

LABEL = np.dtype("<i4")
# Added to the key of the random bits, so that they differ from the bits of the order.
AUGMENTED = 2**63


@dataclass
class ImageSplit:
    """The images of one split, memory-mapped."""

    name: str
    images: np.ndarray  # uint8 [N, H, W, C]
    labels: np.ndarray  # int32 [N]

    def __len__(self) -> int:
        return len(self.labels)


class ImageData(Prepared[ImageSplit]):
    """A folder written by `depthmix data --images`."""

    def __init__(self, folder: Path, meta: dict[str, Any], splits: dict[str, ImageSplit]) -> None:
        super().__init__(folder, meta, splits)
        self.shape: tuple[int, int, int] = (meta["height"], meta["width"], meta["channels"])
        self.classes: list[str] = meta["classes"]
        self.mean: list[float] = meta["mean"]  # by channel, over the training images, of values from 0 to 1
        self.std: list[float] = meta["std"]

    @classmethod
    def open(cls, folder: str | Path) -> ImageData:
        """Check the folder against its meta.json, sizes, labels and checksums, and map its files."""
        folder = Path(folder)
        meta = read_meta(folder)
        if "classes" not in meta:
            raise UserError(f"{folder} holds text, and this needs images: choose another folder.", DATA)
        if (wrong := _wrong(meta)) is not None:
            raise UserError(f"{folder / 'meta.json'} is damaged ({wrong}): prepare the data again.", DATA)
        shape = meta["height"], meta["width"], meta["channels"]
        splits = {}
        for name in SPLITS:
            info = meta["splits"][name]
            pixels, labels = map_file(folder / info["pixels"], np.dtype("u1")), map_file(folder / info["labels"], LABEL)
            if len(labels) != info["images"] or pixels.size != info["images"] * shape[0] * shape[1] * shape[2]:
                what = f"its {name} split has {info['images']} images in meta.json and other sizes on disk"
                raise UserError(f"{folder} is damaged: {what}; prepare the data again.", DATA)
            if labels.min() < 0 or labels.max() >= len(meta["classes"]):
                raise UserError(f"{folder} is damaged: a label is of no class; prepare the data again.", DATA)
            splits[name] = ImageSplit(name, pixels.reshape(-1, *shape), labels)
        verify_files(folder, meta, [meta["splits"][name][kind] for name in SPLITS for kind in ("pixels", "labels")])
        return cls(folder, meta, splits)


def _wrong(meta: dict[str, Any]) -> str | None:
    """Name the field that makes a meta.json unusable, or None."""
    for name in ("height", "width", "channels"):
        if not is_count(meta.get(name), 1):
            return name
    classes, sums = meta["classes"], meta.get("sha256")
    if not isinstance(classes, list) or len(classes) < 2 or not all(isinstance(c, str) for c in classes):
        return "classes"
    for name in ("mean", "std"):
        values = meta.get(name)
        if not isinstance(values, list) or len(values) != meta["channels"]:
            return name
        if not all(isinstance(v, float) and v >= 0 for v in values):
            return name
    if not isinstance(sums, dict) or not all(map(is_name, sums)):
        return "sha256"
    for split in SPLITS:
        info = meta["splits"].get(split) if isinstance(meta["splits"], dict) else None
        if not isinstance(info, dict) or not is_count(info.get("images"), 1):
            return f"split {split}"
        if not all(is_name(info.get(k)) for k in ("pixels", "labels")):
            return f"files of {split}"
    return None


def pack(images: Tensor, labels: Tensor) -> Tensor:
    """Pack images uint8 [B, H, W, C] and labels [B] into one tensor of bytes [B, 4 + H W C]."""
    return torch.cat([labels.to(torch.int32).unsqueeze(-1).view(torch.uint8), images.flatten(1)], dim=1)


def unpack(batch: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Unpack a batch of images [H, W, C] into uint8 [B, C, H, W] and labels [B]."""
    labels = batch[:, :4].contiguous().view(torch.int32).squeeze(-1).long()
    return batch[:, 4:].unflatten(1, shape).permute(0, 3, 1, 2), labels


def augment(images: Tensor, bits: np.ndarray, crop: int, flip: bool) -> Tensor:
    """Shift and mirror images [B, H, W, C].

    Args:
        images: The images.
        bits: Random bits [B, 3]: vertical shift, horizontal shift, mirroring.
        crop: Largest shift in pixels. Uncovered pixels are black.
        flip: Whether to mirror half of the images.
    """
    n, height, width, channels = images.shape
    padded = np.zeros((n, height + 2 * crop, width + 2 * crop, channels), np.uint8)
    padded[:, crop : crop + height, crop : crop + width] = images.numpy()
    out = np.empty(images.shape, np.uint8)
    moves = (bits[:, :2] % np.uint64(2 * crop + 1)).astype(np.int64).tolist()
    for i, (down, right) in enumerate(moves):  # faster than indexing all pixels at once
        out[i] = padded[i, down : down + height, right : right + width]
    if flip:
        mirrored = bits[:, 2] >= np.uint64(2**63)
        out[mirrored] = out[mirrored, :, ::-1]
    return torch.from_numpy(out)


class ImageBatches:
    """Training batches. `get(step)` depends on the data, the arguments and the step only."""

    def __init__(
        self,
        split: ImageSplit,
        batch_size: int,
        seed: int,
        crop: int = 0,
        flip: bool = False,
        rows: slice = slice(None),
    ) -> None:
        self.split, self.batch_size, self.seed, self.crop, self.flip = split, batch_size, seed, crop, flip
        self.rows = range(batch_size)[rows]  # this process's rows of every batch
        self.order = Order(len(split), seed)

    def get(self, step: int, rows: range | None = None) -> Tensor:
        """Return rows of batch `step` (from 0), packed; by default the rows of this process."""
        if step < 0:
            raise IndexError(f"step {step}")
        rows = self.rows if rows is None else rows
        taken = self.order.take(step * self.batch_size + rows.start, len(rows))
        images, labels = torch.from_numpy(self.split.images[taken]), torch.from_numpy(self.split.labels[taken])
        if self.crop or self.flip:
            key = np.array([self.seed % 2**64, AUGMENTED + step], np.uint64)
            bits = np.random.Philox(key=key).random_raw(3 * self.batch_size).reshape(-1, 3)
            images = augment(images, bits[rows.start : rows.stop], self.crop, self.flip)
        return pack(images, labels)


def image_batches(split: ImageSplit, batch_size: int) -> Iterator[Tensor]:
    """Yield the split's images in order, packed; the last batch may be smaller."""
    for first in range(0, len(split), batch_size):
        part = slice(first, first + batch_size)
        yield pack(torch.from_numpy(split.images[part].copy()), torch.from_numpy(split.labels[part].copy()))
