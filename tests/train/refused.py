"""A user's mistake: one line that says what is wrong, and the exit code of its kind."""

from collections.abc import Callable

import pytest

from depthmix.errors import CHECKPOINT, UserError


def refused(call: Callable[[], object], *words: object, code: int = CHECKPOINT) -> str:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert caught.value.exit_code == code, message
    assert "\n" not in message
    for word in words:
        assert str(word) in message
    return message
