"""mhc. x = n copies of e, [n, D] per token. At every site, x_vec the n streams one after the other:

    z = RMS(x_vec) phi_s = [z_pre | z_post | z_res];   H~ = alpha_s z + b_s, each part with its own alpha
    H_pre = sigmoid(H~_pre);   H_post = post_scale sigmoid(H~_post);   H_res = map(H~_res)
    h_s = sum_i H_pre[i] x_i;   x'_o = sum_i H_res[o, i] x_i + H_post[o] y_s
    single_pass: h_s reads with the H_pre of site s-1, site 0 reads stream 0, the end reads with the last site's.

M[s, i+1] = H_pre,s H_res,s-1 ... H_res,i+1 H_post,i.

fractions=m: x = e cut into m rows [m, D/m], x_vec = e; y is cut in the same way. z_pre has m^2 numbers, [m, m]:

    h_s,j = sum_i H_pre[j, i] x_i;   x'_o = sum_i H_res[o, i] x_i + H_post[o] y_s,o;   h_S = x
    start: H_pre = sigmoid(8) on the diagonal and sigmoid(-8) elsewhere. H_res: sigmoid(8) on the diagonal, the rest in equal parts;
    for birkhoff sigmoid(8) for the identity, the rest in equal parts for the other permutations.
M[s, i+1] is a matrix of fractions, H_pre,s H_res,s-1 ... H_res,i+1 diag(H_post,i); its diagonal is what M holds.
"""

import math
from itertools import permutations

import torch

from .tables import combine, full, one_hot_by_site
from .trace import Trace, fractions_trace, multi_stream, rms

DEFAULTS = {
    "n": 4,
    "residual_map": "sinkhorn",
    "convention": "paper",
    "iterations": 20,
    "head": "sum",
    "init": "identity",
    "schedule": "standard",
    "eps": None,
    "post_scale": 2.0,
    "fractions": None,
}
OPTIONS = (
    combine(n=[2, 3], residual_map=["sinkhorn"], convention=["paper", "deepseek"], iterations=[1, 3, 20])
    + combine(residual_map=["birkhoff", "identity"], head=["sum", "mean", "learned"])
    + combine(convention=["paper", "deepseek"], head=["mean", "learned"])
    + combine(residual_map=["sinkhorn", "birkhoff", "identity"], init=["identity", "uniform", "symmetry"])
    + combine(schedule=["single_pass"], residual_map=["sinkhorn", "birkhoff", "identity"])
    + combine(schedule=["single_pass"], convention=["deepseek"], n=[2, 4])
    + combine(convention=["paper", "deepseek"], head=["learned"], eps=[0.3])
    + combine(
        residual_map=["identity"], convention=["hunyuan"], head=["mean", "learned"], eps=[None, 0.3], post_scale=[1.5]
    )
    + combine(post_scale=[0.5, 3.0], schedule=["standard", "single_pass"])
    + combine(fractions=[2, 4], residual_map=["sinkhorn", "birkhoff", "identity"])
    + combine(fractions=[2], convention=["deepseek"], iterations=[3], eps=[None, 0.3])
    + combine(fractions=[2], convention=["hunyuan"], residual_map=["identity"], post_scale=[1.5])
)
DEAD_ROWS = {("b_res", 0)}  # at site 0 the streams are copies, and the residual map's rows sum to one


def logit(q):
    return math.log(q / (1 - q))


def b_start(o, S, R):
    n = o["n"]
    if o["init"] == "uniform":
        return full((S, 2 * n + R), 0)
    pre = one_hot_by_site(1, -1)((S, n))
    post = pre
    if o["init"] == "identity":
        pre, post = one_hot_by_site(logit(2 / (n + 1)), logit(1 / (n + 1)))((S, n)), full((S, n), 0)
        if o["post_scale"] > 1:
            post = full((S, n), logit(1 / o["post_scale"]))
    res = full((S, R), -8)
    if o["residual_map"] == "sinkhorn":
        res[:, [i * n + i for i in range(n)]] = 0.0
    elif o["residual_map"] == "birkhoff":
        res[:, 0] = 0.0
    return torch.cat([pre, post, res], dim=1)


def fraction_parameters(o, D, S, m):
    R = {"sinkhorn": m * m, "birkhoff": math.factorial(m), "identity": 0}[o["residual_map"]]
    kept, given = 1 / (1 + math.exp(-8)), 1 / (1 + math.exp(8))
    pre = torch.eye(m, dtype=torch.float64).flatten() * 16 - 8
    post = full((m,), logit(1 / o["post_scale"]) if o["post_scale"] > 1 else 0)
    own = torch.zeros(R, dtype=torch.bool)
    own[: m * m : m + 1] = o["residual_map"] == "sinkhorn"
    own[:1] = True
    # Logits count up to a constant: the logarithms of the shares, from that of the largest on.
    share = given / ((m if o["residual_map"] == "sinkhorn" else math.factorial(m)) - 1)
    res = full((R,), 0).masked_fill(~own, math.log(share / kept))
    return {
        "phi": ((S, D, m * m + m + R), 0),
        "b": ((S, m * m + m + R), lambda shape: torch.cat([pre, post, res]).repeat(S, 1)),
        "alpha": ((S, 3 if R else 2), 0.01),
    }


def parameters(o, D, blocks):
    S = blocks.S
    if o["fractions"] is not None:
        return fraction_parameters(o, D, S, o["fractions"])
    n = o["n"]
    R = {"sinkhorn": n * n, "birkhoff": math.factorial(n), "identity": 0}[o["residual_map"]]
    out = {
        "phi": ((S, n * D, 2 * n + R), None if o["init"] == "uniform" else 0),
        "b": ((S, 2 * n + R), lambda shape: b_start(o, S, R)),
        "alpha": ((S, 3 if R else 2), 0.01),
    }
    if o["schedule"] == "standard" and o["head"] == "learned":
        out |= {"phi_head": ((n * D, n), 0), "alpha_head": ((1,), 0.01), "b_head": ((n,), -math.log(n - 1))}
    return out


def starts_plain(options):
    return options["init"] == "identity" and options["post_scale"] > 1 and options["fractions"] is None


def deepseek(options) -> bool:
    return options["residual_map"] == "sinkhorn" and options["convention"] == "deepseek"


def rms_streams(options, x):
    """RMS over all n D numbers of a token."""
    usual = 1e-6 if deepseek(options) or options["convention"] == "hunyuan" else 1e-20
    return rms(x.reshape(*x.shape[:2], -1), usual if options["eps"] is None else options["eps"])


def sinkhorn_paper(logits, iterations):
    """logits [out, in]; columns (over out) first, rows (over in) last."""
    M = torch.exp(logits)
    for _ in range(iterations):
        M = M / M.sum(-2, keepdim=True)
        M = M / M.sum(-1, keepdim=True)
    return M


def sinkhorn_deepseek(logits, iterations, eps=1e-6):
    """logits [in, out]; returns comb^T, which is [out, in]."""
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb.transpose(-1, -2)


def birkhoff(logits, n):
    """sum_r a_r P_r, P_r[o, perm_r(o)] = 1, permutations in lexicographic order."""
    a = torch.softmax(logits, dim=-1)
    eye = torch.eye(n, dtype=logits.dtype)
    P = torch.stack([eye[list(perm)] for perm in permutations(range(n))])
    return torch.einsum("...r,roi->...oi", a, P)


def residual_map(options, logits, batch, n):
    if options["residual_map"] == "identity":
        return torch.eye(n, dtype=logits.dtype).expand(*batch, n, n)
    if options["residual_map"] == "birkhoff":
        return birkhoff(logits, n)
    logits = logits.reshape(*batch, n, n)
    if deepseek(options):
        return sinkhorn_deepseek(logits, options["iterations"])
    return sinkhorn_paper(logits, options["iterations"])


def coefficients(p, options, s, x):
    """H_pre [B, T, n] (of fractions [B, T, m²]), H_post [B, T, n], H_res [B, T, n_out, n_in] of site s, from the x it reads."""
    n, alpha, b = options["fractions"] or options["n"], p["alpha"][s], p["b"][s]
    k = n if options["fractions"] is None else n * n
    z = torch.einsum("btk,km->btm", rms_streams(options, x), p["phi"][s])
    pre = torch.sigmoid(alpha[0] * z[..., :k] + b[:k])
    post = options["post_scale"] * torch.sigmoid(alpha[1] * z[..., k : k + n] + b[k : k + n])
    res = z[..., k + n :]
    if options["residual_map"] != "identity":
        res = alpha[2] * res + b[k + n :]
    if deepseek(options):
        pre = pre + 1e-6
    if options["convention"] == "hunyuan":
        pre, post = pre + 1e-6, post + 1e-6
    return pre, post, residual_map(options, res, x.shape[:2], n)


def head(p, options, x):
    """The weights [B, T, n] with which h_S reads the streams."""
    ones = torch.ones(x.shape[:3], dtype=x.dtype)
    if options["head"] == "sum":
        return ones
    if options["head"] == "mean":
        return ones / options["n"]
    z = torch.einsum("btk,km->btm", rms_streams(options, x), p["phi_head"])
    return torch.sigmoid(p["alpha_head"] * z + p["b_head"]) + 1e-6


def run(p, options, blocks, e, sublayer) -> Trace:
    m = options["fractions"]
    if m is not None:

        def weights(s, x):
            pre, post, res = coefficients(p, options, s, x)
            return pre.unflatten(-1, (m, m)), res, post

        return fractions_trace(m, weights, blocks, e, sublayer)
    single_pass = options["schedule"] == "single_pass"
    x = torch.stack([e] * options["n"], dim=2)  # [B, T, n, D]
    late = torch.zeros(x.shape[:3], dtype=e.dtype)
    late[..., 0] = 1.0
    reads, qs, Rs, ps = [], [], [], []
    for s in range(blocks.S):
        pre, post, res = coefficients(p, options, s, x)
        q, late = (late, pre) if single_pass else (pre, None)
        h = torch.einsum("btn,btnd->btd", q, x)
        reads.append((h,))
        y = sublayer(s, (h,))
        x = torch.einsum("btoi,btid->btod", res, x) + post[..., :, None] * y[..., None, :]
        qs.append(q.detach())
        Rs.append(res.detach())
        ps.append(post.detach())
    q = late if single_pass else head(p, options, x)
    out = torch.einsum("btn,btnd->btd", q, x)
    reads.append((out,))
    qs.append(q.detach())
    return Trace(out, reads, multi_stream(qs, Rs, ps, blocks, e))
