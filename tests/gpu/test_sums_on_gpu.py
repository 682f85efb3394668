"""Rules that read weighted sums of a stack, with kernels on a GPU: precision, memory, streams, CUDA graphs, compilation."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from depthmix import Decoder, DecoderConfig, create_mixer
from depthmix.ops import use_backend
from depthmix.ops.depth_sum.coefficients import coefficients, coefficients_reference
from depthmix.train import graph
from gpu.exact import BF16, DEVICE, FP16, FP32, draw, error

RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "grn1": ("grn", {"version": 1}),
    "grn2": ("grn", {"version": 2}),
    "grn3": ("grn", {"relu_on": "sum"}),
    "dca": ("dca", {}),
    "2-dca": ("dca", {"window": 2}),
    "per entry": ("dca", {"window": 1, "w_per_entry": True}),
    "denseformer": ("denseformer", {}),
    "dilated": ("denseformer", {"dilation": 2, "period": 2}),
    "mudd": ("mudd", {}),
    "residual": ("residual", {}),
    "layerscale": ("layerscale", {}),
    "rezero": ("rezero", {}),
}
every_rule = pytest.mark.parametrize("rule", RULES)
TOLERANCE = {BF16: (4e-3, 1e-2), FP32: (4e-6, 2e-5)}  # of the output, of gradients through many sites


class Stack(nn.Module):
    """A mixer, the norms behind its reads, and sublayers that scale channels."""

    def __init__(self, rule: str, n_blocks: int, dim: int) -> None:
        super().__init__()
        name, options = RULES[rule]
        self.mixer = create_mixer(name, dim=dim, n_blocks=n_blocks, **options)
        sites = range(2 * n_blocks)
        self.weight = nn.Parameter(torch.empty(len(sites), 3, dim))
        self.norms = nn.ModuleList(
            nn.ModuleList(nn.RMSNorm(dim, eps=1e-5) for _ in range(self.mixer.ways(s))) for s in sites
        )
        self.to(DEVICE)
        for i, (key, p) in enumerate(self.named_parameters()):
            noise = draw(*p.shape, seed=100 + i)
            if not key.startswith("mixer"):
                p.data.copy_(1 + 0.3 * noise)
            elif ".w." in key:
                p.data.copy_(noise * 0.3 / dim**0.5)
            else:
                p.data += noise * (0.1 if ".b." in key or ".alpha." in key else 0.02)

    def sublayer(self, site: int, h: Any) -> Tensor:
        ways = h if isinstance(h, tuple) else (h,)
        return sum(t * w.to(t.dtype) for t, w in zip(ways, self.weight[site], strict=False))

    def last_state(self, x: Tensor) -> Any:
        state = self.mixer.start(x)
        for site in range(self.mixer.n_sites):
            h = self.mixer.read(state, site, self.norms[site])
            state = self.mixer.write(state, site, self.sublayer(site, h))
        return state

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer.finish(self.last_state(x))


def results(stack: Stack, x: Tensor, backend: str) -> dict[str, Tensor]:
    """The output and every gradient."""
    x = x.detach().requires_grad_()
    with use_backend(backend):
        out = stack(x)
        out.backward(draw(*x.shape, seed=2, dtype=BF16).to(x.dtype))
    found = {"output": out.detach(), "x": x.grad}
    for name, p in stack.named_parameters():
        found[name], p.grad = p.grad, None
    return found


def clear_of_zero(stack: Stack, x: Tensor) -> Tensor:
    """The tokens of x none of whose clamped sums b + w · G is so near zero that fp32 and fp64 may see different signs.

    The derivative jumps there. With a sum for each channel, among millions some are that near, and each that falls to the
    other side is 1e-3 of a gradient, whoever computes it.
    """
    exact = copy.deepcopy(stack).double()
    with torch.no_grad(), use_backend("reference"):
        state = exact.last_state(x.double())
        entries = torch.stack([*state.stack, sum(state.pending)], 1)  # [N, n, D]
        near = torch.full((len(x),), torch.inf, device=x.device, dtype=torch.float64)
        for b, w in zip(exact.mixer.b.values(), exact.mixer.w.values(), strict=True):
            v = entries[:, : b.shape[1]]
            near = torch.minimum(near, (b[0] + (v * w[0]).sum(-1, keepdim=True)).abs().amin((1, 2)))
    return x[near > 1e-5]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("tokens", "dim", "n_blocks"), [(4096, 512, 6), (777, 1000, 3), (512, 2048, 12)])
@every_rule
def test_every_gradient(rule: str, tokens: int, dim: int, n_blocks: int, dtype: torch.dtype) -> None:
    """Within a few roundings of fp64; where they add up from site to site, within four times what the reference makes of them.

    In bf16 all parameters of a kind are taken together: some gradients of numbers are differences of large sums, and one
    token whose mixture almost vanishes can be most of a gradient.
    """
    stack, x = Stack(rule, n_blocks, dim), draw(tokens, dim, seed=1, dtype=dtype)
    if rule == "grn3" and dtype == FP32:
        x = clear_of_zero(stack, draw(4 * tokens, dim, seed=1))[:tokens]
        assert len(x) == tokens
    runs = (
        results(copy.deepcopy(stack).double(), x.double(), "reference"),
        results(stack, x, "triton"),
        results(stack, x, "reference"),
    )
    assert [[g is None for g in run.values()] for run in runs[1:]] == [[g is None for g in runs[0].values()]] * 2
    exact, got, plain = (by_kind(run) if dtype == BF16 else run for run in runs)
    near, far = TOLERANCE[dtype]
    found = {name: (error(got[name], e), error(plain[name], e)) for name, e in exact.items() if e is not None}
    limits = {name: max(near if name == "output" else far, 4 * allowed) for name, (_, allowed) in found.items()}
    assert {name: (e, limits[name]) for name, (e, _) in found.items() if e > limits[name]} == {}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "dim", "hidden", "rows"), [(4100, 512, 64, 52), (333, 520, 128, 65), (77, 2048, 64, 13)]
)
def test_coefficients(tokens: int, dim: int, hidden: int, rows: int, dtype: torch.dtype) -> None:
    """Of two small layers, and their gradients: what is fp32 as exact as two halves of a weight are, whatever the source."""
    x, w_1 = draw(tokens, dim, seed=1, dtype=dtype), draw(hidden, dim, seed=2, scale=dim**-0.5)
    w_2, b = draw(rows, hidden, seed=3, scale=hidden**-0.5), draw(1, rows, seed=4)
    leaves = [t.requires_grad_() for t in (x, w_1, w_2, b)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    da = draw(tokens, 1, rows, seed=5)
    found, exact = coefficients(*leaves, 1e-6), coefficients_reference(*wide, 1e-6)
    assert error(found, exact) < (2e-6 if dtype == FP32 else 8e-6)  # 2^-17
    dx, *rest = torch.autograd.grad(found, leaves, da)
    exact_dx, *exact_rest = torch.autograd.grad(exact, wide, da.double())
    assert error(dx, exact_dx) < {BF16: 3e-3, FP16: 4e-4, FP32: 2e-6}[dtype]
    assert [e for a, e in zip(rest, exact_rest, strict=True) if error(a, e) > 1e-5] == []


def by_kind(found: dict[str, Tensor]) -> dict[str, Tensor]:
    kinds: dict[str, list[Tensor]] = {}
    for name, g in found.items():
        if g is not None:
            kinds.setdefault(".".join(name.split(".")[: 2 if name.startswith("mixer") else 1]), []).append(g.flatten())
    return {kind: torch.cat(of_kind) for kind, of_kind in kinds.items()}


@every_rule
def test_the_same_bits_every_time(rule: str) -> None:
    stack, x = Stack(rule, 4, 512), draw(2048, 512, dtype=BF16)
    first, second = (results(stack, x, "triton") for _ in range(2))
    for name, t in first.items():
        assert t is None or torch.equal(t, second[name]), name


@pytest.mark.parametrize("rule", ["dca", "2-dca", "denseformer", "mudd"])
def test_fifty_steps_keep_nothing(rule: str) -> None:
    """Memory in use and its peak are the same after 5 steps and after 30, without Python's collector."""
    stack, x = Stack(rule, 4, 512), draw(4096, 512, dtype=BF16)
    in_use, peaks = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(30):
            torch.cuda.reset_peak_memory_stats()
            stack(x.requires_grad_()).sum().backward()
            x.grad = None
            in_use.append(torch.cuda.memory_allocated())
            peaks.append(torch.cuda.max_memory_allocated())
    finally:
        gc.enable()
    activation = x.numel() * x.element_size()
    assert max(in_use[5:]) - in_use[4] < activation / 4  # tables of addresses are kept
    assert max(peaks[5:]) - peaks[4] < activation / 4


@pytest.mark.parametrize("mode", ["sublayer", "block", "two streams", "memory pressure"])
@pytest.mark.parametrize("rule", ["dca", "2-dca", "mudd"])
def test_checkpointing_and_streams(rule: str, mode: str) -> None:
    """Computed again in the backward; a forward on another stream; and freed memory written over between the two."""
    stack, x = Stack(rule, 4, 512), draw(1024, 512, dtype=BF16).requires_grad_()
    wanted = [x, *(p for p in stack.parameters() if p.requires_grad)]

    def gradients(out: Tensor) -> Any:
        return torch.autograd.grad(out.float().square().sum(), wanted, allow_unused=True)

    expected = gradients(stack(x))
    if mode == "sublayer":
        stack.sublayer = lambda site, h, f=stack.sublayer: checkpoint(f, site, h, use_reentrant=False)
        out = stack(x)
    elif mode == "block":

        def block(state: Any, site: int) -> Any:
            for k in (site, site + 1):
                h = stack.mixer.read(state, k, stack.norms[k])
                state = stack.mixer.write(state, k, stack.sublayer(k, h))
            return state

        state = stack.mixer.start(x)
        for site in range(0, 8, 2):
            state = checkpoint(block, state, site, use_reentrant=False)
        out = stack.mixer.finish(state)
    elif mode == "two streams":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = stack(x)
        torch.cuda.current_stream().wait_stream(side)
    else:
        out = stack(x)
        junk = [torch.full((1024, 512), float("nan"), device=DEVICE, dtype=BF16) for _ in range(64)]
        del junk
    for a, b in zip(gradients(out), expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or error(a, b) < 1e-5


def decoder(rule: str, dtype: torch.dtype = FP32, dim: int = 256, n_blocks: int = 3) -> Decoder:
    torch.manual_seed(0)
    name, options = RULES[rule]
    config = DecoderConfig(vocab_size=97, dim=dim, n_blocks=n_blocks, n_heads=4, mixer=name, mixer_options=options)
    model = Decoder(config).to(DEVICE)
    for i, p in enumerate(model.mixer.parameters()):
        p.data += draw(*p.shape, seed=i, scale=0.05)
    return model.to(dtype)


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(97, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("rule", ["grn2", "dca", "2-dca", "dilated", "mudd"])
def test_a_graphed_training_step(rule: str) -> None:
    """Forward and backward as one CUDA graph give the gradients of the eager step, batch after batch."""
    model, twin = decoder(rule), decoder(rule)

    def loss(of: Decoder, batch: Tensor) -> Tensor:
        return functional.cross_entropy(of(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    step = graph.GraphedBackward(lambda batch: loss(model, batch), list(model.parameters()), ids(4, 33))
    for seed in range(1, 4):
        batch = ids(4, 33, seed=seed)
        got = step(batch).clone()
        twin.zero_grad()
        expected = loss(twin, batch)
        expected.backward()
        assert error(got, expected) < 1e-5
        for (name, p), t in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert t.grad is None or error(p.grad, t.grad) < 1e-4, name


@pytest.mark.parametrize("rule", ["dca", "mudd"])
def test_a_decode_step_in_a_cuda_graph(rule: str) -> None:
    """Recorded once on one token; replayed, it follows its input, also after the allocator has moved on."""
    model, static = decoder(rule, BF16), ids(1, 1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        with torch.cuda.stream(side):
            for _ in range(2):
                model(static)
        torch.cuda.current_stream().wait_stream(side)
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            out = model(static)
        for seed in range(1, 4):
            junk = [draw(64, 256) for _ in range(8)]
            static.copy_(ids(1, 1, seed=seed))
            recorded.replay()
            assert torch.equal(out, model(static)), seed
            del junk


@pytest.mark.parametrize("rule", ["2-dca", "mudd"])
def test_inductor(rule: str) -> None:
    """A model compiled as one graph, with gradients: the eager model's numbers."""
    model, batch = decoder(rule, dim=64, n_blocks=3), ids(2, 33)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    wanted = list(model.parameters())
    with use_backend("triton"):
        out = compiled(batch)
        got = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)
    with use_backend("reference"):
        expected = model(batch)
        exact = torch.autograd.grad(expected.square().sum(), wanted, allow_unused=True)
    assert error(out, expected) < 1e-5
    names = [name for name, _ in model.named_parameters()]
    found = {n: error(a, b) for n, a, b in zip(names, got, exact, strict=True) if b is not None}
    assert {n: e for n, e in found.items() if e > 1e-4} == {}
