"""Calls of the operators that `host` times, and rounds of them. Imports nothing of benchmarks: it also runs another commit's depthmix.

As a program it serves rounds on the device that it is given: a line N on stdin makes it call each case N times and answer with a
line of JSON on stdout.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SOURCES, STREAMS = 9, 4
# On a CPU, where only the operators' own Python is of interest, the numbers that PyTorch itself computes are few.
SIZES = {"cuda": (2048, (1, 64)), "cpu": (64, (1,))}
# Clock cycles that the GPU sleeps for each call that is launched meanwhile: 4 ms.
SLEEP = 8_000_000
TRAINING = ", forward and backward"
Case = Callable[[], Any]


def cases(device: torch.device) -> dict[str, Case]:
    """Return each operator's call by name. Names of calls with gradients end with TRAINING."""
    dim, tokens = SIZES[device.type]
    found: dict[str, Case] = {}
    for n, grad in ((tokens[0], False), (tokens[-1], False), (tokens[-1], True)):
        for name, call in _calls(device, dim, n, grad).items():
            found[f"{name}, {n} token{'s' * (n > 1)}{TRAINING * grad}"] = call
    return found


def _calls(device: torch.device, dim: int, tokens: int, grad: bool) -> dict[str, Case]:
    """Return calls on bf16 activations with fp32 parameters. grad: forward and backward."""
    from depthmix.ops import depth_attention, depth_sum
    from depthmix.ops.depth_attention.normed_read import read_normed
    from depthmix.ops.stream_mix.rules import Rule

    def activation(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(torch.bfloat16).requires_grad_(grad)

    def parameter(*shape: int) -> Tensor:
        return torch.nn.Parameter(torch.randn(*shape, device=device) * dim**-0.5, requires_grad=grad)

    sources = [activation(1, tokens, dim) for _ in range(SOURCES)]
    query, gain, out_gain = parameter(dim), parameter(dim), parameter(dim)
    three, three_gains = parameter(3, dim), parameter(3, dim)
    weights = parameter(1, SOURCES, 1)
    stack, newest, y = activation(1, tokens, 6, dim), activation(1, tokens, dim), activation(1, tokens, dim)
    reads: dict[str, Case] = {
        "depth_attention": lambda: depth_attention(query, sources),
        "depth_attention, key and output gain": lambda: depth_attention(query, sources, gain, out_gain=out_gain),
        "depth_attention, three ways": lambda: depth_attention(three, sources, out_gain=three_gains),
        "depth_attention, normed values": lambda: depth_attention(query, sources, out_gain=out_gain, value_norm=True),
        "read of a stack (Inkling 2)": lambda: read_normed(
            (1e-6, 1e-6), torch.bfloat16, True, three, three_gains, stack, y, [newest]
        )[0],
        "depth_sum": lambda: depth_sum(sources, static=weights),
    }
    columns = 2 * STREAMS + STREAMS**2
    fn, base, scale = parameter(columns, STREAMS * dim), parameter(columns), parameter(3)
    rule, x = Rule(STREAMS, joint=True, eps=1e-6, convention="deepseek"), activation(1, tokens, STREAMS, dim)
    reads |= _stream_calls(rule, x, y, SimpleNamespace(fn=fn, base=base, scale=scale), gain)
    reads |= _gated_calls(x, y, grad)
    return {name: _with_backward(call) for name, call in reads.items()} if grad else reads


def _stream_calls(rule: Any, x: Tensor, y: Tensor, weights: Any, gain: Tensor) -> dict[str, Case]:
    """Return the steps of an accelerated mHC layer: depthmix.hf.accelerated.streams."""
    from depthmix.hf.accelerated import streams

    post, res = (
        torch.rand(y.shape[1], STREAMS, device=x.device),
        torch.rand(y.shape[1], STREAMS, STREAMS, device=x.device),
    )
    before = streams.begin(x.detach())._replace(x=x.flatten(0, 1), post=post, res=res)
    return {
        "mHC: write, coefficients, read": lambda: streams._read(rule, before, y, weights, gain, 1e-6)[0],
        "mHC: coefficients, read": lambda: streams._read(rule, streams.begin(x), None, weights, gain, 1e-6)[0],
        "mHC: write": lambda: streams.write(before, y),
    }


def _gated_calls(x: Tensor, y: Tensor, grad: bool) -> dict[str, Case]:
    """Return reads of gated streams (Qwen4-Exp), or none in a checkout that has no such operator."""
    try:
        from depthmix.ops.gated_streams import Inputs, gated_read
    except ImportError:
        return {}
    width, rank = STREAMS * x.shape[-1], min(320, x.shape[-1])

    def weight(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, device=x.device) * width**-0.5
        return torch.nn.Parameter(drawn.to(x.dtype), requires_grad=grad)

    weights = (weight(width), weight(rank, width), weight(width, rank), weight(STREAMS, width))
    post = torch.rand(y.shape[1], STREAMS, device=x.device)
    rows, output = x.flatten(0, 1), y.flatten(0, 1)
    return {
        "gated streams: write, gates, read": lambda: gated_read(Inputs(rows, output, post, *weights), 1e-6, 1.0),
        "gated streams: gates, read": lambda: gated_read(Inputs(rows, None, None, *weights), 1e-6, 1.0)[1:],
    }


def _with_backward(call: Case) -> Case:
    def both() -> None:
        out = call()
        outs = [out] if isinstance(out, Tensor) else list(out)
        torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])

    return both


@contextmanager
def launches_that_do_nothing() -> Iterator[None]:
    """Run the operators' CUDA path on CPU tensors, with kernels that return at once. Results are uninitialised memory.

    Allocating, and asking for the device and its stream, then cost what they cost on a CPU.
    """
    import triton

    from depthmix.ops import backend

    def nothing(*_: Any) -> None:
        pass

    compiled = SimpleNamespace(run=nothing, function=0, packed_metadata=())
    stream, multiply, multiply_batch = SimpleNamespace(cuda_stream=0), torch.mm, torch.bmm
    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    replaced: list[tuple[Any, str, Any]] = [
        (triton.JITFunction, "run", lambda self, *_, **__: compiled),
        (backend, "_why_no_kernels", {}.get),
        (torch.cuda, "current_stream", lambda device=None: stream),
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (torch, "mm", lambda a, b, out_dtype=None: multiply(a, b).to(out_dtype or a.dtype)),
        (torch, "bmm", lambda a, b, out_dtype=None: multiply_batch(a, b).to(out_dtype or a.dtype)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    # A class attribute hides the one of the base class.
    Tensor.is_cuda = True
    try:
        yield
    finally:
        del Tensor.is_cuda
        for owner, name, value in before:
            setattr(owner, name, value)


def microseconds(name: str, call: Case, calls: int, device: torch.device) -> float:
    """Return the time of a call: wall time without waiting for the GPU, or on a CPU the thread's own time."""
    on_gpu = device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.thread_time
    if on_gpu:
        torch.cuda.synchronize(device)
    with torch.set_grad_enabled(name.endswith(TRAINING)):
        begun = clock()
        for _ in range(calls):
            call()
        return 1e6 * (clock() - begun) / calls


def gpu_microseconds(name: str, call: Case, calls: int, device: torch.device) -> float:
    """Return the GPU's time of a call. Calls are launched while the GPU sleeps, so that it never waits for the host."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.set_grad_enabled(name.endswith(TRAINING)):
        torch.cuda.synchronize(device)
        torch.cuda._sleep(calls * SLEEP)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
    torch.cuda.synchronize(device)
    return 1e3 * begin.elapsed_time(end) / calls


def serve(device: torch.device) -> None:
    """Answer requests for rounds until stdin ends: for each case the times of the host and, on a GPU, of the GPU."""
    torch.set_num_threads(1)
    timed = cases(device)
    for line in sys.stdin:
        calls = int(line)
        found = {name: [microseconds(name, call, calls, device)] for name, call in timed.items()}
        if device.type == "cuda":
            for name, call in timed.items():
                found[name].append(gpu_microseconds(name, call, min(calls, 20), device))
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    chosen = torch.device(sys.argv[1])
    with nullcontext() if chosen.type == "cuda" else launches_that_do_nothing():
        serve(chosen)
