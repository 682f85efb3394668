"""laurel. rw:  x_{s+1} = alpha_s y_s + beta_s x_s
           lr:  x_{s+1} = y_s + x_s + B_s A_s x_s
           pa:  x_{s+1} = y_s + x_s + B_s A_s sum_{j<s} gamma_{s,j} x_j           h_s = x_s;  h_S = x_S.

M[s, i+1] is a matrix: rw alpha_i prod_{i<m<s} beta_m;  lr (I + B_{s-1} A_{s-1}) ... (I + B_{i+1} A_{i+1});  pa the
block (s, i+1) of (I - L)^-1, where L holds the coefficients of x_{s+1} = sum_j L_{s+1,j} x_j + y_s.
"""

import torch

from .tables import combine
from .trace import Trace, no_mixing, unit_lower_inverse

DEFAULTS = {"variant": "lr", "rank": None}
OPTIONS = [{"variant": "rw"}, *combine(variant=["lr", "pa"], rank=[None, 2])]
DEAD_ROWS = set()


def parameters(o, D, blocks):
    S = blocks.S
    if o["variant"] == "rw":
        return {"alpha": ((S,), 1), "beta": ((S,), 1)}
    rank = min(16, D) if o["rank"] is None else o["rank"]
    out = {"A": ((S, rank, D), None), "B": ((S, D, rank), 0)}
    return out | ({"gamma": ((S, S), 1)} if o["variant"] == "pa" else {})


def starts_plain(options):
    return True


def step(p, variant, s, x, y):
    """x_{s+1} from x = [x_0 ... x_s] and y_s."""
    if variant == "rw":
        return p["alpha"][s] * y + p["beta"][s] * x[s]
    low = x[s] if variant == "lr" else sum((p["gamma"][s, j] * x[j] for j in range(s)), torch.zeros_like(y))
    low = torch.einsum("rd,btd->btr", p["A"][s], low)
    return y + x[s] + torch.einsum("dr,btr->btd", p["B"][s], low)


def transfer_rw(p, sites, dim):
    eye = torch.eye(dim, dtype=p["alpha"].dtype)
    out = torch.zeros(sites + 1, sites + 1, dim, dim, dtype=eye.dtype)
    for s in range(sites + 1):
        for source in range(s + 1):
            written = p["alpha"][source - 1] if source > 0 else 1.0
            out[s, source] = written * p["beta"][source:s].prod() * eye
    return out


def transfer_lr(p, sites, dim):
    eye = torch.eye(dim, dtype=p["A"].dtype)
    out = torch.zeros(sites + 1, sites + 1, dim, dim, dtype=eye.dtype)
    for s in range(sites + 1):
        for source in range(s + 1):
            product = eye
            for m in range(source, s):
                product = (eye + p["B"][m] @ p["A"][m]) @ product
            out[s, source] = product
    return out


def transfer_pa(p, sites, dim):
    eye = torch.eye(dim, dtype=p["A"].dtype)
    L = torch.zeros(sites + 1, dim, sites + 1, dim, dtype=eye.dtype)
    for s in range(sites):
        L[s + 1, :, s] = eye
        for j in range(s):
            L[s + 1, :, j] = p["gamma"][s, j] * (p["B"][s] @ p["A"][s])
    size = (sites + 1) * dim
    inverse = unit_lower_inverse(L.reshape(size, size))
    return inverse.reshape(sites + 1, dim, sites + 1, dim).transpose(1, 2)


def transfer(p, options, sites, dim):
    """[S+1, S+1, D, D]: the matrix with which reader s reads each source."""
    p = {name: value.detach() for name, value in p.items()}
    return {"rw": transfer_rw, "lr": transfer_lr, "pa": transfer_pa}[options["variant"]](p, sites, dim)


def run(p, options, blocks, e, sublayer) -> Trace:
    x = [e]
    for s in range(blocks.S):
        y = sublayer(s, (x[s],))
        x.append(step(p, options["variant"], s, x, y))
    M = no_mixing(1, blocks, e)
    diagonal = transfer(p, options, blocks.S, e.shape[-1]).diagonal(dim1=-2, dim2=-1)
    M[0] = diagonal[:, :, None, None, :]
    return Trace(x[-1], [(h,) for h in x], M)
