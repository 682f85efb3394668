"""Arms of one seed see the same batches and, where they share parameters, begin at the same weights."""

import functools

import pytest
import torch

from depthmix.data.dataset import TokenData
from depthmix.train.loop import Trainer
from harness import MIXERS, PAIRWISE
from train import small

CPU = torch.device("cpu")


def trainer(mixer="residual", options=None, **changes):
    data = TokenData.open(small.data())
    return Trainer(small.config("nowhere", mixer=mixer, mixer_options=options or {}, n_blocks=2, **changes), data, CPU)


@functools.cache
def plain_trainer():
    return trainer(dim=24, seed=3)


@pytest.mark.parametrize("mixer", MIXERS)
def test_mechanisms_share_weights_and_batches(mixer):
    plain = plain_trainer()
    for options in [options for name, options in PAIRWISE if name == mixer]:
        other = trainer(mixer, options, dim=24, seed=3)
        named = dict(other.model.named_parameters())
        for name, p in plain.model.named_parameters():
            assert torch.equal(p, named[name]), (options, name)
        for step in range(3):
            assert torch.equal(plain.batches.get(step), other.batches.get(step)), options


@pytest.mark.parametrize("changes", [{"qk_gain": False}, {"optimizer": "muon"}, {"lr": 0.1}, {"deterministic": True}])
def test_other_options_leave_them_alone(changes):
    plain, other = trainer(), trainer(**changes)
    named = dict(plain.model.named_parameters())
    assert all(torch.equal(p, named[name]) for name, p in other.model.named_parameters())


def test_another_seed_changes_both():
    one, two = trainer(seed=0), trainer(seed=1)
    assert not torch.equal(one.model.head.weight, two.model.head.weight)
    assert not torch.equal(one.batches.get(0), two.batches.get(0))
