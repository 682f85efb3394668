"""Public operators for mixing over depth, with kernels on GPUs and a reference in plain PyTorch everywhere else.

Each operator has a folder: reference.py is its specification on any device, op.py checks its arguments and chooses the backend.
"""

from depthmix.ops.backend import BackendError, use_backend
from depthmix.ops.depth_attention.op import depth_attention
from depthmix.ops.depth_sum.op import depth_scores, depth_sum
from depthmix.ops.sinkhorn.op import sinkhorn
from depthmix.ops.stream_mix.op import stream_read, stream_write

__all__ = [
    "BackendError",
    "depth_attention",
    "depth_scores",
    "depth_sum",
    "sinkhorn",
    "stream_read",
    "stream_write",
    "use_backend",
]
