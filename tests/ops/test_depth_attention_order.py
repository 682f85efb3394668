"""Stacks of reads with kernels, as a mixer makes them: what people do with a graph gives the reference's gradients, or an error.

A read's backward gives its older sources no gradient; it leaves it with the nodes that made them. So what is asked here is
mostly: whatever part of the graph runs, as often and in whatever order, nothing is lost, doubled or mixed up.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from depthmix import create_mixer
from depthmix.ops import use_backend
from harness import LAYOUTS
from ops.helpers import assert_near
from oracles import DEFAULTS, ORACLES
from oracles.blocks import Blocks
from small_cases import each

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")
D = 24
FULL_NORMED = {"norm": True}
BLOCK_WAYS = {"norm": True, "block_size": 3, "ways": 3}
TWO_WAYS = {"norm": True, "block_size": 4, "ways": 2}


class Stack(nn.Module):
    """A mixer, optionally the norms behind its reads, and elementwise sublayers that tell ways apart; all drawn from a seed."""

    def __init__(self, n_blocks: int = 2, norm: bool = False, dim: int = D, seed: int = 0, **options: Any) -> None:
        super().__init__()
        self.mixer = create_mixer("attnres", dim=dim, n_blocks=n_blocks, **options)
        sites = range(self.mixer.n_sites)
        self.weight = nn.ParameterList(torch.empty(dim) for _ in sites)
        self.norms = nn.ModuleList(
            nn.ModuleList(nn.RMSNorm(dim, eps=1e-3) for _ in range(self.mixer.ways(s))) for s in sites if norm
        )
        drawn = torch.Generator().manual_seed(seed)
        for p in self.parameters():
            nn.init.normal_(p, std=0.5, generator=drawn)

    def read(self, state: Any, site: int) -> Any:
        return self.mixer.read(state, site, self.norms[site] if self.norms else None)

    def sublayer(self, site: int, h: Any) -> Tensor:
        ways = h if isinstance(h, tuple) else (h,)
        w = self.weight[site].to(ways[0].dtype)
        return sum(torch.tanh(t.roll(k + 1, -1) * w) * (k + 1) for k, t in enumerate(ways))

    def step(self, state: Any, site: int) -> Any:
        return self.mixer.write(state, site, self.sublayer(site, self.read(state, site)))

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x)[-1]

    def outputs(self, x: Tensor) -> list[Tensor]:
        """What every sublayer made, and the end."""
        state, made = self.mixer.start(x), []
        for site in range(self.mixer.n_sites):
            made.append(self.sublayer(site, self.read(state, site)))
            state = self.mixer.write(state, site, made[-1])
        return [*made, self.mixer.finish(state)]


Results = list[Tensor | None]
Scenario = Callable[[Stack, Tensor], Results]


def tokens(seed: int = 0, shape: Sequence[int] = (1, 1, D), dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def cotangent(out: Tensor, seed: int = 77) -> Tensor:
    return tokens(seed, out.shape).detach().to(out)


def leaves(stack: Stack, x: Tensor) -> list[Tensor]:
    return [t for t in (x, *stack.parameters()) if t.requires_grad]


def grads_of(out: Tensor, wanted: Sequence[Tensor], **options: Any) -> Results:
    return list(torch.autograd.grad(out, wanted, cotangent(out), allow_unused=True, **options))


def backward(stack: Stack, x: Tensor, out: Tensor) -> Results:
    """The gradients that `out.backward` leaves."""
    out.backward(cotangent(out))
    return [out.detach(), *[t.grad for t in leaves(stack, x)]]


def assert_as_reference(
    scenario: Scenario, x: Tensor, tol: float = 2e-6, make: Callable[..., Stack] = Stack, **options: Any
) -> None:
    """What a scenario returns is the same with either backend, gradients that are not there included."""
    results = []
    for backend in ("triton", "reference"):
        with use_backend(backend):
            results.append(scenario(make(**options), x.detach().clone().requires_grad_()))
    assert [t is None for t in results[0]] == [t is None for t in results[1]]
    got, expected = ([t for t in r if t is not None] for r in results)
    assert expected
    assert_near(got, expected, tol)


def plain(stack: Stack, x: Tensor) -> Results:
    return backward(stack, x, stack(x))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"block_size": 2},
    {"block_size": 3},
    {"block_size": 4},
    {"ways": 2},
    {"block_size": 3, "ways": 3},
    {"block_size": 4, "ways": 2},
    {"ways": 3},
    {"window": 2},
    {"block_size": 2, "window": 1},
    {"routing": "add"},
]


@pytest.mark.parametrize(
    ("options", "norm"), [(o, True) for o in OPTIONS] + [(o, False) for o in OPTIONS[:2] + OPTIONS[4:7]]
)
def test_every_gradient(options: dict[str, Any], norm: bool) -> None:
    """Full, Block, ways and window, with and without the norms after the reads."""
    assert_as_reference(plain, tokens(shape=(2, D)), norm=norm, **options)


UNEVEN: dict[str, Any] = {"n_blocks": 4, "sites": LAYOUTS["uneven"]}


@pytest.mark.parametrize(
    "options", [{"ways": 3, "block_size": 2}, {"ways": 2, "window": 2}, {"block_size": 3}], ids=str
)
def test_every_gradient_with_blocks_of_one_two_and_three_sites(options: dict[str, Any]) -> None:
    assert_as_reference(plain, tokens(), norm=True, **options, **UNEVEN)


@pytest.mark.parametrize("options", [{}, {"block_size": 8}, {"block_size": 4, "window": 3}], ids=str)
def test_a_deep_stack(options: dict[str, Any]) -> None:
    """18 sites: more than any group of sites or sources that a kernel handles at once."""
    assert_as_reference(plain, tokens(), n_blocks=9, norm=True, tol=4e-6, **options)


def assert_as_oracle(options: dict[str, Any], tol: float) -> None:
    """Output and gradients are those of the implementation written from the paper, in fp64."""
    stack, x = Stack(**options), tokens()
    with use_backend("triton"):
        got = backward(stack, x, stack(x))
    exact, y = Stack(**options).double(), x.detach().double().requires_grad_()
    run = ORACLES["attnres"]
    out = run(dict(exact.mixer.named_parameters()), DEFAULTS["attnres"] | options, 2, y, exact.sublayer).out
    assert_near(got, backward(exact, y, out), tol)


@pytest.mark.covered
@pytest.mark.parametrize(
    "options",
    [{}, {"block_size": 4, "ways": 2, "output_gain": 0.1}, {"block_size": 3, "ways": 3}, {"window": 2}],
    ids=str,
)
def test_against_the_oracle(options: dict[str, Any]) -> None:
    assert_as_oracle(options, 2e-6)


@pytest.mark.parametrize(
    ("block_size", "weights"),
    [(1, [1024.0, 0.5, 0.75, 1.0]), (4, [1024.0, 0.5, 0.75, 0.75])],  # of one to four sources, of one and then two
)
def test_a_source_s_gradient_is_rounded_once(block_size: int, weights: list[float]) -> None:
    """What readers leave with x is summed in fp32: of 1024 + 0.75, three roundings to fp16 would make 1024."""
    # Zero queries: each site weighs its sources alike.
    mixer = create_mixer("attnres", dim=D, n_blocks=2, block_size=block_size)
    x = torch.ones(1, D, dtype=torch.float16, requires_grad=True)
    with use_backend("triton"):
        state, reads = mixer.start(x), []
        for site in range(4):
            reads.append(mixer.read(state, site))
            state = mixer.write(state, site, torch.ones_like(x))
    torch.autograd.backward(reads, [torch.full_like(x, w) for w in weights])
    assert torch.equal(x.grad, torch.full_like(x, 1025.0))


@pytest.mark.parametrize("options", [FULL_NORMED, TWO_WAYS, BLOCK_WAYS], ids=str)
def test_half_precision(options: dict[str, Any]) -> None:
    """fp16 activations under autocast: a few roundings from the reference."""

    def scenario(stack: Stack, x: Tensor) -> Results:
        with torch.autocast("cpu", dtype=torch.float16):
            return plain(stack, x)

    assert_as_reference(scenario, tokens(dtype=torch.float16), tol=6e-3, **options)


def test_no_tokens() -> None:
    """An empty batch goes through, forward and backward."""
    stack, x = Stack(norm=True, ways=2), tokens(shape=(0, 2, D))
    with use_backend("triton"):
        out, *grads = backward(stack, x, stack(x))
    assert out.shape == x.shape
    assert all(g is not None and not g.any() for g in grads)


# What people do with a graph. Each returns tensors that must be the same with kernels as with the reference.


def second_backward(stack: Stack, x: Tensor) -> Results:
    """retain_graph: the same gradients again, not doubled."""
    out, wanted = stack(x), leaves(stack, x)
    first = grads_of(out, wanted, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, grads_of(out, wanted), strict=True) if a is not None)
    return first


def one_leaf_at_a_time(stack: Stack, x: Tensor) -> Results:
    """Only a part of the graph runs for each."""
    out, results = stack(x), []
    for leaf in (x, next(stack.mixer.parameters()), stack.weight[0], stack.weight[2], stack.norms[1][0].weight):
        results += grads_of(out, [leaf], retain_graph=True)
    return results


def middle_outputs(stack: Stack, x: Tensor) -> Results:
    """The gradient of one sublayer's output, and of a read's weights behind it."""
    *made, out = stack.outputs(x)
    return [g for y in made for g in grads_of(out, [y], retain_graph=True)] + grads_of(
        out, [made[1], *leaves(stack, x)]
    )


def some_leaves(stack: Stack, x: Tensor) -> Results:
    """backward(inputs=...) leaves the other leaves alone."""
    out = stack(x)
    out.backward(cotangent(out), inputs=[next(stack.mixer.parameters()), stack.weight[1]])
    return [t.grad for t in leaves(stack, x)]


def two_losses(stack: Stack, x: Tensor) -> Results:
    """On parts of one stack: one after the other, the longer first, and together."""
    results = []
    for order in ((1, -1), (-1, 1)):
        made = stack.outputs(x)
        for k in order:
            results += grads_of(made[k], leaves(stack, x), retain_graph=True)
    made = stack.outputs(x)
    together = torch.autograd.grad(made[1].sum() + made[2].square().sum() + made[-1].sum(), leaves(stack, x))
    return [*results, *together]


def loss_on_a_held_tensor(stack: Stack, x: Tensor) -> Results:
    """An auxiliary loss on the sources that a state holds."""
    state = stack.mixer.start(x)
    for site in range(stack.mixer.n_sites):
        state = stack.step(state, site)
    held = sum(t.square().sum() for t in pytree.tree_leaves(state) if t is not None)
    (stack.mixer.finish(state).sum() + held).backward()
    return [t.grad for t in leaves(stack, x)]


def frozen(*prefixes: str) -> Scenario:
    """Only the parameters with these names, and x if it is among them, have gradients."""

    def scenario(stack: Stack, x: Tensor) -> Results:
        for name, p in stack.named_parameters():
            p.requires_grad_(name.startswith(prefixes))
        x.requires_grad_("x" in prefixes)
        return backward(stack, x, stack(x))

    return scenario


def checkpointed(what: str, **options: Any) -> Scenario:
    """Activation checkpointing around a sublayer, a read and its sublayer, or a block."""

    def scenario(stack: Stack, x: Tensor) -> Results:
        mixer, state = stack.mixer, stack.mixer.start(x)
        for sites in Blocks(mixer.layout.blocks).sites:
            if what == "block":
                state = checkpoint(lambda st, sites=sites: functools.reduce(stack.step, sites, st), state, **options)
                continue
            for k in sites:
                if what == "read":
                    y = checkpoint(lambda st, k=k: stack.sublayer(k, stack.read(st, k)), state, **options)
                else:
                    h = stack.read(state, k)
                    h = h if isinstance(h, tuple) else (h,)
                    y = checkpoint(lambda *h, k=k: stack.sublayer(k, h), *h, **options)
                state = mixer.write(state, k, y)
        return backward(stack, x, mixer.finish(state))

    return scenario


def several_forwards(stack: Stack, x: Tensor) -> Results:
    """Two passes before any backward, in either order, and one loss of both."""
    other, wanted, results = tokens(1), leaves(stack, x), []
    for order in ((0, 1), (1, 0)):
        outs = [stack(x), stack(other)]
        results += [g for k in order for g in grads_of(outs[k], wanted)]
    return [*results, *torch.autograd.grad(stack(x).sum() - stack(other).square().sum(), wanted)]


def accumulation(stack: Stack, x: Tensor) -> Results:
    """Three backwards into the same gradients."""
    for seed in range(3):
        stack(x + seed).square().sum().backward()
    return [t.grad for t in leaves(stack, x)]


def broken_forward(stack: Stack, x: Tensor) -> Results:
    """An exception between two sites; a new pass is not concerned, nor is the state that was reached."""
    state = stack.step(stack.mixer.start(x), 0)
    stack.read(state, 1)
    with pytest.raises(ValueError, match="expected shape"):
        stack.mixer.write(state, 1, x[:, :0])
    for site in range(1, stack.mixer.n_sites):
        state = stack.step(state, site)
    return [*grads_of(stack.mixer.finish(state), leaves(stack, x)), *backward(stack, x, stack(x))]


class Stopped(Exception):
    """Raised by a hook."""


def broken_backward(stack: Stack, x: Tensor) -> Results:
    """An exception in the middle of a backward; the next one through the same graph knows nothing of it."""

    def stop(_: Tensor) -> None:
        raise Stopped

    *made, out = stack.outputs(x)
    hook = made[1].register_hook(stop)
    with pytest.raises(Stopped):
        grads_of(out, leaves(stack, x), retain_graph=True)
    hook.remove()
    return grads_of(out, leaves(stack, x))


def read_twice(stack: Stack, x: Tensor) -> Results:
    """A site reads its state twice, and both readings count."""
    state = stack.mixer.start(x)
    for site in range(stack.mixer.n_sites):
        y = stack.sublayer(site, stack.read(state, site))
        state = stack.mixer.write(state, site, y + stack.sublayer(site, stack.read(state, site)).sin())
    return backward(stack, x, stack.mixer.finish(state))


def fork(stack: Stack, x: Tensor) -> Results:
    """Two different outputs written to one state, each stack finished, the older fork last."""
    state = stack.step(stack.mixer.start(x), 0)
    y = stack.sublayer(1, stack.read(state, 1))
    forks = [stack.mixer.write(state, 1, y), stack.mixer.write(state, 1, y.sin())]
    for site in range(2, stack.mixer.n_sites):
        forks = [stack.step(f, site) for f in forks]
    return backward(stack, x, sum(stack.mixer.finish(f) for f in reversed(forks)))


def through_a_pytree(stack: Stack, x: Tensor) -> Results:
    """A state taken apart and put together again in the middle of the stack."""
    state = stack.mixer.start(x)
    for site in range(stack.mixer.n_sites):
        state = stack.step(state, site)
        if site == 1:
            state = pytree.tree_map(lambda t: t, state)
    return backward(stack, x, stack.mixer.finish(state))


def second_derivatives(stack: Stack, x: Tensor) -> Results:
    """create_graph: the penalty on a gradient, differentiated again."""
    wanted = leaves(stack, x)
    first = torch.autograd.grad(stack(x).square().sum(), wanted, create_graph=True)
    return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), wanted)]


def in_narrower_dtype(stack: Stack, x: Tensor) -> Results:
    """One output in fp16 beside fp32 sources, which the kernels do not know: the reference steps in for its reads."""
    state = stack.mixer.start(x)
    for site in range(stack.mixer.n_sites):
        y = stack.sublayer(site, stack.read(state, site))
        state = stack.mixer.write(state, site, y.half() if site == 1 else y)
    return backward(stack, x, stack.mixer.finish(state))


def without_gradients_at_first(start_only: bool) -> Scenario:
    """The lower half, or nothing but start, under no_grad."""

    def scenario(stack: Stack, x: Tensor) -> Results:
        with torch.no_grad():
            state = stack.mixer.start(x)
            for site in range(0 if start_only else 2):
                state = stack.step(state, site)
        for site in range(state.site, stack.mixer.n_sites):
            state = stack.step(state, site)
        return backward(stack, x, stack.mixer.finish(state))

    return scenario


SCENARIOS: dict[str, Scenario] = {
    f.__name__: f
    for f in (
        second_backward, one_leaf_at_a_time, middle_outputs, some_leaves, two_losses, loss_on_a_held_tensor, several_forwards,
        accumulation, broken_forward, broken_backward, read_twice, fork, through_a_pytree, second_derivatives, in_narrower_dtype,
    )
} | {
    "frozen embedding": frozen("mixer", "weight", "norms"),
    "frozen mixer": frozen("x", "weight", "norms"),
    "only one norm": frozen("norms.1"),
    "only the mixer": frozen("mixer"),
    "checkpointed sublayer": checkpointed("sublayer", use_reentrant=False),
    "reentrant sublayer": checkpointed("sublayer", use_reentrant=True),
    "checkpointed read": checkpointed("read", use_reentrant=False),
    "checkpointed block": checkpointed("block", use_reentrant=False),
    "start without gradients": without_gradients_at_first(True),
    "half without gradients": without_gradients_at_first(False),
}  # fmt: skip


COVERED = (
    "second_backward",
    "broken_backward",
    "second_derivatives",
    "fork",
    "checkpointed block",
    "half without gradients",
)


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(s, id=k, marks=[pytest.mark.covered] * (k in COVERED)) for k, s in SCENARIOS.items()],
)
def test_what_people_do(scenario: Scenario) -> None:
    """The gradients are the reference's."""
    assert_as_reference(scenario, tokens(), tol=1e-5, **BLOCK_WAYS)


# Full's backward differs in what it shares: sources in pairs, the newest with its own read. Where parts of a graph run, or run
# again, that must come apart.
APART = (
    second_backward,
    one_leaf_at_a_time,
    middle_outputs,
    two_losses,
    broken_backward,
    read_twice,
    fork,
    second_derivatives,
)


@pytest.mark.parametrize(
    "scenario",
    [
        *APART,
        *(SCENARIOS[name] for name in ("frozen mixer", "only the mixer", "checkpointed read", "checkpointed block")),
    ],
)
def test_what_people_do_with_full(scenario: Scenario) -> None:
    assert_as_reference(scenario, tokens(), tol=1e-5, **FULL_NORMED)


@pytest.mark.parametrize(
    "scenario",
    [
        one_leaf_at_a_time,
        middle_outputs,
        read_twice,
        fork,
        second_derivatives,
        *(SCENARIOS[name] for name in ("only the mixer", "checkpointed block")),
    ],
)
def test_what_people_do_with_two_ways(scenario: Scenario) -> None:
    """All four sites are one block: from the second on a read has two sources, and both gradients at once."""
    assert_as_reference(scenario, tokens(), tol=1e-5, **TWO_WAYS)


@each("block_size", [1, 3])
@each("window", [1, 2])
@each("backend", ["triton", "reference"])
def test_what_has_left_the_window_is_forgotten(backend: str, window: int, block_size: int) -> None:
    """A state holds e, what the window still shows of the finished blocks, and the newest source: not one block more."""
    with use_backend(backend), torch.no_grad():
        stack = Stack(4, block_size=block_size, window=window)
        state = stack.mixer.start(tokens())
        for site in range(stack.mixer.n_sites):
            state = stack.step(state, site)
            assert len(state.blocks) <= window
            assert state.tape is None or len(state.tape.blocks) <= window
        assert len(state.blocks) == window
