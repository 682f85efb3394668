"""delta. X [D, d_v] per token, e in every column. Site s reads z and produces y:

    k = y / sqrt(|y|^2 + 1e-10);   beta = 2 sigmoid(w . RMS(z) + b);   v = 4 sigmoid(W_v z + b_v), or linear W_v RMS(z)
    X <- (I - beta k k^T) X + beta k v^T
d_v = 1: z = X. Otherwise z_i = sum_j r_j U_ij with U_ij = sum_t K_ti X_{i,j+t-1}, X zero outside; K and r of the site, or of the end.

M[s, i+1] is a D x D matrix per token, the product of what the reads and the later (I - beta k k^T) do to beta v / |y| y_i; M holds
its diagonal.
"""

import torch

from .tables import combine
from .trace import Trace, no_mixing, rms

DEFAULTS = {"values": 1, "value": "sigmoid"}
OPTIONS = combine(values=[1, 2, 4], value=["sigmoid", "linear"])
DEAD_ROWS = set()


def parameters(o, D, blocks):
    S, d_v = blocks.S, o["values"]
    out = {"w": ((S, D), None), "b": ((S,), 0), "W_v": ((S, d_v, D), None)}
    if o["value"] == "sigmoid":
        out["b_v"] = ((S, d_v), None)
    if d_v > 1:
        out |= {"K": ((S + 1, 4, D), None), "r": ((S + 1, d_v), 1 / d_v)}
    return out


def starts_plain(options):
    return False


def compress(p, s, X):
    """z [..., D] of X [..., D, d_v] for site s."""
    if X.shape[-1] == 1:
        return X[..., 0]
    K, r, d_v = p["K"][s], p["r"][s], X.shape[-1]
    z = 0
    for j in range(d_v):
        for t in range(4):
            if 0 <= j + t - 1 < d_v:
                z = z + r[j] * K[t] * X[..., j + t - 1]
    return z


def run(p, options, blocks, e, sublayer) -> Trace:
    d_v, reads, M = options["values"], [], no_mixing(1, blocks, e)
    X = torch.stack([e] * d_v, dim=-1)
    D = e.shape[-1]
    eye = torch.eye(D, dtype=e.dtype).expand(*e.shape, D)
    parts = [torch.stack([eye] * d_v, dim=-1)]  # X as matrices [B, T, D (out), D (in), d_v] times the sources
    sources = [e.detach()]

    def record(s, h):
        again = 0
        for source, part in enumerate(parts):
            matrix = compress(p, s, part.transpose(-3, -2)).transpose(-2, -1).detach()  # [B, T, out, in]
            M[0, s, source] = matrix.diagonal(dim1=-2, dim2=-1)
            again = again + torch.einsum("btoi,bti->bto", matrix, sources[source])
        torch.testing.assert_close(again, h.detach(), rtol=1e-9, atol=1e-9)
        reads.append((h,))

    for s in range(blocks.S):
        z = compress(p, s, X)
        record(s, z)
        y = sublayer(s, (z,))
        norm = torch.sqrt((y * y).sum(-1) + 1e-10)  # [B, T]
        k = y / norm[..., None]
        beta = 2 * torch.sigmoid(torch.einsum("btd,d->bt", rms(z, 1e-6), p["w"][s]) + p["b"][s])
        if options["value"] == "sigmoid":
            v = 4 * torch.sigmoid(torch.einsum("btd,jd->btj", z, p["W_v"][s]) + p["b_v"][s])
        else:
            v = torch.einsum("btd,jd->btj", rms(z, 1e-6), p["W_v"][s])
        erase = eye - beta[..., None, None] * k[..., :, None] * k[..., None, :]
        X = torch.einsum("btoi,btij->btoj", erase, X) + (beta[..., None] * k)[..., None] * v[..., None, :]
        parts = [torch.einsum("btoi,btinj->btonj", erase, part) for part in parts]
        parts.append(eye[..., None] * (beta[..., None] * v / norm[..., None])[..., None, None, :])
        parts = [part.detach() for part in parts]
        sources.append(y.detach())
    out = compress(p, blocks.S, X)
    record(blocks.S, out)
    return Trace(out, reads, M)
