"""Depth tiling: sources before a group of sites are read once for the whole group, and nothing changes but the time."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from depthmix.ops import use_backend
from ops.helpers import assert_near
from ops.test_depth_attention_order import (
    Results,
    Stack,
    assert_as_reference,
    backward,
    cotangent,
    leaves,
    plain,
    tokens,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")
precomputed_logits = importlib.import_module("depthmix.ops.depth_attention.precomputed_logits")


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Groups from the first that can be, at any number of tokens; the rows that looked ahead are noted, and there must be some."""
    monkeypatch.setattr(precomputed_logits, "MIN_TOKENS", 1)
    monkeypatch.setattr(precomputed_logits, "MIN_SOURCES", 4)
    begun: list[int] = []

    def noted(function: Any) -> Any:
        def wrapped(queries: Tensor, row: int, *rest: Any) -> Any:
            begun.append(row)
            return function(queries, row, *rest)

        return wrapped

    for name in ("precompute_mixtures", "extend_logits"):
        monkeypatch.setattr(precomputed_logits, name, noted(getattr(precomputed_logits, name)))
    yield begun
    assert begun


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "n_blocks",
    [pytest.param(3, marks=pytest.mark.covered), 6],  # the only group has three sites; the second of two has one
)
def test_every_gradient(n_blocks: int, norm: bool, groups: list[int]) -> None:
    assert_as_reference(plain, tokens(shape=(2, 24)), n_blocks=n_blocks, norm=norm, tol=4e-6)
    assert groups == list(range(4, 2 * n_blocks, 4))


WAYS: list[dict[str, Any]] = [{"ways": 3}, {"ways": 2, "block_size": 2}, {"ways": 2, "block_size": 3, "norm": True}]
BOTH = [{}, WAYS[2]]  # one way looks ahead by mixtures, several by logits


@pytest.mark.covered
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_every_gradient_of_several_ways(options: dict[str, Any], groups: list[int]) -> None:
    """Of finished sources every later row knows the logits; only those of the newest are left to a read."""
    assert_as_reference(plain, tokens(shape=(2, 24)), n_blocks=4, tol=4e-6, **options)
    step = options["ways"] + 1  # rows of a block: attention's, the MLP's, and in the end finish's
    pairs = {step - 1, step} if options.get("block_size") == 3 else {step - 1} if "block_size" in options else set()
    # In the first block a read has e and the sum of its own block, and needs nothing from before.
    assert groups == sorted({*range(step - 1, 4 * step, step), *range(step, 4 * step + 1, step)} - pairs)


@pytest.mark.parametrize("options", [*BOTH, {"norm": True}], ids=str)
def test_without_gradients(options: dict[str, Any]) -> None:
    def forward(stack: Stack, x: Tensor) -> Results:
        with torch.no_grad():
            return [stack(x)]

    assert_as_reference(forward, tokens(shape=(3, 24)), n_blocks=4, **options)


@pytest.mark.parametrize("options", BOTH, ids=str)
def test_half_precision(options: dict[str, Any]) -> None:
    """One rounding: what the first site of a group worked out for the others is kept in fp32."""
    assert_as_reference(plain, tokens(dtype=torch.float16), n_blocks=4, tol=8e-3, **options)


@pytest.mark.parametrize("options", [{"norm": True}, WAYS[2]], ids=str)
def test_whole_blocks_checkpointed(options: dict[str, Any]) -> None:
    def scenario(stack: Stack, x: Tensor) -> Results:
        state = stack.mixer.start(x)
        for site in range(stack.mixer.n_sites):
            state = checkpoint(stack.step, state, site, use_reentrant=False)
        return backward(stack, x, stack.mixer.finish(state))

    assert_as_reference(scenario, tokens(), n_blocks=4, tol=4e-6, **options)


@pytest.mark.parametrize("options", BOTH, ids=str)
def test_twice_and_in_part(options: dict[str, Any]) -> None:
    """A second backward over the same graph, and one that asks only for the queries."""

    def scenario(stack: Stack, x: Tensor) -> Results:
        out = stack(x)
        wanted, found = leaves(stack, x), []
        for _ in range(2):
            found += torch.autograd.grad(out, wanted, cotangent(out), retain_graph=True, allow_unused=True)
        return [*found, *torch.autograd.grad(out, [stack.mixer.query], cotangent(out, 5))]

    assert_as_reference(scenario, tokens(), n_blocks=4, tol=4e-6, **options)


@pytest.mark.parametrize("options", BOTH, ids=str)
def test_a_fork_in_the_middle_of_a_group(options: dict[str, Any]) -> None:
    """Two stacks that part after the group has begun."""

    def scenario(stack: Stack, x: Tensor) -> Results:
        state = stack.mixer.start(x)
        for site in range(5):
            state = stack.step(state, site)
        ends = []
        for scale in (1.0, -0.5):
            fork = state
            for site in range(5, stack.mixer.n_sites):
                y = stack.sublayer(site, stack.read(fork, site)) * scale
                fork = stack.mixer.write(fork, site, y)
            ends.append(stack.mixer.finish(fork))
        return backward(stack, x, ends[0] + 2 * ends[1])

    assert_as_reference(scenario, tokens(), n_blocks=4, tol=4e-6, **options)


@pytest.mark.parametrize("site", [4, 7])  # the first of its group, and the last
def test_the_gradient_of_one_output(site: int) -> None:
    """No later read is in the graph: the newest source's gradient is computed at once, beside a mixture of older ones."""

    def scenario(stack: Stack, x: Tensor) -> Results:
        return backward(stack, x, stack.outputs(x)[site])

    assert_as_reference(scenario, tokens(), n_blocks=4, norm=True, tol=4e-6)


@pytest.mark.parametrize("options", [{}, {"ways": 2, "block_size": 2}], ids=str)
def test_other_queries_see_nothing_of_the_old_ones(options: dict[str, Any]) -> None:
    """A state made without gradients, queries that change, and the rest with gradients: what was looked up is not used."""

    def scenario(stack: Stack, x: Tensor) -> Results:
        with torch.no_grad():
            state = stack.mixer.start(x)
            for site in range(5):
                state = stack.step(state, site)
            for name, p in stack.mixer.named_parameters():
                if name.startswith("query"):
                    p.neg_()
        for site in range(5, stack.mixer.n_sites):
            state = stack.step(state, site)
        return backward(stack, x, stack.mixer.finish(state))

    assert_as_reference(scenario, tokens(), n_blocks=4, tol=4e-6, **options)


@pytest.mark.parametrize(("size", "n_blocks", "fewest", "begun"), [(3, 9, 4, [12, 15]), (6, 6, 2, [10])])
def test_without_gradients_blocks_read_finished_sources_in_two_phases(
    size: int, n_blocks: int, fewest: int, begun: list[int], groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first phase at the first of up to four sites of a block, and in training not at all."""
    monkeypatch.setattr(precomputed_logits, "MIN_SOURCES", fewest)
    monkeypatch.setattr(importlib.import_module("depthmix.ops.slots.op"), "STEP_TOKENS", 0)
    stack, x = Stack(n_blocks=n_blocks, block_size=size, norm=True), tokens(shape=(2, 24))
    with use_backend("reference"), torch.no_grad():
        expected = stack(x)
    with use_backend("triton"):
        assert_near([stack(x).detach()], [expected], 4e-6)
        assert not groups
        with torch.no_grad():
            assert_near([stack(x)], [expected], 4e-6)
    assert groups == begun
