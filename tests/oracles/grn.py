"""grn. Stack of reader i (block i from 0, or the end i = N): G = [e, f_1 ... f_i], f_j = y_{2j-2} + y_{2j-1}; with a
window k and i > k: [e, f_1 + ... + f_{i-k}, f_{i-k+1} ... f_i].

    version 1, 2:  g = sum_j b_j * G_j         version 3:  g = sum_j (b_j + relu(w . G_j)) * G_j,
                                               relu_on="sum": g = sum_j relu(b_j + w . G_j) * G_j
    g_0 = e;  h_{2i} = g_i;  h_{2i+1} = g_i + y_{2i};  h_S = g_N.       relu has derivative 1 at 0.

The paper's block is a residual network of its own, x -> g + f(g), whatever f is: with other sites in a block each reads g_i and
the block's outputs before it, and f_{i+1} is the sum of all the block's outputs.
M: f_j's outputs share the coefficient of the stack entry that holds f_j.
"""

import torch

from .tables import combine
from .trace import Trace, block_level

DEFAULTS = {"version": 3, "window": None, "relu_on": "dynamic", "w_per_entry": False}
OPTIONS = combine(version=[1, 2, 3], window=[None, 1, 2, 9]) + combine(
    window=[None, 2], relu_on=["dynamic", "sum"], w_per_entry=[False, True]
)
DEAD_ROWS = set()


def stacked(o, D, blocks, ways):
    """Of grn and dca."""
    version = o.get("version", 3)
    out = {}
    for i in range(1, blocks.N + 1):
        t = i + 1 if o["window"] is None else min(i + 1, o["window"] + 2)
        c = blocks.ways(i, ways)
        out[f"b.{i}"] = ((c, t, 1 if version == 1 else D), 1)
        if version == 3:
            out[f"w.{i}"] = ((c, t if o["w_per_entry"] else 1, D), 0)
    return out


def parameters(o, D, blocks):
    return stacked(o, D, blocks, 1)


def starts_plain(options):
    return True


def relu(x):
    return torch.where(x >= 0, x, torch.zeros_like(x))


def members(i, window):
    """What each stack entry of reader i sums: 0 is e, j is f_j."""
    if window is None or i <= window:
        return [[j] for j in range(i + 1)]
    first = i - window + 1  # the oldest delta that is still alone
    return [[0], list(range(1, first))] + [[j] for j in range(first, i + 1)]


def coefficients(p, options, i, way, G):
    """A list of coefficients, one per stack entry, each broadcastable to [B, T, D]."""
    if i == 0:
        return [torch.ones_like(G[0])]
    b = p[f"b.{i}"][way]
    version = options.get("version", 3)  # dca is version 3
    if version in (1, 2):
        return [b[j].expand_as(G[j]) for j in range(len(G))]
    out = []
    for j in range(len(G)):
        w = p[f"w.{i}"][way][j if options["w_per_entry"] else 0]
        c = torch.einsum("btd,d->bt", G[j], w)[..., None]
        out.append(relu(b[j] + c) if options["relu_on"] == "sum" else b[j] + relu(c))
    return out


def read(p, options, i, way, deltas, row):
    """The mixture g of reader i; row [N+1, B, T, D] receives its coefficients over [e, f_1 ... f_N]."""
    groups = members(i, options["window"])
    G = [sum(deltas[j] for j in group) for group in groups]
    coefs = coefficients(p, options, i, way, G)
    for group, c in zip(groups, coefs, strict=True):
        for j in group:
            row[j] = c.detach()
    return sum(c * g for c, g in zip(coefs, G, strict=True))


def run_ways(p, options, blocks, e, sublayer, ways) -> Trace:
    """grn (ways = 1) and dca (ways = 3: q, k, v; the q mixture goes on through the block; a single one at the end)."""
    N = blocks.N
    rows = torch.zeros(ways, N + 1, N + 1, *e.shape, dtype=e.dtype)
    deltas, reads = [e], []
    for i, (first, *later) in enumerate(blocks.sites):
        g = tuple(read(p, options, i, way, deltas, rows[way, i]) for way in range(blocks.ways(i, ways)))
        if len(g) == 1:
            rows[:, i] = rows[0, i].clone()
        reads.append(g)
        delta = sublayer(first, g)
        for s in later:
            reads.append((g[0] + delta,))
            delta = delta + sublayer(s, reads[-1])
        deltas.append(delta)
    out = read(p, options, N, 0, deltas, rows[0, N])
    rows[:, N] = rows[0, N].clone()
    reads.append((out,))
    return Trace(out, reads, block_level(rows, blocks, e, middle=rows[0, :-1]))


def run(p, options, blocks, e, sublayer) -> Trace:
    return run_ways(p, options, blocks, e, sublayer, ways=1)
