"""`depthmix data --images`: turn pictures in folders by class, or arrays, into memory-mapped bytes, all or nothing.

FOLDER/CLASS/*.png …                        pictures, a share of each class kept for validation
FOLDER/train/CLASS/*, FOLDER/val/CLASS/*    pictures that are split already (val, valid, validation or test)
FOLDER/images.npy, labels.npy; FILE.npz     arrays: images uint8 [N, H, W, C] or [N, H, W], labels [N]; with val_images and
                                            val_labels they are split already
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from depthmix.config import DataConfig
from depthmix.data.dataset import SPLITS, VERSION
from depthmix.data.images import LABEL, ImageData
from depthmix.data.prepare import Progress
from depthmix.data.staging import staged
from depthmix.data.validation_split import as_keys, check_split, choose, content_hash
from depthmix.data.writing import write_meta
from depthmix.errors import DATA, USAGE, UserError
from depthmix.files import reading, write_hashed

PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
HELD_OUT = ("val", "valid", "validation", "test")  # names of a validation folder, in order of preference
ARRAYS = ("images", "labels", "val_images", "val_labels")
CHUNK = 256  # images hashed or written at a time


@dataclass
class Images:
    """Images of one split, or of an input without a split.

    Attributes:
        labels: int32 [N].
        read: Returns image i, uint8 [H, W, C].
        content: Returns the bytes that identify image i.
    """

    labels: np.ndarray
    read: Callable[[int], np.ndarray]
    content: Callable[[int], bytes]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass
class Source:
    """Class names and images of an input. `val` is None if the input has no split."""

    classes: list[str]
    train: Images
    val: Images | None


def prepare_images(config: DataConfig, progress: Progress | None = None) -> Path:
    """Write the prepared images to config.out.

    Args:
        config: What to prepare.
        progress: Called with (phase, done, total) in images, with the phases scan and encode.

    Returns:
        The folder.

    Raises:
        UserError: The images or the output folder cannot be used.
    """
    _check(config)
    report: Progress = progress or (lambda phase, done, total: None)
    with staged(Path(config.out), config.overwrite) as folder:
        source = _find(Path(config.images), config.image_size)
        if source.val is None:
            train, val = _split(source, config.val_fraction, config.seed, report)
            parts = {"train": (source.train, train), "val": (source.train, val)}
            split: dict[str, Any] = {"by": "image", "val_fraction": config.val_fraction, "seed": config.seed}
        else:
            parts = {
                "train": (source.train, np.arange(len(source.train))),
                "val": (source.val, np.arange(len(source.val))),
            }
            split = {"by": "the input"}
        writer = _Writer(folder, sum(len(chosen) for _, chosen in parts.values()), report)
        for name in SPLITS:
            writer.write(name, *parts[name])
        meta = {
            "version": VERSION,
            **writer.meta(),
            "classes": source.classes,
            "split": split,
            "source": config.images,
        }
        write_meta(folder, meta)
    return Path(config.out)


def summary(folder: str | Path) -> str:
    """Summarise prepared images in a few lines."""
    data = ImageData.open(folder)
    height, width, channels = data.shape
    described = (
        f"{len(data.classes)} classes, {height} x {width} pixels, {channels} channel{'' if channels == 1 else 's'}"
    )
    return "\n".join(
        [f"prepared images in {folder}: {described}", *(f"    {s}: {len(data.split(s)):,} images" for s in SPLITS)]
    )


def _check(config: DataConfig) -> None:
    if config.input:
        raise UserError("Give text with input or images with images, not both.", USAGE)
    check_split(config)
    if config.image_size is not None and config.image_size < 1:
        raise UserError(f"image_size is {config.image_size}: it must be at least 1.", USAGE)


def _find(path: Path, size: int | None) -> Source:
    if not path.exists():
        raise UserError(f"There is no file or folder {path}.", DATA)
    if path.is_dir() and not (path / "images.npy").exists():
        return _pictures(path, size)
    if not path.is_dir() and (path.suffix.lower() != ".npz" or not path.is_file()):
        raise UserError(f"{path} is neither a folder nor an .npz file.", DATA)
    if size is not None:
        raise UserError("image_size is for pictures: arrays are taken as they are, so leave it out.", USAGE)
    return _arrays(path)


# Pictures in folders.


def _pictures(folder: Path, size: int | None) -> Source:
    names = _subfolders(folder)
    held_out = next((name for name in HELD_OUT if name in names), None)
    if "train" in names and held_out:
        classes = _subfolders(folder / "train")
        other = _subfolders(folder / held_out)
        if unknown := sorted(set(other) - set(classes)):
            raise UserError(f"{folder / held_out} has the class {unknown[0]}, which {folder / 'train'} has not.", DATA)
        splits = [_listing(folder / part, classes, part == "train") for part in ("train", held_out)]
    else:
        classes = names
        splits = [_listing(folder, classes, True)]
    if len(classes) < 2:
        held = f"one class only, {classes[0]}" if classes else "no folders with pictures"
        what = f"two classes at least, each a folder of pictures ({', '.join(PICTURES)})"
        raise UserError(f"{folder} holds {held}: it needs {what}, or images.npy and labels.npy.", DATA)
    reader = _Pictures(size)

    def images(listing: list[tuple[Path, int]]) -> Images:
        labels = np.array([label for _, label in listing], LABEL)
        return Images(labels, lambda i: reader.read(listing[i][0]), lambda i: _bytes(listing[i][0]))

    return Source(classes, images(splits[0]), images(splits[1]) if len(splits) == 2 else None)


def _subfolders(folder: Path) -> list[str]:
    with reading(folder, DATA):
        return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _listing(folder: Path, classes: list[str], every: bool) -> list[tuple[Path, int]]:
    """List the pictures with their labels, in order. `every`: require pictures in each class."""
    listed = []
    for label, name in enumerate(classes):
        pictures = sorted(Path(top) / f for top, _, files in os.walk(folder / name) for f in files if _is_picture(f))
        if pipe := next((path for path in pictures if path.exists() and not path.is_file()), None):
            raise UserError(f"{pipe} is no plain file, but a pipe or a device: take it out of the folder.", DATA)
        if every and not pictures:
            raise UserError(f"The class {folder / name} is empty: no file in it ends in {', '.join(PICTURES)}.", DATA)
        listed += [(path, label) for path in pictures]
    if not listed and classes:
        raise UserError(f"{folder} holds no pictures.", DATA)
    return listed


def _is_picture(name: str) -> bool:
    return name.lower().endswith(PICTURES) and not name.startswith(".")


def _bytes(path: Path) -> bytes:
    with reading(path, DATA):
        return path.read_bytes()


class _Pictures:
    """Reads pictures as RGB at one size: the first picture's, or the size that was asked for."""

    def __init__(self, size: int | None) -> None:
        try:
            from PIL import Image, ImageOps
        except ImportError:
            raise UserError("Pictures need Pillow: pip install pillow, or give arrays.", USAGE) from None
        self.image, self.fit, self.size = Image, ImageOps.fit, size
        self.first: tuple[Path, tuple[int, int]] | None = None

    def read(self, path: Path) -> np.ndarray:
        try:
            with self.image.open(path) as file:
                if file.mode.startswith(("I", "F")):  # Pillow would cut them off at 255
                    raise UserError(f"{path} has more than 8 bits a channel: give arrays instead.", DATA)
                picture = file.convert("RGB")
        except (OSError, SyntaxError, ValueError, self.image.DecompressionBombError) as error:
            raise UserError(f"{path} cannot be read as a picture: {str(error).rstrip('.')}.", DATA) from error
        if self.size is not None:
            picture = self.fit(picture, (self.size, self.size))  # crops to the central square
        self.first = self.first or (path, picture.size)
        if picture.size != self.first[1]:
            sizes = f"{picture.width} x {picture.height} pixels, and {self.first[0]} has {self.first[1][0]} x {self.first[1][1]}"
            raise UserError(f"{path} has {sizes}: set image_size to make all of them alike.", DATA)
        return np.asarray(picture)


# Arrays.


def _arrays(path: Path) -> Source:
    arrays = _load(path)
    for name in ("images", "labels"):
        if name not in arrays:
            raise UserError(
                f"{path} has no {name}: it needs images and labels (it has {', '.join(arrays) or 'nothing'}).", DATA
            )
    if ("val_images" in arrays) != ("val_labels" in arrays):
        raise UserError(f"{path} has one of val_images and val_labels: give both or none.", DATA)
    images, labels = _checked(path, arrays["images"], arrays["labels"], "")
    values = np.unique(labels)
    if len(values) < 2:
        raise UserError(f"{path} holds one class only, {values[0]}: it needs two at least.", DATA)
    val = None
    if "val_images" in arrays:
        val_images, val_labels = _checked(path, arrays["val_images"], arrays["val_labels"], "val_")
        if val_images.shape[1:] != images.shape[1:]:
            raise UserError(
                f"{path}: images are {list(images.shape[1:])} and val_images {list(val_images.shape[1:])}.", DATA
            )
        if unknown := sorted(set(val_labels.tolist()) - set(values.tolist())):
            raise UserError(f"{path}: val_labels has the class {unknown[0]}, which labels has not.", DATA)
        val = _array_images(val_images, np.searchsorted(values, val_labels))
    return Source([str(v) for v in values.tolist()], _array_images(images, np.searchsorted(values, labels)), val)


def _array_images(images: np.ndarray, labels: np.ndarray) -> Images:
    return Images(labels.astype(LABEL), lambda i: images[i], lambda i: np.ascontiguousarray(images[i]).tobytes())


def _load(path: Path) -> dict[str, np.ndarray]:
    """Load the arrays by name. Pickled arrays are refused, since they could run any code."""
    try:
        if path.is_dir():
            files = {name: file for name in ARRAYS if (file := path / f"{name}.npy").exists()}
            if pipe := next((file for file in files.values() if not file.is_file()), None):
                raise UserError(f"{pipe} is no plain file: give arrays that `numpy.save` wrote.", DATA)
            return {name: np.load(file, mmap_mode="r", allow_pickle=False) for name, file in files.items()}
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except UserError:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} cannot be read as arrays of numbers: {str(error).splitlines()[0]}.", DATA) from error
    except Exception as error:  # raised by zipfile for a damaged archive
        raise UserError(f"{path} cannot be read as arrays: {error}.", DATA) from error


def _checked(path: Path, images: np.ndarray, labels: np.ndarray, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images as [N, H, W, C]. Raises UserError for shapes and dtypes that do not fit."""
    if images.dtype != np.uint8:
        raise UserError(f"{path}: {prefix}images must be uint8, from 0 to 255, got {images.dtype}.", DATA)
    if images.ndim not in (3, 4) or 0 in images.shape:
        expected = "[N, H, W, C] or [N, H, W], none of them zero"
        raise UserError(f"{path}: {prefix}images must be {expected}, got {list(images.shape)}.", DATA)
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        got = f"{labels.dtype} {list(labels.shape)}"
        raise UserError(f"{path}: {prefix}labels must be whole numbers [{len(images)}], one an image, got {got}.", DATA)
    return images if images.ndim == 4 else images[..., None], labels


# Splitting and writing.


def _split(source: Source, fraction: float, seed: int, report: Progress) -> tuple[np.ndarray, np.ndarray]:
    """Choose training and validation images, class by class. Copies of an image stay together."""
    images = source.train
    digests = []
    for i in range(len(images)):
        digests.append(content_hash(seed, images.content(i)).digest())
        if i % CHUNK == 0:
            report("scan", i, len(images))
    report("scan", len(images), len(images))
    keys, held_out = as_keys(digests), np.zeros(len(images), bool)
    for label, name in enumerate(source.classes):
        members = np.flatnonzero(images.labels == label)
        if len(members) < 2:
            raise UserError(f"The class {name} has one image: it needs two, one of them for validation.", DATA)
        held_out[members] = choose(keys[members], fraction, seed)[0]
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


class _Writer:
    """Writes splits, with checksums and the mean and deviation of each channel of the training images."""

    def __init__(self, folder: Path, total: int, report: Progress) -> None:
        self.folder, self.total, self.report = folder, total, report
        self.done = 0
        self.shape: tuple[int, ...] = ()
        self.splits: dict[str, dict[str, Any]] = {}
        self.sha256: dict[str, str] = {}
        self.moments: np.ndarray = np.zeros((3, 1))  # pixels, their sum, the sum of their squares, by channel

    def write(self, name: str, images: Images, chosen: np.ndarray) -> None:
        """Write one split: the pixels of its images in order, and their labels."""
        files = {"pixels": f"{name}-pixels.bin", "labels": f"{name}-labels.bin"}
        pixels, labels = self._pixels(images, chosen, name == "train"), images.labels[chosen].astype(LABEL).tobytes()
        for kind, chunks in (("pixels", pixels), ("labels", [labels])):
            self.sha256[files[kind]] = write_hashed(self.folder / files[kind], chunks)["sha256"]
        self.splits[name] = {"images": len(chosen), **files}

    def _pixels(self, images: Images, chosen: np.ndarray, counted: bool) -> Iterator[bytes]:
        for first in range(0, len(chosen), CHUNK):
            part = np.stack([images.read(int(i)) for i in chosen[first : first + CHUNK]])
            self.shape = self.shape or part.shape[1:]
            if counted:
                flat = part.reshape(-1, part.shape[-1]).astype(np.float64)
                moments = np.stack([np.full(flat.shape[1], len(flat)), flat.sum(0), (flat**2).sum(0)])
                self.moments = self.moments + moments
            self.done += len(part)
            self.report("encode", self.done, self.total)
            yield part.tobytes()

    def meta(self) -> dict[str, Any]:
        """Describe what was written, for meta.json."""
        count, total, squares = self.moments
        mean = total / count
        std = np.sqrt(np.maximum(squares / count - mean**2, 0))
        height, width, channels = self.shape
        return {
            "height": height,
            "width": width,
            "channels": channels,
            "mean": (mean / 255).tolist(),
            "std": (std / 255).tolist(),
            "splits": self.splits,
            "sha256": self.sha256,
        }
