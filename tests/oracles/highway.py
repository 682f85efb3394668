"""highway: T_s = sigmoid(W_T,s RMS(x_s) + b_T,s);  x_{s+1} = T_s * y_s + (1 - T_s) * x_s;  h_s = x_s;  h_S = x_S.

M[s, 0] = prod_{m<s} (1 - T_m);   M[s, i+1] = T_i prod_{i<m<s} (1 - T_m).
"""

import torch

from .tables import combine
from .trace import Trace, no_mixing, rms

DEFAULTS = {"gate": "vector", "bias": -2.0}
OPTIONS = combine(gate=["vector", "scalar"])
DEAD_ROWS = set()
EPS = 1e-6


def parameters(o, D, blocks):
    S = blocks.S
    gate = (D,) if o["gate"] == "vector" else ()
    return {"W_T": ((S, *gate, D), None), "b_T": ((S, *gate), o["bias"])}


def starts_plain(options):
    return False


def gate(p, options, s, x):
    """[B, T, D], or [B, T, 1] with one gate per token."""
    z = rms(x, EPS)
    if options["gate"] == "vector":
        return torch.sigmoid(torch.einsum("oi,bti->bto", p["W_T"][s], z) + p["b_T"][s])
    return torch.sigmoid(torch.einsum("i,bti->bt", p["W_T"][s], z) + p["b_T"][s])[..., None]


def run(p, options, blocks, e, sublayer) -> Trace:
    x, reads, gates = e, [], []
    for s in range(blocks.S):
        reads.append((x,))
        t = gate(p, options, s, x)
        gates.append(t.detach())
        x = t * sublayer(s, (x,)) + (1 - t) * x
    reads.append((x,))
    M = no_mixing(1, blocks, e)
    for s in range(blocks.S + 1):
        for source in range(s + 1):
            weight = torch.ones_like(e) if source == 0 else gates[source - 1].expand(e.shape)
            for m in range(source, s):  # the sites after the one that wrote the source
                weight = weight * (1 - gates[m])
            M[0, s, source] = weight.detach()
    return Trace(x, reads, M)
