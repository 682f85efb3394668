"""Tables of addresses, through which kernels find tensors that lie anywhere, and how those are aligned."""

import threading
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.launch import launch, on_device
from depthmix.ops.gpu.recording import ALIGNED, ROOM, write_afterwards

_CHUNK = 64  # addresses that one launch of _set_addresses stores


@triton.jit
def _store_eight(table, n, a, b, c, d, e, f, g, h):
    tl.store(table, a, mask=n > 0)
    tl.store(table + 1, b, mask=n > 1)
    tl.store(table + 2, c, mask=n > 2)
    tl.store(table + 3, d, mask=n > 3)
    tl.store(table + 4, e, mask=n > 4)
    tl.store(table + 5, f, mask=n > 5)
    tl.store(table + 6, g, mask=n > 6)
    tl.store(table + 7, h, mask=n > 7)


@triton.jit(do_not_specialize=["n", *(f"a{k}" for k in range(64))])
def _set_addresses(
    table, n: tl.int32,
    a0: tl.int64, a1: tl.int64, a2: tl.int64, a3: tl.int64, a4: tl.int64, a5: tl.int64, a6: tl.int64, a7: tl.int64,
    a8: tl.int64, a9: tl.int64, a10: tl.int64, a11: tl.int64, a12: tl.int64, a13: tl.int64, a14: tl.int64, a15: tl.int64,
    a16: tl.int64, a17: tl.int64, a18: tl.int64, a19: tl.int64, a20: tl.int64, a21: tl.int64, a22: tl.int64, a23: tl.int64,
    a24: tl.int64, a25: tl.int64, a26: tl.int64, a27: tl.int64, a28: tl.int64, a29: tl.int64, a30: tl.int64, a31: tl.int64,
    a32: tl.int64, a33: tl.int64, a34: tl.int64, a35: tl.int64, a36: tl.int64, a37: tl.int64, a38: tl.int64, a39: tl.int64,
    a40: tl.int64, a41: tl.int64, a42: tl.int64, a43: tl.int64, a44: tl.int64, a45: tl.int64, a46: tl.int64, a47: tl.int64,
    a48: tl.int64, a49: tl.int64, a50: tl.int64, a51: tl.int64, a52: tl.int64, a53: tl.int64, a54: tl.int64, a55: tl.int64,
    a56: tl.int64, a57: tl.int64, a58: tl.int64, a59: tl.int64, a60: tl.int64, a61: tl.int64, a62: tl.int64, a63: tl.int64,
):  # fmt: skip
    _store_eight(table + 0, n - 0, a0, a1, a2, a3, a4, a5, a6, a7)
    _store_eight(table + 8, n - 8, a8, a9, a10, a11, a12, a13, a14, a15)
    _store_eight(table + 16, n - 16, a16, a17, a18, a19, a20, a21, a22, a23)
    _store_eight(table + 24, n - 24, a24, a25, a26, a27, a28, a29, a30, a31)
    _store_eight(table + 32, n - 32, a32, a33, a34, a35, a36, a37, a38, a39)
    _store_eight(table + 40, n - 40, a40, a41, a42, a43, a44, a45, a46, a47)
    _store_eight(table + 48, n - 48, a48, a49, a50, a51, a52, a53, a54, a55)
    _store_eight(table + 56, n - 56, a56, a57, a58, a59, a60, a61, a62, a63)


class Arena:
    """The tables of one stream, kept: training asks for the same ones at every step, since the allocator repeats itself.

    When it is full it begins again from its start, which the order of the stream makes safe.
    """

    def __init__(self, device: torch.device, room: int = ROOM) -> None:
        self.memory = outside_pools(room, device)
        self.tables: dict[tuple[int, ...], Tensor] = {}
        self.used = 0

    def table(self, addresses: tuple[int, ...]) -> Tensor:
        table = self.tables.get(addresses)
        if table is None:
            size = -(-len(addresses) // ALIGNED) * ALIGNED
            if self.used + size > len(self.memory):
                self.tables.clear()
                self.used = 0
            if size > len(self.memory):
                return write(torch.empty(len(addresses), dtype=torch.int64, device=self.memory.device), addresses)
            table = write(self.memory[self.used : self.used + len(addresses)], addresses)
            self.tables[addresses] = table
            self.used += size
        return table


def outside_pools(room: int, device: torch.device) -> Tensor:
    """Memory for so many numbers that outlives CUDA graphs.

    Whoever warms up or records one (torch.compile's "reduce-overhead" among them) claims what the current thread allocates
    and takes it back later, so another thread allocates this.
    """
    if device.type != "cuda":
        return torch.empty(room, dtype=torch.int64, device=device)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(torch.empty(room, dtype=torch.int64, device=device)))
    thread.start()
    thread.join()
    # That thread's stream is the default one, on which the memory may still be in use by what was freed there.
    torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
    return found[0]


def write(table: Tensor, addresses: tuple[int, ...]) -> Tensor:
    """The table, filled: the addresses travel as arguments of a kernel, which a CUDA graph replays as they were."""
    if table.device.type != "cuda":
        return table.copy_(torch.tensor(addresses, dtype=torch.int64))
    for start in range(0, len(addresses), _CHUNK):
        chunk = addresses[start : start + _CHUNK]
        rest = (0,) * (_CHUNK - len(chunk))
        launch(_set_addresses, (1,), table, table[start:], len(chunk), *chunk, *rest, num_warps=1)
    return table


_arenas: dict[tuple[torch.device, int], Arena] = {}


def address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """The addresses in device memory: kept ones, or, while a CUDA graph is recorded, ones of its own."""
    with on_device(device):
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return recorded_table(addresses, device)
        key = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
        arena = _arenas.get(key)
        if arena is None:
            arena = _arenas[key] = Arena(device)
        return arena.table(addresses)


def recorded_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """A table for a graph: written once by whoever records it, if they do that, or else by the graph at every replay."""
    table = write_afterwards(addresses, device)
    return write(torch.empty(len(addresses), dtype=torch.int64, device=device), addresses) if table is None else table


def aligned(dim: int, *groups: Sequence[Tensor | None]) -> bool:
    """Whether every row of every tensor starts at a multiple of 16 bytes."""
    given = [t for group in groups for t in group if t is not None]
    return all(t.data_ptr() % 16 == 0 and dim * t.element_size() % 16 == 0 for t in given)
