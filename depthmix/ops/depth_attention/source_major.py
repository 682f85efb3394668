"""Depth attention's backward in the order of the sources, not of the reads: one read per (site, source) pair.

A read's backward gives autograd no gradient for its older sources. It only leaves its own do (and a few numbers per token) with
each of them; PyTorch's engine runs the node that made a source after all of its readers, and that node then reads the source
once, each reader's do once, and writes the source's gradient once, summed in fp32. Every source is made by one node: the read
that saw it first, when it was the newest, and that may have added it up. The queries enter through a node of their own, which
collects their gradients and runs last.

A read of two sources, of which the newest is a sum that only the next read goes on from, has all that its backward needs at hand:
it keeps nothing of its mixtures, and leaves the older source's gradient itself. In a stack of one block all reads but the first do.

What is left with a node is filed under the number of the backward pass that left it, so passes never see each other's.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backward_mail import (
    current_pass_id,
    current_stream,
    post,
    saved_once,
    take_partial_gradient,
    wait_for_stream,
)
from depthmix.ops.depth_attention.ahead import Far, Known, read
from depthmix.ops.depth_attention.reference import depth_attention_reference
from depthmix.ops.precision import rms_normalize, without_autocast
from depthmix.ops.row_gradients import CollectRows, post_row_gradients
from depthmix.ops.torch_internals import node_will_run, saving_is_hooked

OP = "depth_attention"
AT_ONCE = 2  # ways of a read, at most, that share one pass over the newest source for its gradient
FEWEST_READERS = 2  # for which it pays to leave a source's gradient unfinished and take it up again


def is_pair(n: int, ways: int, lasts: bool) -> bool:
    """Whether a read of n sources has both gradients at once: of a newest one that lasts, it would wait for other readers."""
    return n == 2 and ways <= AT_ONCE and not lasts


class Reading(NamedTuple):
    """What a read leaves with its older sources."""

    do: list[Tensor]  # of each way, like a source
    s: Tensor  # logits [W, n, N], of the sources after those that `far` holds
    far: list[Tensor]  # logits [W, N] of each of these
    n: int  # sources that were read
    ld: list[Tensor]  # log-sum-exp and δ of each way: [2, N]
    u: Tensor  # [W, D]
    row: int  # of u's first row among all queries
    queries: Any  # the node that collects du
    stream: torch.cuda.Stream | None  # on which all this was computed

    def wait_for_stream(self) -> "Reading":
        """The same, once the current stream may use it."""
        wait_for_stream(self.stream, *self.do, self.s, *self.far, *self.ld, self.u)
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
    far: Far | Known | None = None,
    lasts: bool = True,
) -> tuple[list[Tensor], Tensor]:
    """Read with kernels: the results of queries[row : row + ways] and the newest source, sources[-1] (+ add).

    queries: [R, D] fp32, key gains included. gain: [W, D] of the norm that follows, or None; without gradients also a row for
    each way. A stack of reads is
    differentiated in source-major order if `queries` came through `collect_rows`, the sources are newest sources that
    earlier reads returned, and nothing is being compiled. far: what `far_sources` or `known_sources` found for this row.
    lasts: later reads see this newest source as it is, too. The caller has checked that the kernels can do it.
    """
    queries, sources = queries.contiguous(), [v.contiguous() for v in sources]
    add = None if add is None else add.contiguous()
    if isinstance(gain, Tensor):
        gain = gain.contiguous()
    given = (queries, add, *sources, *([gain] if isinstance(gain, Tensor) else gain or ()))
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    if wanted and not torch.compiler.is_compiling():
        *y, fresh = ReadSources.apply((row, ways, lasts), (eps, out_eps), far, queries, gain, add, *sources)
        return y, fresh
    (y, _, _, _, fresh), _ = read(queries, row, ways, sources, far, add, gain, eps, out_eps, int(wanted))
    return y, sources[-1] if add is None else fresh


class ReadSources(torch.autograd.Function):
    """W results and the newest source, as later reads must pass it on to be read in source-major order."""

    @staticmethod
    def forward(
        ctx: Any,
        place: tuple[int, int, bool],
        eps: tuple[float, float],
        far: Far | Known | None,
        queries: Tensor,
        gain: Tensor | None,
        add: Tensor | None,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        row, ways, lasts = place
        ctx.pair = is_pair(len(sources), ways, lasts)
        if ctx.pair:
            ctx.far, kept = [], sources[:1]
            y, s, lse, fresh = torch.ops.depthmix.depth_read_pair(queries[row : row + ways], *sources, add, gain, *eps)
        else:
            (y, o, s, lse, fresh), ctx.far = read(queries, row, ways, sources, far, add, gain, *eps, 2)
            kept = o or y
        fresh = sources[-1].detach() if add is None else fresh
        ctx.row, ctx.ways, ctx.eps, ctx.mail, ctx.partial_gradient, ctx.n = row, ways, eps, {}, {}, len(sources)
        ctx.summand_mail = {}  # gradients from reads of two sources
        ctx.hooked = saving_is_hooked()
        ctx.queries = queries.grad_fn if isinstance(queries.grad_fn, CollectRows._backward_cls) else None
        later = ctx.queries is not None or not queries.requires_grad  # du may come after this read's own backward
        ctx.makers = [_maker(v) if later else None for v in sources[:-1]]
        local = [v for v, maker in zip(sources, ctx.makers, strict=False) if maker is None]
        ctx.kept = len(kept)
        ctx.save_for_backward(fresh, queries, gain, s, lse, *kept, *local)
        ctx.set_materialize_grads(False)
        return (*y, fresh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = saved_once(ctx, OP)
        with without_autocast(saved[0]):
            if torch.is_grad_enabled():
                return _differentiable_backward(ctx, saved, grads)
            return _backward(ctx, saved, grads)


def _maker(source: Tensor) -> Any:
    """The node that made a source and will collect its gradient; None if it is not one of ours."""
    node = source.grad_fn
    ours = isinstance(node, ReadSources._backward_cls) and source.output_nr == node.ways
    return node if ours else None


def _backward(ctx: Any, saved: Sequence[Tensor], grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    from depthmix.ops.depth_attention.kernels.layer_backward import layer_backward
    from depthmix.ops.depth_attention.kernels.pair import add_up_rows
    from depthmix.ops.depth_attention.kernels.read import Newest, read_backward

    fresh, queries, gain, s, lse, *rest = saved
    o, local_sources = rest[: ctx.kept], iter(rest[ctx.kept :])
    *dy, g = grads
    g = None if g is None else g.contiguous()
    pass_id, eps = current_pass_id(OP), ctx.eps[0]
    mail: list[tuple[Reading, int]] = ctx.mail.pop(pass_id, [])  # by the later readers of the newest source
    for reading, _ in mail:
        reading.wait_for_stream()
    summand_mail = _in_order(ctx.summand_mail.pop(pass_id, []))
    if len(summand_mail) == 1 and g is None:
        g = summand_mail[0]
    elif summand_mail:
        ctx.partial_gradient[pass_id] = (
            add_up_rows(summand_mail, take_partial_gradient(ctx, pass_id)),
            current_stream(fresh),
        )
    needs_add, *needs = ctx.needs_input_grad[5:]
    need_fresh = needs_add or needs[-1]
    dgain, dqueries = None, None
    dv: list[Tensor | None] = [None] * ctx.n
    alone = ctx.n > 1 and not any(ctx.makers) and not ctx.far and not mail and pass_id not in ctx.partial_gradient

    if ctx.pair and any(d is not None for d in dy):
        dv[0], g, du, dgain = _gradients_of_pair(ctx, saved, dy, g, bool(mail), need_fresh, pass_id)
        dqueries = _give_du(ctx, queries, du, pass_id)
    elif alone and any(d is not None for d in dy):  # not one of a stack: nothing is to be gained from another order
        given = [torch.zeros_like(fresh) if d is None else d.contiguous() for d in dy]
        u, sources = queries[ctx.row : ctx.row + ctx.ways], [*local_sources, fresh]
        found, du, dgain = layer_backward(given, u, gain, s, lse[:, 0].contiguous(), sources, g, *ctx.eps)
        dv = [d if need else None for d, need in zip(found, [*needs[:-1], need_fresh], strict=True)]
        dgain, g = None if gain is None else dgain, dv[-1]
        dqueries = _give_du(ctx, queries, du, pass_id)
    elif any(d is not None for d in dy):
        makers = [(i, m) for i, m in enumerate(ctx.makers) if m is not None and node_will_run(m)]
        local = [(i, next(local_sources)) for i, m in enumerate(ctx.makers) if m is None]
        # Few ways and no reader left: the newest source's gradient is computed here, while its reader's is at hand.
        at_once = ctx.ways <= AT_ONCE and not mail
        newest = Newest(fresh, g, need_fresh, take_partial_gradient(ctx, pass_id)) if at_once else None
        u = queries[ctx.row : ctx.row + ctx.ways]
        store = bool(makers or local or not at_once)
        given = [torch.zeros_like(fresh) if d is None else d.contiguous() for d in dy]
        back = []
        step = ctx.ways if ctx.ways <= AT_ONCE else 1
        for w in range(0, ctx.ways, step):
            own, k = slice(w, w + step), None if gain is None else gain[w : w + step]
            back.append(read_backward(given[own], o[own], u[own], k, s[own], lse[own], newest, eps, store, ctx.n > 1))
        dgain = None if gain is None else back[0].dgain if len(back) == 1 else torch.cat([x.dgain for x in back])
        do, ld = [d for x in back for d in x.do], [t for x in back for t in x.ld]
        reading = Reading(do, s, ctx.far, ctx.n, ld, u, ctx.row, ctx.queries, current_stream(u))
        for i, maker in makers:
            post(maker, pass_id, (reading, i))
        parts = []  # of du
        for i, v in local:
            dv[i], du = _from_own_read(v, None, reading, i, eps, needs[i])
            parts.append(du)
        if at_once:
            g = back[0].dv
            parts.append(back[0].du)
        elif ctx.queries is None and not mail and pass_id not in ctx.partial_gradient:
            g, du = _from_own_read(fresh, g, reading, ctx.n - 1, eps, need_fresh)
            parts.append(du)
        else:
            mail.append((reading, ctx.n - 1))
        if parts:
            dqueries = _give_du(ctx, queries, parts[0] if len(parts) == 1 else torch.stack(parts).sum(0), pass_id)
    if mail or pass_id in ctx.partial_gradient:
        g = _gradient_of_source(ctx, fresh, g, mail, need_fresh, pass_id)
    dv[-1] = g
    return (None, None, None, dqueries, dgain, g if needs_add else None, *dv)


def _gradients_of_pair(
    ctx: Any,
    saved: Sequence[Tensor],
    dy: Sequence[Tensor | None],
    g: Tensor | None,
    goes_on: bool,
    need_fresh: bool,
    pass_id: int,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """Of both sources, du and dgain. goes_on: the newest one has other readers, which take its gradient up from here."""
    from depthmix.ops.depth_attention.kernels.pair import pair_backward

    fresh, queries, gain, s, lse, old, *_ = saved
    maker = ctx.makers[0]
    need_old = ctx.needs_input_grad[6] if maker is None else node_will_run(maker)
    given = [torch.zeros_like(fresh) if d is None else d.contiguous() for d in dy]
    u, partial_gradient = queries[ctx.row : ctx.row + ctx.ways], take_partial_gradient(ctx, pass_id)
    more = None if goes_on else g
    found = pair_backward(
        given,
        old,
        fresh,
        u,
        gain,
        s,
        lse,
        more,
        partial_gradient,
        ctx.eps[0],
        (need_old, need_fresh),
        whole=not goes_on,
    )
    if goes_on and found.db is not None:
        ctx.partial_gradient[pass_id] = found.db, current_stream(fresh)
    if maker is not None and found.da is not None:
        post(maker, pass_id, (ctx.row, found.da, current_stream(fresh)), "summand_mail")
    return (
        found.da if maker is None else None,
        g if goes_on else found.db,
        found.du,
        None if gain is None else found.dgain,
    )


def _in_order(summand_mail: list[tuple[int, Tensor, Any]]) -> list[Tensor]:
    """What reads of two sources left, by their rows, once the current stream may use it."""
    for _, da, stream in summand_mail:
        wait_for_stream(stream, da)
    return [da for _, da, _ in sorted(summand_mail, key=lambda item: item[0])]


def _give_du(ctx: Any, queries: Tensor, du: Tensor, pass_id: int) -> Tensor | None:
    """Leave a read's du with the node that collects it; where there is none, the gradient of the queries."""
    if ctx.queries is None:
        return _in_rows(du, queries, ctx.row) if ctx.needs_input_grad[3] else None
    if node_will_run(ctx.queries):
        post_row_gradients(ctx.queries, pass_id, range(ctx.row, ctx.row + ctx.ways), du.unsqueeze(0))
    return None


def _from_own_read(
    v: Tensor, g: Tensor | None, reading: Reading, i: int, eps: float, need_dv: bool
) -> tuple[Tensor | None, Tensor]:
    """The gradient of a read's source i that leaves through this read, and its part of du."""
    from depthmix.ops.depth_attention.kernels.source_backward import Source, source_backward

    source = Source(v, g, need_dv=need_dv)
    (dv,), du = source_backward([source], _readers(reading, i), eps, need_du=True)
    assert du is not None
    return dv, du.sum(0)


def _readers(reading: Reading, *sources: int) -> list[Any]:
    """The ways of a read, as these of its sources see them."""
    from depthmix.ops.depth_attention.kernels.source_backward import Reader

    before = len(reading.far)
    s = [reading.far[i] if i < before else reading.s[:, i - before] for i in sources]
    ways = zip(reading.do, zip(*s, strict=True), reading.ld, reading.u, strict=True)
    return [Reader(*way, several=reading.n > 1) for way in ways]


def _in_rows(du: Tensor, queries: Tensor, row: int) -> Tensor:
    if du.shape == queries.shape:
        return du
    out = torch.zeros_like(queries)
    out[row : row + len(du)] = du
    return out


def _gradient_of_source(
    ctx: Any, v: Tensor, g: Tensor | None, mail: list[tuple[Reading, int]], need_dv: bool, pass_id: int
) -> Tensor | None:
    from depthmix.ops.depth_attention.kernels.source_backward import Source, source_backward

    by_queries: dict[int, list[tuple[Reading, int]]] = {}
    for item in mail:
        by_queries.setdefault(id(item[0].queries), []).append(item)
    partial_gradient = take_partial_gradient(ctx, pass_id)
    for items in by_queries.values():  # one, unless two stacks read the same source
        items.sort(key=lambda item: item[0].row)
        queries = items[0][0].queries
        need_du = queries is not None and node_will_run(queries)
        if not (need_du or need_dv):
            continue
        older = _older_of_its_pair(ctx, mail, pass_id) if need_dv and len(by_queries) == 1 else []
        sources = [Source(x, None, take_partial_gradient(m, pass_id), whole=False) for m, x in older]
        sources.append(Source(v, g, partial_gradient, need_dv=need_dv))
        readers = [reader for reading, i in items for reader in _readers(reading, *range(i - len(older), i + 1))]
        found, du = source_backward(sources, readers, ctx.eps[0], need_du)
        for (maker, _), d in zip(older, found, strict=False):
            maker.partial_gradient[pass_id] = d, current_stream(v)
            maker.mail[pass_id].clear()
        g, partial_gradient = (found[-1] if need_dv else g), None
        if du is not None:
            rows = [reading.row + w for reading, _ in items for w in range(len(reading.do))]
            post_row_gradients(queries, pass_id, rows, du)
    if partial_gradient is not None and need_dv:  # no reader was left
        g = (partial_gradient if g is None else partial_gradient + g).to(v.dtype)
    return g


def _older_of_its_pair(ctx: Any, mail: list[tuple[Reading, int]], pass_id: int) -> list[tuple[Any, Tensor]]:
    """The source before this one, if its readers so far are the same, so that each of them is read once for both."""
    from depthmix.ops.depth_attention.kernels.source_backward import PAIR

    if ctx.n % PAIR or sum(len(reading.do) for reading, _ in mail) < FEWEST_READERS:
        return []
    maker = ctx.makers[-1]
    # A maker in a checkpointed region recomputes what it saved, and only once.
    if maker is None or maker.hooked or not node_will_run(maker):
        return []
    mine = sorted((id(reading), i) for reading, i in mail)
    theirs = sorted((id(reading), i + 1) for reading, i in maker.mail.get(pass_id, []))
    return [(maker, maker.saved_tensors[0])] if theirs == mine and any(maker.needs_input_grad[5:]) else []


def _differentiable_backward(
    ctx: Any, saved: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Under create_graph=True: gradients of all sources at once, by autograd through the reference."""
    fresh, queries, gain, _, _, *rest = saved
    local = iter(rest[ctx.kept :])
    olds = [next(local) if m is None else saved_once(m, OP)[0] for m in ctx.makers]
    needs_add, *needs = ctx.needs_input_grad[5:]

    def reference(queries: Tensor, gain: Tensor | None, *sources: Tensor) -> tuple[Tensor, ...]:
        outs, _ = depth_attention_reference(queries[ctx.row : ctx.row + ctx.ways], sources, ctx.eps[0])
        if gain is not None:
            outs = tuple(rms_normalize(o, ctx.eps[1]) * k for o, k in zip(outs, gain, strict=True))
        return (*(o.to(fresh.dtype) for o in outs), sources[-1])

    given = [torch.zeros_like(fresh) if g is None else g for g in grads]
    needed = (*ctx.needs_input_grad[3:5], *needs[:-1], needs_add or needs[-1])
    dqueries, dgain, *dv = reference_gradients(reference, (queries, gain, *olds, fresh), needed, given)
    return (None, None, None, dqueries, dgain, dv[-1] if needs_add else None, *dv)
