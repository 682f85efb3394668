"""Data of GPUs, and the share of it that programs reach."""

from __future__ import annotations

from dataclasses import dataclass

from depthmix.errors import UserError
from depthmix.names import nearest

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU in a node of eight."""

    name: str
    flops: float  # bf16 with fp32 sums, dense, per second
    fp32_flops: float  # without tensor cores
    memory: float  # bytes that a process can allocate
    bandwidth: float  # of its memory, bytes per second
    link: float  # to other GPUs of its node, bytes per second in one direction
    network: float  # to other nodes, bytes per second in one direction
    node: int = 8


# From NVIDIA's data sheets: H100 SXM5 (nvidia.com/h100), H200 SXM (nvidia.com/h200), HGX B200 (DGX B200 datasheet). Their FLOPs are
# with sparsity, twice these. Their 900 and 1800 GB/s of NVLink are the sum of both directions. The network is one 400 Gb/s port
# per GPU, as in DGX systems. Memory is what the driver leaves of 80, 141 and 180 GB.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 989e12, 67e12, 79 * GIB, 3.35e12, 450e9, 50e9),
        Gpu("h200", 989e12, 67e12, 139 * GIB, 4.8e12, 450e9, 50e9),
        Gpu("b200", 2250e12, 75e12, 178 * GIB, 8.0e12, 900e9, 50e9),
    )
}

# Shares of the data sheets' numbers that programs reach. COPY was measured (benchmarks/results/h200/kernels.md: 4,269 GB/s). MIXING
# and START are fitted to the extra step times in benchmarks/results/h200, the other shares to the two plain steps there.
# COLLECTIVE is NCCL's usual share of a link.
# A copy, of the bandwidth.
COPY = 0.89
# Norms and everything that mixes over depth, of the speed of a copy.
MIXING = 0.775
# Seconds that these add for every tensor they touch.
START = 0.55e-6
MATMUL, ATTENTION, COLLECTIVE, FP32 = 0.78, 0.4, 0.8, 0.6


def find_gpu(name: str) -> Gpu:
    """Return the GPU of a name.

    Raises:
        UserError: no GPU has this name.
    """
    if name.lower() not in GPUS:
        raise UserError(f"plan: unknown GPU {name!r}; known are {', '.join(GPUS)}{nearest(name.lower(), GPUS)}")
    return GPUS[name.lower()]
