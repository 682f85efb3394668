"""Turn the interruption of a training into a KeyboardInterrupt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from depthmix.errors import INTERRUPTED, UserError


@contextmanager
def as_keyboard_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt where a signal has stopped a training, after its checkpoint is saved.

    The command line reports a UserError. In Python, code that catches errors and goes on must not go on after Ctrl-C.
    """
    try:
        yield
    except UserError as error:
        if error.exit_code != INTERRUPTED:
            raise
        raise KeyboardInterrupt(str(error)) from None
