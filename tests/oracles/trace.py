"""What an oracle returns, and the few pieces several oracles share. Nothing here comes from depthmix."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Trace:
    out: Tensor  # h_S, [B, T, D]
    reads: list[tuple[Tensor, ...]]  # S + 1 entries; the last is (out,)
    M: Tensor  # [ways, S+1, S+1, B, T, D], detached


def rms(v: Tensor, eps: float) -> Tensor:
    """v / sqrt(mean(v^2) + eps) over the last dimension, no gain."""
    return v / torch.sqrt((v * v).mean(-1, keepdim=True) + eps)


def unit_lower_inverse(L: Tensor) -> Tensor:
    """(I - L)^-1 of a strictly lower triangular L, with exact zeros above the diagonal."""
    eye = torch.eye(L.shape[-1], dtype=L.dtype).expand_as(L)
    return torch.linalg.solve_triangular(eye - L, eye, upper=False, unitriangular=True)


def no_mixing(ways: int, n_blocks: int, e: Tensor) -> Tensor:
    """An M of zeros. M[way, reader, source]: source 0 is e, source i + 1 is y_i."""
    sites = 2 * n_blocks
    return torch.zeros(ways, sites + 1, sites + 1, *e.shape, dtype=e.dtype)


def block_level(rows: Tensor, n_blocks: int, e: Tensor, middle: Tensor) -> Tensor:
    """M of a block-level rule from its rows over [e, delta_1 ... delta_N].

    rows [ways, N+1, N+1, B, T, D]: how reader i (block i, or the end) reads e and delta_j = y_{2j-2} + y_{2j-1}.
    middle [N, N+1, B, T, D]: the same for what block i's MLP reads, before its own y_{2i} is added with weight 1.
    """
    M = no_mixing(rows.shape[0], n_blocks, e)
    for i in range(n_blocks + 1):
        M[:, 2 * i, 0] = rows[:, i, 0]
        for j in range(1, i + 1):
            M[:, 2 * i, 2 * j - 1] = rows[:, i, j]
            M[:, 2 * i, 2 * j] = rows[:, i, j]
    for i in range(n_blocks):
        M[:, 2 * i + 1, 0] = middle[i, 0]
        for j in range(1, i + 1):
            M[:, 2 * i + 1, 2 * j - 1] = middle[i, j]
            M[:, 2 * i + 1, 2 * j] = middle[i, j]
        M[:, 2 * i + 1, 2 * i + 1] = 1.0
    return M


def multi_stream(q: list[Tensor], R: list[Tensor], p: list[Tensor], n_blocks: int, e: Tensor) -> Tensor:
    """M[s, i+1] = q_s R_{s-1} ... R_{i+1} p_i and M[s, 0] = q_s R_{s-1} ... R_0 1, per token.

    q: S+1 read vectors [B, T, n]; R: S residual maps [B, T, n_out, n_in]; p: S write vectors [B, T, n].
    """
    M = no_mixing(1, n_blocks, e)
    writes = [torch.ones_like(q[0]), *p]
    for s in range(2 * n_blocks + 1):
        for source in range(s + 1):
            row = q[s]
            for m in range(s - 1, source - 1, -1):
                row = torch.einsum("bto,btoi->bti", row, R[m])
            M[0, s, source] = (row * writes[source]).sum(-1, keepdim=True)
    return M.detach()
