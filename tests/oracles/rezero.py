"""rezero: x_{s+1} = x_s + alpha_s y_s;  h_s = x_s;  h_S = x_S.   M[s, i+1] = alpha_i."""

from .trace import Trace, no_mixing

DEFAULTS = {}
OPTIONS = [{}]
DEAD_ROWS = set()


def parameters(o, D, blocks):
    S = blocks.S
    return {"alpha": ((S,), 0)}


def starts_plain(options):
    return False


def run(p, options, blocks, e, sublayer) -> Trace:
    alpha = p["alpha"]
    x, reads = e, []
    for s in range(blocks.S):
        reads.append((x,))
        x = x + alpha[s] * sublayer(s, (x,))
    reads.append((x,))
    M = no_mixing(1, blocks, e)
    for s in range(blocks.S + 1):
        M[:, s, 0] = 1.0
        for i in range(s):
            M[:, s, i + 1] = alpha[i].detach()
    return Trace(x, reads, M)
