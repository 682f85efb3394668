"""gated_streams. x = n copies of e, [n, D] per token. Reader s (a site, or the end) with xn_i = gain_s[i] * RMS(x_i):

    a = sigmoid(silu(xn W_down_s / n) W_up_s), [n, D];    h_s = (1/n) sum_i a_i * xn_i
    c = 2 sigmoid(xn W_inject_s / n), [n];                x'_i = x_i + c_i y_s

M[s, i+1] = (1/n) sum_k a_s[k] gain_s[k] c_i[k] / rms(x_k), channel by channel; for e with 1 instead of c_i[k].
"""

import torch

from .tables import combine
from .trace import Trace, no_mixing

DEFAULTS = {"n": 4, "rank": 320, "eps": 1e-6}
OPTIONS = combine(n=[2, 3, 4], rank=[1, 5]) + combine(rank=[3], eps=[0.3])
DEAD_ROWS = set()


def parameters(o, D, blocks):
    S, n, rank = blocks.S, o["n"], o["rank"]
    return {
        "gain": ((S + 1, n, D), 1),
        "W_down": ((S + 1, n * D, rank), None),
        "W_up": ((S + 1, rank, n * D), None),
        "W_inject": ((S, n * D, n), None),
    }


def starts_plain(options):
    return False


def run(p, options, blocks, e, sublayer) -> Trace:
    n, S = options["n"], blocks.S
    x = torch.stack([e] * n, dim=2)  # [B, T, n, D]
    M = no_mixing(1, blocks, e)
    reads, injected = [], [torch.ones(*e.shape[:2], n, dtype=e.dtype)]
    for s in range(S + 1):
        rms = torch.sqrt((x * x).mean(-1, keepdim=True) + options["eps"])
        normed = p["gain"][s] * x / rms
        z = torch.einsum("btk,kr->btr", normed.flatten(2), p["W_down"][s]) / n
        hidden = z / (1 + torch.exp(-z))
        a = 1 / (1 + torch.exp(-torch.einsum("btr,rk->btk", hidden, p["W_up"][s])))
        a = a.reshape(x.shape)
        h = (a * normed).mean(2)
        reads.append((h,))
        weights = (a * p["gain"][s] / rms / n).detach()
        for source, c in enumerate(injected):
            M[0, s, source] = (weights * c[..., None]).sum(2)
        if s < S:
            y = sublayer(s, (h,))
            logits = torch.einsum("btk,km->btm", normed.flatten(2), p["W_inject"][s]) / n
            c = 2 / (1 + torch.exp(-logits))
            x = x + c[..., None] * y[..., None, :]
            injected.append(c.detach())
    return Trace(reads[-1][0], reads, M)
