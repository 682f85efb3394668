"""A training on images, as small as it gets."""

import dataclasses
import functools

import numpy as np

from depthmix.config import DataConfig, TrainConfig
from depthmix.data.prepare_images import prepare_images
from train import small


@functools.cache
def stripes():
    """Two classes of 8 x 8 images, lying and standing stripes at any phase, prepared."""
    rng = np.random.default_rng(0)
    labels = np.arange(240) % 2
    wave = 127 + 100 * np.sin(np.arange(8) * 1.6 + 6.28 * rng.random((240, 1)))
    lying = np.repeat(wave[:, :, None], 8, 2)
    images = np.where(labels[:, None, None] == 0, lying, lying.transpose(0, 2, 1)) + rng.normal(0, 20, (240, 8, 8))
    folder = small.place() / "stripes"
    np.savez(small.place() / "stripes.npz", images=images.clip(0, 255).astype(np.uint8), labels=labels)
    config = DataConfig(images=str(small.place() / "stripes.npz"), out=str(folder), val_fraction=0.25)
    return prepare_images(config)


def config(out, **changes):
    values = {"data": str(stripes()), "patch_size": 4, "batch_size": 16, "n_blocks": 1, "crop": 1, "flip": True}
    text = {"seq_len": TrainConfig.seq_len, "eval_tokens": None}
    return dataclasses.replace(small.config(out, data=""), **values | text | changes)
