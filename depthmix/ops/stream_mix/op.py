"""stream_read and stream_write: checks and (when kernels come) the choice between them and the reference."""

from torch import Tensor

from depthmix.ops.checks import check_shape
from depthmix.ops.precision import without_autocast
from depthmix.ops.stream_mix.reference import stream_read_reference, stream_write_reference


def stream_read(x: Tensor, pre: Tensor) -> Tensor:
    """Σ_i pre[i] x_i from streams x [..., n, C] with pre [..., n] or [n], rounded once to x's dtype: [..., C]."""
    n = _streams("stream_read", x)
    check_shape("stream_read", "pre", pre, x, (n,), tuple(x.shape[:-1]))
    with without_autocast(x):
        return stream_read_reference(x, pre).to(x.dtype)


def stream_write(x: Tensor, res: Tensor | None, post: Tensor, y: Tensor) -> Tensor:
    """x'_o = Σ_i res[o, i] x_i + post[o] y, rounded once to x's dtype: [..., n, C].

    res: [..., n, n] or [n, n], output stream first; None for the identity. post: [..., n] or [n]. y: [..., C].
    """
    op = "stream_write"
    n, tokens = _streams(op, x), tuple(x.shape[:-2])
    if res is not None:
        check_shape(op, "res", res, x, (n, n), (*tokens, n, n))
    check_shape(op, "post", post, x, (n,), (*tokens, n))
    check_shape(op, "y", y, x, (*tokens, x.shape[-1]))
    with without_autocast(x):
        return stream_write_reference(x, res, post, y).to(x.dtype)


def _streams(op: str, x: Tensor) -> int:
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(f"{op}: expected floating-point streams [..., n, C], got {list(x.shape)} of {x.dtype}")
    return x.shape[-2]
