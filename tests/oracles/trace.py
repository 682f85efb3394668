"""What an oracle returns, and the few pieces several oracles share. Nothing here comes from depthmix."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import Blocks


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


def no_mixing(ways: int, blocks: Blocks, e: Tensor) -> Tensor:
    """An M of zeros. M[way, reader, source]: source 0 is e, source i + 1 is y_i."""
    return torch.zeros(ways, blocks.S + 1, blocks.S + 1, *e.shape, dtype=e.dtype)


def block_level(rows: Tensor, blocks: Blocks, e: Tensor, middle: Tensor) -> Tensor:
    """M of a block-level rule from its rows over [e, delta_1 ... delta_N].

    rows [ways, N+1, N+1, B, T, D]: how reader i (block i, or the end) reads e and delta_j, the sum of y over the sites of block j-1.
    middle [N, N+1, B, T, D]: the same for what block i's later sites read, before its own earlier y are added with weight 1.
    """
    M = no_mixing(rows.shape[0], blocks, e)

    def spread(i, row):
        """A row over [e, delta_1 ... delta_i] as one over [e, y_0 ...]: [..., S+1, B, T, D]."""
        out = torch.zeros_like(M[0, 0]).expand(*row.shape[:-4], *M.shape[2:]).clone()
        out[..., 0, :, :, :] = row[..., 0, :, :, :]
        for j in range(i):
            for s in blocks.sites[j]:
                out[..., s + 1, :, :, :] = row[..., j + 1, :, :, :]
        return out

    for i, sites in enumerate(blocks.sites):
        M[:, sites[0]] = spread(i, rows[:, i])
        for k in range(1, len(sites)):
            M[:, sites[k]] = spread(i, middle[i])
            for earlier in sites[:k]:
                M[:, sites[k], earlier + 1] = 1.0
    M[:, blocks.S] = spread(blocks.N, rows[:, blocks.N])
    return M


def multi_stream(q: list[Tensor], R: list[Tensor], p: list[Tensor], blocks: Blocks, e: Tensor) -> Tensor:
    """M[s, i+1] = q_s R_{s-1} ... R_{i+1} p_i and M[s, 0] = q_s R_{s-1} ... R_0 1, per token.

    q: S+1 read vectors [B, T, n]; R: S residual maps [B, T, n_out, n_in]; p: S write vectors [B, T, n].
    """
    M = no_mixing(1, blocks, e)
    writes = [torch.ones_like(q[0]), *p]
    for s in range(blocks.S + 1):
        row = q[s]
        for source in range(s, -1, -1):
            M[0, s, source] = (row * writes[source]).sum(-1, keepdim=True)
            if source:
                row = torch.einsum("bto,btoi->bti", row, R[source - 1])
    return M.detach()


def fractions_trace(m, weights, blocks, e, sublayer) -> Trace:
    """Run a rule on m fractions of e [B, T, D].

    weights(s, H [B, T, m, D/m]) gives the read's and the residual map's matrices [B, T, m_out, m_in], and the write's weights [B, T, m].
    """
    reads, M = [], no_mixing(1, blocks, e)
    H = e.unflatten(-1, (m, -1))
    eye = torch.eye(m, dtype=e.dtype).expand(*e.shape[:2], m, m)
    parts = [eye]  # H as a sum of matrices [B, T, out, in] times the sources, cut into fractions
    sources = [e.detach().unflatten(-1, (m, -1))]

    def record(s, h, read):
        matrices = [(read @ part).detach() for part in parts]
        again = sum(a @ b for a, b in zip(matrices, sources, strict=True)).flatten(-2)
        torch.testing.assert_close(again, h.detach(), rtol=1e-9, atol=1e-9)
        for source, matrix in enumerate(matrices):
            diagonal = matrix.diagonal(dim1=-2, dim2=-1)
            M[0, s, source] = diagonal.repeat_interleave(e.shape[-1] // m, dim=-1)
        reads.append((h,))

    for s in range(blocks.S):
        read, kept, written = weights(s, H)
        h = (read @ H).flatten(-2)
        record(s, h, read)
        y = sublayer(s, (h,)).unflatten(-1, (m, -1))
        H = kept @ H + written[..., None] * y
        parts = [kept @ part for part in parts] + [torch.diag_embed(written)]
        sources.append(y.detach())
    out = H.flatten(-2)
    record(blocks.S, out, eye)
    return Trace(out, reads, M)
