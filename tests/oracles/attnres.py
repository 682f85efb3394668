"""attnres: logit_i = q_s . (g_s * RMS(v_i));  p = softmax over the sources;  h_s = sum_i p_i v_i.

Sources of reader s with B sites per block: e; the sums of y over sites [0, B), [B, 2B), ... that end at or before s; the
partial sum from the last block boundary to s, unless it is empty. window W: e and the last W of the others.

M[s, i+1] = p of the source that contains y_i, 0 if a window dropped it.

value_norm: h_s = sum_i p_i RMS(v_i). M[s, i+1] has the factor 1 / rms of the source that contains y_i.
scaled_logits: the logits of a head of C channels are divided by sqrt(C).

output_gain: y_i is gamma_i * what site i put out, channel by channel, so M[s, i+1] has that factor.

routing="add": h_0 = e;  h_s = stream + mixture for s >= 1;  h_S = stream = e + sum_i y_i. Rows of M: 1; p + 1; 1.
"""

import math

import torch

from .tables import combine
from .trace import Trace, no_mixing, rms

DEFAULTS = {
    "block_size": None,
    "ways": 1,
    "query": "learned",
    "query_init": 0.0,
    "weights": "softmax",
    "key_norm": True,
    "value_norm": False,
    "scaled_logits": False,
    "heads": 1,
    "window": None,
    "routing": "replace",
    "output_gain": None,
    "eps": 1e-6,
}
OPTIONS = (
    combine(block_size=[None, 1, 2, 3, 5, 8, "all"], ways=[1, 2], window=[None, 1, 2])
    + combine(block_size=[None, 3, 8], ways=[3], window=[None, 1, 2])
    + combine(query=["learned", "input"], weights=["softmax", "sigmoid"], key_norm=[True, False], heads=[1, 2, 8])
    + combine(ways=[2, 3], weights=["sigmoid"], key_norm=[True, False])
    + combine(block_size=[None, 3], ways=[1, 2], query=["learned", "input"], routing=["replace", "add"], heads=[1, 4])
    + combine(block_size=[3], ways=[3], query=["learned", "input"], routing=["replace", "add"], heads=[1, 4])
    + combine(block_size=[None, 3], ways=[1, 2], weights=["static"], window=[None, 2], routing=["replace", "add"])
    + combine(block_size=[3], ways=[3], weights=["static"], window=[None, 2], routing=["replace", "add"])
    + combine(block_size=[3, "all"], ways=[1, 2], output_gain=[0.1])
    + combine(ways=[3], weights=["softmax", "static"], routing=["add"], output_gain=[1.0])
    + combine(ways=[1, 3], block_size=[None, 3], value_norm=[True], scaled_logits=[False, True])
    + combine(
        value_norm=[True], scaled_logits=[True], heads=[2], weights=["softmax", "sigmoid"], query=["learned", "input"]
    )
    + combine(value_norm=[True], key_norm=[False], ways=[2], window=[2], routing=["replace", "add"])
)
DEAD_ROWS = {("query", 0), ("key_gain", 0)}  # site 0 has a single source


def size_of(block_size):
    """In sites; no model here has a thousand."""
    return 1000 if block_size == "all" else block_size or 1


def parameters(o, D, blocks):
    A, S = len(blocks.attention), blocks.S
    readers = S + 1 if o["routing"] == "replace" else S  # without finish
    most = 1 + math.ceil((readers - 1) / size_of(o["block_size"]))
    if o["window"] is not None:
        most = min(most, 1 + o["window"])
    if o["weights"] == "static":
        rows = {"logits": ((most,), 0)}
    else:
        rows = {"query": ((D,), 0)} if o["query"] == "learned" else {"query_proj": ((D, D), 0)}
        if o["key_norm"]:
            rows["key_gain"] = ((D,), 1)
    out = {name: ((readers, *shape), value) for name, (shape, value) in rows.items()}
    if o["ways"] == 2:
        out |= {name + "_v": ((A, *shape), value) for name, (shape, value) in rows.items()}
    if o["ways"] == 3:
        out |= {name + "_kv": ((A, 2, *shape), value) for name, (shape, value) in rows.items()}
    if o["output_gain"] is not None:
        out["gamma"] = ((S, D), o["output_gain"])
    return out


def starts_plain(options):
    return options["window"] is None and options["output_gain"] in (None, 1) and not options["value_norm"]


def members(s, block_size, window):
    """What each source of reader s sums, oldest first: 0 is e, i + 1 is y_i."""
    size = size_of(block_size)
    blocks = [list(range(first + 1, min(first + size, s) + 1)) for first in range(0, s, size)]
    if window is not None:
        blocks = blocks[-window:]
    return [[0], *blocks]


def pick(p, name, s, way, nth):
    """Of the nth attention site with two ways, v (way 1) has its own tensors; with three, k and v (ways 1 and 2) have."""
    if way == 0:
        return p[name][s]
    return p[name + "_v"][nth] if name + "_v" in p else p[name + "_kv"][nth, way - 1]


def logits(p, options, s, way, nth, v):
    """v [n, B, T, D] -> [n, B, T, heads]."""
    n, heads = v.shape[0], options["heads"]
    if options["query"] == "input":
        q = torch.einsum("oi,bti->bto", pick(p, "query_proj", s, way, nth), rms(v[-1], options["eps"])) / v.shape[-1]
    else:
        q = pick(p, "query", s, way, nth)
    keys = v
    if options["key_norm"]:
        keys = pick(p, "key_gain", s, way, nth) * rms(v, options["eps"])
    product = q * keys
    z = product.reshape(n, *v.shape[1:3], heads, -1).sum(-1)
    return z / math.sqrt(v.shape[-1] // heads) if options["scaled_logits"] else z


def weights(p, options, s, way, nth, v):
    """v [n, B, T, D] -> [n, B, T, D]."""
    n, dim = v.shape[0], v.shape[-1]
    if options["weights"] == "static":
        return torch.softmax(pick(p, "logits", s, way, nth)[:n], dim=0)[:, None, None, None].expand_as(v)
    z = logits(p, options, s, way, nth, v)
    w = torch.softmax(z, dim=0) if options["weights"] == "softmax" else torch.sigmoid(z)
    w = w.repeat_interleave(dim // options["heads"], dim=-1)
    return w / torch.sqrt((v * v).mean(-1, keepdim=True) + options["eps"]) if options["value_norm"] else w


def read(p, options, s, way, nth, sources, row):
    """What reader s sees; row [S+1, B, T, D] receives its coefficients over [e, y_0, y_1 ...]."""
    if options["routing"] == "add" and s in (0, len(row) - 1):
        row[: s + 1] = 1.0
        return sum(sources)
    groups = members(s, options["block_size"], options["window"])
    v = torch.stack([sum(sources[j] for j in group) for group in groups])
    w = weights(p, options, s, way, nth, v)
    for k, group in enumerate(groups):
        for j in group:
            row[j] = w[k].detach()
    h = (w * v).sum(0)
    if options["routing"] == "add":
        row[: s + 1] += 1.0
        h = h + sum(sources)
    return h


def run(p, options, blocks, e, sublayer) -> Trace:
    M = no_mixing(options["ways"], blocks, e)
    sources, reads = [e], []
    for s in range(blocks.S + 1):
        attention = s in blocks.attention
        nth = blocks.attention.index(s) if attention else None
        ways = range(options["ways"] if attention else 1)
        h = tuple(read(p, options, s, way, nth, sources, M[way, s]) for way in ways)
        if not attention:
            M[:, s] = M[0, s].clone()
        reads.append(h)
        if s < blocks.S:
            y = sublayer(s, h)
            sources.append(y if options["output_gain"] is None else p["gamma"][s] * y)
    if options["output_gain"] is not None:
        for i in range(blocks.S):
            M[:, :, i + 1] *= p["gamma"][i].detach()
    return Trace(reads[-1][0], reads, M)
