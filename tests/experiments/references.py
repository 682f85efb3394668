"""The experiments written once more from the equations at their tops, in plain fp64; nothing here comes from depthmix.

run(p, o, blocks, e, sublayer) -> (out, reads): p the parameters by name, o the options that were given.
"""

import torch

from oracles.attnres import members
from oracles.grn import members as entries
from oracles.hyper import coefficients
from oracles.trace import rms

EPS = 1e-6


def sources_of(o, s, seen):
    """e, the sums of finished blocks and the own one's: [n, B, T, D]."""
    return torch.stack([sum(seen[j] for j in group) for group in members(s, o.get("block_size"), None)])


def attend(query, gain, v):
    logits = (query * (gain * rms(v, EPS))).sum(-1)
    return (torch.softmax(logits, 0)[..., None] * v).sum(0)


def over_sites(blocks, e, sublayer, read):
    """read(s, [e, y_0 …]) -> what site s sees."""
    seen, reads = [e], []
    for s in range(blocks.S):
        reads.append(read(s, seen))
        seen.append(sublayer(s, reads[-1]))
    return read(blocks.S, seen)[0], reads


def gate_apart(p, o, blocks, e, sublayer):
    names = [name for block in blocks.names for name in block]
    apart = [s for s, n in enumerate(names) if n == "mlp" or (o.get("values") and s in blocks.attention)]

    def read(s, seen):
        v = sources_of(o, s, seen)
        rows = [(p["query"][s], p["key_gain"][s])]
        if s in apart:
            rows.append((p["query_v"][apart.index(s)], p["key_gain_v"][apart.index(s)]))
        return tuple(attend(q, g, v) for q, g in rows)

    return over_sites(blocks, e, sublayer, read)


def attention_reads(p, o, blocks, e, sublayer):
    def read(s, seen):
        v = sources_of(o, s, seen)
        plain = v.sum(0) / len(v)  # what attending without a preference gives
        if s not in blocks.attention:
            return (plain,)
        i = list(blocks.attention).index(s)
        first = plain if o.get("only") == "values" else attend(p["query"][i], p["key_gain"][i], v)
        return first, attend(p["query_v"][i], p["key_gain_v"][i], v)

    return over_sites(blocks, e, sublayer, read)


def embedding_again(p, o, blocks, e, sublayer):
    if o.get("into") == "stream":
        x, reads = e, []
        for i, sites in enumerate(blocks.sites):
            x = p["lam"][i] * x + p["mu"][i] * e
            for s in sites:
                reads.append((x,))
                x = x + sublayer(s, reads[-1])
        return x, reads

    def read(s, seen):
        x = sum(seen)
        h = x + p["b"][s] * e
        return (h, x + p["b_v"][list(blocks.attention).index(s)] * e) if s in blocks.attention else (h,)

    return over_sites(blocks, e, sublayer, read)


def low_rank_query(p, o, blocks, e, sublayer):
    def read(s, seen):
        v = sources_of(o, s, seen)
        rank, dim = p["U"][s].shape
        query = p["query"][s] + rms(v[-1], EPS) @ p["V"][s].T @ p["U"][s] / (rank * dim**0.5)  # [B, T, D]
        return (attend(query, p["key_gain"][s], v),)

    return over_sites(blocks, e, sublayer, read)


def attnres_on_streams(p, o, blocks, e, sublayer):
    below = {k.removeprefix("below."): v for k, v in p.items()}
    options = {"static": o.get("static", False), "tanh": True, "norm": "layernorm"}
    H, seen, reads = torch.stack([e] * o.get("n", 4), dim=2), [e], []
    for s in range(blocks.S):
        A_m, A_r, B = coefficients(below, options, s, H)
        h = (A_m[..., None] * H).sum(2)
        if s > 0:
            h = h + attend(p["above.query"][s], p["above.key_gain"][s], sources_of(o, s, seen))
        reads.append((h,))
        seen.append(sublayer(s, reads[-1]))
        H = A_r.transpose(-1, -2) @ H + B[..., None] * seen[-1][..., None, :]
    return H.sum(2), reads


def softmax_dca(p, o, blocks, e, sublayer):
    deltas, reads = [e], {}

    def mixtures(i):
        if i == 0:
            return (e,) * blocks.ways(0, 3)
        G = torch.stack([sum(deltas[j] for j in group) for group in entries(i, o.get("window"))])  # [t, B, T, D]
        found = []
        for b, w in zip(p[f"b.{i}"], p[f"w.{i}"], strict=True):  # [t, D], [1, D]
            a = torch.softmax((w * G).sum(-1), 0)[..., None]
            found.append(((b[:, None, None] + a) * G).sum(0))
        return tuple(found)

    for i, sites in enumerate(blocks.sites):
        h = mixtures(i)
        g, own = h[0], []
        for s in sites:
            reads[s] = h if s == sites[0] else (g + sum(own),)
            own.append(sublayer(s, reads[s]))
        deltas.append(sum(own))
    return mixtures(blocks.N)[0], list(reads.values())
