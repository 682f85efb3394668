"""Data that is carried in parts comes back bit for bit, or not at all."""

import lzma

import pytest

from lab import carry_data


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """A folder of files of several chunks, of one byte and of none, and its parts."""
    monkeypatch.setattr(carry_data, "CHUNK", 1000)
    source = tmp_path / "data"
    source.mkdir()
    (source / "train-00000.bin").write_bytes(bytes(i * i % 251 for i in range(3500)))
    (source / ".verified.json").write_bytes(b"{")
    (source / "empty").touch()
    (source / "zzz").write_bytes(b"the only file in the last part" * 20)
    return source, carry_data.pack(source, tmp_path / "parts", 700)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_parts_come_back_in_any_order(packed, tmp_path):
    source, parts = packed
    assert len(parts) > 1
    assert all(sum(path.stat().st_size for path in part.iterdir()) <= 700 for part in parts)
    carry_data.unpack(reversed(parts), tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


def test_a_missing_part_is_refused(packed, tmp_path):
    for left_out in range(len(packed[1])):
        parts = [part for i, part in enumerate(packed[1]) if i != left_out]
        with pytest.raises(ValueError, match="parts are missing"):
            carry_data.unpack(parts, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_damaged_chunk_is_refused(packed, tmp_path):
    chunk = next(path for part in packed[1] for path in part.iterdir() if path.stat().st_size > 200)
    chunk.write_bytes(lzma.compress(b"something else"))
    with pytest.raises(ValueError, match="damaged"):
        carry_data.unpack(packed[1], tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_file_that_is_no_chunk_is_refused(packed, tmp_path):
    (packed[1][0] / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"notes\.txt is no chunk"):
        carry_data.unpack(packed[1], tmp_path / "back")


def test_a_chunk_larger_than_a_part_is_refused(packed, tmp_path):
    with pytest.raises(ValueError, match="a folder may have 10"):
        carry_data.pack(packed[0], tmp_path / "small", 10)
