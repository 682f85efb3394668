"""Among many processes a model is the model in one piece: initial weights, losses, every gradient, their norm."""

import pytest
import torch

from depthmix import list_mixers
from parallel.jobs import example

PLAIN = {}
# A vocabulary that two processes do not divide evenly.
FULL = {"vocab_size": 13, "mlp": "swiglu", "n_kv_heads": 2, "embedding_norm": True}
TIED = {"tie_embeddings": True}
VALUES = ("residual", {}, {"value_residual": "learnable", "value_embeddings": True})
# Options under which states are made of other things, or a parameter is divided otherwise, than with the defaults.
WAYS = ("attnres", {"ways": 3}, FULL)
PARTS = ("mhc", {"residual_map": "birkhoff", "schedule": "single_pass"}, FULL)
EARLIER = ("laurel", {"variant": "pa"}, TIED)
EVERY = [(name, {}, PLAIN) for name in list_mixers()]


@pytest.mark.parametrize(
    ("sizes", "others"),
    [({"dp": 2}, [EARLIER, VALUES]), ({"shard": 2}, [PARTS, VALUES]), ({"tp": 2}, [WAYS, EARLIER])],
    ids=str,
)
def test_every_mixer_with_two_processes(workers, sizes, others):
    workers.run(2, "parallel.jobs:same_training", sizes, [*EVERY, *others])


@pytest.mark.parametrize(
    ("sizes", "case"),
    [
        ({"dp": 2, "shard": 2}, ("hyper", {}, PLAIN)),
        ({"dp": 2, "tp": 2}, ("rezero", {}, PLAIN)),
    ],
    ids=str,
)
def test_other_layouts_with_four(workers, sizes, case):
    """In fp64, where rounding hides nothing. Shards of parts of matrices are trained with, saved and loaded in test_training.py."""
    workers.run(4, "parallel.jobs:same_training", sizes, [case], torch.float64)


def test_gradients_however_they_are_divided(workers):
    workers.run(2, "parallel.jobs:divided_gradients")


def test_the_example_in_torchtitans_style(workers):
    """Two parts of every sublayer, each sharded over two."""
    name, given = "torchtitan_style.py", {"mixer": "dca", "steps": 2}
    expected = example(name, given)
    for losses in workers.run(4, "parallel.jobs:example", name, {**given, "tp": 2}):
        assert losses == pytest.approx(expected, rel=1e-5)
