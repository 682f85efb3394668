"""mudd. X_0 = e, X_i the result of block i (from 1). Reader i >= 1, from X_0 ... X_i (l = i + 1 entries):

    a = W_2 GELU(W_1 RMS(X_i)) + b  [C, l];   Xbar^c = sum_j a[c, j] X_j        C = 4 (q, k, v, r), 1 at the end
    h_{2i} = (Xbar^q, Xbar^k, Xbar^v);  h_{2i+1} = Xbar^r + y_{2i};  X_{i+1} = Xbar^r + y_{2i} + y_{2i+1};  h_S = Xbar

With other sites in a block, each after the first reads Xbar^r and the block's outputs before it. A block that has no attention
has no q, k and v: C = 1, and Xbar^r is what its first site reads.
Reader 0 reads e in all four ways.  X = S A^r X + [e, delta_1 ... delta_N] (S shifts down by one), so way c reads
A^c (I - S A^r)^-1 [e, delta_1 ... delta_N], token by token.
"""

import math

import torch

from .tables import last_is_one
from .trace import Trace, block_level, rms, unit_lower_inverse

DEFAULTS = {}
OPTIONS = [{}]
DEAD_ROWS = set()
EPS = 1e-6


def parameters(o, D, blocks):
    out = {}
    for i in range(1, blocks.N + 1):
        entries = i + 1
        C = blocks.ways(i, 4)
        K = (4 * entries // 64 + 1) * 64
        out[f"W_1.{i}"] = ((K, D), None)
        out[f"W_2.{i}"] = ((C * entries, K), 0)
        out[f"b.{i}"] = ((C, entries), last_is_one)
    return out


def starts_plain(options):
    return True


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def weights(p, i, X):
    """a [B, T, C, l] of reader i >= 1."""
    hidden = gelu(torch.einsum("kd,btd->btk", p[f"W_1.{i}"], rms(X[i], EPS)))
    b = p[f"b.{i}"]
    a = torch.einsum("mk,btk->btm", p[f"W_2.{i}"], hidden)
    return a.reshape(*a.shape[:2], *b.shape) + b


def mixtures(p, i, X, A):
    """The C mixtures of reader i; A [4, N+1, N+1, B, T] receives the coefficients (a single one in all four ways)."""
    if i == 0:
        A[:, 0, 0] = 1.0
        return [X[0]] * 4
    a = weights(p, i, X)
    A[:, i, : i + 1] = a.detach().permute(2, 3, 0, 1)
    return [sum(a[..., c, j, None] * X[j] for j in range(i + 1)) for c in range(a.shape[2])]


def matrix(A, blocks, e):
    A = A.permute(0, 3, 4, 1, 2)  # [4, B, T, N+1, N+1]
    SA = torch.zeros_like(A[3])
    SA[..., 1:, :] = A[3][..., :-1, :]
    G = unit_lower_inverse(SA)
    rows = (A @ G).permute(0, 3, 4, 1, 2)[..., None].expand(*([-1] * 5), e.shape[-1])
    return block_level(rows[:3], blocks, e, middle=rows[3, :-1])


def run(p, options, blocks, e, sublayer) -> Trace:
    N = blocks.N
    A = torch.zeros(4, N + 1, N + 1, *e.shape[:2], dtype=e.dtype)
    X, reads = [e], []
    for i, (first, *later) in enumerate(blocks.sites):
        *qkv, r = mixtures(p, i, X, A)[: 4 if blocks.ways(i, 4) == 4 else 1]
        reads.append(tuple(qkv) or (r,))
        x = r + sublayer(first, reads[-1])
        for s in later:
            reads.append((x,))
            x = x + sublayer(s, (x,))
        X.append(x)
    (out,) = mixtures(p, N, X, A)
    reads.append((out,))
    return Trace(out, reads, matrix(A, blocks, e))
