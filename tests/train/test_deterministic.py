"""Sums in a fixed order: what is asked of torch, and that nothing of it stays."""

import os
from contextlib import suppress

import torch
from torch.utils import deterministic as memory

from depthmix.data.dataset import TokenData
from depthmix.train import brief
from depthmix.train.deterministic import WORKSPACE, deterministic
from train import small


def settings():
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warn, memory.fill_uninitialized_memory


def test_the_settings_are_in_force_inside_only(monkeypatch):
    from torch._inductor import config

    monkeypatch.delenv(WORKSPACE, raising=False)
    before = settings()
    with suppress(KeyError), deterministic(True):
        assert settings() == (True, False, False)
        assert os.environ[WORKSPACE] == ":4096:8"
        assert config.deterministic
        raise KeyError
    assert settings() == before
    assert not config.deterministic
    with deterministic(False):
        assert settings() == before


def test_one_seed_gives_the_same_losses_bit_for_bit():
    data = TokenData.open(small.data())
    config = small.config("nowhere", deterministic=True, mixer="dca", n_blocks=2)
    one, two = (brief.train_briefly(config, data) for _ in range(2))
    assert one["train_curve"] == two["train_curve"]
    assert one["val_loss"] == two["val_loss"]
    other = brief.train_briefly(small.config("nowhere", deterministic=True, mixer="dca", n_blocks=2, seed=1), data)
    assert other["train_curve"] != one["train_curve"]
