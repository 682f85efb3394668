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


def test_a_recorded_table_is_written_once_and_belongs_to_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = pytest.importorskip("depthmix.ops.addresses")
    monkeypatch.setattr(addresses, "_capturing", lambda device: True)
    monkeypatch.setattr(addresses, "_tables", {})
    cpu, held = torch.device("cpu"), (3, 2**41)
    with written_afterwards() as kept:
        table = addresses.address_table(held, cpu)
        table.zero_()
    assert table.tolist() == list(held)
    assert [t is table for t in kept] == [True]
    alone = addresses.address_table(held, cpu)  # someone else's recording, who writes nothing: the graph does
    assert alone.tolist() == list(held)
    assert alone is not table
    assert not addresses._tables
