"""Images in, bytes out: what is written is what was read, splits are kept or made, and what cannot be used is said."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from depthmix.config import DataConfig
from depthmix.data.dataset import TokenData
from depthmix.data.images import ImageBatches, ImageData, augment, image_batches, pack, unpack
from depthmix.data.prepare_images import prepare_images, summary
from depthmix.data.prepared import open_data
from depthmix.errors import DATA, USAGE
from train import small
from train.refused import refused

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (30, 4, 6, 3), dtype=np.uint8)
LABELS = np.repeat([2, 5, 9], 10)


def arrays(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in ({"images": PIXELS, "labels": LABELS} | changes).items():
        np.save(folder / f"{name}.npy", array)
    return folder


def pictures(folder, split="", classes=("cat", "dog"), n=4):
    for label, name in enumerate(classes):
        (folder / split / name).mkdir(parents=True)
        for i in range(n):
            Image.fromarray(PIXELS[label * n + i]).save(folder / split / name / f"{i}.png")
    return folder


def prepared(source, out, **options):
    return ImageData.open(prepare_images(DataConfig(images=str(source), out=str(out), **options)))


def test_arrays_are_split_by_class_and_nothing_is_lost(tmp_path):
    data = prepared(arrays(tmp_path / "in"), tmp_path / "out", val_fraction=0.2)
    train, val = data.split("train"), data.split("val")
    assert (len(train), len(val), data.shape, data.classes) == (24, 6, (4, 6, 3), ["2", "5", "9"])
    assert np.bincount(val.labels).tolist() == [2, 2, 2]
    seen = {
        (image.tobytes(), data.classes[label])
        for split in (train, val)
        for image, label in zip(split.images, split.labels, strict=True)
    }
    assert seen == {(image.tobytes(), str(label)) for image, label in zip(PIXELS, LABELS, strict=True)}
    assert np.allclose(data.mean, train.images.mean((0, 1, 2)) / 255)
    assert np.allclose(data.std, train.images.std((0, 1, 2)) / 255)
    data.verify()
    assert isinstance(open_data(tmp_path / "out"), ImageData)
    assert "3 classes, 4 x 6 pixels, 3 channels" in summary(tmp_path / "out")


def test_another_seed_splits_otherwise_and_copies_stay_together(tmp_path):
    doubled = arrays(tmp_path / "in", images=np.concatenate([PIXELS, PIXELS]), labels=np.tile(LABELS, 2))
    found = []
    for seed in (0, 1):
        data = prepared(doubled, tmp_path / f"out{seed}", val_fraction=0.2, seed=seed)
        sides = [{image.tobytes() for image in data.split(name).images} for name in ("train", "val")]
        assert not sides[0] & sides[1]
        found.append(sides[1])
    assert found[0] != found[1]


def test_an_archive_that_is_split_already_stays_so(tmp_path):
    np.savez(
        tmp_path / "in.npz",
        images=PIXELS[..., 0],
        labels=LABELS,
        val_images=PIXELS[:3, ..., 1],
        val_labels=LABELS[[0, 10, 20]],
    )
    data = prepared(tmp_path / "in.npz", tmp_path / "out")
    assert data.shape == (4, 6, 1)
    assert np.array_equal(data.split("train").images[..., 0], PIXELS[..., 0])
    assert np.array_equal(data.split("val").images[..., 0], PIXELS[:3, ..., 1])
    assert data.split("val").labels.tolist() == [0, 1, 2]


def test_pictures_by_class(tmp_path):
    data = prepared(pictures(tmp_path / "in"), tmp_path / "out", val_fraction=0.25)
    assert (data.classes, len(data.split("train")), len(data.split("val"))) == (["cat", "dog"], 6, 2)
    assert {i.tobytes() for i in data.split("val").images} <= {p.tobytes() for p in PIXELS[:8]}


def test_pictures_that_are_split_already_and_made_of_one_size(tmp_path):
    folder = pictures(pictures(tmp_path / "in", "train"), "test")
    Image.fromarray(np.zeros((9, 5), np.uint8)).save(
        folder / "train" / "cat" / "other.png"
    )  # grey, and of another size
    refused(lambda: prepared(folder, tmp_path / "out"), "other.png", "set image_size", code=DATA)
    assert not (tmp_path / "out").exists()
    data = prepared(folder, tmp_path / "out", image_size=4)
    assert (data.shape, len(data.split("train")), len(data.split("val"))) == ((4, 4, 3), 9, 8)


def test_packing_is_exact():
    labels = torch.tensor([0, 255, 70000])
    images, found = unpack(pack(torch.from_numpy(PIXELS[:3]), labels), (4, 6, 3))
    assert torch.equal(found, labels)
    assert torch.equal(images, torch.from_numpy(PIXELS[:3]).permute(0, 3, 1, 2))


def test_augmentation_moves_and_mirrors():
    images, crop = torch.from_numpy(PIXELS), 2
    bits = np.random.Philox(key=0).random_raw(90).reshape(-1, 3)
    found = augment(images, bits, crop, flip=True)
    mirrored = 0
    for i in range(30):
        down, right = (int(b % np.uint64(5)) - crop for b in bits[i, :2])
        plain = torch.zeros(4, 6, 3, dtype=torch.uint8)
        for y in range(4):
            for x in range(6):
                if 0 <= y + down < 4 and 0 <= x + right < 6:
                    plain[y, x] = images[i, y + down, x + right]
        turned = bool(bits[i, 2] >> np.uint64(63))
        mirrored += turned
        assert torch.equal(found[i], plain.flip(1) if turned else plain)
    assert 5 < mirrored < 25
    assert torch.equal(augment(images, bits, 0, flip=False), images)


def test_batches_are_a_function_of_seed_and_step(tmp_path):
    split = prepared(arrays(tmp_path / "in"), tmp_path / "out").split("train")
    batches = [ImageBatches(split, 8, 3, crop=1, flip=True) for _ in range(2)]
    assert torch.equal(batches[0].get(5), batches[1].get(5))
    assert not torch.equal(batches[0].get(5), ImageBatches(split, 8, 4, crop=1, flip=True).get(5))
    assert not torch.equal(batches[0].get(5)[:, 4:], batches[0].get(5 + len(split))[:, 4:])
    plain = ImageBatches(split, len(split), 3).get(2)  # an epoch takes every image once
    assert sorted(row.numpy().tobytes() for row in plain) == sorted(
        row.numpy().tobytes() for batch in image_batches(split, 7) for row in batch
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images": PIXELS.astype(np.float32)}, "images must be uint8"),
        ({"images": PIXELS[0, 0]}, "images must be [N, H, W, C] or [N, H, W]"),
        ({"images": PIXELS[:0], "labels": LABELS[:0]}, "none of them zero"),
        ({"labels": LABELS[:7]}, "labels must be whole numbers [30], one an image"),
        ({"labels": LABELS / 2}, "labels must be whole numbers"),
        ({"labels": 0 * LABELS}, "one class only, 0"),
        ({"labels": np.arange(30)}, "has one image"),
        ({"val_images": PIXELS}, "give both or none"),
        ({"val_images": PIXELS[:, :2], "val_labels": LABELS}, "images are [4, 6, 3] and val_images [2, 6, 3]"),
        ({"val_images": PIXELS, "val_labels": LABELS + 1}, "which labels has not"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, changes, words):
    source = arrays(tmp_path / "in", **changes)
    refused(lambda: prepared(source, tmp_path / "out"), words, code=DATA)
    assert not (tmp_path / "out").exists()


def test_inputs_that_hold_no_images_are_refused(tmp_path):
    out = tmp_path / "out"
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(lambda: prepared(empty, out), "no folders with pictures", code=DATA)
    refused(lambda: prepared(tmp_path / "gone", out), "There is no file or folder", code=DATA)
    one = pictures(tmp_path / "one", classes=("cat",))
    refused(lambda: prepared(one, out), "one class only, cat", code=DATA)
    (one / "dog").mkdir()
    refused(lambda: prepared(one, out), "dog is empty", code=DATA)
    bad = pictures(tmp_path / "bad")
    (bad / "dog" / "2.png").write_bytes(b"no picture")
    refused(lambda: prepared(bad, out), "2.png cannot be read as a picture", code=DATA)
    Image.fromarray(PIXELS[0, ..., 0].astype(np.uint16) * 256).save(bad / "dog" / "2.png")
    refused(lambda: prepared(bad, out), "more than 8 bits", code=DATA)
    (tmp_path / "text.txt").write_text("text")
    refused(lambda: prepared(tmp_path / "text.txt", out), "neither a folder nor an .npz file", code=DATA)
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04torn")
    refused(lambda: prepared(tmp_path / "torn.npz", out), "torn.npz cannot be read as arrays", code=DATA)
    np.savez(tmp_path / "half.npz", images=PIXELS)
    refused(lambda: prepared(tmp_path / "half.npz", out), "has no labels", code=DATA)
    np.savez(tmp_path / "objects.npz", images=np.array([{}], dtype=object), labels=LABELS)
    refused(lambda: prepared(tmp_path / "objects.npz", out), "cannot be read as arrays", code=DATA)
    other = pictures(pictures(tmp_path / "other", "train"), "val", classes=("cat", "wolf"))
    refused(lambda: prepared(other, out), "wolf", code=DATA)
    refused(lambda: prepared(arrays(tmp_path / "in"), out, input=["x"]), "not both", code=USAGE)
    refused(lambda: prepared(tmp_path / "in", out, image_size=8), "arrays are taken as they are", code=USAGE)
    refused(lambda: prepared(tmp_path / "in", out, val_fraction=1.5), "val_fraction", code=USAGE)
    assert not out.exists()


def test_prepared_images_are_not_overwritten_unless_asked(tmp_path):
    source = arrays(tmp_path / "in")
    prepared(source, tmp_path / "out")
    refused(lambda: prepared(source, tmp_path / "out"), "already holds prepared data", code=DATA)
    assert len(prepared(source, tmp_path / "out", overwrite=True, val_fraction=0.4).split("val")) == 12


def test_damaged_images_are_refused(tmp_path):
    whole = prepared(arrays(tmp_path / "in"), tmp_path / "out").folder
    for name, change, words in (
        ("train-pixels.bin", lambda raw: raw[:-1], "other sizes on disk"),
        ("val-labels.bin", lambda raw: b"\x07\0\0\0" + raw[4:], "a label is of no class"),
        ("meta.json", lambda raw: json.dumps(json.loads(raw) | {"classes": ["a"]}).encode(), "(classes)"),
        ("meta.json", lambda raw: json.dumps(json.loads(raw) | {"mean": [0.5]}).encode(), "(mean)"),
    ):
        folder = shutil.copytree(whole, tmp_path / "copy", dirs_exist_ok=True)
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        refused(lambda: ImageData.open(tmp_path / "copy"), words, code=DATA)
    (whole / "train-pixels.bin").write_bytes(bytes(27 * 72))
    refused(lambda: ImageData.open(whole), "train-pixels.bin is damaged (wrong checksum)", code=DATA)


def test_pipes_among_pictures_and_arrays(tmp_path):
    """A pipe that nobody writes to would never end."""
    source = pictures(tmp_path / "in")
    os.mkfifo(source / "cat" / "9.png")
    refused(lambda: prepared(source, tmp_path / "out"), "9.png is no plain file", code=DATA)
    (source / "cat" / "9.png").unlink()
    (source / "cat" / "9.png").symlink_to("/dev/zero")
    refused(lambda: prepared(source, tmp_path / "out"), "9.png is no plain file", code=DATA)
    os.mkfifo(tmp_path / "a.npz")
    refused(lambda: prepared(tmp_path / "a.npz", tmp_path / "out"), "is neither a folder nor an .npz file", code=DATA)
    folder = arrays(tmp_path / "arrays")
    (folder / "labels.npy").unlink()
    os.mkfifo(folder / "labels.npy")
    refused(lambda: prepared(folder, tmp_path / "out"), "labels.npy is no plain file", code=DATA)
    assert not (tmp_path / "out").exists()


def test_text_is_not_images_nor_the_other_way_round(tmp_path):
    refused(lambda: ImageData.open(small.data()), "holds text", code=DATA)
    images = prepared(arrays(tmp_path / "in"), tmp_path / "out").folder
    refused(lambda: TokenData.open(images), "holds images", code=DATA)
    assert isinstance(open_data(small.data()), TokenData)
