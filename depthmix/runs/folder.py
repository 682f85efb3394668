"""The folder of one run: its recipe, environment, metrics, log, result and checkpoints."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import hashlib
import json
import math
import os
import socket
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from depthmix.data.dataset import read_meta
from depthmix.data.integrity import data_hash, describe_change
from depthmix.errors import CHECKPOINT, DATA, DISK, UserError
from depthmix.files import (
    TEMPORARY,
    check_above,
    json_bytes,
    open_no_link,
    parse_json_object,
    read_json_object,
    reading,
    reason,
    sync_folder,
    write_file,
    writing,
)
from depthmix.mixers.defaults import all_options
from depthmix.names import install_command
from depthmix.ownership import check_new_folder
from depthmix.runs.checkpoint import STATE, list_checkpoints
from depthmix.runs.environment import environment
from depthmix.shown import shown

RECIPE, ENVIRONMENT, METRICS, SPEED = "recipe.yaml", "environment.json", "metrics.jsonl", "speed.jsonl"
DYNAMICS = "dynamics.jsonl"
LOG, RESULT, TOKENIZER, CHECKPOINTS, LOCK = "log.txt", "result.json", "tokenizer.json", "checkpoints", ".lock"
CHECKSUM = "sha256"  # key in result.json: checksum of everything else
WANDB = "wandb.json"  # the run's id in each Weights & Biases project
DATA_META = "data.json"  # a copy of the data's meta.json, whose checksums identify the data
# Files of a folder whose creation was interrupted by a kill. recipe.yaml is written last and makes it a run folder.
BEGUN = {ENVIRONMENT, CHECKPOINTS, LOCK, LOG}


class RunFolder:
    """An existing run folder. Anybody may read it; a process that trains into it holds `locked()`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / CHECKPOINTS

    @classmethod
    def create(cls, path: str | Path, config: Any) -> RunFolder:
        """Create a run folder for a configuration (a dataclass). The folder must be new or empty."""
        self = cls(path)
        self._refuse_foreign()
        check_new_folder(self.path, "the run")
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with self.locked():
            self._refuse_foreign()  # again: another process may have been faster
            with writing(self.checkpoints):
                self.checkpoints.mkdir(exist_ok=True)
            self._write_environment(config)
            self._write_recipe(with_all_options(dataclasses.asdict(config)))
        with suppress(OSError):
            sync_folder(self.path.parent)
        return self

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open an existing run folder."""
        self = cls(path)
        with reading(self.path):
            if not self.path.is_dir():
                what = "is a file, not a run folder" if self.path.exists() else "does not exist"
                raise UserError(f"{self.path} {what}: give the folder that `depthmix train` wrote.", CHECKPOINT)
            if not (self.path / RECIPE).is_file():
                what = f"{self.path} is not a run folder: it has no {RECIPE}"
                raise UserError(f"{what}{_runs_below(self.path)}.", CHECKPOINT)
        return self

    @classmethod
    def open_or_create(cls, path: str | Path, config: Any, free: Collection[str] = ()) -> RunFolder:
        """Open the run to resume, or create a new one.

        A run that died before its first line of metrics, for example out of memory, accepts any configuration.

        Args:
            path: The folder.
            config: The configuration, a dataclass.
            free: Fields in which a resumed run may differ.

        Raises:
            UserError: The folder holds a run of another configuration, or files of something else.
        """
        check_above(Path(path))
        with reading(Path(path)):
            begun = (Path(path) / RECIPE).is_file()
        if not begun:
            return cls.create(path, config)
        self = cls.open(path)
        requested, recorded = _plain(with_all_options(dataclasses.asdict(config))), with_all_options(self.read_recipe())
        check_options(self, recorded, requested)
        # The recipe may lack fields that later versions added.
        defaults = dataclasses.asdict(type(config)())
        changes = {k: recorded.get(k, defaults[k]) for k, v in requested.items() if v != recorded.get(k, defaults[k])}
        fixed = [f"{k} was {v!r} and is {requested[k]!r}" for k, v in changes.items() if k not in free]
        if fixed and not self.has_begun():
            with self.locked():
                if not self.has_begun():  # again: the process that held the lock may have made steps
                    self._write_environment(config)
                    self._write_recipe(requested)
                    self.log(f"started over with another recipe: {', '.join(fixed)}")
                    return self
        if fixed:
            advice = "use the old value to go on with it, or another folder"
            raise UserError(f"{self.path} holds a run of another recipe: {', '.join(fixed)}; {advice}.", CHECKPOINT)
        if changes and not self.has_result():
            with self.locked():
                self._write_recipe({**recorded, **requested})
                self.log(f"recipe changed: {', '.join(f'{k} {v!r} -> {requested[k]!r}' for k, v in changes.items())}")
        return self

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other trainings inside this context. The system releases the lock when the process
        dies.
        """
        import fcntl  # not on Windows, where folders can still be read

        path = self.path / LOCK
        with writing(path):
            # Closed below, once the lock is held.
            file = open(path, "a+b", buffering=0, opener=open_no_link)  # noqa: SIM115
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read(200).decode("utf-8", "replace").strip() or "of unknown number"
                advice = "wait for it or stop it, or use another folder"
                raise UserError(f"{self.path} is in use by process {holder}; {advice}.", CHECKPOINT) from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise UserError(f"Could not lock {path}: {reason(error, path)}.", DISK) from error
                self.log("this file system has no locks: take care that only one process trains into this folder")
            with writing(path):
                file.truncate(0)
                file.write(f"{os.getpid()} on {socket.gethostname()}\n".encode())
            for leftover in self.path.glob(f"{TEMPORARY}*"):
                with suppress(OSError):
                    leftover.unlink()
            yield

    def identity(self) -> str:
        """Return the run's random id, which its checkpoints hold as well; "" if environment.json is missing or damaged."""
        run_id = self._find_object(ENVIRONMENT).get("run_id")
        return run_id if isinstance(run_id, str) else ""

    def keep_identity(self, known: str | None) -> None:
        """Give a run without an id the one in its checkpoint, or a new one."""
        if not self.identity():
            self._note(run_id=known or uuid.uuid4().hex)

    def append(self, name: str, record: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl, speed.jsonl or dynamics.jsonl. Numbers that are not finite become null.

        Args:
            name: METRICS, SPEED or DYNAMICS. A line of dynamics is about the weights after `step` steps.
            record: The line, with a whole number as its step.

        Raises:
            UserError: The file cannot be written.
        """
        self._append(name, (json.dumps(_finite(record), allow_nan=False) + "\n").encode("ascii"))

    @property
    def log_path(self) -> Path:
        """The file that `log` writes to."""
        return self.path / LOG

    def log(self, message: str) -> None:
        """Append a line with the time to log.txt."""
        self._append(LOG, self._line(message))

    def _line(self, message: str) -> bytes:
        timestamp = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        text = message.replace("\n", "\n    ")
        return f"{timestamp} {text}\n".encode("utf-8", "backslashreplace")

    def sync(self) -> None:
        """Flush all logs to the disk. Called before a checkpoint, so that no line up to it is lost in a power failure."""
        for name in (METRICS, SPEED, DYNAMICS, LOG):
            path = self.path / name
            with writing(path):
                if path.exists():
                    with open(path, "rb") as file:
                        os.fsync(file.fileno())
        with writing(self.path):
            sync_folder(self.path)

    def cut(self, step: int, metrics_length: int) -> None:
        """Drop the lines of metrics.jsonl and speed.jsonl after a step, the lines of dynamics.jsonl from it on, and a
        torn last line.

        A line of dynamics is written before the step that follows, so a resumed run writes the line of `step` itself.

        Args:
            step: The step that the run resumes from.
            metrics_length: Bytes of metrics.jsonl up to the step, as its checkpoint records them.
        """
        self._truncate(METRICS, metrics_length)
        for name, last in ((SPEED, step), (DYNAMICS, step - 1)):
            kept = 0
            for number, line in enumerate(self.read_file(name).split(b"\n")[:-1], 1):
                # After a power failure, what was not synced may read as zeros; what a checkpoint needs was synced.
                if line.startswith(b"\0") or _record(self.path / name, number, line)["step"] > last:
                    break
                kept += len(line) + 1
            self._truncate(name, kept)

    def _truncate(self, name: str, length: int) -> None:
        if length < len(self.read_file(name)):
            path = self.path / name
            with writing(path), open(path, "r+b", opener=open_no_link) as file:
                file.truncate(length)  # atomic, and possible on a full disk
                os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, without a torn last one."""
        return self._read_records(METRICS)

    def read_speed(self) -> list[dict[str, Any]]:
        """Return the lines of speed.jsonl, without a torn last one."""
        return self._read_records(SPEED)

    def read_dynamics(self) -> list[dict[str, Any]]:
        """Return the lines of dynamics.jsonl, without a torn last one."""
        return self._read_records(DYNAMICS)

    def has_begun(self) -> bool:
        """Tell whether another recipe would lose anything: a line of metrics, a checkpoint or a result."""
        return bool(self.has_result() or b"\n" in self.read_file(METRICS) or list_checkpoints(self.checkpoints))

    def has_result(self) -> bool:
        """Tell whether the run has finished."""
        with reading(self.path):
            return (self.path / RESULT).is_file()

    def write_result(self, result: dict[str, Any]) -> None:
        """Write result.json atomically, with a checksum of its content. Numbers that are not finite become null."""
        content = _finite(result)
        self._replace(RESULT, json_bytes({**content, CHECKSUM: _checksum(content)}))

    def set_result_aside(self, steps: int) -> None:
        """Rename the result of a run that is extended to result-at-STEPS.json."""
        with writing(self.path / RESULT):
            (self.path / RESULT).rename(self.path / f"result-at-{steps}.json")
            sync_folder(self.path)

    def record_steps(self, steps: int) -> None:
        """Write a new number of steps into the recipe."""
        self._write_recipe({**self.read_recipe(), "steps": steps})

    def read_result(self) -> dict[str, Any]:
        """Return the content of result.json. Raises UserError if the run has not finished or the file is damaged."""
        path = self.path / RESULT
        if not self.has_result():
            raise UserError(f"{self.path} has no {RESULT}: the run has not finished.", CHECKPOINT)
        content = read_json_object(path)
        # Older results have no checksum.
        if CHECKSUM in content and content.pop(CHECKSUM) != _checksum(content):
            what = f"{path} is damaged: its content does not match its checksum"
            raise UserError(f"{what}; put it back from a copy.", CHECKPOINT)
        return content

    def read_recipe(self) -> dict[str, Any]:
        """Return the content of recipe.yaml. Raises UserError if it is missing or damaged."""
        try:
            import yaml

            from depthmix.strict_yaml import load_yaml
        except ModuleNotFoundError:
            raise UserError(f"Reading a run needs the package yaml: {install_command('train')}.") from None

        path = self.path / RECIPE
        raw = self.read_file(RECIPE)
        if not raw:
            raise UserError(f"{path} is missing or empty: {self.path} is not a run folder.", CHECKPOINT)
        try:
            recipe = load_yaml(raw.decode("utf-8"), yaml.SafeLoader)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            what = " ".join(str(error).split())
            raise UserError(f"{path} is damaged: it is not YAML ({what}).", CHECKPOINT) from error
        if not isinstance(recipe, dict) or not all(isinstance(key, str) for key in recipe):
            raise UserError(f"{path} is damaged: it does not map names to values.", CHECKPOINT)
        return recipe

    def keep_data(self, meta: str | Path, tokenizer: str | Path | None) -> None:
        """Copy the data's meta.json and, if any, tokenizer.json into the run. Raises UserError for other data than the
        run began with.
        """
        of_text = [] if tokenizer is None else [(TOKENIZER, Path(tokenizer), "the tokenizer")]
        for name, source, what in (*of_text, (DATA_META, Path(meta), "that of the data")):
            with reading(source, DATA):
                wanted = source.read_bytes()
            kept = self.read_file(name)
            if kept and kept != wanted and self.has_begun():
                advice = "use the data of then, or another folder"
                raise UserError(f"{source} is not {what} this run began with ({self.path / name}); {advice}.", DATA)
            # A finished run without data.json may have been trained on other data.
            if kept != wanted and not self.has_result():
                self._replace(name, wanted)
        if not self.has_result():
            self._note(data=str(Path(meta).parent.absolute()))

    def keep_origin(self, origin: dict[str, Any] | None) -> None:
        """Record the model that the run's weights start from, if any, until the run has begun."""
        if origin is not None and not self.has_begun():
            self._note(init=origin)

    def _note(self, **values: Any) -> None:
        """Record values in environment.json, unless they are there already."""
        noted = self._find_object(ENVIRONMENT)
        if noted | values != noted:
            self._replace(ENVIRONMENT, json_bytes(noted | values))

    def data_meta(self) -> dict[str, Any]:
        """Return the meta.json of the run's data; empty where it was not kept, or is damaged."""
        return self._find_object(DATA_META)

    def wandb_id(self, project: str) -> str:
        """Return the run's id in a Weights & Biases project, which stays the same when the run is resumed."""
        known = self._find_object(WANDB)
        if not isinstance(known.get(project), str):
            known[project] = uuid.uuid4().hex[:8]
            self._replace(WANDB, json_bytes(known))
        return known[project]

    def find_data(self, data: str) -> Path:
        """Find the data that the run was trained on.

        A relative path is tried from where the run was trained, then from the current folder, then from the folders
        above the run, in case the whole project was moved.

        Args:
            data: The path in the recipe.

        Returns:
            The folder of the data.

        Raises:
            UserError: No folder was found, with those tried; or the data have changed, with what changed.
        """
        noted = self._find_object(ENVIRONMENT).get("data")
        near = [Path(p).absolute() for p in (noted, data) if isinstance(p, str) and p]
        above = [] if os.path.isabs(data) else [p / data for p in self.path.absolute().parents]
        candidates = [p for p in (*near, *above) if (p / "meta.json").is_file()]
        if not candidates:
            tried = " and ".join(dict.fromkeys(map(str, near))) + (f", and {data} above the run" if above else "")
            raise UserError(f"The data of {self.path} is not there any more: tried {tried}; use --input.", DATA)
        if not self.read_file(DATA_META):
            return candidates[0]  # nothing identifies the data of the run
        kept = self.data_meta()
        if not kept:
            what = "it no longer identifies the data that the run was trained on"
            raise UserError(
                f"{self.path / DATA_META} is damaged, {what}: put it back from a copy, or use --input.", DATA
            )
        for place in candidates:
            with suppress(UserError):  # this copy may be damaged and another one intact
                if data_hash(place) == data_hash(kept):
                    return place
        change = describe_change(kept, read_meta(candidates[0]))
        changed = f"The data in {candidates[0]} is not what {self.path} was trained on: {change}"
        text = "" if "classes" in kept else ", or give text to measure on with --input"
        raise UserError(f"{changed}; prepare it as then{text}.", DATA)

    def _refuse_foreign(self) -> None:
        with reading(self.path):
            try:
                names = {p.name for p in self.path.iterdir()}
            except FileNotFoundError:
                return
            except NotADirectoryError:
                raise UserError(f"{self.path} is a file; choose another folder for the run.", CHECKPOINT) from None
        if RECIPE in names:
            raise UserError(f"{self.path} already holds a run; choose another folder.", CHECKPOINT)
        if checkpoints := list_checkpoints(self.checkpoints):
            what = f"{self.path} holds checkpoints and no {RECIPE}"
            advice = f"put that file back, whose content is under config in {checkpoints[0] / STATE}, or choose another folder"
            raise UserError(f"{what}: {advice}.", CHECKPOINT)
        foreign = sorted(name for name in names - BEGUN if not name.startswith(TEMPORARY))
        if foreign:
            what = f"it holds {foreign[0]} and no {RECIPE}"
            raise UserError(f"{self.path} is not a run folder ({what}); choose a new or empty folder.", CHECKPOINT)

    def _write_environment(self, config: Any) -> None:
        content = {**environment(config.device), "run_id": uuid.uuid4().hex}
        self._replace(ENVIRONMENT, json_bytes(content))

    def _write_recipe(self, recipe: dict[str, Any]) -> None:
        import yaml

        self._replace(RECIPE, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).encode("utf-8"))

    def _replace(self, name: str, data: bytes) -> None:
        with writing(self.path / name):
            write_file(self.path / name, data)

    def _append(self, name: str, data: bytes) -> None:
        path = self.path / name
        # Opened for each line, so that no line goes to a file that was replaced or removed meanwhile.
        with writing(path), open(path, "ab", buffering=0, opener=open_no_link) as file:
            size, rest = os.fstat(file.fileno()).st_size, memoryview(data)
            try:
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                with suppress(OSError):
                    file.truncate(size)
                raise

    def _read_records(self, name: str) -> list[dict[str, Any]]:
        path = self.path / name
        lines = self.read_file(name).split(b"\n")[:-1]  # drops a torn last line
        return [_record(path, number, line) for number, line in enumerate(lines, 1)]

    def _find_object(self, name: str) -> dict[str, Any]:
        """Return the content of an optional JSON file; empty if it is missing or damaged."""
        return parse_json_object(self.read_file(name))

    def read_file(self, name: str) -> bytes:
        """Return the content of a file in the folder; empty if it does not exist."""
        path = self.path / name
        with reading(path):
            return path.read_bytes() if path.exists() else b""


def check_options(folder: RunFolder, recipe: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a recipe with unknown options, since this version would ignore their effect on the run."""
    if unknown := [name for name in recipe if name not in known]:
        what = f"{folder.path / RECIPE} is damaged, or of a later version of depthmix: there is no option {shown(unknown[0])}"
        raise UserError(f"{what}; put the file back from a copy, or use that version.", CHECKPOINT)


def _runs_below(folder: Path) -> str:
    """List the runs in a folder of runs, such as a comparison's, for an error message."""
    with suppress(OSError):
        runs = sorted(p.parent for pattern in ("*", "*/*") for p in folder.glob(f"{pattern}/{RECIPE}"))
        more = f" and {len(runs) - 8} more" if len(runs) > 8 else ""
        return f"; the runs in it are {', '.join(map(str, runs[:8]))}{more}: give one of them" if runs else ""
    return ""


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON lacks, by null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe as YAML reads it back: tuples become lists."""
    import yaml

    return yaml.safe_load(yaml.safe_dump(recipe, allow_unicode=True))


def with_all_options(recipe: dict[str, Any]) -> dict[str, Any]:
    """Fill in every option of a recipe's mixer, including options that later versions added."""
    options = recipe.get("mixer_options")
    if not isinstance(options, dict):
        return recipe
    return {**recipe, "mixer_options": all_options(str(recipe.get("mixer")), options)}


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    record = parse_json_object(line)
    if type(record.get("step")) is not int:
        raise UserError(f"{path}:{number} is damaged: it is not a JSON object with a step.", CHECKPOINT)
    return record
