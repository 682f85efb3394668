"""Depth attention's backward in source order: every (site, source) pair is read once.

Autograd's own order would write one gradient per (read, source) pair and add them up in passes of its own. Here a read's backward
returns no gradient for its older sources. It posts a `Reading` (its do and a few numbers per token) to the node that made each
source. PyTorch's engine runs that node after all readers of its source. The node then reads the source once, each reader's do
once, and writes the source's gradient once, summed in fp32. Each source has one maker: the read that saw it first, as its newest
source, and that may have added it up (`add`).

Example: three reads, in the order in which the engine runs their backward (y is a read's result, v_i the source it makes):

    forward     read 0 makes v_0       read 1 reads v_0, v_1; makes v_1       read 2 reads v_0, v_1, v_2; makes v_2

    node        reads from memory            posts                                         returns to autograd
    --------    -------------------------    ------------------------------------------    --------------------------
    read 2      dy_2, y_2, v_2               Reading 2 ──┬──▶ mail of read 1               dv_2 ─▶ sublayer 1
                                                         └──▶ mail of read 0
                                             du_2 (its part from v_2) ──▶ collector
      ⋮ sublayer 1's backward: dy_1
    read 1      dy_1, y_1, v_1,              Reading 1 ─────▶ mail of read 0               dv_1 ─▶ sublayer 0
                do_2 from its mail           du_2, du_1 (from v_1) ──▶ collector
      ⋮ sublayer 0's backward: dy_0
    read 0      dy_0, y_0, v_0,              du_2, du_1, du_0 (from v_0) ──▶ collector     dv_0 ─▶ embedding
                do_2, do_1 from its mail
    collector   every du from its mail                                                     Σ du ─▶ query, key_gain

v_i is freed when dv_i appears. Two shortcuts save further traffic:

- Neighbours. If v_i and the source before it have the same readers so far, one launch reads each do once for both. What it knows
  of the older gradient waits in fp32 in the maker's `partial_gradient`, and the older node starts from there.
- Pairs. A read of two sources whose newest one is a running sum (only the next read continues it) has everything at hand. It saves
  nothing of its mixtures and posts the older source's finished gradient as `summand_mail`. In a stack of one block all reads
  but the first are of this kind.

depth_sum/source_order.py runs the same schedule for weighted sums. backward_mail.py and row_gradients.py are common to both
engines; backward_mail.py says why there are two.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backward_mail import (
    current_pass_id,
    current_stream,
    filled,
    finish_gradient,
    leave_partial_gradient,
    maker_of,
    open_mailboxes,
    post,
    saved_once,
    take_partial_gradient,
    wait_for_stream,
)
from depthmix.ops.depth_attention.precomputed_logits import GroupMixtures, KnownLogits, read
from depthmix.ops.depth_attention.reference import depth_attention_reference
from depthmix.ops.precision import rms_normalize, without_autocast
from depthmix.ops.registration import call
from depthmix.ops.row_gradients import CollectRows, post_row_gradients
from depthmix.ops.torch_internals import node_will_run, saving_is_hooked

OP = "depth_attention"
# Up to this many ways of a read share one pass over the newest source for its gradient.
MAX_FUSED_WAYS = 2
# From this many shared readers on, it pays to write a source's gradient unfinished and continue it later.
MIN_SHARED_READERS = 2


def is_pair(n: int, ways: int, lasts: bool) -> bool:
    """Return whether a read of n sources computes both gradients at once. If its newest source lasts, the gradient waits for other readers."""
    return n == 2 and ways <= MAX_FUSED_WAYS and not lasts


class Reading(NamedTuple):
    """Mail from a read to the makers of its older sources."""

    do: list[Tensor]  # gradient of each way's mixture, shaped like a source
    s: Tensor  # logits [W, n, N] of the sources that follow those of `older_logits`
    older_logits: list[Tensor]  # precomputed logits [W, N] of each of the oldest sources
    n: int  # number of sources the read has seen
    ld: list[Tensor]  # log-sum-exp and δ = do · o of each way: [2, N]
    u: Tensor  # queries [W, D]
    row: int  # row of u[0] in the table of all queries
    queries: Any  # the node that collects du
    stream: torch.cuda.Stream | None  # the CUDA stream that computed these tensors

    def wait_for_stream(self) -> "Reading":
        """Make the current stream wait for these tensors, and return self."""
        wait_for_stream(self.stream, *self.do, self.s, *self.older_logits, *self.ld, self.u)
        return self


def read_sources(
    queries: Tensor,
    row: int,
    ways: int,
    sources: Sequence[Tensor],
    add: Tensor | None,
    gain: Tensor | Sequence[Tensor] | None,
    eps: float,
    out_eps: float,
    precomputed: GroupMixtures | KnownLogits | None = None,
    lasts: bool = True,
) -> tuple[list[Tensor], Tensor]:
    """Read with kernels. The caller has checked that they can do it.

    A stack of reads is differentiated in source order if `queries` came through `collect_rows`, the sources are newest sources that
    earlier reads returned, and nothing is being compiled.

    Args:
        queries: [R, D] fp32, key gains included.
        row: first row of this read.
        ways: number of mixtures W; the read uses queries[row : row + ways].
        sources: tensors [..., D], oldest first.
        add: if given, the newest source is sources[-1] + add.
        gain: [W, D] of the norm that follows, or None. Without gradients also a sequence with one row per way.
        eps: of the keys' norm.
        out_eps: of the norm that follows.
        precomputed: what `precompute_group`, `precompute_block_group` or `precompute_logits` returned for this row.
        lasts: later reads see this newest source unchanged.

    Returns:
        The W results, shaped like a source, and the newest source as later reads must receive it.
    """
    queries, sources = queries.contiguous(), [v.contiguous() for v in sources]
    add = None if add is None else add.contiguous()
    if isinstance(gain, Tensor):
        gain = gain.contiguous()
    inputs = (queries, add, *sources, *([gain] if isinstance(gain, Tensor) else gain or ()))
    differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    if differentiated and not torch.compiler.is_compiling():
        *y, fresh = ReadSources.apply((row, ways, lasts), (eps, out_eps), precomputed, queries, gain, add, *sources)
        return y, fresh
    (y, _, _, _, fresh), _ = read(
        queries, row, ways, sources, precomputed, add, gain, eps, out_eps, int(differentiated)
    )
    return y, sources[-1] if add is None else fresh


class ReadSources(torch.autograd.Function):
    """Return W results and the newest source; the backward follows the schedule at the top of this file."""

    @staticmethod
    def forward(
        ctx: Any,
        location: tuple[int, int, bool],
        eps: tuple[float, float],
        precomputed: GroupMixtures | KnownLogits | None,
        queries: Tensor,
        gain: Tensor | None,
        add: Tensor | None,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        row, ways, lasts = location
        ctx.pair = is_pair(len(sources), ways, lasts)
        if ctx.pair:
            ctx.older_logits, mixtures = [], sources[:1]
            y, s, lse, fresh = call("depth_read_pair", queries[row : row + ways], *sources, add, gain, *eps)
        else:
            (y, o, s, lse, fresh), ctx.older_logits = read(queries, row, ways, sources, precomputed, add, gain, *eps, 2)
            mixtures = o or y
        fresh = sources[-1].detach() if add is None else fresh
        ctx.row, ctx.ways, ctx.eps, ctx.n, ctx.source_nr = row, ways, eps, len(sources), ways
        open_mailboxes(ctx, "mail", "partial_gradient", "summand_mail")
        ctx.saved_tensors_hooked = saving_is_hooked()
        ctx.queries = queries.grad_fn if isinstance(queries.grad_fn, CollectRows._backward_cls) else None
        # A source's maker contributes to du after this read's backward has returned. Only a collector can still receive that.
        du_may_come_later = ctx.queries is not None or not queries.requires_grad
        ctx.makers = [maker_of(v, ReadSources._backward_cls) if du_may_come_later else None for v in sources[:-1]]
        makerless = [v for v, maker in zip(sources, ctx.makers, strict=False) if maker is None]
        ctx.n_saved = len(mixtures)
        ctx.save_for_backward(fresh, queries, gain, s, lse, *mixtures, *makerless)
        ctx.set_materialize_grads(False)
        return (*y, fresh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = saved_once(ctx, OP)
        with without_autocast(saved[0]):
            if torch.is_grad_enabled():
                return _differentiable_backward(ctx, saved, grads)
            return _backward(ctx, saved, grads)


class _ReadGradients(NamedTuple):
    """Gradients that a read's backward computes itself, besides what it posts."""

    dv: list[Tensor | None]  # of each older source
    g: Tensor | None  # of the newest source, to which mail adds
    du: Tensor | None  # [W, D], this read's part
    dgain: Tensor | None


def _backward(ctx: Any, saved: Sequence[Tensor], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    fresh, queries = saved[:2]
    *dy, g = grads
    g = None if g is None else g.contiguous()
    pass_id = current_pass_id(OP)
    # Readings of the newest source by later reads, each with the source's number there.
    mail: list[tuple[Reading, int]] = ctx.mail.pop(pass_id, [])
    for reading, _ in mail:
        reading.wait_for_stream()
    g = _take_summands(ctx, g, pass_id)
    dqueries = dgain = None
    dv: list[Tensor | None] = [None] * (ctx.n - 1)
    if any(d is not None for d in dy):
        # Not part of a stack, so nothing is gained from another order.
        standalone = (
            ctx.n > 1
            and not any(ctx.makers)
            and not ctx.older_logits
            and not mail
            and pass_id not in ctx.partial_gradient
        )
        differentiate = _backward_of_pair if ctx.pair else _backward_alone if standalone else _backward_in_stack
        dv, g, du, dgain = differentiate(ctx, saved, filled(dy, fresh), g, mail, pass_id)
        dqueries = None if du is None else _return_or_post_du(ctx, queries, du, pass_id)
    if mail or pass_id in ctx.partial_gradient:
        g = _gradient_of_source(ctx, fresh, g, mail, pass_id)
    return (None, None, None, dqueries, dgain, g if ctx.needs_input_grad[5] else None, *dv, g)


def _needs_newest(ctx: Any) -> bool:
    """Return whether the newest source needs a gradient: as it was passed in, or what was added to it."""
    return ctx.needs_input_grad[5] or ctx.needs_input_grad[-1]


def _backward_in_stack(
    ctx: Any,
    saved: Sequence[Tensor],
    dy: list[Tensor],
    g: Tensor | None,
    mail: list[tuple[Reading, int]],
    pass_id: int,
) -> _ReadGradients:
    """Differentiate a read as the drawing at the top of this file shows: post a `Reading` to the makers of older sources.

    If the newest source's gradient is not computed here, the read becomes one of its readers: it joins `mail`.
    """
    from depthmix.ops.depth_attention.kernels.read import Newest, read_backward

    fresh, queries, gain, s, lse, *rest = saved
    o, makerless_sources = rest[: ctx.n_saved], iter(rest[ctx.n_saved :])
    eps, need_sources, need_fresh = ctx.eps[0], ctx.needs_input_grad[6:], _needs_newest(ctx)
    makers = [(i, m) for i, m in enumerate(ctx.makers) if m is not None and node_will_run(m)]
    makerless = [(i, next(makerless_sources)) for i, m in enumerate(ctx.makers) if m is None]
    # Few ways and no mail: compute the newest source's gradient here, while do is in registers.
    fused = ctx.ways <= MAX_FUSED_WAYS and not mail
    newest = Newest(fresh, g, need_fresh, take_partial_gradient(ctx, pass_id)) if fused else None
    u = queries[ctx.row : ctx.row + ctx.ways]
    store = bool(makers or makerless or not fused)
    by_group = []
    step = ctx.ways if ctx.ways <= MAX_FUSED_WAYS else 1
    for w in range(0, ctx.ways, step):
        ways, k = slice(w, w + step), None if gain is None else gain[w : w + step]
        by_group.append(read_backward(dy[ways], o[ways], u[ways], k, s[ways], lse[ways], newest, eps, store, ctx.n > 1))
    dgain = None
    if gain is not None:
        dgain = by_group[0].dgain if len(by_group) == 1 else torch.cat([x.dgain for x in by_group])
    do, ld = [d for x in by_group for d in x.do], [t for x in by_group for t in x.ld]
    reading = Reading(do, s, ctx.older_logits, ctx.n, ld, u, ctx.row, ctx.queries, current_stream(u))
    for i, maker in makers:
        post(maker, pass_id, (reading, i))
    dv: list[Tensor | None] = [None] * (ctx.n - 1)
    du_parts = []
    for i, v in makerless:
        dv[i], du = _gradient_through_one_read(v, None, reading, i, eps, need_sources[i])
        du_parts.append(du)
    if fused:
        g = by_group[0].dv
        du_parts.append(by_group[0].du)
    elif ctx.queries is None and not mail and pass_id not in ctx.partial_gradient:
        g, du = _gradient_through_one_read(fresh, g, reading, ctx.n - 1, eps, need_fresh)
        du_parts.append(du)
    else:
        mail.append((reading, ctx.n - 1))
    du_total = None
    if du_parts:
        du_total = du_parts[0] if len(du_parts) == 1 else torch.stack(du_parts).sum(0)
    return _ReadGradients(dv, g, du_total, dgain)


def _backward_alone(
    ctx: Any,
    saved: Sequence[Tensor],
    dy: list[Tensor],
    g: Tensor | None,
    mail: list[tuple[Reading, int]],
    pass_id: int,
) -> _ReadGradients:
    """Differentiate a read that is not part of a stack: all its sources in one launch."""
    from depthmix.ops.depth_attention.kernels.layer_backward import layer_backward

    fresh, queries, gain, s, lse, *rest = saved
    u, sources = queries[ctx.row : ctx.row + ctx.ways], [*rest[ctx.n_saved :], fresh]
    gradients, du, dgain = layer_backward(dy, u, gain, s, lse[:, 0].contiguous(), sources, g, *ctx.eps)
    needs = [*ctx.needs_input_grad[6:-1], _needs_newest(ctx)]
    *dv, g = [d if need else None for d, need in zip(gradients, needs, strict=True)]
    return _ReadGradients(dv, g, du, None if gain is None else dgain)


def _backward_of_pair(
    ctx: Any,
    saved: Sequence[Tensor],
    dy: list[Tensor],
    g: Tensor | None,
    mail: list[tuple[Reading, int]],
    pass_id: int,
) -> _ReadGradients:
    """Differentiate a read of two sources, with both of their gradients in one launch.

    If the newest source has other readers, its share goes to `partial_gradient`, and the caller continues from there.
    """
    from depthmix.ops.depth_attention.kernels.pair import pair_backward

    fresh, queries, gain, s, lse, older, *_ = saved
    (maker,) = ctx.makers
    need_older = ctx.needs_input_grad[6] if maker is None else node_will_run(maker)
    u, partial_gradient = queries[ctx.row : ctx.row + ctx.ways], take_partial_gradient(ctx, pass_id)
    gradients = pair_backward(
        dy,
        older,
        fresh,
        u,
        gain,
        s,
        lse,
        None if mail else g,
        partial_gradient,
        ctx.eps[0],
        (need_older, _needs_newest(ctx)),
        whole=not mail,
    )
    if mail and gradients.db is not None:
        leave_partial_gradient(ctx, pass_id, gradients.db)
    if maker is not None and gradients.da is not None:
        post(maker, pass_id, (ctx.row, gradients.da, current_stream(fresh)), "summand_mail")
    dv, g = [gradients.da if maker is None else None], g if mail else gradients.db
    return _ReadGradients(dv, g, gradients.du, None if gain is None else gradients.dgain)


def _take_summands(ctx: Any, g: Tensor | None, pass_id: int) -> Tensor | None:
    """Add the finished gradients that reads of two sources posted, in the order of their rows, and return autograd's part.

    A single one without a gradient from autograd is returned as it is. Others become part of `partial_gradient`.
    """
    from depthmix.ops.depth_attention.kernels.pair import add_up_rows

    posted = sorted(ctx.summand_mail.pop(pass_id, []), key=lambda item: item[0])
    summands = [da for _, da, _ in posted]
    for _, da, stream in posted:
        wait_for_stream(stream, da)
    if len(summands) == 1 and g is None:
        return summands[0]
    if summands:
        leave_partial_gradient(ctx, pass_id, add_up_rows(summands, take_partial_gradient(ctx, pass_id)))
    return g


def _return_or_post_du(ctx: Any, queries: Tensor, du: Tensor, pass_id: int) -> Tensor | None:
    """Post a read's du to the collector of the queries. Without a collector, return it as the gradient of the queries."""
    if ctx.queries is None:
        return _scatter_rows(du, queries, ctx.row) if ctx.needs_input_grad[3] else None
    if node_will_run(ctx.queries):
        post_row_gradients(ctx.queries, pass_id, range(ctx.row, ctx.row + ctx.ways), du.unsqueeze(0))
    return None


def _gradient_through_one_read(
    v: Tensor, g: Tensor | None, reading: Reading, i: int, eps: float, need_dv: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the gradient of a read's source i that flows through this read alone, and the matching part of du."""
    from depthmix.ops.depth_attention.kernels.source_backward import Source, source_backward

    source = Source(v, g, need_dv=need_dv)
    (dv,), du = source_backward([source], _readers_of(reading, i), eps, need_du=True)
    assert du is not None
    return dv, du.sum(0)


def _readers_of(reading: Reading, *sources: int) -> list[Any]:
    """Return the ways of a read as kernel arguments, with the logits of the given sources."""
    from depthmix.ops.depth_attention.kernels.source_backward import Reader

    before = len(reading.older_logits)
    s = [reading.older_logits[i] if i < before else reading.s[:, i - before] for i in sources]
    ways = zip(reading.do, zip(*s, strict=True), reading.ld, reading.u, strict=True)
    return [Reader(*way, several=reading.n > 1) for way in ways]


def _scatter_rows(du: Tensor, queries: Tensor, row: int) -> Tensor:
    """Place du in a zero gradient of all queries."""
    if du.shape == queries.shape:
        return du
    out = torch.zeros_like(queries)
    out[row : row + len(du)] = du
    return out


def _gradient_of_source(
    ctx: Any, v: Tensor, g: Tensor | None, mail: list[tuple[Reading, int]], pass_id: int
) -> Tensor | None:
    """Add up the gradient of the source v that this node made: g from autograd, its partial gradient, and its mail.

    Posts du of the readers. May start the gradient of the source before it, see "Neighbours" at the top of this file.
    """
    from depthmix.ops.depth_attention.kernels.source_backward import Source, source_backward

    need_dv = _needs_newest(ctx)
    by_queries: dict[int, list[tuple[Reading, int]]] = {}
    for item in mail:
        by_queries.setdefault(id(item[0].queries), []).append(item)
    partial_gradient = take_partial_gradient(ctx, pass_id)
    # More than one collector only if two stacks read the same source.
    for items in by_queries.values():
        items.sort(key=lambda item: item[0].row)
        queries = items[0][0].queries
        need_du = queries is not None and node_will_run(queries)
        if not (need_du or need_dv):
            continue
        older = _older_neighbour(ctx, mail, pass_id) if need_dv and len(by_queries) == 1 else []
        sources = [Source(x, None, take_partial_gradient(m, pass_id), whole=False) for m, x in older]
        sources.append(Source(v, g, partial_gradient, need_dv=need_dv))
        readers = [reader for reading, i in items for reader in _readers_of(reading, *range(i - len(older), i + 1))]
        gradients, du = source_backward(sources, readers, ctx.eps[0], need_du)
        for (maker, _), d in zip(older, gradients, strict=False):
            assert d is not None, "sources before this node's are differentiated only on request"
            leave_partial_gradient(maker, pass_id, d)
            maker.mail[pass_id].clear()
        g, partial_gradient = (gradients[-1] if need_dv else g), None
        if du is not None:
            rows = [reading.row + w for reading, _ in items for w in range(len(reading.do))]
            post_row_gradients(queries, pass_id, rows, du)
    return finish_gradient(partial_gradient, g, v.dtype) if need_dv else g


def _older_neighbour(ctx: Any, mail: list[tuple[Reading, int]], pass_id: int) -> list[tuple[Any, Tensor]]:
    """Return the maker and value of the source before this one, if both have the same readers so far; otherwise an empty list."""
    from depthmix.ops.depth_attention.kernels.source_backward import PAIR

    if ctx.n % PAIR or sum(len(reading.do) for reading, _ in mail) < MIN_SHARED_READERS:
        return []
    maker = ctx.makers[-1]
    # A maker in a checkpointed region recomputes what it saved, and only once.
    if maker is None or maker.saved_tensors_hooked or not node_will_run(maker):
        return []
    readings = sorted((id(reading), i) for reading, i in mail)
    older_readings = sorted((id(reading), i + 1) for reading, i in maker.mail.get(pass_id, []))
    return [(maker, maker.saved_tensors[0])] if older_readings == readings and any(maker.needs_input_grad[5:]) else []


def _differentiable_backward(
    ctx: Any, saved: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of all sources at once by autograd through the reference, for create_graph=True."""
    fresh, queries, gain, _, _, *rest = saved
    makerless_sources = iter(rest[ctx.n_saved :])
    older = [next(makerless_sources) if m is None else saved_once(m, OP)[0] for m in ctx.makers]
    needs_add, *needs = ctx.needs_input_grad[5:]

    def reference(queries: Tensor, gain: Tensor | None, *sources: Tensor) -> tuple[Tensor, ...]:
        outs, _ = depth_attention_reference(queries[ctx.row : ctx.row + ctx.ways], sources, ctx.eps[0])
        if gain is not None:
            outs = tuple(rms_normalize(o, ctx.eps[1]) * k for o, k in zip(outs, gain, strict=True))
        return (*(o.to(fresh.dtype) for o in outs), sources[-1])

    filled_dy = [torch.zeros_like(fresh) if g is None else g for g in grads]
    needed = (*ctx.needs_input_grad[3:5], *needs[:-1], needs_add or needs[-1])
    dqueries, dgain, *dv = reference_gradients(reference, (queries, gain, *older, fresh), needed, filled_dy)
    return (None, None, None, dqueries, dgain, dv[-1] if needs_add else None, *dv)
