"""What the kernels of weighted sums share: rows of several tokens at a time, weights, and one reduction for many sums.

A program holds BT tokens, each row [BD] of channels spread over all its lanes in the same way, as a tuple of rows. Rows of
parameters, which are fp32 and of which there is one for each way and source, are then loaded once for BT tokens and meet the
rows of activations without an exchange between lanes. The last tile begins BT tokens before the end and does some of them again:
then no token needs a mask, and its distance from the first is a constant.
"""

# ruff: noqa: RUF005 (Triton adds tuples and does not unpack them)
# mypy: disable-error-code="assignment,var-annotated"

import triton
import triton.language as tl


@triton.jit
def load_rows(address, t, d, mask, like, D: tl.constexpr, BT: tl.constexpr, ALIGNED: tl.constexpr):
    """Rows t to t + BT - 1 of the tensor at an address, as they lie in memory."""
    first = address.to(tl.pointer_type(like.dtype.element_ty)) + t * D
    rows = ()
    for k in tl.static_range(BT):
        at = first + (k * D + d)
        if ALIGNED:
            at = tl.multiple_of(at, 16)  # what comes from a table has no known alignment
        rows = rows + (tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first"),)
    return rows


@triton.jit
def widened(x, BD: tl.constexpr, PAIRS: tl.constexpr):
    """A row in fp32. PAIRS: two bf16 in each integer, for each of which one instruction suffices; the compiler takes up to two."""
    if PAIRS:
        low = (x << 16).to(tl.float32, bitcast=True)
        high = (x & -65536).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(low, high), [BD])
    else:
        return x.to(tl.float32)


@triton.jit
def load_scalars(address, stride, t, some, BT: tl.constexpr):
    """One fp32 number for each of BT tokens that lie `stride` numbers apart."""
    at = address.to(tl.pointer_type(tl.float32)) + t * stride
    numbers = ()
    for _ in tl.static_range(BT):
        numbers = numbers + (tl.load(at, mask=some, other=0.0),)
        at += stride
    return numbers


@triton.jit
def weight(b, p, STATIC: tl.constexpr, DYNAMIC: tl.constexpr, RELU: tl.constexpr):
    """static + dynamic, clamped as relu says: 1: the dynamic part, 2: the sum."""
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
    """The sums over an axis of COUNT tensors in one reduction; UP: the power of two that is at least COUNT."""
    return _split(tl.sum(_join(values, 0, UP, COUNT - 1), AXIS), UP)


@triton.jit
def sums_side_by_side(values, COUNT: tl.constexpr, UP: tl.constexpr):
    """The sums of COUNT rows in one reduction, as a vector [UP]; UP: a power of two, at least 2."""
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
    """Tokens of a tile: no more than there are."""
    return tile if tokens >= tile else 1
