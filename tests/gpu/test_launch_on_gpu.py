"""Launches that pass by Triton's own call: the same numbers for all kinds of arguments, and hooks still see every launch."""

import statistics
import time

import pytest
import torch

from depthmix.ops import depth_attention
from depthmix.ops.gpu import launch
from depthmix.ops.torch_internals import current_stream_handle

pytestmark = pytest.mark.gpu


def read(tokens: int, dim: int, n: int, dtype: torch.dtype, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a read by kernels and by the reference; start: where the sources begin in their memory."""
    torch.manual_seed(tokens + dim)
    memory = [torch.randn(tokens * dim + start, device="cuda").to(dtype) for _ in range(n)]
    sources = [m[start:].view(tokens, dim) for m in memory]
    query = torch.randn(dim, device="cuda") / dim**0.5
    with torch.no_grad():
        return tuple(depth_attention(query, sources, backend=backend) for backend in ("triton", "reference"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_of_argument_twice(dtype: torch.dtype) -> None:
    """One token and sixteen, aligned rows and others, in an order in which a variant meets the next one's arguments."""
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    cases = [(t, d, n, s) for t in (1, 16, 17) for d in (64, 72, 33) for n in (2, 3, 16) for s in (0, 1, 8)]
    for _ in range(2):
        for tokens, dim, n, start in cases:
            ours, expected = read(tokens, dim, n, dtype, start)
            torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def test_a_second_launch_passes_by_triton_unless_a_hook_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    from depthmix.ops.depth_attention.kernels.read import _read_kernel

    read(5, 64, 3, torch.float32)
    calls = []
    run = type(_read_kernel).run
    monkeypatch.setattr(type(_read_kernel), "run", lambda self, *a, **k: (calls.append(self), run(self, *a, **k))[1])
    ours, expected = read(5, 64, 3, torch.float32)
    torch.testing.assert_close(ours, expected)
    assert not calls
    seen = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        ours, expected = read(5, 64, 3, torch.float32)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    torch.testing.assert_close(ours, expected)
    assert calls
    assert seen


def test_launches_follow_the_current_stream() -> None:
    """A launch by `launch_again` goes to the stream that is current at that moment, and a new thread has another one."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert current_stream_handle(device) == torch.cuda.current_stream(device).cuda_stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert current_stream_handle(device) == stream.cuda_stream
        ours, expected = read(5, 64, 3, torch.float32)
    stream.synchronize()
    torch.testing.assert_close(ours, expected)
    assert current_stream_handle(device) == torch.cuda.current_stream(device).cuda_stream


def test_a_tensor_on_the_cpu_is_refused_at_a_second_launch_too() -> None:
    from depthmix.ops.depth_attention.kernels.read import mixtures

    sources, query = [torch.randn(1, 64, device="cuda") for _ in range(2)], torch.randn(64, device="cuda")
    for _ in range(2):
        mixtures(query, sources, None, None, 1e-6, 1e-6)
    with pytest.raises(ValueError, match="cpu tensor"):
        mixtures(query, sources, None, query.cpu(), 1e-6, 1e-6)


def test_it_takes_less_of_the_host() -> None:
    """A read of one token, with and without: the kernel is a few microseconds, the rest is Python."""
    sources, query = [torch.randn(1, 64, device="cuda") for _ in range(9)], torch.randn(64, device="cuda")

    def measure() -> float:
        times = []
        for _ in range(300):
            start = time.perf_counter()
            depth_attention(query, sources)
            times.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        return statistics.median(times)

    with torch.no_grad():
        measure()
        quick = measure()
        watched = launch.is_watched
        try:
            launch.is_watched = lambda kernel, settings: True
            slow = measure()
        finally:
            launch.is_watched = watched
    print(f"host: {quick * 1e6:.0f} us, by Triton's call {slow * 1e6:.0f} us")
    assert quick < slow
