"""stream_read, stream_write and stream_rule_read: check arguments. step.py runs the kernels, which write and read in one step."""

from torch import Tensor

from depthmix.ops.autograd import uses_custom_backward
from depthmix.ops.checks import KERNEL_DTYPES, check_shape, why_too_wide
from depthmix.ops.precision import without_autocast
from depthmix.ops.stream_mix.reference import stream_read_reference, stream_write_reference
from depthmix.ops.stream_mix.reference_autograd import StreamRead, StreamRuleRead, StreamWrite, rule_read_reference
from depthmix.ops.stream_mix.rules import Rule

# With n streams a token has n² weights and sums, which must fit in registers.
MAX_STREAMS = 4


def why_unsupported(x: Tensor, y: Tensor | None, n: int, *, wide: bool) -> str | None:
    """Return why the kernels cannot do a step, or None if they can. wide: the parameters are float64."""
    if x.dtype not in KERNEL_DTYPES or (y is not None and y.dtype not in KERNEL_DTYPES):
        return "they know streams in float32, bfloat16 or float16"
    if wide:
        return "they compute in float32, and the parameters are float64"
    if n > MAX_STREAMS:
        return f"they hold up to {MAX_STREAMS} streams, got {n}"
    return why_too_wide(x.shape[-1])


def stream_read(x: Tensor, pre: Tensor) -> Tensor:
    """Read from n residual streams: Σ_i pre[i] x_i.

    Args:
        x: streams [..., n, C].
        pre: weights [..., n], or [n] shared by all tokens.

    Returns:
        [..., C], rounded once to x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.

    Examples:
        >>> stream_read(torch.ones(2, 16, 4, 64), torch.full((4,), 0.25)).shape
        torch.Size([2, 16, 64])
    """
    n = _streams("stream_read", x)
    check_shape("stream_read", "pre", pre, x, (n,), tuple(x.shape[:-1]))
    with without_autocast(x):
        if uses_custom_backward():
            return StreamRead.apply(x, pre)
        return stream_read_reference(x, pre).to(x.dtype)


def stream_write(x: Tensor, res: Tensor | None, post: Tensor, y: Tensor) -> Tensor:
    """Write to n residual streams: x'_o = Σ_i res[o, i] x_i + post[o] y.

    Args:
        x: streams [..., n, C].
        res: [..., n, n] or [n, n], output stream first; None for the identity.
        post: [..., n] or [n].
        y: a sublayer's output [..., C].

    Returns:
        [..., n, C], rounded once to x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.

    Examples:
        >>> x = stream_write(torch.ones(2, 16, 4, 64), None, torch.ones(4), torch.ones(2, 16, 64))
    """
    op = "stream_write"
    n, tokens = _streams(op, x), tuple(x.shape[:-2])
    if res is not None:
        check_shape(op, "res", res, x, (n, n), (*tokens, n, n))
    check_shape(op, "post", post, x, (n,), (*tokens, n))
    check_shape(op, "y", y, x, (*tokens, x.shape[-1]))
    with without_autocast(x):
        if uses_custom_backward():
            return StreamWrite.apply(x, res, post, y)
        return stream_write_reference(x, res, post, y).to(x.dtype)


def stream_rule_read(
    rule: Rule, x: Tensor, columns: Tensor, bases: Tensor, scales: Tensor, gain: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the weights of Hyper-Connections from the streams, and read with them.

    Args:
        rule: the rule that makes the weights.
        x: streams [..., n, C].
        columns, bases, scales: one site's of `rules.by_column`.
        gain: [C], of an RMSNorm of the read, or None.
        eps: of that norm.

    Returns:
        u [..., C], rounded once, post [..., n] and res [..., n, n].

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
    """
    op = "stream_rule_read"
    n, width = _streams(op, x), x.shape[-1]
    check_shape(op, "columns", columns, x, (n + 2 + rule.centred, width))
    check_shape(op, "bases", bases, x, (n + 2, n))
    check_shape(op, "scales", scales, x, (n + 2,))
    if gain is not None:
        check_shape(op, "gain", gain, x, (width,))
    with without_autocast(x):
        if uses_custom_backward():
            u, post, res = StreamRuleRead.apply(rule, eps, x, columns, bases, scales, gain)
            return u, post, res
        return rule_read_reference(rule, eps, x, columns, bases, scales, gain)


def _streams(op: str, x: Tensor) -> int:
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(f"{op}: expected floating-point streams [..., n, C], got {list(x.shape)} of {x.dtype}")
    return x.shape[-2]
