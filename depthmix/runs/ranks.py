"""The run folder as all processes but the first see it: they log into files of their own and leave the rest to the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from depthmix.files import writing
from depthmix.runs.folder import RunFolder

RANKS = "ranks"


class RankFolder(RunFolder):
    """A run folder into which another process trains; this one writes `ranks/rank-00003.txt`."""

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

    def append_metrics(self, record: dict[str, Any]) -> None:
        """The first process does."""

    def append_dynamics(self, record: dict[str, Any]) -> None:
        """The first process does."""

    def append_speed(self, record: dict[str, Any]) -> None:
        """The first process does."""

    def sync(self) -> None:
        """The first process does."""

    def cut(self, step: int, metrics_length: int | None = None) -> None:
        """The first process does."""

    def keep_identity(self, known: object = None) -> None:
        """The first process does."""

    def write_result(self, result: dict[str, Any]) -> None:
        """The first process does."""

    def keep_data(self, meta: str | Path, tokenizer: str | Path | None) -> None:
        """The first process does; that all have the same data is agreed before."""

    def keep_origin(self, origin: dict[str, Any] | None) -> None:
        """The first process does."""
