"""A step of a stack of residual streams as one autograd node: the write of a site and the read of the next site.

    x' = the write of y to x;    pre, post, res = the coefficients of x';    h = RMSNorm of the read of x' with pre

Between two steps only x' is handed on and nothing else reads it, so no gradient [..., n, D] is ever added to another. That holds
for a step that writes nothing, too, if the next one takes the step's x' (an alias of x) instead of x.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.precision import compute_dtype
from depthmix.ops.stream_mix.products import halves_of, product_backward, split_by_kernels, weight_gradient
from depthmix.ops.stream_mix.reference import stream_read_reference, stream_write_reference
from depthmix.ops.stream_mix.rules import Rule, coefficients, products


class Step(NamedTuple):
    """Results of a step. x' is x if nothing was written; pre, post and res are None without a rule."""

    x: Tensor
    h: Tensor
    pre: Tensor | None
    post: Tensor | None
    res: Tensor | None


class Inputs(NamedTuple):
    """Inputs of a step."""

    x: Tensor  # [N, n, D], or [N, D] of which every stream is a copy
    y: Tensor | None = None  # [N, D], what is written; None: nothing
    post: Tensor | None = None  # [N, n] or [n]
    res: Tensor | None = None  # [N, n, n] or [n, n], output stream first; None: the identity
    pre: Tensor | None = None  # [N, n] or [n], to read with; None: those of the rule
    w: Tensor | None = None  # the three of the rule
    base: Tensor | None = None
    scale: Tensor | None = None
    gain: Tensor | None = None  # [D], of the norm; None: no norm
    halves: Tensor | None = (
        None  # parts of w for bf16 streams, from `halves_of`; derived from w, so without a gradient of its own
    )


def step_reference(rule: Rule | None, n: int, eps: float, inputs: Inputs) -> Step:
    """Compute the step in plain PyTorch, with the kernels' roundings."""
    x, kind = inputs.x, inputs.x.dtype
    streams = x.unsqueeze(1).expand(-1, n, -1) if x.ndim == 2 else x
    if inputs.y is not None:
        assert inputs.post is not None
        streams = stream_write_reference(streams, inputs.res, inputs.post, inputs.y).to(kind)
    pre, post, res = inputs.pre, None, None
    rule_pre = None
    if rule is not None:
        assert inputs.w is not None
        assert inputs.base is not None
        assert inputs.scale is not None
        rule_pre, post, res = coefficients(
            rule, x.shape[-1], *products(rule, streams, inputs.w), inputs.base, inputs.scale
        )
        pre = rule_pre if pre is None else pre
    assert pre is not None
    h = stream_read_reference(streams, pre)
    if inputs.gain is not None:
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * inputs.gain.to(compute_dtype(h))
    return Step(x if inputs.y is None else streams, h.to(kind), rule_pre, post, res)


class _Kept(NamedTuple):
    """Hold what a backward needs besides the inputs."""

    new: Tensor | None  # x' if something was written
    rule_pre: Tensor | None  # the rule's pre if the read used it
    z: Tensor | None
    sums: Tensor | None
    rho: Tensor | None
    h: Tensor | None  # if the backward of the norm needs it instead of the streams


def _by_kernels(rule: Rule | None, n: int, eps: float, a: Inputs, keep: bool) -> tuple[Step, _Kept]:
    """Compute the step with kernels, from contiguous inputs. h is None if nothing says how to read.

    keep: a backward follows. Without one, z and sums of `_Kept` are None.
    """
    from depthmix.ops.stream_mix.kernels import coefficients as weights
    from depthmix.ops.stream_mix.kernels.read import read
    from depthmix.ops.stream_mix.kernels.rows import Reading
    from depthmix.ops.stream_mix.kernels.write import EACH, JOINT, NO_SCAN, write

    copies, scan = a.x.ndim == 2, NO_SCAN if rule is None else JOINT if rule.joint else EACH
    reading = None if a.pre is None else Reading(a.pre, a.gain, eps)
    x, z, sums, h, rho = write(a.x, copies, n, a.y, a.post, a.res, a.w, a.halves, scan, reading)
    rule_pre = post = res = None
    if rule is not None:
        assert z is not None
        assert sums is not None
        assert a.base is not None
        assert a.scale is not None
        rule_pre, post, res, z, sums = weights.forward(rule, x.shape[-1], z, sums, a.base, a.scale, keep)
    pre = rule_pre if a.pre is None else a.pre
    if h is None and pre is not None:
        h, rho = read(x, copies and a.y is None, n, pre, a.gain, eps)
    norm_needs_h = a.pre is not None and a.gain is not None
    kept = _Kept(
        None if a.y is None else x,
        rule_pre if a.pre is None else None,
        z,
        sums,
        rho,
        h if norm_needs_h else None,
    )
    return Step(x, h, rule_pre, post, res), kept  # type: ignore[arg-type]


class _Step(torch.autograd.Function):
    """Compute the step with kernels."""

    @staticmethod
    def forward(ctx: Any, rule: Rule | None, n: int, eps: float, *inputs: Tensor | None) -> Any:
        a = Inputs(*inputs)  # type: ignore[arg-type]
        found, kept = _by_kernels(rule, n, eps, a, keep=True)
        ctx.rule, ctx.n, ctx.eps = rule, n, eps
        ctx.save_for_backward(*a, *kept)
        ctx.set_materialize_grads(False)
        return None if found.x.ndim == 2 else found.x, *found[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        *inputs, new, rule_pre, z, sums, rho, h = ctx.saved_tensors
        a: Any = Inputs(*inputs)
        needed = ctx.needs_input_grad[3:]
        # create_graph=True.
        if torch.is_grad_enabled():
            return None, None, None, *_reference_backward(ctx, a, needed, grads)
        from depthmix.ops.stream_mix.kernels import coefficients as weights
        from depthmix.ops.stream_mix.kernels.read import norm_backward, read_backward
        from depthmix.ops.stream_mix.kernels.write_backward import ReadGradient, ScanGradient, write_backward

        rule, n = ctx.rule, ctx.n
        dx, dh, dpre, dpost, dres = (None if g is None else g.contiguous() for g in grads)
        x, copies = (a.x, a.x.ndim == 2) if new is None else (new, False)
        dgain, read = None, None
        if dh is not None and a.pre is None:
            read_dpre, c, dgain = read_backward(dh, x, copies, n, rule_pre, a.gain, rho)
            dpre = read_dpre if dpre is None else read_dpre + dpre
            read = ReadGradient(dh, rule_pre, a.gain, rho, c)
        elif dh is not None:
            c = None
            if h is not None:
                c, dgain = norm_backward(dh, h, x, copies, n, a.pre, a.gain, rho)
            read = ReadGradient(dh, a.pre, a.gain, rho, c, need_dpre=needed[4])
        scan, dw, dbase, dscale = None, None, None, None
        if rule is not None and not (dpre is None and dpost is None and dres is None):
            dz, parts, slopes, dbase, dscale = weights.backward(
                rule, x.shape[-1], z, sums, a.base, a.scale, dpre, dpost, dres, x.dtype
            )
            in_products: Any = dz if parts is None else parts
            if rule.joint:
                scan = ScanGradient(product_backward(in_products, a.w, a.halves, n), slopes)
            else:
                assert dz is not None
                scan = ScanGradient(dz, slopes, a.w if a.halves is None else a.halves)
            dw = weight_gradient(x, in_products, a.w, n) if needed[5] else None
        input_grads = write_backward(dx, a.x, a.x.ndim == 2, n, a.y, a.post, a.res, read, scan)
        out = [
            input_grads.dx,
            input_grads.dy,
            _shared(input_grads.dpost, a.post, 1),
            _shared(input_grads.dres, a.res, 2),
            _shared(input_grads.dpre, a.pre, 1),
            dw,
            dbase,
            dscale,
            dgain,
            None,
        ]
        return None, None, None, *(g if need else None for g, need in zip(out, needed, strict=True))


def _shared(g: Tensor | None, weight: Tensor | None, ndim: int) -> Tensor | None:
    """Sum a gradient over the tokens if they share the weight."""
    return g.sum(0) if g is not None and weight is not None and weight.ndim == ndim else g


def _reference_backward(ctx: Any, a: Inputs, needed: Any, grads: Any) -> list[Tensor | None]:
    def reference(*inputs: Tensor | None) -> list[Tensor]:
        outputs = step_reference(ctx.rule, ctx.n, ctx.eps, Inputs(*inputs))  # type: ignore[arg-type]
        outs = (None if outputs.x.ndim == 2 else outputs.x, *outputs[1:])
        return [o for o, g in zip(outs, grads, strict=True) if o is not None and g is not None]

    return reference_gradients(reference, a, needed, [g for g in grads if g is not None])


def step(rule: Rule | None, n: int, eps: float, inputs: Inputs) -> Step:
    """Compute the step with kernels, differentiably.

    Args:
        rule: makes the weights, or None if `inputs` has them.
        n: number of streams.
        eps: of the norm.
        inputs: see `Inputs`.
    """
    x, w = inputs.x, inputs.w
    graph = torch.is_grad_enabled()
    if w is not None and x.dtype == torch.bfloat16 and inputs.halves is None and (graph or not split_by_kernels(x, w)):
        inputs = inputs._replace(halves=halves_of(w.detach()))
    # Kernels for bf16 streams read halves instead of w, or split it.
    kept_as_is = w if x.dtype == torch.bfloat16 else None
    inputs = Inputs._make(t if t is None or t is kept_as_is else t.contiguous() for t in inputs)
    if not graph:
        return _by_kernels(rule, n, eps, inputs, keep=False)[0]
    new, *rest = _Step.apply(rule, n, eps, *inputs)
    return Step(inputs.x if new is None else new, *rest)


def write_step(x: Tensor, y: Tensor, post: Tensor, res: Tensor | None) -> Tensor:
    """Write with kernels, differentiably, and read nothing: x' [N, n, D]. The arguments are those of `Inputs`."""
    inputs = Inputs(x.contiguous(), y.contiguous(), post.contiguous(), None if res is None else res.contiguous())
    if not torch.is_grad_enabled():
        return _by_kernels(None, post.shape[-1], 0.0, inputs, keep=False)[0].x
    written: Tensor = _Step.apply(None, post.shape[-1], 0.0, *inputs)[0]
    return written
