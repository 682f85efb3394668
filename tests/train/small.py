"""A corpus, its prepared data, a training and a finished run, all tiny; made once a process."""

import atexit
import functools
import gc
import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch

from depthmix.config import DataConfig, TrainConfig
from depthmix.data.dataset import TokenData
from depthmix.data.prepare import prepare
from depthmix.runs.code_checksums import code_of
from depthmix.runs.folder import RunFolder
from depthmix.runs.restore import Trained, load_model
from depthmix.train.loop import train

torch.set_num_threads(1)  # for tensors this small, threads only get into each other's way

LINES = [
    "The sea is deep, and the sky above it is wide and blue.",
    "A small boat goes out at dawn and comes back at night.",
    "Café, naïve, 東京 and 🌊 need more than one byte.",
    "What is read over depth is a mixture of all that came before.",
]
VOCAB = 300


@functools.cache
def place() -> Path:
    """A folder that goes away with the process."""
    folder = tempfile.TemporaryDirectory(prefix="depthmix-test-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
    atexit.register(folder.cleanup)
    return Path(folder.name)


@functools.cache
def corpus() -> Path:
    """Four lines, many times over, in documents of different length."""
    folder = place() / "corpus"
    folder.mkdir()
    for i in range(12):
        text = "\n".join(LINES[(i + j) % len(LINES)] for j in range(10 + i))
        (folder / f"{i:02d}.txt").write_text(text, encoding="utf-8")
    return folder


@functools.cache
def data() -> Path:
    """The corpus, prepared."""
    config = DataConfig(input=[str(corpus())], out=str(place() / "data"), vocab_size=VOCAB, val_fraction=0.2)
    return prepare(config)


@functools.cache
def other_data() -> Path:
    """The corpus, prepared with other tokens."""
    config = DataConfig(input=[str(corpus())], out=str(place() / "other"), vocab_size=VOCAB - 20, val_fraction=0.2)
    return prepare(config)


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Another file in prepared data, with the checksum that belongs to it."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    meta["sha256"][name] = hashlib.sha256(content).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    (folder / name).write_bytes(content)


def next_tick(path: Path) -> None:
    """Return once a change to the file would be seen in its times: a file system's clock moves in steps of milliseconds."""
    probe = path.with_name("probe")
    probe.touch()
    while probe.stat().st_ctime_ns <= path.stat().st_ctime_ns:
        probe.touch()
    probe.unlink()


def token_data() -> TokenData:
    """The prepared data, opened."""
    return TokenData.open(data())


def config(out, **changes) -> TrainConfig:
    """A training of some milliseconds a step."""
    values = {
        "out": str(out),
        "dim": 16,
        "n_blocks": 1,
        "n_heads": 2,
        "seq_len": 16,
        "batch_size": 4,
        "steps": 6,
        "warmup": 2,
        "lr": 0.01,
        "log_every": 1,
        "eval_every": 5,
        "eval_tokens": 64,
        "save_every": 3,
        "device": "cpu",
        "quiet": True,
    }
    if "data" not in changes:
        values["data"] = str(data())
    return TrainConfig(**{**values, **changes})


def prepare_to_fork(*mixers: str) -> None:
    """Do what each forked training would do for itself: parse depthmix's files and collect garbage.

    Args:
        mixers: Rules of the trainings.
    """
    for mixer in mixers:
        code_of(mixer)
    # Or every process would look through all that was imported, and copy its memory doing so.
    gc.collect()
    gc.freeze()


def flags(config) -> list[str]:
    """A configuration as a command line would say it."""
    plain, given = type(config)(), []
    for name, value in vars(config).items():
        if value != getattr(plain, name):
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                given.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                given += [f"--{flag}", *written(value)]
    return given


def written(value) -> list[str]:
    """A value as the arguments of its flag."""
    if isinstance(value, dict):
        return [f"{k}={v}" for k, v in value.items()]
    several = value if isinstance(value, list) else [value]
    return [",".join(written(v)) if isinstance(v, dict) else str(v) for v in several]


def overriding(argv: list[str], more: list[str]) -> list[str]:
    """A command line with more options, without those of its own that they give again."""
    again = {word.partition("=")[0].replace("--no-", "--") for word in more if word.startswith("--")}
    kept, keeps = [], True
    for word in argv:
        keeps = word.replace("--no-", "--") not in again if word.startswith("--") else keeps
        kept += [word] if keeps else []
    return [*kept, *more]


@functools.cache
def run() -> RunFolder:
    """A finished run of 60 steps, which has learned its lines somewhat."""
    return train(config(place() / "run", dim=32, n_blocks=2, batch_size=8, seq_len=32, steps=60, save_every=20))


def load_run(path=None) -> Trained:
    """The model of a run, by default of that one."""
    return load_model(path or run().path, torch.device("cpu"))
