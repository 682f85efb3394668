"""What a graph reads and never changes is written when the recording is over."""

import pytest
import torch

from depthmix.ops.recording import write_afterwards, written_afterwards


def test_numbers_come_after_the_recording() -> None:
    table = torch.zeros(3, dtype=torch.int64)
    with written_afterwards() as kept:
        assert write_afterwards(table, (1, 2**40, 3))
        assert not table.any()
    assert table.tolist() == [1, 2**40, 3]
    assert [t is table for t in kept] == [True]  # a graph's memory, which must not be used again


def test_nobody_writes_without_a_recording() -> None:
    assert not write_afterwards(torch.zeros(1, dtype=torch.int64), (1,))


def test_a_recording_that_fails_writes_nothing() -> None:
    table = torch.zeros(1, dtype=torch.int64)

    def fail() -> None:
        with written_afterwards():
            write_afterwards(table, (1,))
            raise RuntimeError("cannot be recorded")

    with pytest.raises(RuntimeError, match="cannot be recorded"):
        fail()
    assert not table.any()
    assert not write_afterwards(table, (1,))
