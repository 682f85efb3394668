"""Two ways on a GPU: errors of bf16 stacks against fp64, and the time of stacks with 1, 2 and 3 ways, from one run.

For two ways every choice is timed: logits of old sources known beforehand or not, and the newest source's gradient from both
ways at once or from a pass of its own. PYTHONPATH=. python bench_ways.py
"""

import copy
import statistics
import sys
import time

import torch
from torch import Tensor

from depthmix import create_mixer
from depthmix.mixers import attnres
from depthmix.ops import use_backend
from depthmix.ops.depth_attention import source_major
from depthmix.ops.depth_attention.kernels import read

sys.path.insert(0, "tests")
from gpu.exact import BF16, DEVICE, Stack, draw, error, exact_stack

CHOICES = {  # name: ways, KNOWN_WAYS, AT_ONCE, whether read_backward has half the warps for two ways
    "1 way": (1, 2, 2, False),
    "2 ways, known, at once": (2, 2, 2, False),
    "2 ways, the same, half warps": (2, 2, 2, True),
    "2 ways, known, apart": (2, 2, 1, False),
    "2 ways, not known, at once": (2, 3, 2, False),
    "2 ways, not known, apart": (2, 3, 1, False),
    "3 ways": (3, 2, 2, False),
}
EVERY, USUAL = [*CHOICES], ["2 ways, known, at once"]
CORRECT = [  # tokens, channels, blocks, block_size, choices
    (4097, 512, 4, 4, EVERY),
    (1025, 2048, 8, 8, EVERY),
    (777, 1000, 3, 1, USUAL),
]
TIMED = [(32768, 512, 12, 4), (16384, 2048, 16, 8)]


def choose(known: int, at_once: int, half: bool) -> None:
    attnres.KNOWN_WAYS, source_major.AT_ONCE = known, at_once
    read._warps = (lambda block, rows: warps(block, 8 if rows == 16 else rows)) if half else warps


warps = read._warps


def errors(exact: Stack, x: Tensor, backend: str) -> dict[str, float]:
    stack, x, y = copy.deepcopy(exact).float(), x.detach().requires_grad_(), x.detach().double().requires_grad_()
    exact.zero_grad()
    with use_backend(backend):
        out = stack(x)
        g = draw(*x.shape, seed=2, dtype=x.dtype)
        out.backward(g)
    expected = exact_stack(exact, y, x.dtype)
    expected.backward(g.double())
    found = {"output": error(out, expected), "x": error(x.grad, y.grad)}
    for (name, p), (_, e) in zip(stack.named_parameters(), exact.named_parameters(), strict=True):
        group = name.split(".")[1 if name.startswith("mixer") else 0]
        found[group] = max(found.get(group, 0.0), error(p.grad, e.grad))
    return found


def correctness() -> bool:
    right = True
    for tokens, dim, n_blocks, block_size, names in CORRECT:
        references: dict[int, dict[str, float]] = {}
        print(f"\nN={tokens} D={dim} {n_blocks} blocks, block_size={block_size}: errors of kernels (of the reference)")
        for name in names:
            ways, *choice = CHOICES[name]
            choose(*choice)
            exact = Stack(n_blocks, dim, block_size=block_size, ways=ways).double()
            x = draw(tokens, dim, seed=1, dtype=BF16)
            got = errors(exact, x, "triton")
            if ways not in references:
                references[ways] = errors(exact, x, "reference")
            allowed = references[ways]
            wrong = [k for k, e in got.items() if e > max(2e-3 if k == "output" else 1e-2, 4 * allowed[k])]
            right &= not wrong
            row = "  ".join(f"{k} {e:.1e} ({allowed[k]:.1e})" for k, e in got.items())
            print(f"  {name:28s} {'WRONG ' + str(wrong) if wrong else 'ok'}  {row}", flush=True)
    return right


def recorded(ways: int, tokens: int, dim: int, n_blocks: int, block_size: int) -> tuple[torch.cuda.CUDAGraph, object]:
    """Forward and backward of a stack with norms and identity sublayers; a site's output is its first mixture.

    The other mixtures get a gradient too, as a projection behind them would give them: that of y, without an addition.
    """
    mixer = create_mixer("attnres", dim=dim, n_blocks=n_blocks, block_size=block_size, ways=ways).to(DEVICE)
    for i, (name, p) in enumerate(mixer.named_parameters()):
        p.data += draw(*p.shape, seed=i, scale=dim**-0.5 if name.startswith("query") else 0.1)
    norms = [
        [torch.nn.RMSNorm(dim, eps=1e-6, device=DEVICE) for _ in range(mixer.ways(s))] for s in range(mixer.n_sites)
    ]
    leaves = [*mixer.parameters(), *(n.weight for site in norms for n in site)]
    x, g = draw(tokens, dim, seed=90, dtype=BF16).requires_grad_(), draw(tokens, dim, seed=91, dtype=BF16)

    def step() -> None:
        state = mixer.start(x)
        for site in range(mixer.n_sites):
            h = mixer.read(state, site, norms[site])
            state = mixer.write(state, site, First.apply(*h) if isinstance(h, tuple) else h)
        out = mixer.finish(state)
        torch.autograd.grad(out, [x, *leaves], g)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph, step  # which keeps what the graph reads


class First(torch.autograd.Function):
    """The first of several mixtures; its gradient goes to all of them."""

    @staticmethod
    def forward(ctx, *h: Tensor) -> Tensor:
        ctx.ways = len(h)
        return h[0].view_as(h[0])

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, ...]:
        return (g,) * ctx.ways


def times() -> None:
    for tokens, dim, n_blocks, block_size in TIMED:
        print(
            f"\n{2 * n_blocks} sites, N={tokens} D={dim}, block_size={block_size}: ms of forward and backward, graphs in turn"
        )
        graphs = {}
        for name, (ways, *choice) in CHOICES.items():
            choose(*choice)
            graphs[name] = recorded(ways, tokens, dim, n_blocks, block_size)
        found: dict[str, list[float]] = {name: [] for name in graphs}
        for turn in range(25):
            for name, (graph, _) in graphs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                if turn >= 5:
                    found[name].append(start.elapsed_time(end))
        base = statistics.median(found["1 way"])
        for name, each in found.items():
            ms = statistics.median(each)
            print(f"  {name:28s} {ms:7.3f} ms   {ms - base:+7.3f} of one way's   best {min(each):.3f}", flush=True)
        del graphs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    began = time.time()
    right = correctness()
    print(f"\ncorrectness: {'ok' if right else 'WRONG'}, {time.time() - began:.0f} s", flush=True)
    times()
    print(f"\n{time.time() - began:.0f} s in all")
    sys.exit(0 if right else 1)
