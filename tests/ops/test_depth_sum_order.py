"""Stacks of weighted sums with kernels: what people do with a graph gives the reference's gradients, or an error.

Plain stand-ins take the kernels' place here, so what is asked is whether their autograd loses, doubles or mixes up anything:
a read gives its sources no gradient and leaves it with the nodes that made them. A few stacks run with the kernels themselves.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from depthmix import create_mixer
from depthmix.ops import backward_mail, depth_sum, use_backend
from depthmix.ops.depth_sum import source_order
from harness import LAYOUTS
from ops import plain_sums
from ops.helpers import assert_near, nodes_with_mailboxes, rand
from ops.test_depth_attention_order import (
    SCENARIOS,
    Stack,
    assert_as_reference,
    backward,
    cotangent,
    leaves,
    plain,
    tokens,
)
from oracles import DEFAULTS, ORACLES
from small_cases import each

pytest.importorskip("triton")
D = 24
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "grn1": ("grn", {"version": 1}),
    "grn2": ("grn", {"version": 2}),
    "grn3": ("grn", {"relu_on": "sum"}),
    "dca": ("dca", {}),
    "dca per entry": ("dca", {"w_per_entry": True}),
    "1-dca": ("dca", {"window": 1}),
    "2-dca per entry": ("dca", {"window": 2, "w_per_entry": True, "relu_on": "sum"}),
    "denseformer": ("denseformer", {}),
    "dilated": ("denseformer", {"dilation": 2, "period": 2}),
    "mudd": ("mudd", {}),
    "residual": ("residual", {}),
}
ADDED = {"layerscale": ("layerscale", {}), "rezero": ("rezero", {})}
every_rule = pytest.mark.parametrize("rule", RULES)


class SumStack(Stack):
    """A stack as attention's tests make them, of any rule."""

    def __init__(
        self, rule: str = "dca", n_blocks: int = 3, norm: bool = True, seed: int = 0, sites: Any = None
    ) -> None:
        nn.Module.__init__(self)
        name, options = (RULES | ADDED)[rule]
        self.mixer = create_mixer(name, dim=D, n_blocks=n_blocks, sites=sites, **options)
        sites = range(self.mixer.n_sites)
        self.weight = nn.ParameterList(torch.empty(D) for _ in sites)
        self.norms = nn.ModuleList(
            nn.ModuleList(nn.RMSNorm(D, eps=1e-3) for _ in range(self.mixer.ways(s))) for s in sites if norm
        )
        drawn = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            # unnormed, numbers grow from block to block, and with W_2 of 64 columns so do errors of any fp32
            std = 0.03 if ".W_2." in name else 0.5 if norm else 0.2
            nn.init.normal_(p, std=std, generator=drawn)


@pytest.fixture
def plain_kernels() -> Iterator[None]:
    with plain_sums.plain_kernels():
        yield


def check(scenario: Callable[[Any, Tensor], Any], x: Tensor, tol: float = 1e-5, **options: Any) -> None:
    """As with attention's stacks: the same with either backend, gradients that are not there included."""
    assert_as_reference(scenario, x, tol, make=SumStack, **options)


@each(("rule", "norm"), [(rule, True) for rule in RULES] + [(rule, False) for rule in ("1-dca", "dilated", "mudd")])
@pytest.mark.usefixtures("plain_kernels")
def test_every_gradient(rule: str, norm: bool) -> None:
    check(plain, tokens(shape=(2, 3, D)), rule=rule, n_blocks=6, norm=norm)


@each(
    ("rule", "layout", "norm"),
    [(rule, "uneven", norm) for rule in RULES for norm in (True, False)]
    + [(rule, layout, True) for rule in ("grn2", "dca", "denseformer", "mudd") for layout in ("parallel", "cross")],
)
@pytest.mark.usefixtures("plain_kernels")
def test_every_gradient_with_other_sites(rule: str, layout: str, norm: bool) -> None:
    """Blocks of one site, of three, and of one to three."""
    blocks = LAYOUTS[layout]
    check(plain, tokens(), rule=rule, n_blocks=len(blocks), sites=blocks, norm=norm)


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize("rule", ["grn1", "dca", "denseformer", "mudd"])
def test_other_sites_with_the_kernels_themselves(rule: str) -> None:
    check(plain, tokens(shape=(2, D)), tol=2e-5, rule=rule, n_blocks=3, sites=LAYOUTS["uneven"][1:])


# Of what people do with a graph (attention's tests say what), with DCA all, and with others what their graphs differ in.
APART = ("second_backward", "one_leaf_at_a_time", "middle_outputs", "two_losses", "read_twice", "fork", "second_derivatives",
         "checkpointed block", "half without gradients", "only the mixer", "loss_on_a_held_tensor")  # fmt: skip
OF_STACKS = ("loss_on_a_held_tensor",)  # whose state has one form with either backend
OF_PARAMETERS = (*OF_STACKS, "one_leaf_at_a_time", "only the mixer")


@pytest.mark.covered
@pytest.mark.usefixtures("plain_kernels")
@each(
    ("rule", "scenario"),
    [("dca", name) for name in SCENARIOS]
    + [(rule, name) for rule in ("grn1", "mudd") for name in APART[::2]]
    + [(rule, name) for rule in ("1-dca", "dilated") for name in APART[1::2]]
    + [("residual", name) for name in APART if name not in OF_PARAMETERS],
)
def test_what_people_do(rule: str, scenario: str) -> None:
    """The gradients are the reference's, whatever part of a graph runs, as often and in whatever order."""
    check(SCENARIOS[scenario], tokens(), rule=rule)


@pytest.mark.usefixtures("plain_kernels")
@each("scenario", ["read_twice", "fork", "second_derivatives", "checkpointed block", "middle_outputs"])
@each("rule", ["dca", "denseformer"])
def test_what_people_do_with_other_sites(rule: str, scenario: str) -> None:
    check(SCENARIOS[scenario], tokens(), tol=2e-5, rule=rule, n_blocks=4, sites=LAYOUTS["uneven"])


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize("rule", ["grn1", "grn3", "2-dca per entry", "denseformer", "mudd", "residual"])
def test_with_the_kernels_themselves(rule: str) -> None:
    """Either is up to 7e-6 from fp64 here."""
    check(plain, tokens(shape=(2, D)), tol=2e-5, rule=rule, n_blocks=2)


@pytest.mark.usefixtures("quick_interpreter")
@each(
    ("rule", "scenario"),
    [("rezero", "plain"), *(("layerscale", name) for name in ("plain", *APART) if name not in OF_STACKS)],
)
def test_outputs_that_are_scaled_and_added(rule: str, scenario: str) -> None:
    check(plain if scenario == "plain" else SCENARIOS[scenario], tokens(shape=(2, D)), tol=2e-5, rule=rule, n_blocks=2)


@pytest.mark.usefixtures("quick_interpreter")
def test_half_precision_with_the_kernels_themselves() -> None:
    """fp16 activations under autocast: a few roundings from the reference."""

    def scenario(stack: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.float16):
            return plain(stack, x)

    check(scenario, tokens(dtype=torch.float16), tol=6e-3, rule="dca", n_blocks=2)


def check_against_oracle(rule: str, n_blocks: int, tol: float) -> None:
    """Output and gradients are those of the implementation written from the paper, in fp64."""
    stack, x = SumStack(rule, n_blocks, norm=False), tokens(shape=(1, 3, D))
    with use_backend("triton"):
        got = backward(stack, x, stack(x))
    exact, y = SumStack(rule, n_blocks, norm=False).double(), x.detach().double().requires_grad_()
    name, options = RULES[rule]
    out = ORACLES[name](dict(exact.mixer.named_parameters()), DEFAULTS[name] | options, n_blocks, y, exact.sublayer).out
    assert_near(got, backward(exact, y, out), tol)


@pytest.mark.usefixtures("plain_kernels")
@every_rule
def test_against_the_oracle(rule: str) -> None:
    check_against_oracle(rule, 3, 1e-5)


@pytest.mark.usefixtures("plain_kernels")
def test_the_window_of_the_study_against_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """8-DCA of twelve blocks: the last two and the end read a sum of blocks, the others what a stack without a window has."""
    monkeypatch.setitem(RULES, "8-dca", ("dca", {"window": 8}))
    check_against_oracle("8-dca", 12, 1e-5)


@pytest.mark.usefixtures("quick_interpreter")
def test_the_window_of_the_study_with_the_kernels_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "8-dca", ("dca", {"window": 8}))
    check(plain, tokens(shape=(2, D)), tol=2e-5, rule="8-dca", n_blocks=12)


def test_each_gradient_is_read_once_for_two_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight blocks of DCA: 152 pairs of a way and a source that it reads; one by one every do would be read for each of them."""
    calls: list[tuple[int, int]] = []
    summed = plain_sums.source_backward
    monkeypatch.setattr(plain_sums, "source_backward", lambda t, r: (calls.append((len(t), len(r))), summed(t, r))[1])
    with plain_sums.plain_kernels(), use_backend("triton"):
        stack, x = SumStack("dca", n_blocks=8), tokens()
        stack(x).sum().backward()
    pairs = sum(3 * (1 + reader) for reader in range(1, 8)) + 9 + 3
    attention = [(t, r) for t, r in calls if t]
    assert sum(t * r for t, r in attention) == pairs
    assert sum(r for _, r in attention) <= 70


@pytest.mark.parametrize(("rule", "added"), [("dca", 3), ("grn2", 3), ("mudd", 0)])
def test_the_two_gradients_of_attentions_output_are_added_in_the_norms_backward(
    rule: str, added: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes to the second site and into the block's entry; MUDD's entry begins with the sum that the second site reads."""
    gone: list[bool] = []
    back = plain_sums.read_backward
    monkeypatch.setattr(plain_sums, "read_backward", lambda *a: (gone.append(a[-1] is not None), back(*a))[1])
    with plain_sums.plain_kernels(), use_backend("triton"):
        SumStack(rule, n_blocks=3)(tokens()).sum().backward()
    assert sum(gone) == added


@pytest.mark.usefixtures("plain_kernels")
def test_an_entry_of_constants_needs_no_gradient() -> None:
    """Outputs that have none stay without, though the read between them has gradients."""
    with use_backend("triton"):
        stack = SumStack("dca", n_blocks=2)
        state = stack.mixer.start(tokens())
        for site in range(2):
            h = stack.read(state, site)
            assert (h[0] if site == 0 else h).requires_grad
            state = stack.mixer.write(state, site, rand(1, 1, D, seed=site, dtype=torch.float32))
    assert not any(t.requires_grad for t in state.pending)


def test_neighbours_in_a_window_share_what_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """3-DCA of six blocks: every do once for two neighbours, also where a later reader sees one of them in the sum of older ones."""
    calls: list[tuple[int, int]] = []
    summed = plain_sums.source_backward
    monkeypatch.setattr(plain_sums, "source_backward", lambda t, r: (calls.append((len(t), len(r))), summed(t, r))[1])
    monkeypatch.setattr(source_order, "UNFINISHED_BYTES", 16)  # four ways of a read, as in bf16
    monkeypatch.setitem(RULES, "3-dca", ("dca", {"window": 3}))
    with plain_sums.plain_kernels(), use_backend("triton"):
        SumStack("3-dca", n_blocks=6)(tokens()).sum().backward()
    # f_5 and f_4 have reader 5 and finish; f_3 and f_2 readers 3 and 4, f_3 also 5; f_1 and e 1 to 4, e also 5 and finish
    assert [(t, r) for t, r in calls if t == 2] == [(2, 4), (2, 9), (2, 16)]


def test_the_scores_of_a_source_are_made_and_differentiated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    score, back = plain_sums.add_and_score, plain_sums.score_backward
    monkeypatch.setattr(plain_sums, "add_and_score", lambda *a, **k: (made.append(len(a[2].high)), score(*a, **k))[1])
    monkeypatch.setattr(plain_sums, "score_backward", lambda v, ds: (made.append(-len(ds)), back(v, ds))[1])
    with plain_sums.plain_kernels(), use_backend("triton"):
        SumStack("dca", n_blocks=3)(tokens()).sum().backward()
    assert made == [
        7,
        7,
        4,
        1,
        -1,
        -4,
        -7,
        -7,
    ]  # e, then a delta a block: two readers of three ways and finish, and so on


@pytest.mark.usefixtures("plain_kernels")
def test_a_sources_gradient_is_rounded_once() -> None:
    """What four readers leave with x is summed in fp32: of 1024 + 0.75, roundings to fp16 on the way would make 1024."""
    mixer = create_mixer("grn", dim=D, n_blocks=4, version=1)
    x = torch.ones(1, D, dtype=torch.float16, requires_grad=True)
    with use_backend("triton"):
        state, reads = mixer.start(x), []
        for site in range(8):
            h = mixer.read(state, site)
            reads += [h] if site % 2 == 0 else []
            state = mixer.write(state, site, torch.zeros_like(x))
    torch.autograd.backward(reads, [torch.full_like(x, w) for w in (0.25, 1024.0, 0.25, 0.25)])
    assert torch.equal(x.grad, torch.full_like(x, 1025.0))


@pytest.mark.usefixtures("plain_kernels")
@each("rule", ["dca", "denseformer", "mudd"])
def test_no_tokens(rule: str) -> None:
    stack, x = SumStack(rule), tokens(shape=(0, 2, D))
    with use_backend("triton"):
        out, *grads = backward(stack, x, stack(x))
    assert out.shape == x.shape
    assert all(g is not None and not g.any() for g in grads)


@pytest.mark.usefixtures("plain_kernels")
@each("rule", ["1-dca", "mudd"])
def test_nothing_is_left_behind(rule: str) -> None:
    """Of passes that run a part of the graph, of one that fails, and of the graph when it is over."""
    with use_backend("triton"):
        stack, x = SumStack(rule), tokens()
        *made, out = stack.outputs(x)
        for y in made:
            torch.autograd.grad(out, y, cotangent(out), retain_graph=True)
        hook = made[0].register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.backward(cotangent(out), retain_graph=True)
        hook.remove()
        found = nodes_with_mailboxes(out)
        assert len(found) > 8
        failed = {id(node) for node in found if node.mail}
        out.backward(cotangent(out), retain_graph=True)
        assert {id(node) for node in found if node.mail or getattr(node, "partial_gradient", None)} <= failed
        assert not backward_mail._open_passes
        node = weakref.ref(out.grad_fn)
        del out, made, found, y
        gc.collect()
        assert node() is None


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("ask", ["retain_grad", "register_hook"])
def test_the_gradient_of_a_states_tensor(ask: str) -> None:
    """Kernels never form it, and say so; what a read or finish returns is the caller's own."""
    with use_backend("triton"):
        stack, state = SumStack("dilated", n_blocks=3), None
        for site in range(6):
            state = stack.step(stack.mixer.start(tokens()) if state is None else state, site)
        held = [*state.stack[1:], stack.step(stack.mixer.start(tokens()), 0).g]
        for t in held:
            with pytest.raises(RuntimeError, match=r"depth_sum: .*gradient of a state's tensor .*\"reference\""):
                getattr(t, ask)(*[print] * (ask == "register_hook"))
        getattr(stack.mixer.finish(state), ask)(*[print] * (ask == "register_hook"))


@pytest.mark.parametrize(("rule", "adds"), [("grn2", 3), ("denseformer", 3), ("dilated", 2), ("mudd", 0), ("dca", 0)])
def test_additions_inside_reads(rule: str, adds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's entry, where its weights do not depend on it; finish without an average only adds."""
    added: list[bool] = []
    summed = plain_sums.read
    monkeypatch.setattr(plain_sums, "read", lambda *args: (added.append(args[1] is not None), summed(*args))[1])
    with plain_sums.plain_kernels(), use_backend("triton"):
        SumStack(rule, n_blocks=3)(tokens())
    assert sum(added) == adds


@pytest.mark.usefixtures("plain_kernels")
def test_second_derivatives_of_checkpointed_blocks() -> None:
    """Each read saves all that it needs for them, so a region is computed again no more often than PyTorch allows."""

    def scenario(stack: Any, x: Tensor) -> Any:
        state = stack.mixer.start(x)
        for site in range(4):
            state = checkpoint(stack.step, state, site, use_reentrant=False)
        out = stack.mixer.finish(state)
        (g,) = torch.autograd.grad(out, x, cotangent(out), create_graph=True)
        return torch.autograd.grad(g.square().sum(), leaves(stack, x), allow_unused=True)

    check(scenario, tokens(), rule="dca", n_blocks=2)


@pytest.mark.usefixtures("plain_kernels")
def test_compiled_autograd_is_refused_in_one_sentence() -> None:
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    torch._dynamo.reset()
    with use_backend("triton"):
        stack, x = SumStack("denseformer", n_blocks=1), tokens()
        out = stack(x)
        with (
            compiled_autograd._enable(torch.compile(backend="eager")),
            pytest.raises(RuntimeError, match=r"depth_sum: compiled autograd .*\"reference\""),
        ):
            out.backward(cotangent(out))


SHAPES = {
    "static": (3, 1, True, False, False),
    "numbers": (2, 5, True, False, True),
    "dynamic": (4, 2, False, True, False),
    "both, relu": (1, 3, True, True, False),
}


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize(("ways", "n", "static", "dynamic", "numbers"), SHAPES.values(), ids=SHAPES)
def test_the_operator(ways: int, n: int, static: bool, dynamic: bool, numbers: bool) -> None:
    """depth_sum with kernels: the reference's sums and gradients; as an operator that PyTorch knows, well-formed."""
    given = [rand(2, 3, 8, seed=i, dtype=torch.float32) for i in range(n)]
    if static:
        given.append(rand(ways, n, 1 if numbers else 8, seed=50, dtype=torch.float32))
    if dynamic:
        given.append(rand(2, 3, ways, n, seed=51, dtype=torch.float32))

    def split(given: Any) -> tuple[Any, ...]:
        return list(given[:n]), given[n] if static else None, given[-1] if dynamic else None, static and dynamic

    def run(backend: str) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in given]
        outs = depth_sum(*split(leaves), backend=backend)
        return [*outs, *torch.autograd.grad(outs, leaves, [rand(*o.shape, seed=60).to(o) for o in outs])]

    assert_near(run("triton"), run("reference"), 2e-6)
    if n > 2:
        leaves = [t.requires_grad_() for t in given]
        torch.library.opcheck(torch.ops.depthmix.depth_sum_read.default, split(leaves))


@pytest.mark.uncovered  # tracing the compiler itself takes minutes
@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("rule", ["grn3"])
def test_compiled_as_one_graph(rule: str) -> None:
    """Reads are operators then, differentiated layer by layer; states that eager code made go on in compiled code."""
    stack, x = SumStack(rule, n_blocks=2), tokens()
    with use_backend("triton"):
        state = stack.step(stack.step(stack.mixer.start(x), 0), 1)

        def rest(state: Any) -> Tensor:
            return stack.mixer.finish(stack.step(stack.step(state, 2), 3))

        torch._dynamo.reset()
        expected = torch.autograd.grad(rest(state).square().sum(), leaves(stack, x), retain_graph=True)
        got = torch.autograd.grad(
            torch.compile(rest, fullgraph=True, backend="aot_eager")(state).square().sum(), leaves(stack, x)
        )
    assert_near(got, expected, 1e-5)
