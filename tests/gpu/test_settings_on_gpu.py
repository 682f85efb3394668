"""What people set around a model on a GPU: compilation modes, TF32, streams, the current device."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix import Decoder, DecoderConfig, create_mixer, list_mixers
from depthmix.ops import use_backend
from depthmix.ops.gpu import launch
from gpu.exact import DEVICE, FP32, Stack, draw, error

MS = 2_000_000  # clock cycles, about


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=64, dim=128, n_blocks=3, n_heads=2, mixer="attnres", mixer_options={"block_size": 4} | options
    )
    return Decoder(config).to(DEVICE)


def ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def gradients(run: Any, model: Decoder, batch: Tensor) -> list[Tensor]:
    return [g.clone() for g in torch.autograd.grad(run(batch).float().square().mean(), list(model.parameters()))]


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(map(error, found, expected))


@pytest.mark.parametrize("options", [{}, {"block_size": None}, {"ways": 2}], ids=str)
def test_reduce_overhead(options: dict[str, Any]) -> None:
    """Inductor's CUDA graphs own what is allocated while they are warmed up and recorded: our tables are not among it."""
    torch._dynamo.reset()
    model = decoder(**options)
    compiled = torch.compile(model, mode="reduce-overhead")
    for seed in range(4):  # warmed up, recorded, replayed
        batch = ids(33, seed)
        assert worst(gradients(compiled, model, batch), gradients(model, model, batch)) < 1e-4


def test_dynamic_shapes() -> None:
    torch._dynamo.reset()
    model = decoder()
    compiled = torch.compile(model, dynamic=True, fullgraph=True)
    for length in (33, 40, 17):
        batch = ids(length)
        assert worst(gradients(compiled, model, batch), gradients(model, model, batch)) < 1e-4


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    a, b = draw(256, 256, seed=1), draw(256, 256, seed=2)
    assert error(a @ b, a.double() @ b.double()) > 1e-4  # it is in force
    yield
    torch.set_float32_matmul_precision(before)


def stack_results(name: str, options: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    mixer = create_mixer(name, dim=128, n_blocks=2, **options)
    with torch.no_grad():
        for p in mixer.parameters():
            p += 0.1 * torch.randn_like(p)
    mixer = mixer.to(DEVICE, dtype=dtype)
    x = draw(64, 128).to(dtype).requires_grad_()
    state = mixer.start(x)
    for site in range(mixer.n_sites):
        h = mixer.read(state, site)
        state = mixer.write(state, site, sum(h).tanh() if isinstance(h, tuple) else h.tanh())
    out = mixer.finish(state)
    grads = torch.autograd.grad(out.square().sum(), [x, *mixer.parameters()], allow_unused=True)
    return [out, *(g for g in grads if g is not None and float(g.abs().max()) > 1e-6)]


OPTIONS = [(name, {}) for name in list_mixers()] + [
    ("attnres", {"query": "input"}),
    ("mhc", {"residual_map": "birkhoff", "head": "learned"}),
    ("laurel", {"variant": "lr"}),
    ("highway", {"gate": "scalar"}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_mixing_is_fp32_whatever_products_may_be(name: str, options: dict[str, Any], tf32: None) -> None:
    """TF32 keeps 10 bits: an error of 1e-4 and more, where fp32 has 1e-6."""
    exact = stack_results(name, options, torch.float64)
    found = stack_results(name, options, FP32)
    assert len(found) == len(exact)
    assert worst(found, exact) < 2e-5


def test_the_gradient_of_queries_is_fp32_too(tf32: None) -> None:
    """source_backward's product, for sources in fp32 and in fp16."""
    for dtype, limit in ((FP32, 1e-5), (torch.float16, 5e-3)):
        stack = Stack(3, 64)
        x, g = draw(512, 64, seed=1, dtype=dtype), draw(512, 64, seed=2, dtype=dtype)
        found = torch.autograd.grad(stack(x), stack.mixer.query, g)[0]
        twin = copy.deepcopy(stack).double()
        expected = torch.autograd.grad(twin(x.double()), twin.mixer.query, g.double())[0]
        assert error(found[1:], expected[1:]) < limit


@pytest.mark.parametrize(
    "late", [(0, 10), (60, 3)]
)  # ms of a and b: gradients that come late; memory that is freed early
def test_reads_on_one_stream_and_their_sources_on_another(late: tuple[int, int]) -> None:
    """What reads leave with the node of an older source is waited for, and its memory is not given away before.

    Site 0 makes the source on stream a; later sites, on stream b, are connected to it by what they leave alone: their own
    inputs have no gradient. b is late with its gradients, or a is late with reading them, and whatever b frees is overwritten.
    """
    a, b, main = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()
    dim, tokens = 256, 4096
    stack = Stack(4, dim)
    x = draw(tokens, dim, seed=1, dtype=torch.bfloat16)
    ys = [draw(tokens, dim, seed=10 + s, dtype=torch.bfloat16) for s in range(8)]

    def results(streams: list[torch.cuda.Stream], late: tuple[int, int] | None) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        for s in set(streams):
            s.wait_stream(main)
        reads = []
        with torch.cuda.stream(streams[0]):
            state = stack.mixer.start(leaf)
        for site in range(8):
            if site:
                streams[site].wait_stream(streams[site - 1])
            with torch.cuda.stream(streams[site]):
                h = stack.mixer.read(state, site, stack.norms[site])
                if late:
                    h.register_hook(lambda g, ms=late[site > 0]: torch.cuda._sleep(ms * MS))
                reads.append(h)
                state = stack.mixer.write(state, site, ys[site])
        with torch.cuda.stream(streams[-1]):
            total = sum((h * y).float().sum() for h, y in zip(reads, ys, strict=True))
        main.wait_stream(streams[-1])
        grads = torch.autograd.grad(total, [leaf, stack.mixer.query, *(n[0].weight for n in stack.norms)])
        if late:
            with torch.cuda.stream(b):
                rubbish = [torch.full((tokens, dim), float("nan"), device=DEVICE, dtype=t) for t in
                           (torch.bfloat16, torch.float16, torch.float32) for _ in range(8)]  # fmt: skip
                rubbish += [torch.full((2, tokens), float("nan"), device=DEVICE) for _ in range(16)]
        torch.cuda.synchronize()
        return list(grads)

    expected = results([main] * 8, None)
    for _ in range(3):
        found = results([a] + [b] * 7, late)
        assert worst(found, expected) < 1e-3


def test_another_device_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one GPU here, so the current device is only said to be another: every launch then enters the guard."""
    entered, real = [], torch.cuda.device

    class Guard(real):  # type: ignore[misc, valid-type]
        def __enter__(self) -> None:
            entered.append(self.idx)
            super().__enter__()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 99)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    stacks = [Stack(3, 256, **options) for options in ({}, {"heads": 4})]
    x = draw(1024, 256, dtype=torch.bfloat16).requires_grad_()
    launches, run = [], launch.launch
    for module in ("read", "source_backward", "layer_backward", "tiling", "general_read"):
        kernels = pytest.importorskip(f"depthmix.ops.depth_attention.kernels.{module}")
        monkeypatch.setattr(kernels, "launch", lambda *args, **kwargs: (launches.append(1), run(*args, **kwargs)))
    with use_backend("triton"):
        sum(stack(x).float().square().sum() for stack in stacks).backward()
    assert launches
    assert len(entered) >= len(launches)
    assert set(entered) == {0}
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
