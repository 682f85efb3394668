"""Tables of addresses in device memory, through which kernels reach tensors that are not contiguous to each other."""

import threading
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.launch import Place, current_place, launch, on_device
from depthmix.ops.gpu.recording import ALIGNED, ROOM, write_afterwards

# Numbers that a new arena has room for: 128 KiB.
FIRST_PIECE = 1 << 14
# Addresses that one launch of _set_addresses stores.
_CHUNK = 64


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
    """Address tables of one thread on one stream. They are kept, because training asks for the same ones at every step.

    A table must hold its addresses until the kernel that reads it has been launched. Two rules ensure that:

    - One thread at a time owns an arena, so nobody overwrites a table between the thread's fill and its launch. Two threads on
      one stream have two arenas: a lock around the fill would not help, because the launch comes later.
    - All tables of one launch are asked for together, so the second one cannot restart the arena and overwrite the first.

    A full arena restarts from its beginning. Kernels launched before the restart have read their tables by then, because the
    owner uses one stream. Memory begins small and grows: a server has many pairs of thread and stream, and most need little.
    """

    def __init__(self, device: torch.device, room: int = ROOM) -> None:
        """Allocate the first piece of memory; room: numbers that all pieces hold together."""
        self.device, self.room = device, room
        self.pieces = [outside_pools(min(FIRST_PIECE, room), device)]
        self.cached: dict[tuple[tuple[int, ...], ...], tuple[Tensor, ...]] = {}
        self.piece, self.used = 0, 0

    def tables(self, groups: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
        """Return one table for each group of addresses, all of them for one launch."""
        cached = self.cached.get(groups)
        return self._fill(groups) if cached is None else cached

    def _fill(self, groups: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
        joined, starts = _joined(groups)
        if len(joined) > len(self.pieces[0]):
            # Too long to keep: memory for this launch alone.
            memory = torch.empty(len(joined), dtype=torch.int64, device=self.device)
            return _cut(write(memory, joined), groups, starts)
        if self.used + len(joined) > len(self.pieces[self.piece]):
            self._next_piece()
        memory = self.pieces[self.piece][self.used : self.used + len(joined)]
        self.used += len(joined)
        self.cached[groups] = tables = _cut(write(memory, joined), groups, starts)
        return tables

    def _next_piece(self) -> None:
        """Continue in the next piece of memory, or restart from the first one when there is no room for more."""
        held = sum(len(piece) for piece in self.pieces)
        self.piece, self.used = self.piece + 1, 0
        if self.piece < len(self.pieces):
            return
        if held + FIRST_PIECE <= self.room:
            self.pieces.append(outside_pools(min(held, self.room - held), self.device))
            return
        self.piece = 0
        self.cached.clear()


def _joined(groups: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], list[int]]:
    """Return the groups one after the other, each filled up to aligned addresses, and where each begins."""
    joined: tuple[int, ...] = ()
    starts = []
    for group in groups:
        starts.append(len(joined))
        joined += (*group, *(0,) * (-len(group) % ALIGNED))
    return joined, starts


def _cut(table: Tensor, groups: tuple[tuple[int, ...], ...], starts: list[int]) -> tuple[Tensor, ...]:
    return tuple(table[start : start + len(group)] for start, group in zip(starts, groups, strict=True))


def outside_pools(room: int, device: torch.device) -> Tensor:
    """Allocate memory for `room` int64 numbers that outlives CUDA graphs.

    While a thread warms up or records a graph (torch.compile's "reduce-overhead" does), the graph's memory pool claims what this
    thread allocates and takes it back later. Another thread allocates this memory, outside the pool.
    """
    if device.type != "cuda":
        return torch.empty(room, dtype=torch.int64, device=device)
    allocated: list[Tensor] = []
    thread = threading.Thread(target=lambda: allocated.append(torch.empty(room, dtype=torch.int64, device=device)))
    thread.start()
    thread.join()
    # That thread's stream is the default one, on which the memory may still be in use by what was freed there.
    torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
    return allocated[0]


def write(table: Tensor, addresses: tuple[int, ...]) -> Tensor:
    """Fill a table and return it. Addresses travel as kernel arguments, so a CUDA graph replays them unchanged."""
    if table.device.type != "cuda":
        return table.copy_(torch.tensor(addresses, dtype=torch.int64))
    for start in range(0, len(addresses), _CHUNK):
        chunk = addresses[start : start + _CHUNK]
        rest = (0,) * (_CHUNK - len(chunk))
        launch(_set_addresses, (1,), table, table[start:], len(chunk), *chunk, *rest, num_warps=1)
    return table


# Arenas of threads that have ended.
_idle: dict[Place, list[Arena]] = {}


class _Lease:
    """Own the arenas of one thread, by device and stream. When the thread ends, its arenas go to `_idle` for another thread.

    The thread's kernels have all been launched by then, so the next owner's launches come after them on the stream.
    """

    def __init__(self) -> None:
        self.arenas: dict[Place, Arena] = {}
        # Keep a reference: at the end of a process the module may be gone first.
        self.idle = _idle

    def __del__(self) -> None:
        for place, arena in self.arenas.items():
            self.idle.setdefault(place, []).append(arena)


class _ThreadArenas(threading.local):
    """Hold the current thread's arenas."""

    def __init__(self) -> None:
        self.lease = _Lease()
        # A direct reference saves one lookup per launch.
        self.arenas = self.lease.arenas


_thread_arenas = _ThreadArenas()


def _take(place: Place) -> Arena:
    """Return an arena that no other thread has."""
    try:
        # list.pop is atomic: of two threads one finds the list empty.
        return _idle[place].pop()
    except (KeyError, IndexError):
        return Arena(place[0])


def address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a table of addresses in device memory, for a launch that needs one table."""
    return address_tables(device, addresses)[0]


def address_tables(device: torch.device, *groups: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the address tables of one launch, which must follow in the same thread and on the same stream.

    Args:
        device: where the tensors of the kernel are.
        groups: the addresses of each table.

    Returns:
        One int64 table in device memory for each group: a kept one or, while a CUDA graph is recorded, one of the graph's own.
    """
    with on_device(device):
        place = current_place(device)
        # A CPU has no index.
        if device.index is not None and torch.cuda.is_current_stream_capturing():
            return tuple(recorded_table(group, place) for group in groups)
        arena = _thread_arenas.arenas.get(place)
        if arena is None:
            arena = _thread_arenas.arenas[place] = _take(place)
        return arena.tables(groups)


def recorded_table(addresses: tuple[int, ...], place: Place) -> Tensor:
    """Return a table for a CUDA graph under recording.

    Inside `recorded` the table is written once, after the recording. Otherwise the graph writes it at every replay.
    """
    table = write_afterwards(addresses, place)
    return write(torch.empty(len(addresses), dtype=torch.int64, device=place[0]), addresses) if table is None else table


def table_of(sources: Sequence[Tensor], stack: Tensor | None = None) -> tuple[Tensor, bool]:
    """Return the address table of sources for a launch that needs one table, and whether `aligned` holds for them.

    Args:
        sources: tensors [..., D].
        stack: more sources, as one contiguous tensor [..., m, D]. They come first.
    """
    first = sources[0]
    row_bytes = first.shape[-1] * first.element_size()
    addresses = [v.data_ptr() for v in sources]
    if stack is not None:
        start = stack.data_ptr()
        addresses = [*range(start, start + stack.shape[-2] * row_bytes, row_bytes), *addresses]
    bits = row_bytes
    for address in addresses:
        bits |= address
    return address_tables(first.device, tuple(addresses))[0], bits % 16 == 0


def aligned(dim: int, *groups: Sequence[Tensor | None]) -> bool:
    """Return whether every row of every tensor starts at a multiple of 16 bytes."""
    for group in groups:
        for t in group:
            if t is not None and (t.data_ptr() % 16 or dim * t.element_size() % 16):
                return False
    return True
