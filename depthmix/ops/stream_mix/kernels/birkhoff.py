"""mHC-lite's residual map for n ≤ 4. As in sinkhorn/lanes.py, a lane holds one token and its numbers are registers.

    a = softmax of n! logits;    H[o, i] = Σ_k a_k where the k-th permutation sends o to i
    a'_k = Σ_o H'[o, perm_k(o)];    logits'_k = a_k (a'_k - Σ_j a_j a'_j)

PERMUTATIONS is one compile-time integer: its bit k n² + e is set if the k-th permutation has entry e.
"""

# Triton knows no other way to add to a tuple:
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"

import triton
import triton.language as tl

from depthmix.ops.stream_mix.rules import permutations


def permutation_bits(n: int) -> int:
    """Return PERMUTATIONS of n streams."""
    entries = (k * n * n + o * n + i for k, order in enumerate(permutations(n)) for o, i in enumerate(order))
    return sum(1 << bit for bit in entries)


@triton.jit
def _softmax(logits, COUNT: tl.constexpr):
    top = logits[0]
    for k in tl.static_range(1, COUNT):
        top = tl.maximum(top, logits[k])
    e = ()
    total = tl.zeros_like(top)
    for k in tl.static_range(COUNT):
        e = e + (tl.exp(logits[k] - top),)
        total += e[k]
    a = ()
    for k in tl.static_range(COUNT):
        a = a + (e[k] / total,)
    return a


@triton.jit
def birkhoff_lanes(logits, n: tl.constexpr, COUNT: tl.constexpr, PERMUTATIONS: tl.constexpr):
    """Map a tuple of n! logits [BT] to a tuple of n² entries."""
    a = _softmax(logits, COUNT)
    m = ()
    for e in tl.static_range(n * n):
        total = tl.zeros_like(a[0])
        for k in tl.static_range(COUNT):
            if (PERMUTATIONS >> (k * n * n + e)) & 1 == 1:
                total += a[k]
        m = m + (total,)
    return m


@triton.jit
def birkhoff_lanes_backward(logits, dm, n: tl.constexpr, COUNT: tl.constexpr, PERMUTATIONS: tl.constexpr):
    """Return dlogits."""
    a = _softmax(logits, COUNT)
    da = ()
    along = tl.zeros_like(a[0])
    for k in tl.static_range(COUNT):
        total = tl.zeros_like(a[0])
        for e in tl.static_range(n * n):
            if (PERMUTATIONS >> (k * n * n + e)) & 1 == 1:
                total += dm[e]
        da = da + (total,)
        along += a[k] * total
    g = ()
    for k in tl.static_range(COUNT):
        g = g + (a[k] * (da[k] - along),)
    return g
