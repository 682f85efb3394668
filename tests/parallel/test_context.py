"""Context parallelism: a sequence in parts is the sequence in one piece, and every part has as much to look at."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from depthmix.parallel.share import Share
from parallel.in_turn import in_turn

GROUPED = {"n_kv_heads": 2, "mlp": "swiglu"}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_are_a_sequence(count):
    tokens = torch.arange(5 * 12).view(5, 12)
    parts = [Share(index, count).of(tokens, 1) for index in range(count)]
    assert all(part.shape == (5, 12 // count) for part in parts)
    assert torch.equal(Share(0, count).put_together(parts, 1), tokens)


@pytest.mark.parametrize("count", [2, 4])
def test_every_part_looks_at_as_many_keys(count):
    """Token t at t + 1 of them."""
    looks = {int((Share(index, count).of(torch.arange(48), 0) + 1).sum()) for index in range(count)}
    assert len(looks) == 1


@pytest.mark.parametrize("count", [2, 4])
def test_attention_is_that_of_the_whole_sequence(count):
    """With grouped heads, and its gradients; in four parts of eight tokens a chunk is one of them."""
    q, k, v = (torch.randn(3, heads, 8, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    found, way = in_turn(q, k, v, count), torch.randn_like(expected)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(*(torch.autograd.grad(y, (q, k, v), way) for y in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_mixers_with_two_processes(workers):
    """One of each make: a stream, a stack of blocks with ways, streams, sums; with grouped heads."""
    values = {"value_residual": "sparse", "value_embeddings": True}
    cases = [("residual", {}, values), ("attnres", {"ways": 3}, GROUPED), ("mhc", {}, {}), ("dca", {}, GROUPED)]
    workers.run(2, "parallel.jobs:same_training", {"cp": 2}, cases)


@pytest.mark.parametrize("sizes", [{"dp": 2, "cp": 2}, {"shard": 2, "cp": 2}, {"cp": 4}], ids=str)
def test_layouts_with_four(workers, sizes):
    """In fp64, where rounding hides nothing; with four parts a chunk is a single token."""
    workers.run(4, "parallel.jobs:same_training", sizes, [("attnres", {}, GROUPED)], torch.float64)
