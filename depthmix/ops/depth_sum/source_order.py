"""Weighted sums over depth with kernels, differentiated in source order.

    out_k = Σ_i weight[k, i] ⊙ v_i;    weight = static + dynamic, clamped as `relu` says;    dynamic = given, or the scores w[k, i] · v_i
    dv_i  = Σ over all reads of v_i, and their ways, of  weight[k, i] ⊙ do_k + ds[k, i] w[k, i];    dw[k, i] = Σ_tokens ds[k, i] v_i

A read's backward returns no gradient for its sources. It posts a `Reading` (its do and ds) to the node that made each source.
PyTorch's engine runs that node after all readers of its source. The node then reads each reader's do once and writes the source's
gradient once, summed in fp32. A source is made by a `MakeSource` node, or by the read that added it up (`add`). The rows w of all
reads come from one table, through a collector node that runs last and adds up their gradients.

Example: sources v_0, v_1, v_2 made by nodes M0, M1, M2, and three reads, in the order in which the engine runs their backward:

    forward     M0 makes v_0    read 0 of v_0    M1 makes v_1    read 1 of v_0, v_1    M2 makes v_2    read 2 of v_0, v_1, v_2

    node        reads from memory             posts                                           returns to autograd
    --------    --------------------------    --------------------------------------------    -------------------------
    read 2      dy_2, v_0, v_1, v_2           Reading 2 ──┬──▶ mail of M2                     dstatic, ddynamic, dgain
                (for the weights'                         ├──▶ mail of M1
                gradients)                                └──▶ mail of M0
    M2          do_2 from its mail; v_2       dw of v_2's scores ──▶ collector                dv_2 ─▶ sublayer 1
      ⋮ sublayer 1's backward: dy_1
    read 1      dy_1, v_0, v_1                Reading 1 ──┬──▶ mail of M1                     dstatic, ...
                                                          └──▶ mail of M0
    M1          do_2, do_1 from its mail;     dw of v_1's scores ──▶ collector                dv_1 ─▶ sublayer 0
                v_1                           its part of dv_0, in fp32 ──▶ partial_gradient
                                              of M0, and M0's readings' ds ──▶ its score_mail
      ⋮ sublayer 0's backward: dy_0
    read 0      dy_0, v_0                     Reading 0 ─────▶ mail of M0                     dstatic, ...
    M0          do_0 from its mail; its       dw of v_0's scores ──▶ collector                dv_0 ─▶ embedding
                partial_gradient; v_0
    collector   every dw from its mail                                                        Σ dw ─▶ w

M1 and M0 are neighbours: M1 reads do_2 and do_1 once for both sources. Every second source, counted from the oldest, does so.

depth_attention/source_order.py runs the same schedule for softmax. backward_mail.py and row_gradients.py are common to both
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
from depthmix.ops.depth_sum.reference import depth_scores_reference, depth_sum_reference
from depthmix.ops.precision import rms_normalize, without_autocast
from depthmix.ops.row_gradients import post_row_gradients
from depthmix.ops.torch_internals import node_will_run

OP = "depth_sum"
# Memory traffic of one number of an unfinished fp32 gradient: written once and read once.
UNFINISHED_BYTES = 8
# Values of `relu`: static + dynamic, static + max(dynamic, 0), max(static + dynamic, 0).
ADDED, CLAMPED, SUM_CLAMPED = 0, 1, 2


class Weights(NamedTuple):
    """Weights of a read: how each way weighs its sources."""

    static: Tensor | None = None  # [W, n, D] or [W, n, 1], fp32
    dynamic: Tensor | None = None  # [..., W, n], fp32
    scores: Sequence[Tensor] = ()  # instead of dynamic: scores [N, W] of each source, from `make_source`
    table: Tensor | None = None  # [R, D], fp32, from `collect_rows`: the rows that made the scores
    rows: Sequence[Sequence[int]] = ()  # for each source, the table's row of each way
    relu: int = ADDED
    plain: bool = False  # static is all ones and there is nothing else


def plain_sum(like: Tensor, ways: int, n: int = 1) -> Weights:
    """Return weights that are all one."""
    return Weights(static=torch.ones(ways, n, 1, device=like.device), plain=True)


class Result(NamedTuple):
    """Results of a read."""

    y: tuple[Tensor, ...]  # one sum per way, normed if there is a norm
    raw: Tensor | None  # the way that was asked for before its norm
    fresh: Tensor | None  # the newest source with `add`, as later reads must receive it
    passed: Tensor | None = None  # the newest source unchanged, with `passes`: this read adds its two gradients


def make_source(v: Tensor, add: Tensor | None = None, rows: Any = None) -> tuple[Tensor, Tensor | None]:
    """Make the source v (+ add) for reads that are differentiated in source order.

    Args:
        v: [..., D].
        add: [..., D], or None.
        rows: from `split_rows`: score the source with these rows.

    Returns:
        The source, and its scores [N, R] or None.
    """
    if torch.is_grad_enabled() and (v.requires_grad or (add is not None and add.requires_grad)):
        outputs = MakeSource.apply(rows, v, add)
        return outputs if rows is not None else (outputs, None)
    fresh, scores = _add_and_score(v, add, rows, across=not torch.is_grad_enabled())
    return v if add is None and v.is_contiguous() else fresh, scores


def split_rows(table: Tensor, like: Tensor) -> Any:
    """Return a table's rows split into two tensors of the sources' precision, as `make_source` needs them."""
    from depthmix.ops.depth_sum.kernels.scores import SplitRows

    return SplitRows.of(table.detach(), like.dtype)


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

    Args:
        sources: n tensors [..., D], oldest first.
        weights: of the W ways.
        add: the newest source is sources[-1] + add. Only without dynamic weights.
        gain: [G, D], of the norms of the first G ways, or None. Without gradients also a sequence with one row per way.
        eps: of the norms.
        raw: a way to return before its norm too. Beside ways with a norm, a way without one has no other result.
        passes: also return the newest source, for a plain sum whose newest source is used elsewhere. Autograd would add its two
            gradients in a pass of its own; this read adds them in its backward.
    """
    plan = ReadOptions(
        weights._replace(static=None, dynamic=None, table=None), eps, None if gain is None else raw, passes
    )
    rows = None if gain is None or isinstance(gain, Tensor) else [g.contiguous() for g in gain]
    inputs: tuple[Any, ...] = (weights.static, weights.table, weights.dynamic, None if rows else gain, add, *sources)
    inputs = tuple(None if t is None else t.contiguous() for t in inputs)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        outs = list(ReadSums.apply(plan, *inputs))
    else:
        outs = [
            *_outputs(_read(plan, (*inputs[:3], rows or inputs[3], *inputs[4:]), keep=False)),
            *inputs[-1:] * passes,
        ]
    passed = outs.pop() if passes else None
    fresh = None if add is None else outs.pop()
    before_norm = None if plan.raw is None else outs.pop()
    return Result(tuple(outs), outs[raw] if gain is None and raw is not None else before_norm, fresh, passed)


class ReadOptions(NamedTuple):
    """Arguments of a read besides tensors that have gradients."""

    weights: Weights  # without static, dynamic and table: these have gradients
    eps: float = 0.0
    raw: int | None = None
    passes: bool = False


def _read(plan: ReadOptions, inputs: Sequence[Any], keep: bool) -> Any:
    from depthmix.ops.depth_sum.kernels.read import read

    static, _, dynamic, gain, add, *sources = inputs
    dynamic_numbers = dynamic_by_source(dynamic, plan.weights.scores)
    return read(
        sources, add, static, dynamic_numbers, plan.weights.relu, gain, plan.eps, plan.raw, keep, plan.weights.plain
    )


def dynamic_by_source(dynamic: Tensor | None, scores: Sequence[Tensor] = ()) -> list[Tensor] | None:
    """Return the dynamic weights [N, W] of each source."""
    if dynamic is None:
        return list(scores) or None
    return list(dynamic.reshape(-1, *dynamic.shape[-2:]).unbind(-1))


def _outputs(sums: Any) -> list[Tensor]:
    return [*sums.y, *(t for t in (sums.raw, sums.fresh) if t is not None)]


# For each source, one tensor per way.
BySource = list[Sequence[Tensor]] | None


class Reading(NamedTuple):
    """Mail from a read to the makers of its sources."""

    do: list[Tensor]  # gradient of each way's sum, shaped like a source
    static: BySource  # [D] or [1]
    dynamic: BySource  # [N]
    relu: int
    ds: BySource = None  # [N], gradients of the scores, where these depend on the sources
    w: BySource = None  # [D], rows that made the scores
    rows: Sequence[Sequence[int]] = ()  # for each source, the table's row of each way
    makers: Sequence[Any] = ()  # the node that made each source, or None
    collector: Any = None  # the node that collects dw, or None if this pass does not need dw
    stream: torch.cuda.Stream | None = None  # the CUDA stream that computed these tensors

    def wait_for_stream(self) -> "Reading":
        """Make the current stream wait for these tensors, and return self."""
        if self.stream is not None:
            rows_by_source = [
                t for x in (self.static, self.dynamic, self.ds, self.w) for of_source in x or () for t in of_source
            ]
            wait_for_stream(self.stream, *self.do, *rows_by_source)
        return self

    def as_readers(self, sources: Sequence[int | None]) -> list[Any]:
        """Return the ways of this read as kernel arguments for the given sources; None marks a source that this read does not use."""
        from depthmix.ops.depth_sum.kernels.source_backward import Reader

        def of(x: BySource, k: int) -> list[Tensor | None] | None:
            return None if x is None else [None if i is None else x[i][k] for i in sources]

        static, dynamic, ds, w = self.static, self.dynamic, self.ds, self.w
        ways = enumerate(self.do)
        return [Reader(do, of(static, k), of(dynamic, k), self.relu, of(ds, k), of(w, k)) for k, do in ways]

    def scored_rows(self, i: int) -> "ScoredRows":
        """Return what is needed to differentiate the rows that scored source i."""
        ds, rows = ((), ()) if self.ds is None or self.collector is None else (self.ds[i], self.rows[i])
        return ScoredRows(ds, rows, self.collector, self.stream)


def rows_by_source(x: Tensor | None) -> BySource:
    """Split x [W, n, ...] into one view per source and way."""
    return None if x is None else [of_source.unbind(0) for of_source in x.unbind(1)]


def numbers_by_source(x: Sequence[Tensor] | None) -> BySource:
    """Split [N, W] of each source into one view per way."""
    return None if x is None else [of_source.unbind(1) for of_source in x]


class ScoredRows(NamedTuple):
    """Mail for dw alone: gradients of a source's scores. The read's do may have been freed by then."""

    ds: Sequence[Tensor]  # [N] for each way
    rows: Sequence[int]  # the table's row of each way; empty if nothing collects dw
    collector: Any
    stream: torch.cuda.Stream | None


class MakeSource(torch.autograd.Function):
    """Return v (+ add) and its scores; the backward adds up the mail of its readers."""

    @staticmethod
    def forward(ctx: Any, rows: Any, v: Tensor, add: Tensor | None) -> Any:
        open_mailboxes(ctx, "mail", "partial_gradient", "score_mail")
        ctx.source_nr, ctx.dtype, ctx.stack_position = 0, v.dtype, None
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
    """Return the ways of a read, the raw one, and with `add` the newest source."""

    @staticmethod
    def forward(ctx: Any, plan: ReadOptions, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        static, table, dynamic, gain, add, *sources = inputs
        sums = _read(plan, inputs, keep=True)
        outs = _outputs(sums)
        ctx.n, ctx.n_kept, ctx.mixtures = len(sources), len(sums.kept), sums.mixtures
        open_mailboxes(ctx, "mail", "partial_gradient", "score_mail")
        ctx.source_nr, ctx.stack_position = None if add is None else len(outs) - 1, None
        ctx.dtype = sources[-1].dtype  # type: ignore[union-attr]
        ctx.makers = [maker_of(v, MakeSource._backward_cls, ReadSums._backward_cls) for v in sources]  # type: ignore[arg-type]
        _number_sources(ctx.makers if add is None else [*ctx.makers[:-1], ctx])
        ctx.collector = None if table is None else table.grad_fn
        if add is not None:
            # The maker is this node. A reference to itself would be a cycle, and keep it alive.
            ctx.makers[-1] = None
            if not (add.requires_grad or sources[-1].requires_grad):  # type: ignore[union-attr]
                ctx.mark_non_differentiable(sums.fresh)
            sources[-1] = sums.fresh
        # The backward of one plain sum through its norm needs its result and not its sources.
        one_plain_sum = plan.weights.plain and len(sums.y) == 1 and add is None and not plan.passes
        ctx.saves_result_only = one_plain_sum and sums.raw is not None and sums.kept[0] is sums.raw
        sources = [sums.raw] if ctx.saves_result_only else sources
        ctx.save_for_backward(static, table, dynamic, gain, sums.rms, *sums.kept, *sources, *plan.weights.scores)
        ctx.set_materialize_grads(False)
        ctx.plan = plan._replace(weights=plan.weights._replace(scores=()))
        return (*outs, *inputs[-1:] * plan.passes)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = saved_once(ctx, OP)
        rest = iter(saved[4:])
        kept = next(rest), [next(rest) for _ in range(ctx.n_kept)], ctx.mixtures
        sources, scores = [next(rest) for _ in range(1 if ctx.saves_result_only else ctx.n)], list(rest)
        with without_autocast(sources[-1]):
            if torch.is_grad_enabled():
                # Only the sum was saved: the first source stands for it, the others for zeros with the same gradient.
                others = range(ctx.n - len(sources))
                sources += [torch.zeros_like(sources[0], requires_grad=True) for _ in others]
                return _differentiable_backward(ctx, saved[:4], sources, grads)
            return _backward(ctx, saved[:4], kept, sources * (ctx.n // len(sources)), scores, grads)


def _backward(
    ctx: Any, inputs: Sequence[Any], kept: tuple[Any, Any, int], sources: list[Tensor], scores: list[Tensor], grads: Any
) -> tuple[Tensor | None, ...]:
    static, table, dynamic, gain = inputs
    need_static, _, need_dynamic, _, need_add, *needs = ctx.needs_input_grad[1:]
    dy = [None if g is None else g.contiguous() for g in grads]
    passed = dy.pop() if ctx.plan.passes else None
    g = None if ctx.source_nr is None else dy.pop()
    draw = None if ctx.plan.raw is None else dy.pop()
    need_fresh = ctx.source_nr is not None and (need_add or needs[-1])
    pass_id = current_pass_id(OP)
    mail: list[tuple[Reading, int]] = ctx.mail.pop(pass_id, []) if need_fresh else []
    dstatic = ddynamic = dgain = None
    dv: list[Tensor | None] = [None] * ctx.n
    if draw is not None or any(d is not None for d in dy):
        collector = ctx.collector if ctx.collector is not None and node_will_run(ctx.collector) else None
        need_ds = need_dynamic or (table is not None and (collector is not None or any(needs)))
        dynamic_numbers = dynamic_by_source(dynamic, scores)
        need = need_static, need_ds, table is not None
        back = differentiate_read(ctx.plan, dy, draw, kept, gain, sources, static, dynamic_numbers, need, passed)
        dgain, dstatic = back.dgain, back.dstatic
        ddynamic = back.ddynamic.view(dynamic.shape) if need_dynamic else None
        differentiate_scores = table is not None and need_ds
        w = (
            {row: table[row] for of_source in ctx.plan.weights.rows for row in of_source}
            if differentiate_scores
            else {}
        )
        reading = Reading(
            back.do, rows_by_source(static), numbers_by_source(dynamic_numbers), ctx.plan.weights.relu,
            numbers_by_source(back.ddynamic.unbind(2)) if differentiate_scores else None,
            [[w[row] for row in of_source] for of_source in ctx.plan.weights.rows] if differentiate_scores else None,
            ctx.plan.weights.rows, ctx.makers, collector, current_stream(sources[-1]),
        )  # fmt: skip
        through_this_read = []
        for i, maker in enumerate(ctx.makers):
            if need_fresh and i == ctx.n - 1:
                mail.append((reading, i))
            elif maker is not None and node_will_run(maker):
                post(maker, pass_id, (reading, i))
            else:
                through_this_read += [i] * needs[i] * (maker is None)
                if collector is not None:
                    _post_row_gradients(sources[i], [reading.scored_rows(i)], pass_id)
        # In one plain sum every source has the gradient of the sum.
        plain = ctx.plan.weights.plain and len(back.do) == 1
        dvs = back.do * len(through_this_read) if plain else source_gradients(reading, through_this_read)
        for i, d in zip(through_this_read, dvs, strict=True):
            dv[i] = d if passed is None or i < ctx.n - 1 else back.through
    if passed is not None and needs[-1] and dv[-1] is None:
        dv[-1] = passed
    if need_fresh:
        dv[-1] = _gradient_of_source(ctx, g, mail, pass_id)
    return None, dstatic, None, ddynamic, dgain, dv[-1] if need_add else None, *dv


def differentiate_read(
    plan: ReadOptions, dy: Sequence[Tensor | None], draw: Tensor | None, kept: tuple[Any, Any, int] | None, gain: Tensor | None,
    sources: list[Tensor], static: Tensor | None, dynamic: list[Tensor] | None, need: tuple[bool, ...],
    passed: Tensor | None = None,
) -> Any:  # fmt: skip
    """Return the gradients of a read's sums and of its parameters. kept: what the norm saved."""
    from depthmix.ops.depth_sum.kernels.read_backward import Need, read_backward

    rms, rows, mixtures = kept or (torch.empty(0, dtype=torch.float32, device=sources[0].device), [], 0)
    return read_backward(
        filled(dy, sources[-1]), draw, plan.raw, rows, rms, gain, sources, static, dynamic, plan.weights.relu, Need(*need), mixtures, passed
    )  # fmt: skip


def source_gradients(reading: Reading, sources: list[int]) -> list[Tensor]:
    """Return the gradients of some sources of a read that flow through this read alone."""
    from depthmix.ops.depth_sum.kernels.source_backward import Target, source_backward

    dv: list[Tensor] = []
    # Two at a time: four are no faster than two times two.
    for start in range(0, len(sources), 2):
        pair = sources[start : start + 2]
        dv += source_backward([Target(reading.do[0], None, None, True) for _ in pair], reading.as_readers(pair))
    return dv


def _post_row_gradients(v: Tensor, scored: list[ScoredRows], pass_id: int) -> None:
    """Post the gradients of the rows that scored a source to their collector. The source v is read once for all of them."""
    from depthmix.ops.depth_sum.kernels.scores import score_backward

    # More than one collector only if two stacks read the same source.
    by_collector: dict[Any, list[tuple[int, Tensor]]] = {}
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
    """Add up the gradient of the source that a node made: g from autograd, its partial gradient and its mail."""
    from depthmix.ops.depth_sum.kernels.source_backward import Target, source_backward

    partial_gradient = take_partial_gradient(node, pass_id)
    if not mail:
        return finish_gradient(partial_gradient, g, node.dtype)
    like = mail[0][0].do[0]
    target = Target(like, None if g is None else g.contiguous(), partial_gradient, True)
    older = _older_neighbour(node, mail, pass_id)
    only_older = {} if older is None else {id(reading): (reading, i) for reading, i in older.mail[pass_id]}
    readers = []
    for reading, i in mail:
        number_of_older = [] if older is None else [only_older.pop(id(reading), (None, None))[1]]
        readers += reading.wait_for_stream().as_readers([*number_of_older, i])
    # What remains are readings of the older source alone.
    for reading, i in only_older.values():
        readers += reading.wait_for_stream().as_readers([i, None])
    if older is None:
        return source_backward([target], readers)[0]
    unfinished, whole = source_backward(
        [Target(like, None, take_partial_gradient(older, pass_id), False), target], readers
    )
    leave_partial_gradient(older, pass_id, unfinished)
    older.score_mail.setdefault(pass_id, []).extend(reading.scored_rows(i) for reading, i in older.mail[pass_id])
    older.mail[pass_id].clear()
    return whole


def _older_neighbour(node: Any, mail: list[tuple[Reading, int]], pass_id: int) -> Any:
    """Return the maker of the source before this one, if starting its gradient in the same pass saves traffic; otherwise None.

    Every second source looks for its neighbour, counted from the oldest, so that the oldest has one: it has the most readers.
    """
    # Posted last, so by the oldest read: with a window, later reads may see a sum instead of the older source.
    reading, i = mail[-1]
    maker = reading.makers[i - 1] if node.stack_position % 2 and i > 0 else None
    if maker is None or maker is node or not node_will_run(maker):
        return None
    older_mail = maker.mail.get(pass_id, [])
    readings, older_readings = [{id(reading) for reading, _ in entries} for entries in (mail, older_mail)]
    # A source that is read twice in one read.
    if len(readings) < len(mail) or len(older_readings) < len(older_mail):
        return None
    shared = sum(len(reading.do) for reading, _ in mail if id(reading) in older_readings)
    return maker if shared * reading.do[0].element_size() >= UNFINISHED_BYTES else None


def _number_sources(makers: Sequence[Any]) -> None:
    """Number the sources of a read by their position in the stack, except those that an earlier read has numbered."""
    position = -1
    for maker in makers:
        if maker is not None and maker.stack_position is None:
            maker.stack_position = position + 1
        position = position + 1 if maker is None else maker.stack_position


def _differentiable_backward(
    ctx: Any, inputs: Sequence[Any], sources: list[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Compute all gradients at once by autograd through the reference, for create_graph=True."""
    plan, raw, rows, relu = ctx.plan, ctx.plan.raw, ctx.plan.weights.rows, ctx.plan.weights.relu

    def reference(static: Any, table: Any, dynamic: Any, gain: Any, *sources: Tensor) -> tuple[Tensor, ...]:
        if table is not None:
            w = torch.stack([torch.stack([table[row] for row in of_source]) for of_source in rows], dim=1)
            dynamic = depth_scores_reference(sources, w)
        dynamic = dynamic.clamp(min=0) if relu == CLAMPED else dynamic
        mixed = depth_sum_reference(sources, static, dynamic, relu == SUM_CLAMPED)
        y = mixed if gain is None else [rms_normalize(o, plan.eps) * k for o, k in zip(mixed, gain, strict=False)]
        outs = [*y, *([] if raw is None else [mixed[raw]])]
        return (*(o.to(ctx.dtype) for o in outs), *sources[-1:] * (ctx.source_nr is not None or plan.passes))

    *needs, need_add = ctx.needs_input_grad[1:6]
    need_sources = [*ctx.needs_input_grad[6:-1], ctx.needs_input_grad[-1] or need_add]
    output_grads = [torch.zeros_like(sources[-1]) if g is None else g for g in grads]
    gradients = reference_gradients(reference, (*inputs, *sources), (*needs, *need_sources), output_grads)
    return None, *gradients[:4], gradients[-1] if need_add else None, *gradients[4:]
