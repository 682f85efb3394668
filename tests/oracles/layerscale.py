"""layerscale: x_{s+1} = x_s + gamma_s * y_s, channel by channel;  h_s = x_s;  h_S = x_S.   M[s, i+1] = gamma_i."""

from .trace import Trace, no_mixing

DEFAULTS = {"init": None}
OPTIONS = [{}, {"init": 0.5}]
DEAD_ROWS = set()


def parameters(o, D, blocks):
    N, S = blocks.N, blocks.S
    by_depth = 0.1 if N <= 18 else 1e-5 if N <= 24 else 1e-6
    return {"gamma": ((S, D), by_depth if o["init"] is None else o["init"])}


def starts_plain(options):
    return options["init"] == 1


def run(p, options, blocks, e, sublayer) -> Trace:
    gamma = p["gamma"]  # [S, D]
    x, reads = e, []
    for s in range(blocks.S):
        reads.append((x,))
        x = x + gamma[s] * sublayer(s, (x,))
    reads.append((x,))
    M = no_mixing(1, blocks, e)
    for s in range(blocks.S + 1):
        M[:, s, 0] = 1.0
        for i in range(s):
            M[:, s, i + 1] = gamma[i].detach()
    return Trace(x, reads, M)
