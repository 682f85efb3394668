"""What a graph reads and never changes is written when the recording is over."""

import pytest
import torch

from depthmix.ops.gpu.recording import write_afterwards, written_afterwards

CPU = torch.device("cpu")


def test_numbers_come_after_the_recording_and_lie_apart() -> None:
    with written_afterwards(CPU) as constants:
        tables = [write_afterwards(values, CPU) for values in ((1, 2**40, 3), (4,))]
        assert not constants.memory.any()
    assert [t is not None and t.tolist() for t in tables] == [[1, 2**40, 3], [4]]
    assert [t is not None and t.data_ptr() % 16 for t in tables] == [0, 0]
    assert constants.memory.sum() == 8 + 2**40


def test_nobody_writes_without_a_recording() -> None:
    assert write_afterwards((1,), CPU) is None


def test_what_has_no_room_is_left_to_the_graph() -> None:
    with written_afterwards(CPU, room=20) as constants:
        assert write_afterwards(range(21), CPU) is None
        assert write_afterwards((1, 2), CPU) is not None
        last = write_afterwards((3, 4, 5, 6), CPU)
        assert write_afterwards((7,), CPU) is None
    assert last is not None
    assert last.tolist() == [3, 4, 5, 6]
    assert constants.memory.tolist() == [1, 2, *[0] * 14, 3, 4, 5, 6]


def test_another_device_is_left_to_the_graph() -> None:
    with written_afterwards(torch.device("meta")):
        assert write_afterwards((1,), CPU) is None


def test_a_recording_that_fails_writes_nothing() -> None:
    tables = []

    def fail() -> None:
        with written_afterwards(CPU):
            tables.append(write_afterwards((1,), CPU))
            raise RuntimeError("cannot be recorded")

    with pytest.raises(RuntimeError, match="cannot be recorded"):
        fail()
    assert tables[0] is not None
    assert not tables[0].any()
    assert write_afterwards((1,), CPU) is None


def test_a_recorded_table_is_written_once_and_belongs_to_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = pytest.importorskip("depthmix.ops.gpu.addresses")
    held = (3, 2**41)
    with written_afterwards(CPU) as constants:
        table = addresses.recorded_table(held, CPU)
        table.zero_()
    assert table.tolist() == list(held)
    assert table.data_ptr() == constants.memory.data_ptr()
    alone = addresses.recorded_table(held, CPU)  # someone else's recording, who writes nothing: the graph does
    assert alone.tolist() == list(held)
    assert alone.data_ptr() != table.data_ptr()


def test_kept_tables_lie_in_one_memory_that_begins_again_when_it_is_full() -> None:
    addresses = pytest.importorskip("depthmix.ops.gpu.addresses")
    arena = addresses.Arena(CPU, room=64)
    first = arena.table((1, 2, 3))
    assert arena.table((1, 2, 3)) is first
    others = [arena.table((k, 2**41, 7)) for k in range(10, 13)]
    assert [t.tolist() for t in (first, *others)] == [[1, 2, 3], *([k, 2**41, 7] for k in range(10, 13))]
    start, end = arena.memory.data_ptr(), arena.memory.data_ptr() + arena.memory.nbytes
    assert all(start <= t.data_ptr() < end and t.data_ptr() % 128 == start % 128 for t in others)
    again = arena.table((5,))  # the fifth of four
    assert again.data_ptr() == start
    assert arena.table((1, 2, 3)).tolist() == [1, 2, 3]  # written anew
    assert arena.table(tuple(range(100))).tolist() == list(range(100))  # more than there is room for
