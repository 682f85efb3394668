"""One run of a study: a training, and the record of what it found."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from depthmix.compare.checks import plain_config
from depthmix.compare.pieces import Piece
from depthmix.data.dataset import TokenData
from depthmix.data.images import ImageData
from depthmix.errors import DIVERGED, UserError
from depthmix.runs.code_checksums import code_id, code_of


@dataclass(frozen=True)
class Outcome:
    """What came of a run: lines for the results, or why it could not be made; neither, if it was stopped."""

    lines: tuple[dict[str, Any], ...] = ()  # its code, and the run itself, last
    error: str = ""


def make_run(
    piece: Piece,
    data: TokenData | ImageData,
    mark: str,
    environment: Mapping[str, Any],
    stop: Callable[[float], bool],
) -> Outcome:
    """Train, and say what was found; a training that diverges is a result, and one arm that cannot run is an error in words.

    mark: of the data.
    """
    from depthmix.train.brief import train_briefly

    table = code_of(piece.config.mixer, images=isinstance(data, ImageData))
    record: dict[str, Any] = {
        "kind": "run",
        "arm": piece.arm.label,
        "domain": piece.cell.domain,
        "size": piece.cell.size,
        "seed": piece.config.seed,
        "config": plain_config(piece.config),
        "data": mark,
        "code": code_id(table),
        "environment": {**environment, "started": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())},
    }
    try:
        result = train_briefly(piece.config, data, label=piece.title, stop=stop)
    except Exception as error:  # one arm that cannot run must not cost the others their time
        if not isinstance(error, UserError) or error.exit_code != DIVERGED:
            said = in_words(error)
            print(f"{piece.title} failed: {said}", file=sys.stderr, flush=True)
            return Outcome(error=said)
        record["diverged"] = str(error)
    else:
        if result is None:
            return Outcome()
        record["result"] = rounded(result)
    return Outcome(({"kind": "code", "id": code_id(table), "files": table}, record))


def in_words(error: Exception) -> str:
    """Why an arm cannot run, on one line; what is no user's mistake is printed whole, too."""
    if not isinstance(error, UserError):
        traceback.print_exception(error)
    return " ".join(str(error).split())[:300] or type(error).__name__


def rounded(result: dict[str, Any]) -> dict[str, Any]:
    """The result with curves of five digits: they are for drawing, and the file is committed."""
    return {
        key: [[step, float(f"{loss:.5g}")] for step, loss in value] if key.endswith("_curve") else value
        for key, value in result.items()
    }
