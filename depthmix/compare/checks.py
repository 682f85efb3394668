"""Check that results may share a table: one recipe, one data set, one kind of device and one version of the code."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from depthmix.compare.plan import PlannedRun, key_of
from depthmix.compare.recipe import Key
from depthmix.compare.records import Records
from depthmix.data.dataset import TokenData
from depthmix.data.images import ImageData
from depthmix.errors import CHECKPOINT, USAGE, UserError
from depthmix.mixers import OptionError, create_mixer
from depthmix.runs.code_checksums import accepted, code_of, differences

# Options that no final number depends on, or that a record states elsewhere.
NOT_RECORDED = {"data", "out", "seed", "quiet", "device", "tensorboard", "wandb", "keep", "save_every", "log_every"}
NOT_RECORDED |= {"hang_limit"}
# Recorded options that may differ: how many points a curve has, what else is recorded, and what a diverging run does.
MAY_DIFFER = {"eval_every", "dynamics_every", "on_nan"}
# The checksum of initial weights that are not on this machine.
NOT_HERE = "not here"


def data_checksum(data: TokenData | ImageData) -> str:
    """Return a checksum of prepared data: of its tokens or images, wherever the folder is."""
    if isinstance(data, ImageData):
        return hashlib.sha256(json.dumps(data.meta["sha256"], sort_keys=True).encode()).hexdigest()[:16]
    shards = {s: data.meta["splits"][s]["shards"] for s in ("train", "val")}
    sums = {s: [data.meta["sha256"].get(shard) for shard in names] for s, names in shards.items()}
    known = [data.vocab_size, sums, {s: data.split(s).n_bytes for s in sums}]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def plain_config(config: Any) -> dict[str, Any]:
    """Return a run's configuration as its record holds it, with the checksum of its initial weights for `init`."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    values["init"] = values["init"] and weights_checksum(Path(values["init"]))
    return {key: value for key, value in values.items() if key not in NOT_RECORDED}


def weights_checksum(folder: Path) -> str:
    """Return a checksum of the weights in a folder; NOT_HERE if there are none on this machine."""
    files = sorted(folder.rglob("*.safetensors")) if folder.is_dir() else []
    return _checksum(tuple((file, file.stat().st_mtime_ns) for file in files)) if files else NOT_HERE


@functools.cache
def _checksum(files: tuple[tuple[Path, int], ...]) -> str:
    """Hash files. Their modification times are part of the key, so a changed file is read again."""
    total = hashlib.sha256()
    for file, _ in files:
        with file.open("rb") as opened:
            total.update(hashlib.file_digest(opened, "sha256").digest())
    return total.hexdigest()[:16]


def device_kind(record: Mapping[str, Any]) -> str:
    """Return the kind of device that made a run."""
    return str(record["environment"].get("device")).partition(":")[0]


def check_planned(planned: Iterable[PlannedRun], data: Mapping[str, TokenData | ImageData]) -> None:
    """Find what would stop a run before any run starts. Each arm is checked once per cell, without allocating memory.

    Raises:
        UserError: An arm cannot be trained.
    """
    from depthmix.runs.init import settled
    from depthmix.train.check import check_config, check_run
    from depthmix.train.optim import match_groups
    from depthmix.train.task import make_task

    checked: set[tuple[str, str, str]] = set()
    for run in planned:
        if run.key[:3] in checked:
            continue
        checked.add(run.key[:3])
        opened = data[run.cell.domain]
        try:
            check_config(run.config)
            config = settled(run.config)
            check_run(config, opened)
            with torch.device("meta"):
                create_mixer(config.mixer, dim=config.dim, n_blocks=config.n_blocks, **config.mixer_options)
                # Building a whole model takes a while even so. Only parameter groups need its names.
                if config.groups:
                    match_groups(dict(make_task(config, opened).build().named_parameters()), config.groups)
        except (UserError, OptionError) as error:
            code = error.exit_code if isinstance(error, UserError) else USAGE
            raise UserError(f"arm {run.arm.label!r}: {error}", code) from None


def check_records(
    used: Iterable[Mapping[str, Any]], planned: Iterable[PlannedRun], checksums: Mapping[str, str], device: str | None
) -> None:
    """Refuse results of another recipe, other data or another kind of device.

    Args:
        used: Results that the table would show.
        planned: All runs of the comparison.
        checksums: Checksums of the data by domain, of the data that is on this machine.
        device: Kind of the device, if anything is to run.
    """
    by_key: dict[Key, PlannedRun] = {run.key: run for run in planned}
    for record in used:
        run = by_key.get(key_of(record))
        if run is None:
            continue
        then, now, usual = record["config"], plain_config(run.config), plain_config(type(run.config)())
        now["init"] = then.get("init", "") if now["init"] == NOT_HERE else now["init"]
        changed = [  # a result of an older version lacks the options that came later
            f"{key} was {then.get(key, usual[key])!r} and is {value!r}"
            for key, value in now.items()
            if key not in MAY_DIFFER and then.get(key, usual[key]) != value
        ]
        if record["data"] != checksums.get(run.cell.domain, record["data"]):
            changed.append("its data was prepared otherwise")
        if device is not None and device_kind(record) != device:
            changed.append(f"it ran on {device_kind(record)} and this is {device}")
        if changed:
            what = f"the results hold {run.title} of another recipe ({', '.join(changed)})"
            advice = "give that recipe, remove that line from the results, or choose another --out"
            raise UserError(f"{what}; {advice}", CHECKPOINT)


def check_code(
    records: Records,
    used: Sequence[dict[str, Any]],
    missing: Sequence[PlannedRun],
    reason: str,
    kernels: bool,
    images: Iterable[str] = (),
) -> None:
    """Refuse to mix results of different code, unless the user has said why they may be mixed.

    Args:
        records: All records. A new acceptance is added to them.
        used: Results that the table would show.
        missing: Runs that the code here would make.
        reason: Why versions that nobody has accepted yet may be mixed; empty: they may not.
        kernels: Whether a change of the kernels counts, as at equal time.
        images: Domains that hold images.
    """
    tables = [(run["config"].get("mixer", ""), table) for run in used for table in records.codes(run)]
    kinds = sorted({(run.config.mixer, run.cell.domain in set(images)) for run in missing}) if used else []
    installed = [(mixer, code_of(mixer, of_images)) for mixer, of_images in kinds]
    changed = differences([*tables, *installed], kernels)
    files = {f: sorted(sums) for f, sums in changed.items() if not accepted(f, sums, records.of("accept"))}
    if files and not reason:
        what = f"the results are of different code ({', '.join(sorted(files))} changed)"
        if missing:
            what = f"the results were made by other code than this ({', '.join(sorted(files))} changed), and {len(missing)} more runs would be mixed with them"
        advice = "go back to that code, choose another --out, or say why it does not matter with --accept-code REASON"
        raise UserError(f"{what}; {advice}", CHECKPOINT)
    if files:
        records.add({"kind": "accept", "reason": " ".join(reason.split()), "files": files})
