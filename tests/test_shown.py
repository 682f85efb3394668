"""Messages stay short whatever a user gives."""

import tracemalloc

from depthmix.shown import ENDING, MESSAGE, shorten, shown


def test_short_values_are_shown_as_they_are():
    for value in (5, "text", [1, [2, "a'b"]], {"a": (1,), "b": {}}, (), (1, 2), None, 1.5, b"\x80", [], True):
        assert shown(value) == repr(value)


def test_long_values_are_cut_off_and_never_made():
    assert shown("x" * 10**6) == "'" + "x" * 199 + "…"
    assert shown([1] * 10**6, 10) == "[1, 1, 1, …"
    value = ["a"] * 10
    for _ in range(30):  # written out, 10 ** 31 texts
        value = [value] * 10
    around = []
    around.append(around)
    tracemalloc.start()
    assert len(shown(value)) == len(shown(around)) == len(shown({"a": value})) == 201
    assert tracemalloc.get_traced_memory()[1] < 10**6
    tracemalloc.stop()


def test_messages_keep_their_beginning_and_their_end():
    assert shorten("short") == "short"
    long = shorten("begin" + "x" * 10**6 + "end")
    assert len(long) == MESSAGE + 3
    assert long.startswith("beginx")
    assert long.endswith("x" * (ENDING - 3) + "end")
