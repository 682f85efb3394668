"""denseformer. X_0 = Y_0 = e. Block i (from 1):

    h_{2i-2} = Y_{i-1};   h_{2i-1} = Y_{i-1} + y_{2i-2};   X_i = Y_{i-1} + y_{2i-2} + y_{2i-1}
    (with other sites in a block, ordinary residuals from site to site: X_i = Y_{i-1} + all the block's outputs)
    Y_i = sum_{j <= i, j = i mod k} alpha_{i,j} X_j  if i = 0 mod p, else X_i;   h_S = Y_N

With delta = [e, delta_1 ... delta_N], Y = A X and X = S A X + delta (S shifts down by one):  Y = A (I - S A)^-1 delta.
"""

import torch

from .tables import combine, last_is_one
from .trace import Trace, block_level, unit_lower_inverse

DEFAULTS = {"dilation": 1, "period": 1}
OPTIONS = combine(dilation=[1, 2, 3, 9], period=[1, 2, 3, 9])
DEAD_ROWS = set()


def parameters(o, D, blocks):
    N = blocks.N
    return {f"alpha.{i}": ((i // o["dilation"] + 1,), last_is_one) for i in range(1, N + 1) if i % o["period"] == 0}


def starts_plain(options):
    return True


def weights(p, options, i, dtype):
    """The row of A for Y_i: {j: alpha_{i,j}}."""
    k, period = options["dilation"], options["period"]
    if i == 0 or i % period != 0:
        return {i: torch.ones((), dtype=dtype)}
    alpha = p[f"alpha.{i}"]
    row = [j for j in range(i + 1) if j % k == i % k]
    assert alpha.shape == (len(row),)
    return {j: alpha[m] for m, j in enumerate(row)}


def matrix(p, options, blocks, e):
    n = blocks.N + 1
    A = torch.zeros(n, n, dtype=e.dtype)
    for i in range(n):
        for j, a in weights(p, options, i, e.dtype).items():
            A[i, j] = a.detach()
    SA = torch.zeros_like(A)
    SA[1:] = A[:-1]
    Y = A @ unit_lower_inverse(SA)
    rows = Y[None, :, :, None, None, None].expand(1, n, n, *e.shape)
    return block_level(rows, blocks, e, middle=rows[0, :-1])


def run(p, options, blocks, e, sublayer) -> Trace:
    X, Y, reads = [e], e, []
    for i, sites in enumerate(blocks.sites, start=1):
        x = Y
        for s in sites:
            reads.append((x,))
            x = x + sublayer(s, (x,))
        X.append(x)
        Y = sum(a * X[j] for j, a in weights(p, options, i, e.dtype).items())
    reads.append((Y,))
    return Trace(Y, reads, matrix(p, options, blocks, e))
