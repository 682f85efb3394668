"""layerscale: x_{s+1} = x_s + gamma_s * y_s, channel by channel;  h_s = x_s;  h_S = x_S.   M[s, i+1] = gamma_i."""

from .trace import Trace, no_mixing


def run(p, options, n_blocks, e, sublayer) -> Trace:
    gamma = p["gamma"]  # [S, D]
    x, reads = e, []
    for s in range(2 * n_blocks):
        reads.append((x,))
        x = x + gamma[s] * sublayer(s, (x,))
    reads.append((x,))
    M = no_mixing(1, n_blocks, e)
    for s in range(2 * n_blocks + 1):
        M[:, s, 0] = 1.0
        for i in range(s):
            M[:, s, i + 1] = gamma[i].detach()
    return Trace(x, reads, M)
