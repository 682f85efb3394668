"""Facts about GPUs, and how much of what they promise is had."""

from __future__ import annotations

from dataclasses import dataclass

from depthmix.errors import UserError
from depthmix.names import nearest

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU of a node of eight."""

    name: str
    flops: float  # bf16 with fp32 sums, dense, per second
    fp32_flops: float  # without tensor cores
    memory: float  # bytes that a process can have
    bandwidth: float  # of its memory, bytes per second
    link: float  # to the others of its node, in one direction
    network: float  # to other nodes, in one direction
    node: int = 8


# NVIDIA's data sheets: H100 SXM5 (nvidia.com/h100), H200 SXM (nvidia.com/h200), HGX B200 (DGX B200 datasheet). FLOPs there are with
# sparsity, twice these; NVLink's 900 and 1800 GB/s are both directions together; the network is one 400 Gb/s port per GPU, as in
# DGX systems. Memory is what the driver leaves of 80, 141 and 180 GB.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 989e12, 67e12, 79 * GIB, 3.35e12, 450e9, 50e9),
        Gpu("h200", 989e12, 67e12, 139 * GIB, 4.8e12, 450e9, 50e9),
        Gpu("b200", 2250e12, 75e12, 178 * GIB, 8.0e12, 900e9, 50e9),
    )
}

# Shares of these. A copy's was measured (benchmarks/results/h200/kernels.md: 4,269 GB/s). MIXING and START are fitted to the extra step
# times of benchmarks/results/h200, the others to the two plain steps there; collectives are NCCL's usual share of a link.
COPY = 0.89  # of the bandwidth
MIXING = 0.775  # of a copy, by all that mixes over depth and by norms,
START = 0.55e-6  # and seconds for every tensor they touch
MATMUL, ATTENTION, COLLECTIVE, FP32 = 0.78, 0.4, 0.8, 0.6


def find_gpu(name: str) -> Gpu:
    """The GPU of that name."""
    if name.lower() not in GPUS:
        raise UserError(f"plan: unknown GPU {name!r}; there are {', '.join(GPUS)}{nearest(name.lower(), GPUS)}")
    return GPUS[name.lower()]
