"""CUDA graph recording with constants that are written once, after the recording, instead of at every replay."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from depthmix.ops.gpu.launch import Place

# Numbers that the constants of one graph may hold: 4 MiB.
ROOM = 1 << 19
# Tables start at multiples of this many numbers: kernels are compiled for aligned addresses.
ALIGNED = 16


class Constants:
    """Memory for constants that a CUDA graph reads and must not own.

    Memory that a graph allocates under recording may be reused within the graph, so a replay would overwrite constants in it.
    """

    def __init__(self, device: torch.device, room: int = ROOM) -> None:
        self.memory = torch.zeros(room, dtype=torch.int64, device=device)
        self.values: list[int] = []

    def add(self, values: Sequence[int]) -> Tensor | None:
        """Reserve a place for values and return it as a tensor, or None if there is no room."""
        start = len(self.values)
        if start + len(values) > len(self.memory):
            return None
        self.values += [*values, *(0,) * (-len(values) % ALIGNED)]
        return self.memory[start : start + len(values)]

    def write(self) -> None:
        values = self.values[: len(self.memory)]
        self.memory[: len(values)] = torch.tensor(values, dtype=torch.int64)


# By the stream that is recorded, which no other recording has at that time. The thread cannot be the key: a recorded backward
# pass runs in PyTorch's threads, on the stream of its forward pass.
_constants: dict[Place, Constants] = {}
_one_at_a_time = threading.Lock()


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[Constants]:
    """Record what is launched inside on `stream` as a CUDA graph. The yielded constants must live as long as the graph.

    Recordings of several threads wait for each other, because each begins with a synchronization of the device, which would
    end another one. Other threads may meanwhile launch kernels and allocate memory ("thread_local").
    """
    place = stream.device, stream.cuda_stream
    recording = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
    with _one_at_a_time, written_afterwards(place) as constants, recording:
        yield constants


@contextmanager
def written_afterwards(place: Place, room: int = ROOM) -> Iterator[Constants]:
    """Collect the values that `write_afterwards` receives during a recording on a stream, and write them at the end."""
    before = _constants.get(place)
    _constants[place] = constants = Constants(place[0], room)
    try:
        yield constants
        constants.write()
    finally:
        if before is None:
            del _constants[place]
        else:
            _constants[place] = before


def write_afterwards(values: Sequence[int], place: Place) -> Tensor | None:
    """Return the tensor in which these values will stand once the recording on this stream is over.

    Returns None outside `written_afterwards`, or without room.
    """
    constants = _constants.get(place)
    return None if constants is None else constants.add(values)
