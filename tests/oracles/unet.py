"""unet. k = N // 2. Blocks 0 ... k-1 push their results; before its first read block k+j, j < k, pops the newest:

    x <- x + share * popped;     then h_s = x, x <- x + y_s;     h_S = x

share: w (number, vector), sigmoid(w), or per token 2 sigmoid(w) sigmoid(g . RMS(e)[:12]).
Every x is linear in e and y: M follows by the same steps on its rows.
"""

import torch

from .trace import Trace, no_mixing, rms

DEFAULTS = {"gate": "number"}
OPTIONS = [{}, {"gate": "vector"}, {"gate": "sigmoid"}, {"gate": "token"}]
DEAD_ROWS = set()


def parameters(o, D, blocks):
    k = blocks.N // 2
    start = 1 if o["gate"] in ("number", "vector") else -1.5
    out = {f"w.{b}": ((D if o["gate"] == "vector" else 1,), start) for b in range(k, 2 * k)}
    if o["gate"] == "token":
        out |= {f"g.{b}": ((min(12, D),), 0) for b in range(k, 2 * k)}
    return out


def starts_plain(options):
    return False


def share(p, options, b, e):
    """[1], [D] or [B, T, 1]."""
    w = p[f"w.{b}"]
    if options["gate"] in ("number", "vector"):
        return w
    if options["gate"] == "sigmoid":
        return 1 / (1 + torch.exp(-w))
    g = p[f"g.{b}"]
    logit = torch.einsum("btc,c->bt", rms(e, 1e-6)[:, :, : len(g)], g)[..., None]
    return 2 / (1 + torch.exp(-w)) / (1 + torch.exp(-logit))


def run(p, options, blocks, e, sublayer) -> Trace:
    M, k = no_mixing(1, blocks, e), blocks.N // 2
    row = torch.zeros_like(M[0, 0])  # [S+1, B, T, D]: x in terms of e and y
    row[0] = 1.0
    x, reads, results = e, [], []
    for b, sites in enumerate(blocks.sites):
        if k <= b < 2 * k:
            a = share(p, options, b, e)
            mirrored, its_row = results[2 * k - 1 - b]
            x, row = x + a * mirrored, row + a.detach() * its_row
        for s in sites:
            reads.append((x,))
            M[0, s] = row
            x = x + sublayer(s, (x,))
            row = row.clone()
            row[s + 1] += 1.0
        results.append((x, row))
    reads.append((x,))
    M[0, blocks.S] = row
    return Trace(x, reads, M)
