"""Kernels of depth attention's ablations on a GPU, at real shapes: heads, sigmoid, keys without a norm, a query for each token."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix.ops import depth_attention, use_backend
from gpu import exact
from gpu.exact import BF16, FP16, FP32, GRADIENT, OUTPUT, Stack, draw, error

SHAPES = [  # tokens, channels, sources, heads, a query for each token
    (4096, 512, 13, 16, False),
    (4096, 512, 13, 1, True),
    (30000, 512, 4, 16, False),  # several tokens for each program of the backward
    (30000, 512, 4, 1, True),
    (1024, 2048, 9, 16, True),
    (777, 1000, 7, 4, False),  # heads of 250 channels
    (300, 333, 5, 3, True),  # odd
    (300, 768, 5, 12, False),  # heads that are no power of two
    (64, 4096, 4, 32, False),
    (16, 16384, 3, 1, True),  # as wide as it gets
    (1000, 24, 3, 24, False),  # a head for each channel
    (1, 512, 200, 4, True),
    (5, 2048, 1, 16, False),
]


def attend_exactly(
    u: Tensor, sources: Sequence[Tensor], heads: int, key_norm: bool, softmax: bool, gain: Tensor | None
) -> Tensor:
    """From the equations, in fp64: sources [N, D], u [D] or [N, D]."""
    v = torch.stack(list(sources))
    keys = v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() if key_norm else v
    s = (keys * u).unflatten(-1, (heads, -1)).sum(-1, keepdim=True)  # [n, N, H, 1]
    p = torch.softmax(s, 0) if softmax else torch.sigmoid(s)
    o = (p * v.unflatten(-1, (heads, -1))).sum(0).flatten(-2)
    return o if gain is None else o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


@pytest.mark.parametrize(("key_norm", "softmax"), [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("tokens", "dim", "n", "heads", "by_token"), SHAPES)
def test_outputs_and_gradients(
    tokens: int, dim: int, n: int, heads: int, by_token: bool, dtype: torch.dtype, key_norm: bool, softmax: bool
) -> None:
    """Every gradient within a few roundings of fp64's, with a norm of the result and without."""
    # Seeds beyond those of sources: a query that is a multiple of one makes softmax ignore the others.
    query = draw(*((1, tokens) if by_token else ()), dim, seed=250, scale=2 / (dim // heads) ** 0.5)
    v = [draw(1, tokens, dim, seed=i, dtype=dtype) for i in range(n)]
    for gain in (None, draw(dim, seed=251)):
        leaves = [t.detach().requires_grad_() for t in (query, *v, *(() if gain is None else (gain,)))]
        wide = [t.detach().double().requires_grad_() for t in leaves]
        own_gain, exact_gain = (None, None) if gain is None else (leaves[-1], wide[-1])
        options: dict[str, Any] = {
            "heads": heads,
            "key_norm": key_norm,
            "activation": "softmax" if softmax else "sigmoid",
        }
        out = depth_attention(
            leaves[0], leaves[1 : n + 1], None, 1e-6, own_gain, out_eps=1e-5, **options, backend="triton"
        )
        expected = attend_exactly(wide[0], wide[1 : n + 1], heads, key_norm, softmax, exact_gain)
        cotangent = 64 * draw(1, tokens, dim, seed=290, dtype=dtype)  # 1/200 of it is fp16's still
        grads = torch.autograd.grad(out, leaves, cotangent)
        exact_grads = torch.autograd.grad(expected, wide, cotangent.double())
        assert out.dtype == dtype
        assert error(out, expected) < OUTPUT[dtype]
        if n == 1 and softmax:  # the weight of an only source is 1, whatever the query
            assert not grads[0].any()
            grads, exact_grads = grads[1:], exact_grads[1:]
        for i, (grad, e) in enumerate(zip(grads, exact_grads, strict=True)):
            assert error(grad, e) < GRADIENT[dtype], i


ABLATIONS: list[dict[str, Any]] = [
    {"query": "input"},
    {"weights": "sigmoid"},
    {"key_norm": False, "block_size": 4},
    {"heads": 16, "block_size": 4, "ways": 2},
    {"heads": 4, "routing": "add"},
]
every_ablation = pytest.mark.parametrize("options", ABLATIONS, ids=str)


@every_ablation
def test_a_stack_is_the_reference_s(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients in fp32, by kernels without being asked; the reference in fp64."""
    kernels = pytest.importorskip("depthmix.ops.depth_attention.kernels.general_read")
    calls, read = [], kernels.read
    monkeypatch.setattr(kernels, "read", lambda *args, **named: (calls.append(1), read(*args, **named))[1])
    stack, x = Stack(4, 512, **options), draw(1, 1000, 512)
    results = []
    for backend, dtype in ((None, FP32), ("reference", torch.float64)):
        stack.to(dtype)
        y = x.to(dtype).requires_grad_()
        with use_backend(backend):
            out = stack(y)
            grads = torch.autograd.grad(
                out, [y, *stack.parameters()], draw(*out.shape, seed=7).to(dtype), allow_unused=True
            )
        results.append([out, *grads])
    assert len(calls) == sum(stack.mixer.ways(site) for site in range(8)) + (stack.mixer.routing == "replace")
    for got, wanted in zip(*results, strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or not wanted.any() or error(got, wanted) < 1e-4


@every_ablation
def test_a_recorded_step_is_the_step(options: dict[str, Any]) -> None:
    random_data = pytest.importorskip("benchmarks.step").random_data
    trainer_of = pytest.importorskip("depthmix.train.loop").Trainer
    config_of = pytest.importorskip("depthmix.config").TrainConfig
    sizes = {"dim": 64, "n_blocks": 3, "n_heads": 2, "seq_len": 32, "batch_size": 4}
    losses = []
    for graph in (False, True):
        config = config_of(
            mixer="attnres", mixer_options=options, steps=100, warmup=1, cuda_graph=graph, data="random tokens", quiet=True,
            seed=0, **sizes,
        )  # fmt: skip
        trainer = trainer_of(config, random_data(64, 4096), torch.device(exact.DEVICE))
        losses.append([trainer.step(step)[0] for step in range(5)])
    assert losses[0] == pytest.approx(losses[1], abs=5e-3)
    assert losses[1][-1] != losses[1][0]
