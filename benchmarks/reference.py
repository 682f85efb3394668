"""The stack and the operator in fp64, in plain PyTorch with autograd's own gradients. All implementations are compared with them.

Tokens are independent of each other, so they are computed a few at a time, and any size fits into memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.check import Results
from benchmarks.stacks import EPS, Problem, gradients, walk

MEMORY = {"cuda": 16 * 2**30, "cpu": 2**28}


def read(query: Tensor, sources: Sequence[Tensor], key_gain: Tensor) -> Tensor:
    """Return the softmax over the sources of query · (key_gain ⊙ RMS(v)), then the weighted sum."""
    v = torch.stack(list(sources))  # [n, ..., D]
    r = torch.rsqrt(v.square().mean(-1) + EPS)
    p = torch.softmax(r * (v @ (query * key_gain)), dim=0)
    return (p.unsqueeze(-1) * v).sum(0)


def read_by_heads(query: Tensor, sources: Sequence[Tensor], heads: int) -> Tensor:
    """Return a read with several heads, whose keys share a norm; query: [D], or [..., D] like the sources."""
    v = torch.stack(list(sources)).unflatten(-1, (heads, -1))  # [n, ..., H, D/H]
    r = torch.rsqrt(v.square().mean((-2, -1)) + EPS).unsqueeze(-1)
    p = torch.softmax(r * (v * query.unflatten(-1, (heads, -1))).sum(-1), dim=0)
    return (p.unsqueeze(-1) * v).sum(0).flatten(-2)


def results(problem: Problem) -> Results:
    """Return the output and gradients of a stack around the sublayers for checks."""
    tokens, dim = problem.x.shape[1:]
    parameters = {n: getattr(problem, n).detach().double().requires_grad_() for n in ("query", "key_gain")}
    scale, outs, dxs = problem.scale.double(), [], []
    for at in _parts(tokens, dim, _pairs(problem), problem.x.device):
        x = problem.x[:, at].detach().double().requires_grad_()
        part = replace(problem, x=x, scale=scale, **parameters)
        out = walk(part, read, part.scaled)
        out.backward(problem.grad[:, at].double())
        outs.append(out.detach())
        dxs.append(gradients({"x": x})["d x"])
    return {"output": torch.cat(outs, 1), "d x": torch.cat(dxs, 1), **gradients(parameters)}


def operator_results(
    query: Tensor, sources: Sequence[Tensor], key_gain: Tensor, out_gain: Tensor | None, grad: Tensor
) -> Results:
    """Return the output and gradients of one read, followed by an RMSNorm if out_gain is given."""
    q, g = (t.detach().double().requires_grad_() for t in (query, key_gain))
    vs = [v.detach().double().requires_grad_() for v in sources]
    og = None if out_gain is None else out_gain.detach().double().requires_grad_()
    out = read(q, vs, g)
    if og is not None:
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + EPS) * og
    out.backward(grad.double())
    return {"output": out.detach(), **named_gradients(q, vs, g, og)}


def named_gradients(query: Tensor, sources: Sequence[Tensor], key_gain: Tensor, out_gain: Tensor | None) -> Results:
    """Return the gradients of one read's arguments. Those of the sources are stacked."""
    named = {"d query": query.grad, "d key_gain": key_gain.grad}
    if out_gain is not None:
        named["d out_gain"] = out_gain.grad
    grads = [v.grad for v in sources]
    if all(g is not None for g in grads):
        named["d sources"] = torch.stack([g for g in grads if g is not None])
    return {n: g for n, g in named.items() if g is not None}


def _pairs(problem: Problem) -> int:
    size = problem.block_size or 1
    return sum(2 + site // size for site in range(problem.sites + 1))


def _parts(tokens: int, dim: int, pairs: int, device: torch.device) -> list[slice]:
    """Return slices of tokens whose graph fits into MEMORY: two fp64 values per pair and channel, and as many temporary ones."""
    step = max(1, MEMORY.get(device.type, MEMORY["cpu"]) // (pairs * dim * 32))
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]
