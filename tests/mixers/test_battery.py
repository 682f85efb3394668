"""What every registered mixer must do, whatever its rule. A new mixer is tested here by being registered."""

import copy
import shutil
import warnings

import pytest
import safetensors.torch
import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from depthmix import create_mixer
from depthmix.ops import use_backend
from depthmix.ops.norm import RMSNorm
from harness import (
    DIM,
    EVERY_VALUE,
    LAYOUTS,
    MIXERS,
    PAIRWISE,
    B,
    Sublayers,
    T,
    as_tuple,
    build,
    embedding,
    label,
    run_stack,
)
from oracles import MODULES
from oracles.blocks import Blocks

every_mixer = pytest.mark.parametrize("name", MIXERS)
every_layout = pytest.mark.parametrize("blocks", [3, *LAYOUTS.values()], ids=["usual", *LAYOUTS])
every_value = pytest.mark.parametrize(("name", "choice"), EVERY_VALUE, ids=[label(*case) for case in EVERY_VALUE])


def every_two_values(name):
    """Return the choices of options in which all pairs of values meet. A rule that is not registered has its defaults."""
    return [choice for other, choice in PAIRWISE if other == name] or [{}]


def gradients(mixer, sublayers, e, **kwargs):
    """Gradients of everything for a fixed loss, and the output."""
    for p in (*mixer.parameters(), *sublayers.parameters()):
        p.grad = None
    e = e.detach().clone().requires_grad_()
    out, _, _ = run_stack(mixer, sublayers, e, **kwargs)
    out.square().mean().backward()
    named = {**dict(mixer.named_parameters()), "sublayers": sublayers.weight, "e": e}
    return out.detach(), {k: None if p.grad is None else p.grad.clone() for k, p in named.items()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for k in a:
        assert (a[k] is None) == (b[k] is None), k
        assert a[k] is None or torch.equal(a[k], b[k]), k


def rows_of(mixer):
    """(name, row) -> a view of the parameter that belongs to one site, way or reader."""
    for name, p in mixer.named_parameters():
        if "." in name or name.endswith(("_head", "_v", "_kv")):
            yield name, 0, lambda g: g
        elif mixer.name == "mhc" and name == "b":  # its parts have different fates
            n = mixer.n
            for s in range(len(p)):
                yield "b_pre", s, lambda g, s=s, n=n: g[s, :n]
                yield "b_post", s, lambda g, s=s, n=n: g[s, n : 2 * n]
                yield "b_res", s, lambda g, s=s, n=n: g[s, 2 * n :]
        else:
            for s in range(len(p)):
                yield name, s, lambda g, s=s: g[s]


@every_layout
@every_mixer
def test_every_parameter_receives_a_gradient_at_step_0_or_1(name, blocks):
    """Row by row (a row is a site's), so that one dead site among live ones is seen."""
    mixer, sublayers = build(name, blocks), Sublayers(blocks)
    optimizer = torch.optim.SGD([*mixer.parameters(), *sublayers.parameters()], lr=0.3)
    size = {}
    for step in range(2):
        out, _, _ = run_stack(mixer, sublayers, embedding())
        optimizer.zero_grad()
        # The final norm is part of the picture: it decides what scale means to the loss.
        torch.nn.functional.rms_norm(out, (DIM,)).sub(1.0).square().mean().backward()
        grads = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in mixer.named_parameters()}
        for key, row, view in rows_of(mixer):
            source = "b" if key.startswith("b_") and name == "mhc" else key
            size[key, row] = max(size.get((key, row), 0.0), float(view(grads[source]).abs().max()))
        optimizer.step()
        assert step == 1 or sublayers.weight.grad is not None
    dead = {k for k, g in size.items() if g < 1e-13}
    assert dead == MODULES[name].DEAD_ROWS


SCALING = [(name, choice) for name, choice in PAIRWISE if build(name, 1, choice).output_gains()]


@pytest.mark.parametrize(("name", "choice"), SCALING, ids=[label(*case) for case in SCALING])
def test_outputs_that_a_model_has_multiplied_with_their_gains(name, choice):
    """The same, with every gradient, as if the rule did it; one without gains writes what it is given."""
    mixer, sublayers, e = build(name, 3, choice, random=True), Sublayers(3), embedding()
    gains = mixer.output_gains()
    assert list(gains) in ([], list(range(mixer.n_sites)))
    assert all(gain.shape == (DIM,) for gain in gains.values())
    expected = gradients(mixer, sublayers, e)
    write = mixer.write
    mixer.write = lambda state, site, y: write(state, site, gains[site] * y if gains else y, scaled=True)
    found = gradients(mixer, sublayers, e)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@every_value
def test_no_token_sees_a_later_one(name, choice):
    mixer, sublayers = build(name, 3, choice, random=True), Sublayers(3)
    e = embedding()
    with torch.no_grad():
        before, _, _ = run_stack(mixer, sublayers, e)
        changed = e.clone()
        changed[:, 3] += 1.0
        after, _, _ = run_stack(mixer, sublayers, changed)
    torch.testing.assert_close(before[:, :3], after[:, :3], rtol=0, atol=1e-13)
    assert not torch.allclose(before[:, 3:], after[:, 3:])


@pytest.mark.parametrize("blocks", [3, LAYOUTS["uneven"]], ids=["usual", "uneven"])
@every_mixer
def test_a_pass_over_flat_tokens_is_the_same(name, blocks):
    """The rule is token-local: only the last dimension means anything to it."""
    mixer = build(name, blocks, random=True)
    sources = [embedding() for _ in range(mixer.n_sites + 1)]
    reads = [as_tuple(h) for h in replay(mixer, sources)]
    flat = [as_tuple(h) for h in replay(mixer, [s.reshape(B * T, DIM) for s in sources])]
    for one, other in zip(reads, flat, strict=True):
        for h, f in zip(one, other, strict=True):
            torch.testing.assert_close(h.reshape(B * T, DIM), f, rtol=0, atol=1e-13)


def replay(mixer, sources):
    """Every read when the sublayers' outputs are given."""
    state, reads = mixer.start(sources[0]), []
    for site in range(mixer.n_sites):
        reads.append(mixer.read(state, site))
        state = mixer.write(state, site, sources[site + 1])
    return [*reads, mixer.finish(state)]


@pytest.mark.parametrize("blocks", [2, LAYOUTS["uneven"]], ids=["usual", "uneven"])
@every_mixer
def test_state_dict_and_deepcopy_round_trips(name, blocks, tmp_path):
    mixer, sublayers, e = build(name, blocks, random=True), Sublayers(blocks), embedding()
    expected = gradients(mixer, sublayers, e)
    twin = copy.deepcopy(mixer)
    safetensors.torch.save_file(mixer.state_dict(), tmp_path / "mixer.safetensors")
    loaded = build(name, blocks)
    loaded.load_state_dict(safetensors.torch.load_file(tmp_path / "mixer.safetensors"))
    for other in (twin, loaded):
        out, grads = gradients(other, sublayers, e)
        assert torch.equal(out, expected[0])
        assert_same(grads, expected[1])


@every_mixer  # options: with whole blocks
def test_checkpointed_sublayers_give_identical_gradients(name):
    mixer, sublayers, e = build(name, 2, random=True), Sublayers(2), embedding()
    plain = gradients(mixer, sublayers, e)
    kept = gradients(mixer, sublayers, e, around=lambda f, *args: checkpoint(f, *args, use_reentrant=False))
    assert torch.equal(plain[0], kept[0])
    assert_same(plain[1], kept[1])


@pytest.mark.parametrize(
    ("name", "choice", "blocks"),
    [(*case, 2) for case in EVERY_VALUE]
    + [(name, {}, LAYOUTS[layout]) for layout in ("cross", "uneven") for name in MIXERS],
    ids=[label(*case) for case in EVERY_VALUE]
    + [f"{name}-{layout}" for layout in ("cross", "uneven") for name in MIXERS],
)
def test_checkpointed_blocks_give_identical_gradients(name, choice, blocks):
    """Read, sublayer and write inside the region, the state in and out: how whole blocks are checkpointed."""
    mixer, sublayers = build(name, blocks, choice, random=True), Sublayers(blocks)
    e = embedding()

    def block(state, sites):
        for site in sites:
            state = mixer.write(state, site, sublayers(site, as_tuple(mixer.read(state, site))))
        return state

    results = []
    for run in (block, lambda *args: checkpoint(block, *args, use_reentrant=False)):
        leaf = e.clone().requires_grad_()
        state = mixer.start(leaf)
        for sites in Blocks(blocks).sites:
            state = run(state, sites)
        out = mixer.finish(state)
        wanted = [leaf, sublayers.weight, *mixer.parameters()]
        results.append(torch.autograd.grad(out.square().mean(), wanted, allow_unused=True))
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@every_mixer
def test_interleaved_passes_do_not_disturb_each_other(name):
    mixer, sublayers = build(name, 3, random=True), Sublayers(3)
    inputs = [embedding(), embedding()]
    with torch.no_grad():
        expected = [run_stack(mixer, sublayers, e)[0] for e in inputs]
        states = [mixer.start(e) for e in inputs]
        for site in range(mixer.n_sites):
            reads = [as_tuple(mixer.read(s, site)) for s in states]
            states = [mixer.write(s, site, sublayers(site, h)) for s, h in zip(states, reads, strict=True)]
        for state, e in zip(states, expected, strict=True):
            assert torch.equal(mixer.finish(state), e)


def tensors(state):
    return [leaf for leaf in pytree.tree_leaves(state) if leaf is not None]


@pytest.mark.parametrize("blocks", [2, *LAYOUTS.values()], ids=["usual", *LAYOUTS])
@every_mixer
def test_a_state_is_a_value(name, blocks):
    """Writing twice from one state, with or without the read before it, and after a pytree round trip, gives the same."""
    for choice in every_two_values(name) if blocks == 2 else [{}]:
        check_a_state_is_a_value(name, choice, blocks)


def check_a_state_is_a_value(name, choice, blocks):
    case = f"{label(name, choice)}, {blocks}"
    mixer = build(name, blocks, choice, random=True)
    sources = [embedding() for _ in range(mixer.n_sites + 1)]
    state = mixer.start(sources[0])
    for site in range(mixer.n_sites):
        leaves, spec = pytree.tree_flatten(state)
        assert all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves), case
        bare = mixer.write(pytree.tree_unflatten(leaves, spec), site, sources[site + 1])
        with torch.no_grad():
            mixer.read(state, site)  # someone looks: this must not cost the next write its gradient
        first = mixer.write(state, site, sources[site + 1])
        mixer.read(state, site)
        second = mixer.write(state, site, sources[site + 1])
        for a, b, c in zip(*(tensors(s) for s in (bare, first, second)), strict=True):
            for other in (b, c):  # not bit for bit: products of other shapes add in another order, on some processors
                assert torch.allclose(other, a, rtol=1e-12, atol=1e-12), case
            assert a.requires_grad == b.requires_grad == c.requires_grad, case
        state = second


@every_mixer
def test_a_prefix_without_gradients_leaves_those_of_the_rest_alone(name):
    """What a state remembers of it besides its value, which a pytree round trip drops, was made without gradients too."""
    for choice in every_two_values(name):
        check_a_prefix_without_gradients(name, choice)


def check_a_prefix_without_gradients(name, choice):
    mixer = build(name, 2, choice, random=True)
    sources = [embedding() for _ in range(mixer.n_sites + 1)]
    with torch.no_grad():
        begun = mixer.start(sources[0])
        for site in range(2):
            begun = mixer.write(begun, site, sources[site + 1])
    grads = []
    for state in (begun, pytree.tree_map(lambda t: t, begun)):
        for site in range(2, mixer.n_sites):
            state = mixer.write(state, site, sources[site + 1])
        out = mixer.finish(state)
        if out.requires_grad:
            grads.append(torch.autograd.grad(out.square().sum(), list(mixer.parameters()), allow_unused=True))
    for a, b in zip(*grads, strict=True) if grads else ():
        assert (a is None) == (b is None), choice
        assert a is None or torch.allclose(a, b, rtol=1e-12, atol=1e-12), choice


@pytest.mark.parametrize("blocks", [3, LAYOUTS["cross"]], ids=["usual", "cross"])
@every_mixer
def test_bf16_is_within_rounding_of_fp32(name, blocks):
    """On the same bf16 values: a mixture rounds once, a stream once a write, so the bound is a rounding a site of the largest value."""
    mixer = build(name, blocks, random=True, dtype=torch.float32)
    sources = [embedding(torch.bfloat16) for _ in range(mixer.n_sites + 1)]
    wide = replay(mixer, [s.float() for s in sources])
    for site, (h, exact) in enumerate(zip(replay(mixer, sources), wide, strict=True)):
        for a, b in zip(as_tuple(h), as_tuple(exact), strict=True):
            assert a.dtype == torch.bfloat16
            bound = 2**-8 * (site + 1) * float(b.detach().abs().max().clamp(min=1))
            assert float((a.float() - b).detach().abs().max()) <= bound


@every_mixer
def test_half_precision_casts_leave_the_parameters_in_fp32(name):
    mixer = create_mixer(name, dim=DIM, n_blocks=2)
    before = {k: p.clone() for k, p in mixer.named_parameters()}
    for cast in (
        lambda m: m.bfloat16(),
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.float16),
    ):
        cast(mixer)
        for k, p in mixer.named_parameters():
            assert p.dtype == torch.float32
            assert torch.equal(p, before[k])
    assert all(p.dtype == torch.float64 for p in mixer.double().parameters())


@every_mixer
def test_autocast_does_not_lower_the_precision_of_mixing(name):
    mixer = build(name, 2, random=True, dtype=torch.float32)
    sources = [embedding(torch.float32) for _ in range(5)]
    plain = replay(mixer, sources)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = replay(mixer, sources)
    for a, b in zip(plain, cast, strict=True):
        for x, y in zip(as_tuple(a), as_tuple(b), strict=True):
            assert torch.equal(x, y)


class OwnNorm(torch.nn.Module):
    """As users write theirs."""

    def __init__(self, dim):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (self.weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


NORMS = {
    "torch's": lambda dim: torch.nn.RMSNorm(dim),
    "torch's with eps": lambda dim: torch.nn.RMSNorm(dim, eps=1e-5),
    "ours": lambda dim: RMSNorm(dim),
    "ours with eps": lambda dim: RMSNorm(dim, eps=1e-5),
    "a user's": OwnNorm,
    "a function": lambda dim: lambda x: torch.nn.functional.rms_norm(x, (dim,)),
}


def assert_norm_inside_is_norm_after(mixer, state, site, reads, norm):
    """Up to the rounding of what was read, token by token."""
    norms = [norm(DIM) for _ in reads]
    for f in norms:
        if isinstance(f, torch.nn.Module):
            torch.nn.init.normal_(f.to(reads[0].dtype).weight)
    expected = [f(h) for f, h in zip(norms, reads, strict=True)]
    got = as_tuple(mixer.read(state, site, norms if len(norms) > 1 else norms[0]))
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype == reads[0].dtype
        assert ((a - b).abs() <= 4 * torch.finfo(b.dtype).eps * b.abs().amax(-1, keepdim=True)).all()


EVERY_SCALE = torch.tensor([1e-4, 1e-3, 0.02, 1.0, 16.0], dtype=torch.float64).unsqueeze(
    -1
)  # of tokens: eps counts for the first


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_mixer
def test_a_norm_inside_a_read_is_the_norm_after_it(name, dtype):
    check_a_norm_inside_a_read(name, dtype, LAYOUTS["uneven"] if dtype == torch.float32 else 2)


def check_a_norm_inside_a_read(name, dtype, blocks):
    """For tiny activations and large ones, however the norm is given."""
    mixer = build(name, blocks, random=True, dtype=torch.promote_types(dtype, torch.float32))
    sources = [(EVERY_SCALE * embedding()).to(dtype) for _ in range(mixer.n_sites + 1)]
    state = mixer.start(sources[0])
    for site in range(mixer.n_sites):
        reads = as_tuple(mixer.read(state, site))
        for norm in NORMS.values():
            assert_norm_inside_is_norm_after(mixer, state, site, reads, norm)
        state = mixer.write(state, site, sources[site + 1])


@pytest.mark.parametrize(
    ("name", "choice", "dtype"),
    [
        ("attnres", {}, torch.float32),
        ("attnres", {}, torch.bfloat16),
        ("attnres", {}, torch.float16),
        ("dca", {}, torch.bfloat16),
        ("denseformer", {}, torch.float16),
        ("mudd", {}, torch.float32),
        ("hyper", {"n": 2}, torch.bfloat16),
        ("hyper", {"n": 2}, torch.float16),
        ("mhc", {"n": 2, "iterations": 2}, torch.float32),
    ],
    ids=str,
)
def test_a_norm_inside_a_read_by_kernels_is_the_norm_after_it(name, choice, dtype, quick_interpreter):
    mixer = build(name, 2 if name in ("dca", "denseformer", "mudd") else 1, choice, random=True, dtype=torch.float32)
    sources = [(EVERY_SCALE[:3] * torch.randn(3, DIM)).to(dtype) for _ in range(3)]
    with use_backend("triton"), torch.no_grad():
        state = mixer.start(sources[0])
        for site, y in enumerate(sources[1 : mixer.n_sites]):
            state = mixer.write(state, site, y)
            reads = as_tuple(mixer.read(state, site + 1))
            for norm in ("torch's", "ours with eps"):
                assert_norm_inside_is_norm_after(mixer, state, site + 1, reads, NORMS[norm])


@every_mixer
def test_norms_come_one_per_way_in_a_list_or_a_module_list(name):
    mixer = build(name, 1)
    state, ways = mixer.start(embedding()), mixer.ways(0)
    norms = [RMSNorm(DIM, dtype=torch.float64) for _ in range(ways)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    for given in (norms, tuple(norms), torch.nn.ModuleList(norms)):
        for norm, h, read in zip(
            norms, as_tuple(mixer.read(state, 0, given)), as_tuple(mixer.read(state, 0)), strict=True
        ):
            torch.testing.assert_close(h, norm(read), rtol=1e-12, atol=1e-12)


@every_mixer
def test_decay_names_exist(name):
    mixer = create_mixer(name, dim=DIM, n_blocks=2)
    names = {k.split(".")[0] for k, _ in mixer.named_parameters()}
    for key, p in mixer.named_parameters():
        assert key.split(".")[0] not in mixer.decayed or p.ndim >= 2, f"{key} decays but is no matrix"
    for choice in MODULES[name].OPTIONS:
        names |= {k.split(".")[0] for k, _ in build(name, 2, choice).named_parameters()}
    assert mixer.decayed <= names


def test_a_state_names_its_tensors():
    """Paths, as torch.export and distributed checkpoints print them."""
    state = build("attnres", 1).start(embedding())
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(state)[0]]
    assert paths == [".partial", ".pending", ".stream"]


# Unrolled, Sinkhorn's two iterations over two streams show what twenty over four do.
COMPILED = {"mhc": {"n": 2, "iterations": 2}, "hyper": {"n": 2}}
OWN_BACKWARD = ("attnres", "denseformer")  # of their operators, which the compiler has to trace; others have torch's
# A block has a first site, a later one and an end. One rule by blocks, which asks the layout at every site, has others too.
COMPILED_BLOCKS = {"grn": [("attention", "cross_attention", "mlp"), ("mlp",)]}


@pytest.mark.uncovered  # tracing the compiler itself takes minutes
@every_mixer
def test_compiles_as_one_graph_and_gives_the_same(name):
    """Traced as one graph, the backward too where it is our own: output and gradients."""
    mixer, e = build(name, COMPILED_BLOCKS.get(name, 1), COMPILED.get(name), random=True), embedding().requires_grad_()
    wanted = [e, *mixer.parameters()]

    def forward(e):
        return run_stack(mixer, lambda site, reads: sum(reads).tanh(), e)[0]

    torch._dynamo.reset()
    results = []
    backend = "aot_eager" if name in OWN_BACKWARD else "eager"
    for f in (forward, torch.compile(forward, fullgraph=True, backend=backend)):
        out = f(e)
        grads = torch.autograd.grad(out.square().mean(), wanted, allow_unused=True)
        results.append([out, *(torch.zeros(()) if g is None else g for g in grads)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, check_dtype=False)


@pytest.mark.uncovered
def test_inductor_gives_the_same(quick_inductor):
    """What Inductor makes of the reads of one mixer of each kind: mixtures of sources, and streams. One file for its C++ compiler, which takes seconds."""
    backend = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"
    kinds = (("attnres", {}), ("hyper", {"static": True}))  # products of matrices would be files of their own
    mixers = [build(name, [("mlp",)], choice, random=True, dtype=torch.float32) for name, choice in kinds]
    sources = [embedding(torch.float32) for _ in range(2)]

    def forward(sources):
        return [h for mixer in mixers for h in replay(mixer, sources)]

    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(forward, fullgraph=True, backend=backend)(sources)
    for got, expected in zip(found, forward(sources), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6 * float(expected.abs().max().clamp(min=1)))


@pytest.mark.uncovered
@every_mixer
def test_traces_as_torch_jit_has_it(name):
    """With sizes that are tensors while it is traced; the batch may then be another."""
    mixer, sublayers = build(name, 1, random=True, dtype=torch.float32), Sublayers(1, dtype=torch.float32)

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer, self.sublayers = mixer, sublayers

        def forward(self, e):
            return run_stack(self.mixer, self.sublayers, e)[0]

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(Whole(), embedding(torch.float32), check_trace=False)
        e = torch.cat([embedding(torch.float32), embedding(torch.float32)])
        torch.testing.assert_close(traced(e), run_stack(mixer, sublayers, e)[0])
