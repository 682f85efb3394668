"""Threads that share a GPU, a model or both: what each of them computes is what it computes alone."""

import functools
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from depthmix import Decoder, DecoderConfig
from depthmix.models.decoding import Decoding
from depthmix.ops import use_backend
from depthmix.ops.backend import choose
from depthmix.ops.gpu.launch import launch
from depthmix.ops.token_loss import token_loss
from depthmix.train import graph

DEVICE = torch.device("cuda", 0)
VOCAB, DIM, BLOCKS = 61, 64, 6
SHAPE = 2, 256  # tokens of a batch: enough that reads look ahead
ROUNDS = 4
NEAR = 1e-5
WAIT = 120  # seconds, after which a thread that hangs fails
RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "residual": ("residual", {}),
    "Full": ("attnres", {}),
    "Block": ("attnres", {"block_size": 3}),
    "two ways": ("attnres", {"block_size": 4, "ways": 2}),
    "three ways": ("attnres", {"block_size": 4, "ways": 3}),
    "one block": ("attnres", {"block_size": "all", "ways": 2}),
    "heads": ("attnres", {"heads": 2}),
    "dca": ("dca", {}),
    "grn": ("grn", {}),
    "denseformer": ("denseformer", {}),
    "mudd": ("mudd", {}),
    "hyper": ("hyper", {}),
    "mhc": ("mhc", {}),
    "gated_streams": ("gated_streams", {"rank": 16}),
    "layerscale": ("layerscale", {}),
    "rezero": ("rezero", {}),
}
ALL = pytest.mark.parametrize("rule", RULES)
SOME = pytest.mark.parametrize("rule", ["Full", "two ways", "dca"])
STREAMS = pytest.mark.parametrize("own", [False, True], ids=["default stream", "own streams"])
Job = Callable[[], object]


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Let Python change threads five hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@functools.cache
def model_of(rule: str, seed: int) -> Decoder:
    mixer, options = RULES[rule]
    shape = {"vocab_size": VOCAB, "dim": DIM, "n_blocks": BLOCKS, "n_heads": 2}
    torch.manual_seed(seed)
    model = Decoder(DecoderConfig(**shape, mixer=mixer, mixer_options=options))
    with torch.no_grad():
        for p in model.mixer.parameters():
            p += 0.3 * torch.randn_like(p) / DIM**0.5
    return model.to(DEVICE)


def tokens(seed: int, *shape: int) -> Tensor:
    return torch.randint(VOCAB, shape or SHAPE, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)
    return token_loss(logits.flatten(0, 1), ids.roll(-1, 1).flatten()).mean()


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@functools.cache
def alone(rule: str, model_seed: int, ids_seed: int) -> list[Tensor]:
    """The gradients of a model for a batch, with no other thread about."""
    model = model_of(rule, model_seed)
    found = gradients(model, loss_of(model, tokens(ids_seed)))
    synchronize()
    return found


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def assert_same(found: Sequence[Tensor | None], expected: Sequence[Tensor]) -> None:
    """Within NEAR of each gradient's length, or of a thousandth of all of them together for those that nearly vanish."""
    whole = torch.stack([e.norm() for e in expected]).norm()
    apart = [
        torch.full_like(whole, torch.inf) if f is None else (f - e).norm() / e.norm().clamp(min=1e-3 * whole)
        for f, e in zip(found, expected, strict=True)
    ]
    assert torch.stack(apart).nan_to_num(nan=torch.inf).max().item() <= NEAR


def on_stream(own: bool) -> AbstractContextManager[Any]:
    """A stream of the caller's own, which comes after all work so far, or the default one."""
    if not own or DEVICE.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(DEVICE)
    stream.wait_stream(torch.cuda.default_stream(DEVICE))
    return torch.cuda.stream(stream)


def in_threads(jobs: Sequence[Job], own: bool = False) -> None:
    """Run each job in a thread, all of them from the same moment on; raise what one of them raised."""
    start, errors = threading.Barrier(len(jobs), timeout=WAIT), list[BaseException]()

    def run(job: Job) -> None:
        try:
            with on_stream(own):
                start.wait()
                job()
                if own and DEVICE.type == "cuda":
                    torch.cuda.current_stream().synchronize()
        except BaseException as error:
            start.abort()
            errors.append(error)

    synchronize()
    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    assert not any(thread.is_alive() for thread in threads)


@STREAMS
@ALL
def test_two_threads_train_two_models(rule: str, own: bool) -> None:
    def train(seed: int) -> None:
        model, ids = model_of(rule, seed), tokens(seed)
        for _ in range(ROUNDS):
            loss_of(model, ids).backward()
            assert_same([p.grad for p in model.parameters()], alone(rule, seed, seed))
            model.zero_grad()

    for seed in (1, 2):
        alone(rule, seed, seed)
    in_threads([functools.partial(train, seed) for seed in (1, 2)], own)


@STREAMS
@ALL
def test_two_threads_differentiate_one_model(rule: str, own: bool) -> None:
    def differentiate(seed: int) -> None:
        model, ids = model_of(rule, 0), tokens(seed)
        for _ in range(ROUNDS):
            assert_same(gradients(model, loss_of(model, ids)), alone(rule, 0, seed))

    for seed in (1, 2):
        alone(rule, 0, seed)
    in_threads([functools.partial(differentiate, seed) for seed in (1, 2)], own)


@ALL
def test_two_threads_add_to_the_gradients_of_one_model(rule: str) -> None:
    model = model_of(rule, 0)
    both = [ROUNDS * (a + b) for a, b in zip(alone(rule, 0, 1), alone(rule, 0, 2), strict=True)]

    def train(seed: int) -> None:
        for _ in range(ROUNDS):
            loss_of(model, tokens(seed)).backward()

    try:
        in_threads([functools.partial(train, seed) for seed in (1, 2)])
        assert_same([p.grad for p in model.parameters()], both)
    finally:
        model.zero_grad()


@STREAMS
@ALL
def test_a_backward_pass_in_another_thread_than_its_forward_pass(rule: str, own: bool) -> None:
    """While it runs, the first thread is at the next forward pass."""
    model, made = model_of(rule, 0), queue.Queue[tuple[int, Tensor] | None](1)
    seeds = [1, 2] * ROUNDS

    def forward() -> None:
        try:
            for seed in seeds:
                made.put((seed, loss_of(model, tokens(seed))), timeout=WAIT)
        finally:
            made.put(None, timeout=WAIT)

    def backward() -> None:
        while (item := made.get(timeout=WAIT)) is not None:
            seed, loss = item
            assert_same(gradients(model, loss), alone(rule, 0, seed))
            done.append(seed)

    done: list[int] = []
    for seed in (1, 2):
        alone(rule, 0, seed)
    in_threads([forward, backward], own)
    assert done == seeds


@SOME
def test_parallel_apply_of_one_model(rule: str) -> None:
    """PyTorch's own threads, and one backward pass through what both have computed."""
    if DEVICE.type != "cuda":
        pytest.skip("its threads are for GPUs")
    model = model_of(rule, 0)

    class Loss(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return loss_of(model, ids)

    both = [a + b for a, b in zip(alone(rule, 0, 1), alone(rule, 0, 2), strict=True)]
    for _ in range(ROUNDS):
        inputs = [(tokens(seed),) for seed in (1, 2)]
        losses = nn.parallel.parallel_apply([Loss(), Loss()], inputs, devices=[DEVICE.index] * 2)
        assert_same(gradients(model, losses[0] + losses[1]), both)


@ALL
def test_data_parallel(rule: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = model_of(rule, 0)
    replicated = nn.DataParallel(model, device_ids=[0, 1])
    both = [(a + b) / 2 for a, b in zip(alone(rule, 0, 1), alone(rule, 0, 2), strict=True)]
    for _ in range(ROUNDS):
        loss = loss_of(replicated, torch.cat([tokens(1), tokens(2)]))
        assert_same(gradients(model, loss), both)


PROMPT, NEW, THREADS = 5, 3, 8


def decoded(model: Decoder, ids: Tensor) -> list[Tensor]:
    """Logits after a prompt, that goes through the model token by token, and after each of some tokens, by a CUDA graph."""
    decoding = Decoding(model, 1, PROMPT + NEW, chunk=1)
    found = [decoding.prefill(ids[:, :PROMPT])]
    return [*found, *(decoding.step(ids[:, PROMPT + i]).clone() for i in range(NEW))]


@functools.cache
def decoded_alone(rule: str, seed: int) -> list[Tensor]:
    return decoded(model_of(rule, 0), tokens(seed, 1, PROMPT + NEW))


@STREAMS
@SOME
def test_eight_threads_decode_with_one_model(rule: str, own: bool) -> None:
    def decode(seed: int) -> None:
        assert_same(decoded(model_of(rule, 0), tokens(seed, 1, PROMPT + NEW)), decoded_alone(rule, seed))

    for seed in range(THREADS):
        decoded_alone(rule, seed)
    in_threads([functools.partial(decode, seed) for seed in range(THREADS)], own)


@STREAMS
@SOME
def test_eight_threads_read_prompts_with_one_model(rule: str, own: bool) -> None:
    """Without gradients, and longer than what is read from slots."""
    model = model_of(rule, 0)
    with torch.no_grad():
        expected = [model(tokens(seed)) for seed in range(THREADS)]

    @torch.no_grad()
    def read(k: int) -> None:
        for _ in range(ROUNDS):
            assert_same([model(tokens(k))], [expected[k]])

    in_threads([functools.partial(read, k) for k in range(THREADS)], own)


@SOME
def test_two_threads_record_their_steps(rule: str) -> None:
    """Each replays its own CUDA graph, while a third thread trains without one."""
    if DEVICE.type != "cuda":
        pytest.skip("needs CUDA graphs")

    def replayed(seed: int) -> None:
        model, ids = model_of(rule, seed), tokens(seed)
        parameters = list(model.parameters())
        try:
            step = graph.record(functools.partial(loss_of, model), parameters, ids)
            for _ in range(ROUNDS):
                step(ids)
                assert_same([p.grad for p in parameters], alone(rule, seed, seed))
        finally:
            model.zero_grad()

    def eager() -> None:
        model, ids = model_of(rule, 0), tokens(1)
        for _ in range(2 * ROUNDS):
            assert_same(gradients(model, loss_of(model, ids)), alone(rule, 0, 1))

    for seed in (1, 2):
        alone(rule, seed, seed)
    alone(rule, 0, 1)
    in_threads([*(functools.partial(replayed, seed) for seed in (1, 2)), eager], own=True)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_forced_backend_reaches_what_a_backward_pass_computes_again(backend: str) -> None:
    """A checkpointed region under `use_backend`, whose backward pass PyTorch would run in a thread of its own."""
    x, chosen = torch.ones(2, 8, device=DEVICE, requires_grad=True), []

    def region(x: Tensor) -> Tensor:
        chosen.append((choose("test", x, None), threading.current_thread()))
        return x.sin()

    with use_backend(backend):
        checkpoint(region, x, use_reentrant=False).sum().backward()
    assert chosen == [(backend, threading.main_thread())] * 2


@triton.jit
def _ones_kernel(out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), 1.0)


def test_a_kernel_that_another_thread_is_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton publishes it before it can run."""
    if DEVICE.type != "cuda":
        pytest.skip("the interpreter loads nothing")
    loading, go = threading.Event(), threading.Event()
    results = [torch.zeros(256, device=DEVICE) for _ in range(2)]
    first = threading.Thread(target=lambda: launch(_ones_kernel, (1,), results[0], results[0], N=256), daemon=True)

    def hold(*_: Any) -> None:
        if threading.current_thread() is first:
            loading.set()
            go.wait(WAIT)

    monkeypatch.setattr(triton.knobs.runtime, "kernel_load_start_hook", hold)
    first.start()
    assert loading.wait(WAIT)
    launched: list[object] = []
    second = threading.Thread(
        target=lambda: launched.append(launch(_ones_kernel, (1,), results[1], results[1], N=256)), daemon=True
    )
    second.start()
    second.join(10)  # a Triton that waits for the other thread ends here
    go.set()
    for thread in (first, second):
        thread.join(WAIT)
    assert launched == [None]
    assert all(bool((out == 1).all()) for out in results)
