"""Names: the default mixer, suggestions for misspelt names, and the install command."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

DEFAULT_MIXER = "residual"


def nearest(name: str, valid: Iterable[str], cutoff: float = 0.5) -> str:
    """Return a "did you mean" clause for the message, or "". A higher cutoff suggests less."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def install_command(extra: str) -> str:
    """Return the command that installs the package with one of its extras. It needs a clone, since no index has the package."""
    return f"pip install '.[{extra}]' in a clone of depthmix"
