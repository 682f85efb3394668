"""Shorten values and messages for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

VALUE = 200  # characters of a value in a message
MESSAGE = 2000  # characters of a message
ENDING = 400  # characters of a shortened message's end, which holds the advice


def shown(value: Any, limit: int = VALUE) -> str:
    """Return the first characters of repr(value). The rest of the text is never built.

    Args:
        value: A user's value of any size; lists may contain themselves.
        limit: Maximum number of characters.

    Returns:
        repr(value) if it is short enough, else its beginning with an ellipsis.

    Examples:
        >>> shown([1] * 10**6, limit=10)
        '[1, 1, 1, …'
    """
    text = ""
    for part in _parts(value, limit):
        text += part
        if len(text) > limit:
            return f"{text[:limit]}…"
    return text


def shorten(message: str) -> str:
    """Cut the middle out of a message that is too long."""
    if len(message) <= MESSAGE:
        return message
    return f"{message[: MESSAGE - ENDING]} … {message[-ENDING:]}"


def _parts(value: Any, limit: int) -> Iterator[str]:
    """Yield repr(value) piece by piece."""
    if type(value) in (list, tuple):
        yield "[" if type(value) is list else "("
        for i, item in enumerate(value):
            yield ", " if i else ""
            yield from _parts(item, limit)
        yield "]" if type(value) is list else ",)" if len(value) == 1 else ")"
    elif type(value) is dict:
        yield from _pairs(value, limit)
    elif isinstance(value, str | bytes):
        yield repr(value[: limit + 1])
    else:
        yield repr(value)


def _pairs(value: Mapping[Any, Any], limit: int) -> Iterator[str]:
    yield "{"
    for i, (key, item) in enumerate(value.items()):
        yield ", " if i else ""
        yield from _parts(key, limit)
        yield ": "
        yield from _parts(item, limit)
    yield "}"
