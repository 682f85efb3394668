"""The published kernels, as PyPI has them (`pip install .[bench]`), called as their own models call them.

* fla, flash-linear-attention: `fused_attnres(query, sources, gain)`, one call per read. `checkpoint_level` stays at its default, 1.
  fla-level0 uses 0, which keeps every mixture and need not recompute it. Every (depth rounded up to a power of two, D) is tuned over
  24 configurations at its first call. FLA_GLUON=1, fla's own switch, selects its other kernels; the CSV then says so beside the version.
* flash-attn-res: Block only, bf16 only. One autograd function around the whole stack recomputes its sublayers in the backward. It has
  no key gain, so the query is multiplied by the gain outside, which is equivalent.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.stacks import EPS, Build, Built, Problem, Sublayer, from_read, identity
from benchmarks.timing import Clock

MODULES = {"fla": "fla", "fla-level0": "fla", "flash-attn-res": "flash_attn_res"}


def why_not(name: str, device: torch.device) -> str:
    """Return the reason why a rival cannot run on this device, or "" if it can."""
    if device.type != "cuda":
        return "skipped: its kernels need a GPU"
    for module in (MODULES[name], "triton"):
        if importlib.util.find_spec(module) is None:
            return f"skipped: {module} is not installed (pip install '.[bench]')"
    # Triton keeps what tuning found beside its compiled kernels; flash-attn-res does not ask for that itself.
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
    return ""


def builds(names: Sequence[str]) -> dict[str, Build]:
    """Return the stacks of the named rivals."""
    known: dict[str, Build] = {"fla": fla, "fla-level0": fla_level0, "flash-attn-res": flash_attn_res}
    return {name: known[name] for name in names}


def fla_read(
    query: Tensor, sources: Sequence[Tensor], key_gain: Tensor, out_gain: Tensor | None = None, level: int = 1
) -> Tensor:
    """Read once with fla's kernel."""
    from fla.ops.attnres import fused_attnres

    h: Tensor = fused_attnres(query, sources, key_gain, output_rms_weight=out_gain, rms_eps=EPS, checkpoint_level=level)
    return h


def fla(problem: Problem) -> Built:
    """Build a stack of fla's reads, with lists of sources that are never stacked."""
    return from_read(problem, fla_read)


def fla_level0(problem: Problem) -> Built:
    """Build a stack of fla's reads that keep the mixtures for the backward."""
    return from_read(problem, partial(fla_read, level=0))


class _Layer(nn.Module):
    """A sublayer in the form that flash-attn-res expects."""

    def __init__(self, site: int, sublayer: Sublayer) -> None:
        super().__init__()
        self.site, self.sublayer = site, sublayer

    def forward(self, h: Tensor) -> Tensor:
        return self.sublayer(self.site, h)


def flash_attn_res(problem: Problem) -> Built:
    """Build flash-attn-res's function over the whole stack."""
    from flash_attn_res.experimental.autograd import BlockAttentionResiduals

    if problem.block_size is None:
        raise ValueError("flash-attn-res has no Full stack")
    leaves = {n: getattr(problem, n).detach().clone().requires_grad_() for n in ("x", "query", "key_gain")}

    def forward(sublayer: Sublayer) -> Tensor:
        layers = [_Layer(site, sublayer) for site in range(problem.sites)]
        queries = leaves["query"] * leaves["key_gain"]
        out: Tensor = BlockAttentionResiduals.apply(leaves["x"], queries, layers, problem.block_size, EPS)
        return out

    return Built(leaves, forward)


@dataclass(frozen=True)
class Tuning:
    """The outcome of flash-attn-res's tuning."""

    finished: bool
    seconds: float


def tune_flash_attn_res(problem: Problem, limit: float) -> Tuning:
    """Let flash-attn-res tune in a process of its own, and stop it at the limit.

    This process then reads the result from Triton's cache. If the tuning does not finish, this process gives it fewer configurations to
    try, through its own `set_autotune_configs`.
    """
    tokens, dim = problem.x.shape[1:]
    sizes = {"sites": problem.sites, "tokens": tokens, "dim": dim, "block_size": problem.block_size}
    command = [sys.executable, "-m", "benchmarks.rivals", json.dumps(sizes)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=Path(__file__).parents[1])
    except subprocess.TimeoutExpired:
        _fewer_configurations()
        return Tuning(False, limit)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "its tuning failed")
    return Tuning(True, float(done.stdout.split()[-1]))


def _fewer_configurations() -> None:
    """Keep the configurations without register spills: four or eight warps and, in the phase that tiles tokens, the smallest tile."""
    import flash_attn_res as package

    kernels: list[Any] = [
        package.phase_1_batched_attention_forward_kernel,
        package.phase_1_batched_attention_backward_kernel,
        package.phase_2_online_softmax_merge_forward_kernel,
        package.phase_2_online_softmax_merge_backward_kernel,
    ]
    for kernel in kernels:
        tile = min(c.kwargs.get("BLOCK_BT", 0) for c in kernel.configs)
        few = [c for c in kernel.configs if c.num_warps in (4, 8) and c.kwargs.get("BLOCK_BT", 0) == tile]
        package.set_autotune_configs(kernel, few[-3:])


def _tune(sizes: dict[str, int]) -> float:
    """Return the seconds of its first forward and backward pass."""
    device = torch.device("cuda")
    problem = Problem.make(dtype=torch.bfloat16, device=device, **sizes)
    built = flash_attn_res(problem)
    return Clock(device).seconds(lambda: built.forward(identity).backward(problem.grad))


if __name__ == "__main__":
    if reason := why_not("flash-attn-res", torch.device("cuda")):
        sys.exit(reason)
    print(_tune(json.loads(sys.argv[1])))
