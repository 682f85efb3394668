"""The write to n streams, with the products and sums that the next coefficients need.

    x'_o = Σ_i res[o, i] x_i + post[o] y, rounded;      z = x' W;      Σ x'²  (and Σ x' of each stream)

over all n D channels for mHC (z [N, K]), stream by stream for Hyper-Connections (z [N, n, K]). An elementwise kernel writes and sums
(rows.py), and a matrix product reads x' again (products.py): so neither waits for the other's layout. If nothing is written,
the product sums (split_product.py). z and the sums come in slices, which the kernel of the coefficients adds up.
"""

from typing import NamedTuple

from torch import Tensor

from depthmix.ops.stream_mix.kernels.rows import Reading, write_rows
from depthmix.ops.stream_mix.kernels.split_product import split_product
from depthmix.ops.stream_mix.products import product

# What z is computed from: nothing, all streams together, or each of them.
NO_SCAN, JOINT, EACH = 0, 1, 2


class Written(NamedTuple):
    """Results of a write: x' [N, n, D] (x if nothing was written), slices of z and its sums, and the read if it was done here."""

    x: Tensor
    z: Tensor | None
    sums: Tensor | None
    h: Tensor | None = None
    rho: Tensor | None = None


def write(
    x: Tensor, copies: bool, n: int, y: Tensor | None, post: Tensor | None, res: Tensor | None,
    w: Tensor | None, halves: Tensor | None, scan: int, reading: Reading | None = None,
) -> Written:  # fmt: skip
    """Write to the streams and compute what the next coefficients need.

    Args:
        x: [N, n, D], or with copies [N, D].
        y: [N, D], or None to write nothing.
        w: fp32; for bf16 streams `halves` holds its parts (`halves_of`), or kernels split it (`split_by_kernels`).
        scan: NO_SCAN; JOINT for slices of Σ x'² [S, N]; EACH for slices of Σ x' and Σ x'² [S, N, n, 2].
        reading: a read that may run in the same launch.
    """
    if y is None or post is None:
        if scan == NO_SCAN or w is None:
            return Written(x, None, None)
        return Written(x, *split_product(x, n, w, halves, joint=scan == JOINT, sums=True))
    done = write_rows(x, copies, n, y, post, res, scan, reading)
    z = None if scan == NO_SCAN or w is None else product(done.x, w, halves, scan == JOINT)
    return Written(done.x, z, done.sums, done.h, done.rho)
