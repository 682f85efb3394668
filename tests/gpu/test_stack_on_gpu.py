"""Stacks and models with kernels on a GPU: precision, memory, CUDA graphs, compilation."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from depthmix import Decoder, DecoderConfig
from depthmix.errors import UserError
from depthmix.ops import use_backend
from depthmix.train import graph
from gpu.exact import BF16, DEVICE, FP32, Stack, draw, error, exact_stack

STACKS: list[tuple[int, int, int, dict[str, Any]]] = [  # tokens, channels, blocks, options
    (4096, 512, 6, {}),
    (4096, 512, 6, {"block_size": 4, "ways": 2}),
    (4096, 512, 6, {"block_size": 4, "ways": 3}),
    (4096, 512, 6, {"block_size": 12, "ways": 2}),  # one block, whose reads have two sources
    (4096, 512, 6, {"block_size": "all", "ways": 2, "output_gain": 0.1}),
    (777, 1000, 3, {"block_size": 6}),
    (1024, 2048, 16, {}),
    (1024, 2048, 16, {"block_size": 8}),
    (1024, 2048, 16, {"block_size": 8, "ways": 2}),
    (777, 1000, 3, {"ways": 2}),
    (777, 1000, 3, {"ways": 3}),
]
TOLERANCE = {BF16: (2e-3, 1e-2), FP32: (4e-6, 2e-5)}  # of the output, of gradients through many sites


def errors(exact: Stack, x: Tensor, backend: str) -> dict[str, float]:
    """How far a stack's output and gradients are from fp64 that rounds reads and outputs as the stack does."""
    stack, x, y = copy.deepcopy(exact).float(), x.detach().requires_grad_(), x.detach().double().requires_grad_()
    exact.zero_grad()
    with use_backend(backend):
        out = stack(x)
    expected = exact_stack(exact, y, x.dtype)
    g = draw(*x.shape, seed=2, dtype=x.dtype)
    out.backward(g)
    expected.backward(g.double())
    found = {"output": error(out, expected), "x": error(x.grad, y.grad)}
    for (name, p), e in zip(stack.named_parameters(), exact.named_parameters(), strict=True):
        found[name] = error(p.grad, e[1].grad)
    return found


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("tokens", "dim", "n_blocks", "options"), STACKS)
def test_every_gradient(tokens: int, dim: int, n_blocks: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Within a few roundings of fp64; where they add up from site to site, within four times what the reference makes of them.

    Gradients of queries are sums of differences, and without a norm the kernels know a mixture only as it was rounded.
    """
    exact, x = Stack(n_blocks, dim, **options).double(), draw(tokens, dim, seed=1, dtype=dtype)
    got, allowed = (errors(exact, x, backend) for backend in ("triton", "reference"))
    near, far = TOLERANCE[dtype]
    limits = {name: max(near if name == "output" else far, 4 * e) for name, e in allowed.items()}
    assert {name: (e, limits[name]) for name, e in got.items() if e > limits[name]} == {}


def test_fifty_steps_keep_nothing() -> None:
    """Memory in use and its peak are the same after 5 steps and after 50, without Python's collector."""
    stack, x = Stack(4, 512), draw(4096, 512, dtype=BF16)
    in_use, peaks = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
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


def test_memory_is_released_as_the_backward_proceeds() -> None:
    """The peak of a Full stack is little more than what its forward keeps: two activations a site."""
    stack, x = Stack(8, 1024), draw(8192, 1024, dtype=BF16).requires_grad_()
    stack.weight.requires_grad_(False)  # or each sublayer keeps its input
    stack(x).sum().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stack(x).sum().backward()
    activations = (torch.cuda.max_memory_allocated() - before) / (x.numel() * x.element_size())
    assert activations < 2 * 17 + 8, activations


@pytest.mark.parametrize("mode", ["sublayer", "two streams"])
def test_checkpointing_and_streams(mode: str) -> None:
    """Sublayers computed again in the backward; a backward that follows a forward on another stream."""
    stack, x = Stack(3, 512), draw(1024, 512, dtype=BF16).requires_grad_()
    expected = torch.autograd.grad(stack(x).float().square().sum(), [x, *stack.parameters()])
    if mode == "sublayer":
        stack.sublayer = lambda site, h, f=stack.sublayer: checkpoint(f, site, h, use_reentrant=False)
        out = stack(x)
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = stack(x)
        torch.cuda.current_stream().wait_stream(side)
    got = torch.autograd.grad(out.float().square().sum(), [x, *stack.parameters()])
    assert max(error(a, b) for a, b in zip(got, expected, strict=True)) < 1e-5


def decoder(dtype: torch.dtype = FP32, dim: int = 256, n_blocks: int = 3, **options: Any) -> Decoder:
    """A small model with queries that matter."""
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=97, dim=dim, n_blocks=n_blocks, n_heads=4, mixer="attnres", mixer_options=options)
    model = Decoder(config).to(DEVICE)
    for i, p in enumerate(model.mixer.parameters()):
        p.data += draw(*p.shape, seed=i, scale=0.3)
    return model.to(dtype)


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(97, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("options", [{}, {"block_size": 4, "ways": 2}], ids=str)
def test_a_decode_step_in_a_cuda_graph(options: dict[str, Any]) -> None:
    """Recorded once on one token; replayed, it follows its input, also after the allocator has moved on."""
    model, static = decoder(BF16, **options), ids(1, 1)
    with torch.no_grad():
        replay, out = record(lambda: model(static))
        for seed in range(1, 4):
            junk = [draw(64, 256) for _ in range(8)]  # memory that warm-up or recording gave back is written over
            static.copy_(ids(1, 1, seed=seed))
            replay()
            assert torch.equal(out, model(static)), seed
            del junk


def record(f: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """f as a CUDA graph: what runs it again, and where its result appears."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            f()
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        out = f()
    return recorded.replay, out


@pytest.mark.parametrize("options", [{}, {"block_size": 4, "ways": 2}], ids=str)
def test_a_graphed_training_step(options: dict[str, Any]) -> None:
    """Forward and backward as one CUDA graph give the gradients of the eager step, batch after batch."""
    model, twin = decoder(**options), decoder(**options)

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
            assert error(p.grad, t.grad) < 1e-4, name


def test_a_step_that_cannot_be_recorded() -> None:
    """A number read back from the GPU in the middle of a step: one sentence, and what comes next runs where it did."""
    model, stream = decoder(), torch.cuda.current_stream()

    def loss(batch: Tensor) -> Tensor:
        out = model(batch).square().mean()
        return out * 2 if out.item() > 0 else out

    with pytest.raises(UserError, match=r"cannot be recorded .* cuda_graph off"):
        graph.record(loss, list(model.parameters()), ids(4, 33))
    assert torch.cuda.current_stream() == stream
    assert torch.isfinite(torch.randn(3, device=DEVICE)).all()  # the generator would go on refusing


def test_inductor() -> None:
    """A model compiled as one graph, with gradients and without: the eager model's numbers."""
    model, batch = decoder(dim=64, n_blocks=2, block_size=3, ways=2), ids(2, 33)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    wanted = list(model.parameters())
    with use_backend("triton"):
        out = compiled(batch)
        got = torch.autograd.grad(out.square().sum(), wanted)
    with use_backend("reference"):
        expected = model(batch)
        exact = torch.autograd.grad(expected.square().sum(), wanted)
    assert error(out, expected) < 1e-5
    names = [name for name, _ in model.named_parameters()]
    assert {n: e for n, a, b in zip(names, got, exact, strict=True) if (e := error(a, b)) > 1e-4} == {}
