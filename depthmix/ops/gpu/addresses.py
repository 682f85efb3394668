"""Tables of addresses, through which kernels find tensors that lie anywhere, and how those are aligned."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.recording import write_afterwards

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


_tables: dict[tuple[Any, ...], Tensor] = {}


def address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """The addresses in device memory.

    They travel as arguments of a kernel, which a CUDA graph replays as they were (a copy from the host would be read again),
    unless whoever records the graph writes them afterwards. Training asks for the same ones at every step (the allocator
    repeats itself), so tables are kept.
    """
    capturing = _capturing(device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream, addresses)
    if not capturing and key in _tables:
        return _tables[key]
    table = write_afterwards(addresses, device) if capturing else None
    if table is not None:
        return table
    table = torch.empty(len(addresses), dtype=torch.int64, device=device)
    if device.type != "cuda":
        table.copy_(torch.tensor(addresses, dtype=torch.int64))
    else:
        for start in range(0, len(addresses), _CHUNK):
            chunk = addresses[start : start + _CHUNK]
            _set_addresses[(1,)](table[start:], len(chunk), *chunk, *(0,) * (_CHUNK - len(chunk)), num_warps=1)
    if not capturing:  # a graph owns what it makes
        if len(_tables) > 4096:
            _tables.clear()
        _tables[key] = table
    return table


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def aligned(dim: int, *groups: Sequence[Tensor | None]) -> bool:
    """Whether every row of every tensor starts at a multiple of 16 bytes."""
    given = [t for group in groups for t in group if t is not None]
    return all(t.data_ptr() % 16 == 0 and dim * t.element_size() % 16 == 0 for t in given)
