"""Runs that another study has made already: the same training on the same data with the same code, under another name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from depthmix.errors import UserError
from depthmix.runs.code_checksums import code_of, differences
from depthmix.study.checks import plain_config, ran_on
from depthmix.study.pieces import Piece
from depthmix.study.records import RUNS, Records, read_records


def borrow(
    missing: Iterable[Piece],
    results: Path,
    own: Path,
    marks: Mapping[str, str],
    device: str,
    images: Iterable[str],
    any_code: bool,
    say: Callable[[str], None],
) -> list[tuple[Piece, tuple[dict[str, Any], ...]]]:
    """For each run that another study has: its code and itself, as lines of this study.

    results: the folder of all studies' results; own: this one's there; marks: of the data, by domain; images: domains that
    hold them; any_code: somebody says why other code may be mixed.
    """
    others: dict[str, Records] = {}
    for path in sorted(results.glob(f"*/{RUNS}")):
        if path.parent != own:
            try:
                others[path.parent.name] = read_records([path])
            except UserError as error:  # taking runs over only saves time
                say(f"No run is taken from {path.parent.name}: {error}")
    found: list[tuple[Piece, tuple[dict[str, Any], ...]]] = []
    for piece in missing:
        domain, config = piece.cell.domain, plain_config(piece.config)
        code = code_of(piece.config.mixer, domain in set(images))
        for name, records in others.items():
            same = (r for r in records.runs if _is(r, piece, config, marks[domain], device))
            run = next((r for r in same if any_code or _of_code(r, code, records)), None)
            if run is not None:
                arm, domain, size, seed = piece.key
                line = {**run, "arm": arm, "domain": domain, "size": size, "seed": seed}
                kept = {"kind": "code", "id": run["code"], "files": records.code(run)}
                found.append((piece, (kept, {**line, "from": run.get("from", name)})))
                break
    return found


def known_of(runs: Iterable[Mapping[str, Any]]) -> tuple[dict[str, str], str, set[str]]:
    """What a study's own runs say where data and device are not here: marks by domain, the kind of device, domains of images."""
    marks: dict[str, str] = {}
    device, images = "", set()
    for run in runs:
        marks.setdefault(run["domain"], run["data"])
        device = device or ran_on(run)
        images |= {run["domain"]} if "images" in run.get("result", {}) else set()
    return marks, device, images


def _is(run: Mapping[str, Any], piece: Piece, config: Mapping[str, Any], mark: str, device: str) -> bool:
    """Whether a run is that of a piece, to the last option; what came later has its default in an older run."""
    if run["seed"] != piece.config.seed or run["data"] != mark or ran_on(run) != device:
        return False
    return {**plain_config(type(piece.config)()), **run["config"]} == config


def _of_code(run: dict[str, Any], code: Mapping[str, str], records: Records) -> bool:
    mixer = run["config"].get("mixer", "")
    return not differences([(mixer, code), (mixer, records.code(run))], kernels=False)
