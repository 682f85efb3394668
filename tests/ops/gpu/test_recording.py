"""What a graph reads and never changes is written when the recording is over."""

from contextlib import ExitStack

import pytest
import torch

from depthmix.ops.gpu.recording import write_afterwards, written_afterwards

CPU = torch.device("cpu")
PLACE = CPU, 0


def test_numbers_come_after_the_recording_and_lie_apart() -> None:
    with written_afterwards(PLACE) as constants:
        tables = [write_afterwards(values, PLACE) for values in ((1, 2**40, 3), (4,))]
        assert not constants.memory.any()
    assert [t is not None and t.tolist() for t in tables] == [[1, 2**40, 3], [4]]
    assert [t is not None and t.data_ptr() % 16 for t in tables] == [0, 0]
    assert constants.memory.sum() == 8 + 2**40


def test_nobody_writes_without_a_recording() -> None:
    assert write_afterwards((1,), PLACE) is None


def test_what_has_no_room_is_left_to_the_graph() -> None:
    with written_afterwards(PLACE, room=20) as constants:
        assert write_afterwards(range(21), PLACE) is None
        assert write_afterwards((1, 2), PLACE) is not None
        last = write_afterwards((3, 4, 5, 6), PLACE)
        assert write_afterwards((7,), PLACE) is None
    assert last is not None
    assert last.tolist() == [3, 4, 5, 6]
    assert constants.memory.tolist() == [1, 2, *[0] * 14, 3, 4, 5, 6]


def test_another_device_is_left_to_the_graph() -> None:
    with written_afterwards((torch.device("meta"), 0)):
        assert write_afterwards((1,), PLACE) is None


def test_two_recordings_at_once_have_their_own_numbers() -> None:
    """Two threads record on two streams, whichever of them ends first."""
    with ExitStack() as first, ExitStack() as second:
        one = first.enter_context(written_afterwards((CPU, 1)))
        two = second.enter_context(written_afterwards((CPU, 2)))
        tables = [write_afterwards((n,), (CPU, n)) for n in (1, 2)]
        first.close()
        later = write_afterwards((3,), (CPU, 2))
        assert write_afterwards((4,), (CPU, 1)) is None
        second.close()
    assert [t is not None and t.tolist() for t in (*tables, later)] == [[1], [2], [3]]
    assert [constants.values[::16] for constants in (one, two)] == [[1], [2, 3]]
    assert write_afterwards((5,), (CPU, 2)) is None


def test_a_recording_that_fails_writes_nothing() -> None:
    tables = []

    def fail() -> None:
        with written_afterwards(PLACE):
            tables.append(write_afterwards((1,), PLACE))
            raise RuntimeError("cannot be recorded")

    with pytest.raises(RuntimeError, match="cannot be recorded"):
        fail()
    assert tables[0] is not None
    assert not tables[0].any()
    assert write_afterwards((1,), PLACE) is None


def test_a_recorded_table_is_written_once_and_belongs_to_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = pytest.importorskip("depthmix.ops.gpu.addresses")
    held = (3, 2**41)
    with written_afterwards(PLACE) as constants:
        table = addresses.recorded_table(held, PLACE)
        table.zero_()
    assert table.tolist() == list(held)
    assert table.data_ptr() == constants.memory.data_ptr()
    alone = addresses.recorded_table(held, PLACE)  # someone else's recording, who writes nothing: the graph does
    assert alone.tolist() == list(held)
    assert alone.data_ptr() != table.data_ptr()
