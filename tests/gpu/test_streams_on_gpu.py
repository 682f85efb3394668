"""Hyper-Connections, mHC and gated streams on a GPU: bf16 against fp64, no worse than the reference; the same bits twice and in a CUDA graph."""

import copy
import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from depthmix import create_mixer
from depthmix.ops import sinkhorn, use_backend
from depthmix.ops.norm import RMSNorm
from depthmix.ops.stream_mix.rules import Rule
from depthmix.ops.stream_mix.step import Inputs, step
from gpu.exact import BF16, DEVICE, FP16, FP32, Round, draw, error

ROUNDING = 2e-3  # relative, of one rounding to bf16
CASES = [
    ("hyper", {}),
    ("hyper", {"n": 3, "norm": "rmsnorm", "tanh": False}),
    ("hyper", {"static": True}),
    ("mhc", {}),
    ("mhc", {"n": 2, "convention": "deepseek", "head": "learned"}),
    ("mhc", {"residual_map": "identity", "head": "mean"}),
    ("mhc", {"schedule": "single_pass"}),
    ("mhc", {"residual_map": "birkhoff"}),
    ("mhc", {"residual_map": "birkhoff", "n": 3, "head": "learned"}),
    ("gated_streams", {"rank": 40}),
    ("gated_streams", {"n": 3, "rank": 64}),
]
WIDE = {"phi", "phi_head", "W_m", "W_beta", "W_r", "W_down", "W_up", "W_inject"}


class Stack(nn.Module):
    """Sublayers that scale channels, so that what is compared is the mixer's."""

    def __init__(self, name: str, options: dict[str, Any], dim: int, n_blocks: int = 2) -> None:
        super().__init__()
        self.mixer = create_mixer(name, dim=dim, n_blocks=n_blocks, **options)
        self.norms = nn.ModuleList(RMSNorm(dim, eps=1e-6) for _ in range(2 * n_blocks))
        self.weight = nn.Parameter(torch.ones(2 * n_blocks, dim))
        self.to(DEVICE)
        with torch.no_grad():
            for i, (key, p) in enumerate(self.named_parameters()):
                p += (0.5 / dim**0.5 if key.split(".")[-1] in WIDE else 0.3) * draw(*p.shape, seed=i)

    def forward(self, x: Tensor) -> Tensor:
        state = self.mixer.start(x)
        for site in range(self.mixer.n_sites):
            h = self.mixer.read(state, site, self.norms[site])
            state = self.mixer.write(state, site, h * self.weight[site].to(h.dtype))
        return self.mixer.finish(state)


def results(stack: nn.Module, x: Tensor, g: Tensor, backend: str) -> list[Tensor]:
    x = x.detach().requires_grad_()
    with use_backend(backend):
        out = stack(x)
        grads = torch.autograd.grad(out, [x, *stack.parameters()], g.to(out.dtype))
    return [out.detach(), *grads]  # a graph kept alive would tie a recording to the stream that it was made on


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_errors_are_the_references(name: str, options: dict[str, Any], kind: torch.dtype) -> None:
    """In the mean of the logarithms over eight draws: gradients here are small differences, and one draw says little.

    Nor do eight draws of a gradient of a few numbers: twice the error of the reference there is chance."""
    dim, tokens = 136, 67
    stack = Stack(name, options, dim)
    errors: dict[str, list[float]] = {}
    for draws in range(90, 106, 2):
        x, g = (draw(tokens, dim, seed=seed, dtype=kind) for seed in (draws, draws + 1))
        exact = results(copy.deepcopy(stack).double(), x.double(), g.double(), "reference")
        found, reference = results(stack, x, g, "triton"), results(stack, x, g, "reference")
        names = ["out", "x", *(k for k, _ in stack.named_parameters())]
        slack = {torch.bfloat16: ROUNDING, torch.float16: ROUNDING / 4, FP32: 2e-5}[kind]
        for key, a, r, e in zip(names, found, reference, exact, strict=True):
            errors.setdefault(key, []).append(math.log((error(a, e) + slack) / (error(r, e) + slack)))
    worse = {key: math.exp(statistics.fmean(logs)) for key, logs in errors.items()}
    sizes = {k: p.numel() for k, p in stack.named_parameters()}
    assert {k: ratio for k, ratio in worse.items() if ratio > (1.5 if sizes.get(k, tokens) > 16 else 3)} == {}


@pytest.mark.parametrize(("name", "options"), [CASES[0], CASES[3], CASES[6], CASES[-1]], ids=str)
def test_the_same_bits_twice_and_in_a_graph(name: str, options: dict[str, Any]) -> None:
    stack, x, g = Stack(name, options, 512), draw(515, 512, dtype=torch.bfloat16), draw(515, 512, dtype=torch.bfloat16)
    first, second = (results(stack, x, g, "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results(stack, x, g, "triton")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = results(stack, x, g, "triton")
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(first, recorded, strict=True))


@pytest.mark.parametrize("name", ["hyper", "mhc"])
def test_compiled_as_one_graph(name: str) -> None:
    """torch.compile sees the reference."""
    stack, x = Stack(name, {"n": 2} if name == "hyper" else {"n": 2, "iterations": 2}, 64, 1), draw(9, 64)
    with torch.no_grad():
        assert error(torch.compile(stack, fullgraph=True)(x), stack(x)) < 1e-5


@pytest.mark.parametrize("convention", ["paper", "deepseek"])
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_sinkhorn(n: int, convention: str) -> None:
    logits = draw(1003, n, n, scale=5.0).requires_grad_()
    g, wide = draw(1003, n, n, seed=1), logits.detach().double().requires_grad_()
    m, exact = sinkhorn(logits, 20, convention, backend="triton"), sinkhorn(wide, 20, convention, backend="reference")
    assert error(m, exact) < 2e-6
    assert error(torch.autograd.grad(m, logits, g)[0], torch.autograd.grad(exact, wide, g.double())[0]) < 2e-5


def exact_step(rule: Rule, kind: torch.dtype, a: Any) -> list[Tensor]:
    """x', h, post and res from mHC's equations in fp64, with x' and h rounded as kernels round them."""
    n, x = rule.n, a.x
    if a.y is not None:
        x = torch.einsum("toi,tid->tod", a.res, x) + torch.einsum("to,td->tod", a.post, a.y)
        x = Round.apply(x, kind)
    flat = x.flatten(1)
    z = flat / (flat.square().mean(-1, keepdim=True) + rule.eps).sqrt() @ a.w
    pre, post = (
        k * torch.sigmoid(a.scale[i] * z[:, i * n : i * n + n] + a.base[i * n : i * n + n])
        for i, k in enumerate((1, 2))
    )
    res = torch.exp(a.scale[2] * z[:, 2 * n :] + a.base[2 * n :]).view(-1, n, n)
    for _ in range(rule.iterations):
        res = res / res.sum(1, keepdim=True)
        res = res / res.sum(2, keepdim=True)
    h = torch.einsum("ti,tid->td", pre, x)
    h = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * a.gain
    return [x, Round.apply(h, kind), post, res]


# Tokens, D, dtype, and whether an output is written before.
SIZES = [
    (1, 64, FP32, True),
    (1, 4096, BF16, True),
    (1, 4096, BF16, False),
    (1, 4608, FP16, True),
    (3, 64, BF16, False),
    (3, 2816, BF16, True),
    (3, 4608, FP32, False),
    (64, 2816, BF16, False),
    (64, 4096, BF16, True),
    (64, 4096, FP16, False),
    (64, 4608, BF16, True),
    (65, 64, FP16, True),
    (65, 2816, FP32, True),
    (65, 4096, BF16, False),
    (200, 64, BF16, True),
    (200, 2816, FP16, True),
    (200, 4096, FP32, False),
    (200, 4608, BF16, True),
    (8192, 64, FP32, True),
    (8192, 2816, FP16, True),
    (8192, 2816, BF16, True),
    (8192, 4096, BF16, True),
    (8192, 4096, BF16, False),
    (8192, 4608, BF16, False),
]


@pytest.mark.parametrize(("tokens", "dim", "kind", "writes"), SIZES, ids=str)
def test_channels_split_among_programs(tokens: int, dim: int, kind: torch.dtype, writes: bool) -> None:
    """From one token to 8192, in 64 parts to one: against fp64, with every gradient, and the same bits twice."""
    n = 4
    rule = Rule(n, joint=True, eps=1e-6)
    x, y = (draw(tokens, *shape, seed=i, dtype=kind) for i, shape in enumerate([(n, dim), (dim,)]))
    post, res = draw(tokens, n, seed=2), draw(tokens, n, n, seed=3)
    fn, gain = draw(24, n * dim, seed=4) / (n * dim) ** 0.5, 1 + 0.3 * draw(dim, seed=7)
    base, scale = draw(24, seed=5), 1 + 0.3 * draw(3, seed=6)
    leaves = [x, *([y, post, res] if writes else []), fn, base, scale, gain]
    cotangents = [draw(tokens, *shape, seed=10 + i) for i, shape in enumerate([(n, dim), (dim,), (n,), (n, n)])]

    def inputs(given: list[Tensor]) -> Inputs:
        first, *written, w, base, scale, gain = given
        return Inputs(first, *(written or [None] * 3), None, w.T, base, scale, gain)

    def outputs(given: list[Tensor]) -> list[Tensor]:
        found = step(rule, n, 1e-6, inputs(given))
        return [found.x, found.h, found.post, found.res]  # type: ignore[list-item]

    def with_gradients(wide: bool) -> tuple[list[Tensor], list[Tensor]]:
        given = [(t.double() if wide else t).detach().requires_grad_() for t in leaves]
        out = exact_step(rule, kind, inputs(given)) if wide else outputs(given)
        # Without a write, x' is x.
        used = list(zip(out, cotangents, strict=True))[0 if writes else 1 :]
        grads = torch.autograd.grad([o for o, _ in used], given, [c.to(o.dtype) for o, c in used])
        return [o.detach() for o in out], list(grads)

    (exact, exact_grads), (out, grads), (again, grads_again) = (with_gradients(wide) for wide in (True, False, False))
    assert all(torch.equal(a, b) for a, b in zip([*out, *grads], [*again, *grads_again], strict=True))
    with torch.no_grad():
        alone, alone_again = outputs(leaves), outputs(leaves)
    assert all(torch.equal(a, b) for a, b in zip(alone, alone_again, strict=True))
    rounding = {BF16: ROUNDING, FP16: ROUNDING / 4, FP32: 1e-5}[kind]
    for found in (out, alone):
        for actual, expected in zip(found, exact, strict=True):
            # A few streams are rounded the other way, which the coefficients notice.
            assert error(actual, expected) < 2 * rounding
    for actual, expected in zip(grads, exact_grads, strict=True):
        assert error(actual, expected) < max(15 * rounding, 1e-4)


@pytest.mark.parametrize("tokens", [1, 5, 64, 65])
@pytest.mark.parametrize("writes", [False, True], ids=["reads", "writes and reads"])
def test_few_tokens_without_gradients_have_the_numbers_of_training(tokens: int, writes: bool) -> None:
    """Kernels split W themselves for up to 64 tokens; in training PyTorch does."""
    n, dim = 4, 200
    rule = Rule(n, joint=True, eps=1e-6, convention="deepseek")
    x, y = (draw(tokens, *shape, seed=i).to(DEVICE, torch.bfloat16) for i, shape in enumerate([(n, dim), (dim,)]))
    post, res = draw(tokens, n, seed=2).to(DEVICE, FP32), draw(tokens, n, n, seed=3).to(DEVICE, FP32)
    fn = draw(24, n * dim, seed=4).to(DEVICE, FP32) / dim**0.5
    base, scale, gain = (draw(k, seed=5 + i).to(DEVICE, FP32) for i, k in enumerate([24, 3, dim]))
    written = (y, post, res) if writes else (None, None, None)
    inputs = Inputs(x, *written, None, fn.requires_grad_().T, base, scale, gain)
    training = step(rule, n, 1e-6, inputs)
    with torch.no_grad():
        alone = step(rule, n, 1e-6, inputs)
    for ours, expected in zip(alone, training, strict=True):
        assert ours is not None
        assert expected is not None
        assert not ours.requires_grad
        assert error(ours, expected.double()) < (ROUNDING if ours.dtype == torch.bfloat16 else 1e-5)
