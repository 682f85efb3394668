"""The plain residual connection.

x_0 = e;   h_s = x_s;   x_{s+1} = x_s + y_s;   h_S = x_S
"""

from depthmix.mixers.one_stream import AddedStream
from depthmix.mixers.registry import register


@register("residual")
class Residual(AddedStream):
    """Every earlier output with weight one."""

    fast_paths = ("depthmix.fast.one_stream:DECODING", *AddedStream.fast_paths)

    def __init__(self, dim: int, n_blocks: int) -> None:
        super().__init__(dim, n_blocks)
