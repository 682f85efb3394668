"""A comparison's runs are of one version of the code, or somebody has said why they need not be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from depthmix.compare.arms import Arm
from depthmix.compare.plan import is_finished
from depthmix.config import TrainConfig
from depthmix.data.dataset import read_meta
from depthmix.errors import CHECKPOINT, UserError
from depthmix.runs.code_checksums import accepted, code_of, differences
from depthmix.runs.code_record import read_code
from depthmix.runs.folder import RunFolder


@dataclass
class CodeCheck:
    """Which runs of a comparison were made by which code."""

    acceptances: list[dict[str, Any]] = field(default_factory=list)  # {"reason": …, "files": {file: [checksums]}}
    unrecorded: list[str] = field(default_factory=list)  # folders of runs that do not say which code made them

    @property
    def notes(self) -> list[str]:
        """The sentences that belong under the table."""
        files: dict[str, set[str]] = {}
        for said in self.acceptances:
            files.setdefault(said["reason"], set()).update(said["files"])
        found = [
            f"Runs of different code are mixed ({', '.join(sorted(names))}), accepted because: {reason.rstrip('.')}."
            for reason, names in files.items()
        ]
        if self.unrecorded:
            some = f"{len(self.unrecorded)} runs do" if len(self.unrecorded) > 1 else f"{self.unrecorded[0]} does"
            found.append(f"{some} not say which code made them, so runs of different code may be mixed here.")
        return found


def check_code(
    out: Path,
    plan: Sequence[tuple[Arm, TrainConfig]],
    acceptances: Sequence[Mapping[str, Any]],
    reason: str,
    kernels: bool,
) -> CodeCheck:
    """Compare the code of the runs that are there with each other, and with the code here if runs are missing.

    Args:
        out: The comparison's folder.
        plan: All its runs.
        acceptances: Which versions of which files may be mixed, as somebody has said before.
        reason: Why versions that nobody has accepted yet may be mixed; "": they may not.
        kernels: Whether a change of the kernels counts, as it does where arms are given equal time.

    Returns:
        The acceptances, with a new one if `reason` was needed, and the runs without a record of their code.

    Raises:
        UserError: Versions would be mixed that nobody has accepted.
    """
    tables: list[tuple[str, Mapping[str, str]]] = []
    unrecorded, missing = [], []
    for arm, config in plan:
        folder = RunFolder(config.out)
        for table in read_code(folder) if folder.has_begun() else ():
            if table is not None:
                tables.append((arm.name, table))
            elif config.out not in unrecorded:
                unrecorded.append(config.out)
        if not is_finished(config):
            missing.append(config)
    of_runs = differences(tables, kernels)
    found = differences([*tables, *_code_here(missing if tables else [])], kernels)
    files = {name: sorted(sums) for name, sums in found.items() if not accepted(name, sums, acceptances)}
    if not files:
        return CodeCheck([dict(said) for said in acceptances], unrecorded)
    if reason:
        new = {"reason": " ".join(reason.split()), "files": files}
        return CodeCheck([*map(dict, acceptances), new], unrecorded)
    changed = f"({', '.join(sorted(files))} changed)"
    what = f"{out} holds runs that were made by different code {changed}"
    if missing and not files.keys() & of_runs.keys():
        what = (
            f"{out} holds runs made by other code than this {changed}, and {len(missing)} more would be mixed with them"
        )
    advice = "go back to that code, choose another --out, or say why it does not matter with --accept-code REASON"
    raise UserError(f"{what}; {advice}", CHECKPOINT)


def _code_here(missing: Sequence[TrainConfig]) -> list[tuple[str, Mapping[str, str]]]:
    """Return each rule of the missing runs with the checksums of its code as it is now."""
    images = bool(missing) and "classes" in read_meta(Path(missing[0].data))
    return [(mixer, code_of(mixer, images)) for mixer in dict.fromkeys(config.mixer for config in missing)]


def read_acceptances(saved: Any) -> list[dict[str, Any]]:
    """Return the well-formed acceptances of a comparison.json; one that is damaged counts as never given."""
    return [said for said in saved if _is_acceptance(said)] if isinstance(saved, list) else []


def _is_acceptance(said: Any) -> bool:
    if not isinstance(said, dict) or not isinstance(said.get("reason"), str) or not isinstance(said.get("files"), dict):
        return False
    return all(isinstance(sums, list) and all(isinstance(s, str) for s in sums) for sums in said["files"].values())
