"""One table a mechanism, as docs/mechanisms.md gives it: {parameter: (shape, initial value)}.

The initial value is a number, a function of the shape, or None where it is random. Arguments: options, D, N, S = 2N.
"""

import math

import torch


def full(shape, value):
    return torch.full(shape, float(value), dtype=torch.float64)


def residual(o, D, N, S):
    return {}


def rezero(o, D, N, S):
    return {"alpha": ((S,), 0)}


def layerscale(o, D, N, S):
    by_depth = 0.1 if N <= 18 else 1e-5 if N <= 24 else 1e-6
    return {"gamma": ((S, D), by_depth if o["init"] is None else o["init"])}


def highway(o, D, N, S):
    gate = (D,) if o["gate"] == "vector" else ()
    return {"W_T": ((S, *gate, D), None), "b_T": ((S, *gate), o["bias"])}


def last_is_one(shape):
    value = full(shape, 0)
    value[..., -1] = 1.0
    return value


def denseformer(o, D, N, S):
    return {f"alpha.{i}": ((i // o["dilation"] + 1,), last_is_one) for i in range(1, N + 1) if i % o["period"] == 0}


def one_hot_by_site(on, off):
    """[S, n]: `on` at stream s mod n, `off` elsewhere."""

    def build(shape):
        S, n = shape
        value = full(shape, off)
        for s in range(S):
            value[s, s % n] = on
        return value

    return build


def hyper(o, D, N, S):
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


def logit(q):
    return math.log(q / (1 - q))


def mhc_b(o, S, R):
    n = o["n"]
    if o["init"] == "uniform":
        return full((S, 2 * n + R), 0)
    pre = one_hot_by_site(1, -1)((S, n))
    post = pre
    if o["init"] == "identity":
        pre, post = one_hot_by_site(logit(2 / (n + 1)), logit(1 / (n + 1)))((S, n)), full((S, n), 0)
    res = full((S, R), -8)
    if o["residual_map"] == "sinkhorn":
        res[:, [i * n + i for i in range(n)]] = 0.0
    elif o["residual_map"] == "birkhoff":
        res[:, 0] = 0.0
    return torch.cat([pre, post, res], dim=1)


def mhc(o, D, N, S):
    n = o["n"]
    R = {"sinkhorn": n * n, "birkhoff": math.factorial(n), "identity": 0}[o["residual_map"]]
    out = {
        "phi": ((S, n * D, 2 * n + R), None if o["init"] == "uniform" else 0),
        "b": ((S, 2 * n + R), lambda shape: mhc_b(o, S, R)),
        "alpha": ((S, 3 if R else 2), 0.01),
    }
    if o["schedule"] == "standard" and o["head"] == "learned":
        out |= {"phi_head": ((n * D, n), 0), "alpha_head": ((1,), 0.01), "b_head": ((n,), -math.log(n - 1))}
    return out


def stacked(o, D, N, ways):
    """grn and dca."""
    version = o.get("version", 3)
    out = {}
    for i in range(1, N + 1):
        t = i + 1 if o["window"] is None else min(i + 1, o["window"] + 2)
        c = ways if i < N else 1
        out[f"b.{i}"] = ((c, t, 1 if version == 1 else D), 1)
        if version == 3:
            out[f"w.{i}"] = ((c, t if o["w_per_entry"] else 1, D), 0)
    return out


def grn(o, D, N, S):
    return stacked(o, D, N, 1)


def dca(o, D, N, S):
    return stacked(o, D, N, 3)


def attnres(o, D, N, S):
    most = 1 + math.ceil(S / (o["block_size"] or 1))
    if o["window"] is not None:
        most = min(most, 1 + o["window"])
    if o["weights"] == "static":
        rows = {"logits": ((most,), 0)}
    else:
        rows = {"query": ((D,), 0)} if o["query"] == "learned" else {"query_proj": ((D, D), 0)}
        if o["key_norm"]:
            rows["key_gain"] = ((D,), 1)
    out = {name: ((S + 1, *shape), value) for name, (shape, value) in rows.items()}
    if o["ways"] == 3:
        out |= {name + "_kv": ((N, 2, *shape), value) for name, (shape, value) in rows.items()}
    return out


def laurel(o, D, N, S):
    if o["variant"] == "rw":
        return {"alpha": ((S,), 1), "beta": ((S,), 1)}
    rank = min(16, D) if o["rank"] is None else o["rank"]
    out = {"A": ((S, rank, D), None), "B": ((S, D, rank), 0)}
    return out | ({"gamma": ((S, S), 1)} if o["variant"] == "pa" else {})


def mudd(o, D, N, S):
    out = {}
    for i in range(1, N + 1):
        entries = i + 1
        C = 4 if i < N else 1
        K = (C * entries // 64 + 1) * 64 * (1 if i < N else 4)
        out[f"W_1.{i}"] = ((K, D), None)
        out[f"W_2.{i}"] = ((C * entries, K), 0)
        out[f"b.{i}"] = ((C, entries), last_is_one)
    return out


TABLES = {
    "residual": residual,
    "rezero": rezero,
    "layerscale": layerscale,
    "highway": highway,
    "denseformer": denseformer,
    "hyper": hyper,
    "mhc": mhc,
    "grn": grn,
    "dca": dca,
    "attnres": attnres,
    "laurel": laurel,
    "mudd": mudd,
}
