"""hyper (Hyper-Connections). H = n copies of e, [n, D] per token. At every site, from the H it reads,

    h_s = A_m^T H;    H'_j = sum_i A_r[i, j] H_i + B_j y_s;    h_S = sum_j H_j

static: A_m, A_r, B are parameters. dynamic, Hn = norm(H) stream by stream (no gain):
    B(H) = s_beta tanh(Hn W_beta) + B;   A_m(H) = s_alpha tanh(Hn W_m) + A_m;   A_r(H) = s_alpha tanh(Hn W_r) + A_r
M[s, i+1] = A_m,s^T A_r,s-1^T ... A_r,i+1^T B_i.

fractions=m (Frac-Connections): H = e cut into m rows [m, D/m]; Y = A_m [m, m], A = A_r, and y is cut in the same way:

    h_s = Y^T H;    H'_j = sum_i A[i, j] H_i + B_j y_{s,j};    h_S = H
    Y(H) = s_alpha tanh(Hn W_m) + Y, and A(H), B(H) as above; row i of Hn makes row i of Y and A.
M[s, i+1] is a matrix of fractions, Y_s^T A_{s-1}^T ... A_{i+1}^T diag(B_i); its diagonal is what M holds.
"""

import torch

from .tables import combine, one_hot_by_site
from .trace import Trace, fractions_trace, multi_stream, rms

DEFAULTS = {"n": 4, "static": False, "tanh": True, "norm": "layernorm", "fractions": None}
OPTIONS = combine(n=[1, 2, 4], static=[False, True], tanh=[True, False], norm=["layernorm", "rmsnorm"])
OPTIONS += combine(fractions=[1, 2, 4], static=[False, True], tanh=[True, False], norm=["layernorm", "rmsnorm"])
DEAD_ROWS = set()


def parameters(o, D, blocks):
    S = blocks.S
    if o["fractions"] is not None:
        return fraction_parameters(o, D // o["fractions"], S, o["fractions"])
    n = o["n"]
    out = {
        "A_m": ((S, n), one_hot_by_site(1, 0)),
        "A_r": ((S, n, n), lambda shape: torch.eye(n, dtype=torch.float64).repeat(S, 1, 1)),
        "B": ((S, n), 1),
    }
    if not o["static"]:
        out |= {"W_beta": ((S, D), 0), "W_m": ((S, D), 0), "W_r": ((S, D, n), 0)}
        out |= {"s_alpha": ((S,), 0.01), "s_beta": ((S,), 0.01)}
    return out


def fraction_parameters(o, width, S, m):
    identity = lambda shape: torch.eye(m, dtype=torch.float64).repeat(S, 1, 1)  # noqa: E731
    out = {"A_m": ((S, m, m), identity), "A_r": ((S, m, m), identity), "B": ((S, m), 1)}
    if not o["static"]:
        out |= {"W_beta": ((S, width), 0), "W_m": ((S, width, m), 0), "W_r": ((S, width, m), 0)}
        out |= {"s_alpha": ((S,), 0.01), "s_beta": ((S,), 0.01)}
    return out


def starts_plain(options):
    return True


def norm(options, H):
    if options["norm"] == "rmsnorm":
        return rms(H, 1e-6)
    centred = H - H.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)


def coefficients(p, options, s, H):
    """A_m [B, T, n], A_r [B, T, n, n] and B [B, T, n] of site s."""
    batch = H.shape[:2]
    A_m, A_r, B = p["A_m"][s], p["A_r"][s], p["B"][s]
    if options["static"]:
        return A_m.expand(*batch, -1), A_r.expand(*batch, -1, -1), B.expand(*batch, -1)
    squash = torch.tanh if options["tanh"] else lambda z: z
    Hn = norm(options, H)
    s_alpha, s_beta = p["s_alpha"][s], p["s_beta"][s]
    A_m = s_alpha * squash(torch.einsum("btnd,d->btn", Hn, p["W_m"][s])) + A_m
    A_r = s_alpha * squash(torch.einsum("btnd,dm->btnm", Hn, p["W_r"][s])) + A_r
    B = s_beta * squash(torch.einsum("btnd,d->btn", Hn, p["W_beta"][s])) + B
    return A_m, A_r, B


def fraction_coefficients(p, options, s, H):
    """Y, A [B, T, m, m] and B [B, T, m] of site s for H [B, T, m, D/m]."""
    batch = H.shape[:2]
    Y, A, B = p["A_m"][s], p["A_r"][s], p["B"][s]
    if options["static"]:
        return Y.expand(*batch, -1, -1), A.expand(*batch, -1, -1), B.expand(*batch, -1)
    squash = torch.tanh if options["tanh"] else lambda z: z
    Hn = norm(options, H)
    Y = p["s_alpha"][s] * squash(Hn @ p["W_m"][s]) + Y
    A = p["s_alpha"][s] * squash(Hn @ p["W_r"][s]) + A
    B = p["s_beta"][s] * squash(Hn @ p["W_beta"][s]) + B
    return Y, A, B


def run_fractions(p, options, blocks, e, sublayer) -> Trace:
    def weights(s, H):
        Y, A, B = fraction_coefficients(p, options, s, H)
        return Y.transpose(-1, -2), A.transpose(-1, -2), B

    return fractions_trace(options["fractions"], weights, blocks, e, sublayer)


def run(p, options, blocks, e, sublayer) -> Trace:
    if options["fractions"] is not None:
        return run_fractions(p, options, blocks, e, sublayer)
    H = torch.stack([e] * options["n"], dim=2)  # [B, T, n, D]
    reads, qs, Rs, ps = [], [], [], []
    for s in range(blocks.S):
        A_m, A_r, B = coefficients(p, options, s, H)
        h = torch.einsum("btn,btnd->btd", A_m, H)
        reads.append((h,))
        y = sublayer(s, (h,))
        H = torch.einsum("btij,btid->btjd", A_r, H) + B[..., :, None] * y[..., None, :]
        qs.append(A_m.detach())
        Rs.append(A_r.detach().transpose(-1, -2))  # [out, in]
        ps.append(B.detach())
    out = H.sum(2)
    reads.append((out,))
    qs.append(torch.ones_like(qs[0]))
    return Trace(out, reads, multi_stream(qs, Rs, ps, blocks, e))
