"""Check that the tokenizer in a run's folder is the one the run was trained with."""

from __future__ import annotations

import hashlib

from depthmix.errors import CHECKPOINT, UserError
from depthmix.files import reading
from depthmix.runs.folder import DATA_META, TOKENIZER, RunFolder


def check_tokenizer(folder: RunFolder) -> None:
    """Compare a run's tokenizer.json with the checksum in the run's copy of its data's meta.json.

    With another vocabulary of the same size every token would stand for other text, and only the loss would show it.

    Args:
        folder: The run. A run of an older version, without such a checksum, passes.

    Raises:
        UserError: The tokenizer is another one.
    """
    meta = folder.data_meta()
    sums, name = meta.get("sha256"), meta.get("tokenizer")
    expected = sums.get(name) if isinstance(sums, dict) and isinstance(name, str) else None
    if expected is None:
        return
    path = folder.path / TOKENIZER
    with reading(path):
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        what = f"{path} is not the tokenizer that the run was trained with ({DATA_META} has another checksum)"
        raise UserError(f"{what}: put it back, from the run's data or from a copy.", CHECKPOINT)
