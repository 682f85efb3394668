"""Weighted sums over depth with kernels, differentiated in the order of the sources, not of the reads.

    out_k = Σ_i weight[k, i] ⊙ v_i;    weight = static + dynamic, clamped as `relu` says;    dynamic = given, or the scores w[k, i] · v_i
    dv_i  = Σ over all reads of v_i, and their ways, of  weight[k, i] ⊙ do_k + ds[k, i] w[k, i];    dw[k, i] = Σ_tokens ds[k, i] v_i

A read's backward gives autograd no gradient for its sources. It only leaves its do and ds with each of them; PyTorch's engine
runs the node that made a source after all of its readers, and that node then reads each reader's do once and writes the
gradient once, summed in fp32. Neighbours that share readers are summed together, and each do is read once for both of them.
The rows w of all reads come in one table, through a node of its own that runs last and collects their gradients.
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
from depthmix.ops.depth_sum.reference import depth_scores_reference, depth_sum_reference
from depthmix.ops.precision import rms_normalize, without_autocast
from depthmix.ops.row_gradients import post_row_gradients
from depthmix.ops.torch_internals import node_will_run

OP = "depth_sum"
UNFINISHED = 8  # bytes that a number of an unfinished gradient costs, written and read again
ADDED, CLAMPED, SUM_CLAMPED = 0, 1, 2  # relu: static + dynamic, static + max(dynamic, 0), max(static + dynamic, 0)


class Weights(NamedTuple):
    """What the ways of a read weigh their sources with."""

    static: Tensor | None = None  # [W, n, D] or [W, n, 1], fp32
    dynamic: Tensor | None = None  # [..., W, n], fp32
    scores: Sequence[Tensor] = ()  # in its place: [N, W] of each source, which `make_source` gave
    table: Tensor | None = None  # [R, D], fp32, from `collect_rows`: its rows made the scores,
    rows: Sequence[Sequence[int]] = ()  # these, for each source one of each way
    relu: int = ADDED
    plain: bool = False  # static is ones, and nothing else counts


def plain_sum(like: Tensor, ways: int, n: int = 1) -> Weights:
    """Weights that are all one."""
    return Weights(static=torch.ones(ways, n, 1, device=like.device), plain=True)


class Result(NamedTuple):
    """What a read gives."""

    y: tuple[Tensor, ...]  # the ways, normed if there is a norm
    raw: Tensor | None  # the way asked for before its norm
    fresh: Tensor | None  # the newest source with `add`, as later reads must pass it on
    passed: Tensor | None = None  # the newest source as it is, if that was asked for: its gradient is then added here


def make_source(v: Tensor, add: Tensor | None = None, rows: Any = None) -> tuple[Tensor, Tensor | None]:
    """The source v (+ add) for reads that are differentiated in source order, and its scores [N, R] with rows that `halves` gave."""
    if torch.is_grad_enabled() and (v.requires_grad or (add is not None and add.requires_grad)):
        found = MakeSource.apply(rows, v, add)
        return found if rows is not None else (found, None)
    fresh, scores = _add_and_score(v, add, rows, across=not torch.is_grad_enabled())
    return v if add is None and v.is_contiguous() else fresh, scores


def halves(table: Tensor, like: Tensor) -> Any:
    """A table's rows as the scores of sources like this one want them: two tables in the sources' precision."""
    from depthmix.ops.depth_sum.kernels.scores import Halves

    return Halves.of(table.detach(), like.dtype)


def _add_and_score(v: Tensor, add: Tensor | None, rows: Any, across: bool = False) -> tuple[Tensor, Tensor | None]:
    v = v.contiguous()
    if rows is None:
        return (v if add is None else v + add), None
    from depthmix.ops.depth_sum.kernels.scores import add_and_score

    fresh, scores = add_and_score(v, None if add is None else add.contiguous(), rows, across=across)
    return v if add is None else fresh, scores


def read_sums(
    sources: Sequence[Tensor],
    weights: Weights,
    add: Tensor | None = None,
    gain: Tensor | Sequence[Tensor] | None = None,
    eps: float = 0.0,
    raw: int | None = None,
    passes: bool = False,
) -> Result:
    """Read with kernels. The caller has checked that they can do it.

    add: the newest source is sources[-1] + add; only without dynamic weights. gain: [G, D], of the norms of the first G ways; without
    gradients also a row for each.
    raw: a way that is wanted as it is before its norm too; ways without a norm beside others with one have no other result.
    passes: for a plain sum whose newest source goes on elsewhere: autograd would add up its two gradients in a pass of its own.
    """
    plan = Plan(weights._replace(static=None, dynamic=None, table=None), eps, None if gain is None else raw, passes)
    rows = None if gain is None or isinstance(gain, Tensor) else [g.contiguous() for g in gain]
    given: tuple[Any, ...] = (weights.static, weights.table, weights.dynamic, None if rows else gain, add, *sources)
    given = tuple(None if t is None else t.contiguous() for t in given)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        outs = list(ReadSums.apply(plan, *given))
    else:
        outs = [*_outputs(_read(plan, (*given[:3], rows or given[3], *given[4:]), keep=False)), *given[-1:] * passes]
    passed = outs.pop() if passes else None
    fresh = None if add is None else outs.pop()
    rough = None if plan.raw is None else outs.pop()
    return Result(tuple(outs), outs[raw] if gain is None and raw is not None else rough, fresh, passed)


class Plan(NamedTuple):
    """What a read is given besides tensors that have gradients."""

    weights: Weights  # without static, dynamic and table, which have
    eps: float = 0.0
    raw: int | None = None
    passes: bool = False


def _read(plan: Plan, given: Sequence[Any], keep: bool) -> Any:
    from depthmix.ops.depth_sum.kernels.read import read

    static, _, dynamic, gain, add, *sources = given
    seen = by_source(dynamic, plan.weights.scores)
    return read(sources, add, static, seen, plan.weights.relu, gain, plan.eps, plan.raw, keep, plan.weights.plain)


def by_source(dynamic: Tensor | None, scores: Sequence[Tensor] = ()) -> list[Tensor] | None:
    """Dynamic weights [N, W] of each source."""
    if dynamic is None:
        return list(scores) or None
    return list(dynamic.reshape(-1, *dynamic.shape[-2:]).unbind(-1))


def _outputs(sums: Any) -> list[Tensor]:
    return [*sums.y, *(t for t in (sums.raw, sums.fresh) if t is not None)]


Views = list[Sequence[Tensor]] | None  # for each source one of each way


class Reading(NamedTuple):
    """What a read leaves with its sources."""

    do: list[Tensor]  # of each way, like a source
    static: Views  # [D] or [1]
    dynamic: Views  # [N]
    relu: int
    ds: Views = None  # [N], where the scores depend on the sources
    w: Views = None  # [D]
    rows: Sequence[Sequence[int]] = ()  # of w in the table, for each source
    makers: Sequence[Any] = ()  # of the sources
    collector: Any = None  # the node that collects dw, if it will
    stream: torch.cuda.Stream | None = None  # on which all this was computed

    def wait_for_stream(self) -> "Reading":
        """The same, once the current stream may use it."""
        if self.stream is not None:
            views = [
                t for x in (self.static, self.dynamic, self.ds, self.w) for of_source in x or () for t in of_source
            ]
            wait_for_stream(self.stream, *self.do, *views)
        return self

    def seen_by(self, sources: Sequence[int | None]) -> list[Any]:
        """The ways of this read as these of its sources see them; None: a source that it does not read."""
        from depthmix.ops.depth_sum.kernels.source_backward import Reader

        def of(x: Views, k: int) -> list[Tensor | None] | None:
            return None if x is None else [None if i is None else x[i][k] for i in sources]

        static, dynamic, ds, w = self.static, self.dynamic, self.ds, self.w
        ways = enumerate(self.do)
        return [Reader(do, of(static, k), of(dynamic, k), self.relu, of(ds, k), of(w, k)) for k, do in ways]

    def scored_rows(self, i: int) -> "ScoredRows":
        ds, rows = ((), ()) if self.ds is None or self.collector is None else (self.ds[i], self.rows[i])
        return ScoredRows(ds, rows, self.collector, self.stream)


def views(x: Tensor | None) -> Views:
    """What is laid out by way and source, [W, n, ...], as one tensor for each."""
    return None if x is None else [of_source.unbind(0) for of_source in x.unbind(1)]


def views_by_token(x: Sequence[Tensor] | None) -> Views:
    """The same of [N, W] for each source."""
    return None if x is None else [of_source.unbind(1) for of_source in x]


class ScoredRows(NamedTuple):
    """What a read leaves with a source for dw. Its do may be gone by then."""

    ds: Sequence[Tensor]  # [N], of each way
    rows: Sequence[int]  # none if there is nobody to collect dw
    collector: Any
    stream: torch.cuda.Stream | None


class MakeSource(torch.autograd.Function):
    """v (+ add), and its scores; the backward collects what its readers left."""

    @staticmethod
    def forward(ctx: Any, rows: Any, v: Tensor, add: Tensor | None) -> Any:
        ctx.mail, ctx.partial_gradient, ctx.score_mail, ctx.fresh_nr, ctx.dtype, ctx.place = (
            {},
            {},
            {},
            0,
            v.dtype,
            None,
        )
        ctx.set_materialize_grads(False)
        fresh, scores = _add_and_score(v, add, rows)
        fresh = v.detach() if fresh is v else fresh
        if scores is None:
            return fresh
        ctx.save_for_backward(fresh)
        ctx.mark_non_differentiable(scores)
        return fresh, scores

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[None, Tensor | None, Tensor | None]:
        if not torch.is_grad_enabled():
            pass_id = current_pass_id(OP)
            mail = ctx.mail.pop(pass_id, [])
            score_mail = [*ctx.score_mail.pop(pass_id, []), *(reading.scored_rows(i) for reading, i in mail)]
            if any(s.rows for s in score_mail):
                _post_row_gradients(saved_once(ctx, OP)[0], score_mail, pass_id)
            g = _gradient_of_source(ctx, g, mail, pass_id)
        _, needs_v, needs_add = ctx.needs_input_grad
        return None, g if needs_v else None, g if needs_add else None


class ReadSums(torch.autograd.Function):
    """The ways of a read, the raw one, and with `add` the newest source."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *given: Tensor | None) -> tuple[Tensor, ...]:
        static, table, dynamic, gain, add, *sources = given
        sums = _read(plan, given, keep=True)
        outs = _outputs(sums)
        ctx.n, ctx.kept, ctx.mixtures = len(sources), len(sums.kept), sums.mixtures
        ctx.mail, ctx.partial_gradient, ctx.score_mail, ctx.place = {}, {}, {}, None
        ctx.dtype = sources[-1].dtype  # type: ignore[union-attr]
        ctx.fresh_nr = None if add is None else len(outs) - 1
        ctx.makers = [_maker(v) for v in sources]
        _count(ctx.makers if add is None else [*ctx.makers[:-1], ctx])
        ctx.collector = None if table is None else table.grad_fn
        if add is not None:
            ctx.makers[-1] = None  # this node itself, but with a reference to it would never go away
            if not (add.requires_grad or sources[-1].requires_grad):  # type: ignore[union-attr]
                ctx.mark_non_differentiable(sums.fresh)
            sources[-1] = sums.fresh
        # The backward of a plain sum through its norm needs what it gave, and not what went into it.
        alone = plan.weights.plain and len(sums.y) == 1 and add is None and not plan.passes
        ctx.whole = alone and sums.raw is not None and sums.kept[0] is sums.raw
        sources = [sums.raw] if ctx.whole else sources
        ctx.save_for_backward(static, table, dynamic, gain, sums.rms, *sums.kept, *sources, *plan.weights.scores)
        ctx.set_materialize_grads(False)
        ctx.plan = plan._replace(weights=plan.weights._replace(scores=()))
        return (*outs, *given[-1:] * plan.passes)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = saved_once(ctx, OP)
        rest = iter(saved[4:])
        kept = next(rest), [next(rest) for _ in range(ctx.kept)], ctx.mixtures
        sources, scores = [next(rest) for _ in range(1 if ctx.whole else ctx.n)], list(rest)
        with without_autocast(sources[-1]):
            if torch.is_grad_enabled():
                others = range(ctx.n - len(sources))  # the same sum, and what it depends on is what the first does
                sources += [torch.zeros_like(sources[0], requires_grad=True) for _ in others]
                return _differentiable_backward(ctx, saved[:4], sources, grads)
            return _backward(ctx, saved[:4], kept, sources * (ctx.n // len(sources)), scores, grads)


def _maker(source: Any) -> Any:
    """The node that made a source and will collect its gradient; None if it is not one of ours."""
    node = source.grad_fn
    ours = isinstance(node, (MakeSource._backward_cls, ReadSums._backward_cls)) and source.output_nr == node.fresh_nr
    return node if ours else None


def _backward(
    ctx: Any, given: Sequence[Any], kept: tuple[Any, Any, int], sources: list[Tensor], scores: list[Tensor], grads: Any
) -> tuple[Tensor | None, ...]:
    static, table, dynamic, gain = given
    need_static, _, need_dynamic, _, need_add, *needs = ctx.needs_input_grad[1:]
    dy = [None if g is None else g.contiguous() for g in grads]
    passed = dy.pop() if ctx.plan.passes else None
    g = None if ctx.fresh_nr is None else dy.pop()
    draw = None if ctx.plan.raw is None else dy.pop()
    need_fresh = ctx.fresh_nr is not None and (need_add or needs[-1])
    pass_id = current_pass_id(OP)
    mail: list[tuple[Reading, int]] = ctx.mail.pop(pass_id, []) if need_fresh else []
    dstatic = ddynamic = dgain = None
    dv: list[Tensor | None] = [None] * ctx.n
    if draw is not None or any(d is not None for d in dy):
        collector = ctx.collector if ctx.collector is not None and node_will_run(ctx.collector) else None
        need_ds = need_dynamic or (table is not None and (collector is not None or any(needs)))
        seen = by_source(dynamic, scores)
        need = need_static, need_ds, table is not None
        found = differentiate(ctx.plan, dy, draw, kept, gain, sources, static, seen, need, passed)
        dgain, dstatic = found.dgain, found.dstatic
        ddynamic = found.ddynamic.view(dynamic.shape) if need_dynamic else None
        differentiate_scores = table is not None and need_ds
        w = (
            {row: table[row] for of_source in ctx.plan.weights.rows for row in of_source}
            if differentiate_scores
            else {}
        )
        reading = Reading(
            found.do, views(static), views_by_token(seen), ctx.plan.weights.relu,
            views_by_token(found.ddynamic.unbind(2)) if differentiate_scores else None,
            [[w[row] for row in of_source] for of_source in ctx.plan.weights.rows] if differentiate_scores else None,
            ctx.plan.weights.rows, ctx.makers, collector, current_stream(sources[-1]),
        )  # fmt: skip
        alone = []
        for i, maker in enumerate(ctx.makers):
            if need_fresh and i == ctx.n - 1:
                mail.append((reading, i))
            elif maker is not None and node_will_run(maker):
                post(maker, pass_id, (reading, i))
            else:
                alone += [i] * needs[i] * (maker is None)
                if collector is not None:
                    _post_row_gradients(sources[i], [reading.scored_rows(i)], pass_id)
        plain = ctx.plan.weights.plain and len(found.do) == 1  # each has the whole gradient
        for i, d in zip(alone, found.do * len(alone) if plain else gradients(reading, alone), strict=True):
            dv[i] = d if passed is None or i < ctx.n - 1 else found.through
    if passed is not None and needs[-1] and dv[-1] is None:
        dv[-1] = passed
    if need_fresh:
        dv[-1] = _gradient_of_source(ctx, g, mail, pass_id)
    return None, dstatic, None, ddynamic, dgain, dv[-1] if need_add else None, *dv


def differentiate(
    plan: Plan, dy: Sequence[Tensor | None], draw: Tensor | None, kept: tuple[Any, Any, int] | None, gain: Tensor | None,
    sources: list[Tensor], static: Tensor | None, dynamic: list[Tensor] | None, need: tuple[bool, ...],
    passed: Tensor | None = None,
) -> Any:  # fmt: skip
    """The gradients of a read's mixtures and of its parameters; kept: what the norm saved."""
    from depthmix.ops.depth_sum.kernels.read_backward import Need, read_backward

    rms, rows, mixtures = kept or (torch.empty(0, dtype=torch.float32, device=sources[0].device), [], 0)
    filled = [torch.zeros_like(sources[-1]) if d is None else d for d in dy]
    return read_backward(
        filled, draw, plan.raw, rows, rms, gain, sources, static, dynamic, plan.weights.relu, Need(*need), mixtures, passed
    )  # fmt: skip


def gradients(reading: Reading, sources: list[int]) -> list[Tensor]:
    """The gradients of some of a read's sources that leave through this read."""
    from depthmix.ops.depth_sum.kernels.source_backward import Target, source_backward

    found: list[Tensor] = []
    for start in range(0, len(sources), 2):  # two at once: four are no faster than two times two
        some = sources[start : start + 2]
        found += source_backward([Target(reading.do[0], None, None, True) for _ in some], reading.seen_by(some))
    return found


def _post_row_gradients(v: Tensor, scored: list[ScoredRows], pass_id: int) -> None:
    """Leave the gradients of the rows that scored a source with the node that collects them: v is read once for all of them."""
    from depthmix.ops.depth_sum.kernels.scores import score_backward

    by_collector: dict[Any, list[tuple[int, Tensor]]] = {}  # one, unless two stacks read the same source
    for ds, rows, collector, stream in scored:
        if rows:
            wait_for_stream(stream, *ds)
            by_collector.setdefault(collector, []).extend(zip(rows, ds, strict=True))
    for collector, columns in by_collector.items():
        columns.sort(key=lambda column: column[0])
        post_row_gradients(
            collector, pass_id, [row for row, _ in columns], score_backward(v, [ds for _, ds in columns])
        )


def _gradient_of_source(node: Any, g: Tensor | None, mail: list[tuple[Reading, int]], pass_id: int) -> Tensor | None:
    """Of the source that a node made: g, which autograd brought, and what its readers left."""
    from depthmix.ops.depth_sum.kernels.source_backward import Target, source_backward

    partial_gradient = take_partial_gradient(node, pass_id)
    if not mail:
        return (
            g if partial_gradient is None else (partial_gradient if g is None else partial_gradient + g).to(node.dtype)
        )
    like = mail[0][0].do[0]
    target = Target(like, None if g is None else g.contiguous(), partial_gradient, True)
    older = _older_neighbour(node, mail, pass_id)
    theirs = {} if older is None else {id(reading): (reading, i) for reading, i in older.mail[pass_id]}
    readers = []
    for reading, i in mail:
        also = [] if older is None else [theirs.pop(id(reading), (None, None))[1]]
        readers += reading.wait_for_stream().seen_by([*also, i])
    for reading, i in theirs.values():  # those that read the older one alone
        readers += reading.wait_for_stream().seen_by([i, None])
    if older is None:
        return source_backward([target], readers)[0]
    unfinished, whole = source_backward(
        [Target(like, None, take_partial_gradient(older, pass_id), False), target], readers
    )
    older.partial_gradient[pass_id] = unfinished, current_stream(like)
    older.score_mail.setdefault(pass_id, []).extend(reading.scored_rows(i) for reading, i in older.mail[pass_id])
    older.mail[pass_id].clear()
    return whole


def _older_neighbour(node: Any, mail: list[tuple[Reading, int]], pass_id: int) -> Any:
    """The maker of the source before this one, if it pays to form what is known of its gradient in the same pass.

    Every second source looks for one, counted from the oldest, so that this has a partner: it has the most readers.
    """
    reading, i = mail[-1]  # the oldest: with a window, later ones may see a sum in the older one's place
    maker = reading.makers[i - 1] if node.place % 2 and i > 0 else None
    if maker is None or maker is node or not node_will_run(maker):
        return None
    mine, theirs = [{id(reading) for reading, _ in found} for found in (mail, maker.mail.get(pass_id, []))]
    if len(mine) < len(mail) or len(theirs) < len(
        maker.mail.get(pass_id, [])
    ):  # a source that is read twice in one read
        return None
    shared = sum(len(reading.do) for reading, _ in mail if id(reading) in theirs)
    return maker if shared * reading.do[0].element_size() >= UNFINISHED else None


def _count(makers: Sequence[Any]) -> None:
    """Give each source of a read its place, unless an earlier read has: one more than the place of the source before it."""
    place = -1
    for maker in makers:
        if maker is not None and maker.place is None:
            maker.place = place + 1
        place = place + 1 if maker is None else maker.place


def _differentiable_backward(
    ctx: Any, given: Sequence[Any], sources: list[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Under create_graph=True: all gradients at once, by autograd through the reference."""
    plan, raw, rows, relu = ctx.plan, ctx.plan.raw, ctx.plan.weights.rows, ctx.plan.weights.relu

    def reference(static: Any, table: Any, dynamic: Any, gain: Any, *sources: Tensor) -> tuple[Tensor, ...]:
        if table is not None:
            w = torch.stack([torch.stack([table[row] for row in of_source]) for of_source in rows], dim=1)
            dynamic = depth_scores_reference(sources, w)
        dynamic = dynamic.clamp(min=0) if relu == CLAMPED else dynamic
        mixed = depth_sum_reference(sources, static, dynamic, relu == SUM_CLAMPED)
        y = mixed if gain is None else [rms_normalize(o, plan.eps) * k for o, k in zip(mixed, gain, strict=False)]
        outs = [*y, *([] if raw is None else [mixed[raw]])]
        return (*(o.to(ctx.dtype) for o in outs), *sources[-1:] * (ctx.fresh_nr is not None or plan.passes))

    full = [torch.zeros_like(sources[-1]) if g is None else g for g in grads]
    *needs, need_add = ctx.needs_input_grad[1:6]
    need_sources = [*ctx.needs_input_grad[6:-1], ctx.needs_input_grad[-1] or need_add]
    found = reference_gradients(reference, (*given, *sources), (*needs, *need_sources), full)
    return None, *found[:4], found[-1] if need_add else None, *found[4:]
