"""Device functions that the kernels of weighted sums share: rows of several tokens, weights, and one reduction for many sums.

A program holds BT tokens as a tuple of rows [BD]. Every row is spread over the lanes in the same way. A row of parameters (fp32,
one for each way and source) is then loaded once for BT tokens and meets activations without an exchange between lanes. The last
tile begins BT tokens before the end and repeats some of them: then no token needs a mask, and offsets are constants.
"""

# ruff: noqa: RUF005 (Triton adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,var-annotated"

import triton
import triton.language as tl


@triton.jit
def load_rows(address, t, d, mask, like, D: tl.constexpr, BT: tl.constexpr, ALIGNED: tl.constexpr):
    """Load rows t to t + BT - 1 of the tensor at an address, without widening them."""
    first = address.to(tl.pointer_type(like.dtype.element_ty)) + t * D
    rows = ()
    for k in tl.static_range(BT):
        at = first + (k * D + d)
        if ALIGNED:
            # The compiler knows no alignment of an address that comes from a table.
            at = tl.multiple_of(at, 16)
        rows = rows + (tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first"),)
    return rows


@triton.jit
def widened(x, BD: tl.constexpr, PAIRS: tl.constexpr):
    """Widen a row to fp32. PAIRS: each integer holds two bf16 numbers, and widening takes one instruction each instead of up to two."""
    if PAIRS:
        low = (x << 16).to(tl.float32, bitcast=True)
        high = (x & -65536).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(low, high), [BD])
    else:
        return x.to(tl.float32)


@triton.jit
def load_scalars(address, stride, t, ok, BT: tl.constexpr):
    """Load one fp32 number for each of BT tokens, `stride` numbers apart."""
    at = address.to(tl.pointer_type(tl.float32)) + t * stride
    numbers = ()
    for _ in tl.static_range(BT):
        numbers = numbers + (tl.load(at, mask=ok, other=0.0),)
        at += stride
    return numbers


@triton.jit
def weight(b, p, STATIC: tl.constexpr, DYNAMIC: tl.constexpr, RELU: tl.constexpr):
    """Return static + dynamic, clamped by RELU. 1: the dynamic part, 2: the sum."""
    if DYNAMIC:
        if RELU == 1:
            p = tl.maximum(p, 0.0)
        total = b + p if STATIC > 0 else p
    else:
        total = b
    return tl.maximum(total, 0.0) if RELU == 2 else total


@triton.jit
def _join(values, START: tl.constexpr, COUNT: tl.constexpr, LAST: tl.constexpr):
    if COUNT == 1:
        return values[START if START < LAST else LAST]
    else:
        half: tl.constexpr = COUNT // 2
        return tl.join(_join(values, START, half, LAST), _join(values, START + half, half, LAST))


@triton.jit
def _split(x, COUNT: tl.constexpr):
    if COUNT == 1:
        return (x,)
    else:
        a, b = tl.split(x)
        return _split(a, COUNT // 2) + _split(b, COUNT // 2)


@triton.jit
def sums(values, COUNT: tl.constexpr, UP: tl.constexpr, AXIS: tl.constexpr):
    """Return the sums over an axis of COUNT tensors, from one reduction. UP: the smallest power of two not below COUNT."""
    return _split(tl.sum(_join(values, 0, UP, COUNT - 1), AXIS), UP)


@triton.jit
def sums_side_by_side(values, COUNT: tl.constexpr, UP: tl.constexpr):
    """Return the sums of COUNT rows as a vector [UP], from one reduction. UP: a power of two, at least 2."""
    x = tl.sum(_join(values, 0, UP, COUNT - 1), 0)
    if UP == 4:
        x = tl.permute(x, (1, 0))
    elif UP == 8:
        x = tl.permute(x, (2, 1, 0))
    elif UP == 16:
        x = tl.permute(x, (3, 2, 1, 0))
    elif UP == 32:
        x = tl.permute(x, (4, 3, 2, 1, 0))
    return tl.reshape(x, [UP])


def tokens_of(tile: int, tokens: int) -> int:
    """Return the number of tokens of a tile: no more than there are."""
    return tile if tokens >= tile else 1
