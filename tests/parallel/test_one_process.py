"""A world of one process, where torch's engine has nobody to send anything to: the plain loop's steps, and no message more."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from depthmix.data.dataset import TokenData
from depthmix.parallel.layout import Layout
from depthmix.parallel.world import World, join
from depthmix.train.loop import Trainer
from train import small

LAYOUTS = {"DDP": Layout(dp=1), "FSDP2": Layout(shard=1)}
SIZE = {"n_blocks": 1, "n_heads": 2, "dim": 16, "mlp_dim": 16, "batch_size": 4, "warmup": 1, "clip": 0.1}


@pytest.fixture(scope="module")
def worlds():
    with join(Layout(), "cpu", given=True) as world:
        yield {name: World(layout, world.device, mesh=world.mesh) for name, layout in LAYOUTS.items()}


def trainer(world=None, **changes):
    config = small.config("nowhere", **{**SIZE, **changes})
    return Trainer(config, TokenData.open(config.data), torch.device("cpu"), world)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    "changes",
    [
        {"mixer": "attnres", "mixer_options": {"ways": 2}, "tie_embeddings": True, "precision": "bf16"},
        {"mixer": "mhc", "micro_batch_size": 2, "checkpoint_activations": True},
    ],
    ids=["bf16, tied", "in two parts, recomputed"],
)
def test_steps_are_the_plain_loops_to_the_bit(worlds, name, changes):
    """Clipped ones: the limit is far below the norm. Nothing is added up in another order, nor rounded at another place."""
    plain, divided = trainer(**changes), trainer(worlds[name], **changes)
    for step in range(3):
        assert divided.step(step) == plain.step(step)
    for found, expected in zip(divided.checkpoint_tensors(), plain.checkpoint_tensors(), strict=True):
        assert set(found) == set(expected)
        for key, t in found.items():
            assert torch.equal(getattr(t, "full_tensor", lambda t=t: t)(), expected[key]), key


class FromTheHost(TorchDispatchMode):
    """Notes numbers of Python's that are made tensors: on their way to a GPU they wait for all that was launched before them."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "lift_fresh" in str(function):
            self.found.append(args)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_sends_a_gpu_no_numbers(worlds, name):
    taken = trainer(worlds[name])
    taken.step(0)  # in which the engine sets itself up
    taken.prefetched = 1, taken.load_batch(1)
    with FromTheHost() as noted:
        taken.launch(1)
    assert noted.found == []


def test_one_group_beside_the_mixers(worlds):
    """Every group costs hooks in every pass, and with one process there is nothing that could overlap."""
    taken = trainer(worlds["FSDP2"])
    assert [m for m in taken.model.modules() if isinstance(m, FSDPModule)] == [taken.model, taken.model.mixer]
