"""lambdas. x = x_0 = e. Before block i (per="site": before every site), x <- r_i x + c_i x_0; then

    h_s = x;   x <- x + y_s.        h_S = x, or with backout x - b x_m, x_m the stream after block m = N // 2.

At reader k, with the mixing steps 0 ... k done: M[k, e] = prod_{i<=k} r_i + sum_{j<=k} c_j prod_{j<i<=k} r_i, and a y written
after j of them has prod_{j<=i<=k} r_i, numbered from j: those that came after it.
"""

import torch

from .tables import combine, full
from .trace import Trace, no_mixing

DEFAULTS = {"per": "block", "channels": False, "backout": False, "init": "nanochat"}
OPTIONS = combine(per=["block", "site"], channels=[False, True], backout=[False, True], init=["nanochat", "plain"])
DEAD_ROWS = set()


def steps(o, blocks):
    """The site before which each row of r and c is applied, and the row's block."""
    if o["per"] == "block":
        return [(sites[0], i) for i, sites in enumerate(blocks.sites)]
    return [(s, i) for i, sites in enumerate(blocks.sites) for s in sites]


def parameters(o, D, blocks):
    rows = steps(o, blocks)
    shape = (len(rows), D) if o["channels"] else (len(rows),)

    def start(first, last, name):
        def build(shape):
            value = full(shape, 1 if name == "r" else 0)
            if o["init"] == "plain":
                return value
            for row, (s, i) in enumerate(rows):
                at_block = first + (last - first) * i / max(blocks.N - 1, 1)
                if o["per"] == "block":
                    value[row] = at_block
                elif name == "r":
                    value[row] = at_block ** (1 / len(blocks.sites[i]))
                elif s == blocks.sites[i][0]:
                    value[row] = at_block
            return value

        return build

    out = {"r": (shape, start(1.15, 1.05, "r")), "c": (shape, start(0.20, 0.05, "c"))}
    if o["backout"]:
        out["b"] = ((1,), 0.2 if o["init"] == "nanochat" else 0)
    return out


def starts_plain(options):
    return options["init"] == "plain"


def run(p, options, blocks, e, sublayer) -> Trace:
    row_of = {s: row for row, (s, _) in enumerate(steps(options, blocks))}
    x, reads, middle = e, [], None
    for i, sites in enumerate(blocks.sites):
        for s in sites:
            if s in row_of:
                x = p["r"][row_of[s]] * x + p["c"][row_of[s]] * e
            reads.append((x,))
            x = x + sublayer(s, (x,))
        if i == blocks.N // 2:
            middle = x
    out = x - p["b"] * middle if options["backout"] else x
    reads.append((out,))
    return Trace(out, reads, closed_form(p, options, blocks, e, row_of))


def closed_form(p, options, blocks, e, row_of):
    r, c = p["r"].detach(), p["c"].detach()
    last_row = [max(row for at, row in row_of.items() if at <= s) for s in range(blocks.S)]

    def product(first, last):
        """r_first ... r_last; one for an empty range."""
        value = torch.ones_like(r[0])
        for i in range(first, last + 1):
            value = value * r[i]
        return value

    def weights(k, written):
        """[S+1, D or 1] of the stream after mixing step k and the outputs of sites < written."""
        row = torch.zeros(blocks.S + 1, e.shape[-1], dtype=e.dtype)
        row[0] = product(0, k) + sum(c[j] * product(j + 1, k) for j in range(k + 1))
        for s in range(written):
            row[s + 1] = product(last_row[s] + 1, k)
        return row

    M = no_mixing(1, blocks, e)
    for s in range(blocks.S):
        M[0, s] = weights(last_row[s], s)[:, None, None, :]
    final = weights(last_row[-1], blocks.S)
    if options["backout"]:
        m = blocks.sites[blocks.N // 2][-1]
        final = final - p["b"].detach() * weights(last_row[m], m + 1)
    M[0, blocks.S] = final[:, None, None, :]
    return M
