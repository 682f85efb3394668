"""The run folder for all processes but the first. They write their own logs and leave everything else to the first process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from depthmix.files import writing
from depthmix.runs.folder import RunFolder

RANKS = "ranks"


class RankFolder(RunFolder):
    """A run folder into which another process trains. This process writes `ranks/rank-00003.txt`."""

    def __init__(self, path: str | Path, rank: int) -> None:
        super().__init__(path)
        self.rank = rank

    @property
    def log_path(self) -> Path:
        return self.path / RANKS / f"rank-{self.rank:05d}.txt"

    def log(self, message: str) -> None:
        with writing(self.path / RANKS):
            (self.path / RANKS).mkdir(exist_ok=True)
        self._append(f"{RANKS}/{self.log_path.name}", self._line(message))

    @contextmanager
    def locked(self) -> Iterator[None]:
        yield

    def append(self, name: str, record: dict[str, Any]) -> None:
        """Do nothing: the first process appends the line."""

    def sync(self) -> None:
        """Do nothing: the first process syncs the files."""

    def cut(self, step: int, metrics_length: int) -> None:
        """Do nothing: the first process cuts the files."""

    def keep_identity(self, known: str | None) -> None:
        """Do nothing: the first process keeps the identity."""

    def write_result(self, result: dict[str, Any]) -> None:
        """Do nothing: the first process writes the result."""

    def keep_data(self, meta: str | Path, tokenizer: str | Path | None) -> None:
        """Do nothing: the first process keeps the copies. All processes have agreed on the data before."""

    def keep_origin(self, origin: dict[str, Any] | None) -> None:
        """Do nothing: the first process records the origin."""
