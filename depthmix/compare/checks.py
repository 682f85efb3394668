"""Whether results may stand in one table: of one recipe, one data set, one kind of device and one version of the code."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from depthmix.compare.pieces import Piece
from depthmix.compare.recipe import Study
from depthmix.compare.records import Records
from depthmix.data.dataset import TokenData
from depthmix.data.images import ImageData
from depthmix.errors import CHECKPOINT, USAGE, UserError
from depthmix.mixers import OptionError, create_mixer
from depthmix.runs.code_checksums import accepted, code_of, differences

# Options that no final number depends on, or that the rest of a record says.
FREE = {"data", "out", "seed", "quiet", "device", "tensorboard", "wandb", "keep", "save_every", "log_every"}
FREE |= {"hang_limit"}
CURVE = {"eval_every"}  # how many points a curve has
NOT_HERE = "not here"  # of weights to start from


def data_mark(data: TokenData | ImageData) -> str:
    """What tells prepared data apart: the checksums of its tokens or images, wherever and however it was made."""
    if isinstance(data, ImageData):
        return hashlib.sha256(json.dumps(data.meta["sha256"], sort_keys=True).encode()).hexdigest()[:16]
    shards = {s: data.meta["splits"][s]["shards"] for s in ("train", "val")}
    sums = {s: [data.meta["sha256"].get(shard) for shard in names] for s, names in shards.items()}
    known = [data.vocab_size, sums, {s: data.split(s).n_bytes for s in sums}]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def plain_config(config: Any) -> dict[str, Any]:
    """A run's configuration as JSON keeps it, without what belongs to a machine or to a run's folder; of `init` the weights."""
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    found["init"] = found["init"] and weights_mark(Path(found["init"]))
    return {key: value for key, value in found.items() if key not in FREE}


def weights_mark(folder: Path) -> str:
    """What tells the weights that a training starts from apart, wherever they lie; NOT_HERE for those of another machine."""
    files = sorted(folder.rglob("*.safetensors")) if folder.is_dir() else []
    return _checksum(tuple((file, file.stat().st_mtime_ns) for file in files)) if files else NOT_HERE


@functools.cache  # of files as they were at that time
def _checksum(files: tuple[tuple[Path, int], ...]) -> str:
    found = hashlib.sha256()
    for file, _ in files:
        with file.open("rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()[:16]


def ran_on(run: Mapping[str, Any]) -> str:
    """The kind of device that made a run."""
    return str(run["environment"].get("device")).partition(":")[0]


def check_pieces(study: Study, pieces: Iterable[Piece], data: Mapping[str, TokenData | ImageData]) -> None:
    """What would stop a run is said before anything runs: each arm is looked at once in each cell, without memory."""
    # Building a whole model takes a while even so, and is needed only where groups name parameters.
    from depthmix.train.check import check_config, check_run
    from depthmix.train.optim import match_groups
    from depthmix.train.task import make_task

    looked: set[tuple[str, str, str]] = set()
    for piece in pieces:
        if piece.key[:3] in looked:
            continue
        looked.add(piece.key[:3])
        tokens = data[piece.cell.domain]
        try:
            check_config(piece.config)
            if piece.config.parallel:
                raise UserError("studies run in one process: leave parallel out")
            check_run(piece.config, tokens)
            with torch.device("meta"):
                if groups := piece.config.groups:
                    match_groups(dict(make_task(piece.config, tokens).build().named_parameters()), groups)
                c = piece.config
                create_mixer(c.mixer, dim=c.dim, n_blocks=c.n_blocks, **c.mixer_options)
        except (UserError, OptionError) as error:
            code = error.exit_code if isinstance(error, UserError) else USAGE
            raise UserError(f"{study.path}, arm {piece.arm.label!r}: {error}", code) from None


def check_runs(
    used: Iterable[Mapping[str, Any]], pieces: Iterable[Piece], marks: Mapping[str, str], device: str | None
) -> None:
    """UserError for a result in the place of a planned one that is of another recipe, other data or another kind of device.

    marks: of the data, by domain, where it is here; device: its kind, where anything is to run.
    """
    planned = {piece.key: piece for piece in pieces}
    for run in used:
        piece = planned.get((run["arm"], run["domain"], run["size"], run["seed"]))
        if piece is None:
            continue
        then, now, plain = run["config"], plain_config(piece.config), plain_config(type(piece.config)())
        now["init"] = then.get("init", "") if now["init"] == NOT_HERE else now["init"]
        changed = [  # a result of an older version lacks the options that came later
            f"{key} was {then.get(key, plain[key])!r} and is {value!r}"
            for key, value in now.items()
            if key not in CURVE and then.get(key, plain[key]) != value
        ]
        if run["data"] != marks.get(piece.cell.domain, run["data"]):
            changed.append("it was trained on other data")
        if device is not None and ran_on(run) != device:
            changed.append(f"it ran on {ran_on(run)} and this is {device}")
        if changed:
            what = f"the results hold {piece.title} of another recipe ({', '.join(changed)})"
            advice = "go back to that recipe, remove that line from the results, or give the study another name"
            raise UserError(f"{what}; {advice}", CHECKPOINT)


def check_code(
    study: Study,
    records: Records,
    used: Sequence[dict[str, Any]],
    missing: Sequence[Piece],
    reason: str,
    images: Iterable[str] = (),
) -> None:
    """UserError if results of different code would stand in one table, unless somebody says, or has said, why they may.

    images: the domains that hold them.
    """
    tables = [(run["config"].get("mixer", ""), records.code(run)) for run in used]
    kinds = sorted({(piece.config.mixer, piece.cell.domain in set(images)) for piece in missing})
    tables += [(mixer, code_of(mixer, of_images)) for mixer, of_images in kinds]
    found = differences(tables, kernels=study.budget == "time")
    files = {f: sorted(sums) for f, sums in found.items() if not accepted(f, sums, records.of("accept"))}
    if files and not reason:
        what = f"the results are of different code ({', '.join(sorted(files))} changed)"
        if missing:
            what = f"the results are of other code than this, which would be mixed with it ({', '.join(sorted(files))} changed)"
        advice = (
            "go back to that code, give the study another name, or say why it does not matter with --accept-code REASON"
        )
        raise UserError(f"{what}; {advice}", CHECKPOINT)
    if files:
        records.add({"kind": "accept", "reason": " ".join(reason.split()), "files": files})
