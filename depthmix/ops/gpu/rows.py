"""Rows of any width in registers: a row is a tuple of C pieces of K channels.

A block of Triton's has a power of two of elements, so a row of 4608 channels in one block leaves almost half of all lanes without
work, and a kernel that waits for memory becomes one that computes. Nine pieces of 512 fit exactly. Sums over a row add its pieces
first, so that one reduction is left. A row that is one piece compiles to the code of a plain block.
"""

# ruff: noqa: RUF005 (Triton adds tuples and does not unpack them)
# mypy: disable-error-code="assignment"

from typing import NamedTuple

import triton
import triton.language as tl

from depthmix.ops.gpu.sizes import cdiv, next_power_of_2

# Rows up to this width are always one piece: their kernels wait for memory either way.
ONE_PIECE = 2048
# A wider row is cut when more than this part of it would be lanes without a channel.
WASTE = 0.1


class Pieces(NamedTuple):
    """Describe how a kernel cuts a row."""

    number: int
    width: int  # a power of two


def cut(dim: int, warps: int) -> Pieces:
    """Choose the pieces of a row.

    Args:
        dim: channels of the row.
        warps: warps of a program. Each of their lanes gets a channel of every piece.

    Returns:
        One piece where it wastes little, otherwise the widest pieces that do; the least wasteful if none does.
    """
    block = next_power_of_2(dim)
    if block <= ONE_PIECE or block <= dim * (1 + WASTE):
        return Pieces(1, block)
    possible = [Pieces(cdiv(dim, width), width) for width in (2048, 1024, 512) if width >= 32 * warps]
    fitting = [p for p in possible if p.number * p.width <= dim * (1 + WASTE)]
    return (fitting or [min([*possible, Pieces(1, block)], key=lambda p: p.number * p.width)])[0]


@triton.jit
def zero_row(C: tl.constexpr, K: tl.constexpr):
    """Return a row of zeros, in fp32."""
    row = (tl.zeros([K], tl.float32),)
    for _ in tl.static_range(1, C):
        row = row + (tl.zeros([K], tl.float32),)
    return row


@triton.jit
def load_pieces(at, dim, C: tl.constexpr, K: tl.constexpr, ALIGNED: tl.constexpr = False):
    """Load the first `dim` channels of a row, in fp32; the others are zeros.

    Args:
        at: pointer to the row's first channel.
        dim: channels of the row, or 0 to load nothing.
        ALIGNED: every row begins at a multiple of 16 bytes, which the compiler cannot see of an address from a table.
    """
    d = tl.arange(0, K)
    row = (_load_piece(at, d, dim, ALIGNED),)
    for c in tl.static_range(1, C):
        row = row + (_load_piece(at, c * K + d, dim, ALIGNED),)
    return row


@triton.jit
def _load_piece(at, d, dim, ALIGNED: tl.constexpr):
    # The alignment is a note on the addition, and is lost if that is made in another function.
    piece = at + d
    if ALIGNED:
        piece = tl.multiple_of(piece, 16)
    return tl.load(piece, mask=d < dim, other=0.0).to(tl.float32)


@triton.jit
def store_pieces(at, row, D: tl.constexpr, ALIGNED: tl.constexpr = False):
    """Store the D channels of a row at a pointer to its first one, rounded to the pointer's type."""
    K: tl.constexpr = row[0].shape[0]
    d = tl.arange(0, K)
    for c in tl.static_range(len(row)):
        piece = at + (c * K + d)
        if ALIGNED:
            piece = tl.multiple_of(piece, 16)
        tl.store(piece, row[c].to(at.dtype.element_ty), mask=c * K + d < D)


@triton.jit
def round_row(row, like):
    """Round a row to the type that a pointer points to, and return it in fp32."""
    out = (row[0].to(like.dtype.element_ty).to(tl.float32),)
    for c in tl.static_range(1, len(row)):
        out = out + (row[c].to(like.dtype.element_ty).to(tl.float32),)
    return out


@triton.jit
def dot(a, b):
    """Return Σ a b over a row."""
    products = a[0] * b[0]
    for c in tl.static_range(1, len(a)):
        products += a[c] * b[c]
    return tl.sum(products, 0)


@triton.jit
def add_rows(a, b):
    """Return a + b."""
    out = (a[0] + b[0],)
    for c in tl.static_range(1, len(a)):
        out = out + (a[c] + b[c],)
    return out


@triton.jit
def multiply_rows(a, b):
    """Return a * b, channel by channel."""
    out = (a[0] * b[0],)
    for c in tl.static_range(1, len(a)):
        out = out + (a[c] * b[c],)
    return out


@triton.jit
def scale_row(a, x):
    """Return a * x for one number x."""
    out = (a[0] * x,)
    for c in tl.static_range(1, len(a)):
        out = out + (a[c] * x,)
    return out


@triton.jit
def divide_row(a, x):
    """Return a / x for one number x."""
    out = (a[0] / x,)
    for c in tl.static_range(1, len(a)):
        out = out + (a[c] / x,)
    return out


@triton.jit
def blend_rows(a, x, b, y):
    """Return a * x + y * b for two numbers x and y."""
    out = (a[0] * x + y * b[0],)
    for c in tl.static_range(1, len(a)):
        out = out + (a[c] * x + y * b[c],)
    return out


@triton.jit
def add_scaled(a, x, b):
    """Return a + x * b for one number x, rounded once."""
    out = (tl.fma(x, b[0], a[0]),)
    for c in tl.static_range(1, len(a)):
        out = out + (tl.fma(x, b[c], a[c]),)
    return out
