"""How rows are cut into pieces. What kernels compute with them is tested with the kernels."""

import pytest

pytest.importorskip("triton")
from depthmix.ops.gpu.rows import Pieces, cut


@pytest.mark.parametrize(
    ("dim", "warps", "pieces"),
    [
        (1, 1, Pieces(1, 1)),
        (1500, 1, Pieces(1, 2048)),  # narrow
        (4096, 4, Pieces(1, 4096)),  # a power of two
        (3800, 4, Pieces(1, 4096)),  # nearly one
        (4608, 4, Pieces(9, 512)),
        (5120, 4, Pieces(5, 1024)),
        (6144, 4, Pieces(3, 2048)),
        (2600, 4, Pieces(3, 1024)),  # nothing fits well: the widest of what wastes least
        (4608, 32, Pieces(5, 1024)),  # a lane without a channel would be worse than a wider piece
    ],
)
def test_cut(dim: int, warps: int, pieces: Pieces) -> None:
    assert cut(dim, warps) == pieces
    assert pieces.number * pieces.width >= dim
