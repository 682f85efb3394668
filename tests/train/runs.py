"""What tests ask of a run: its metrics and losses, or that it is refused."""

from depthmix.errors import USAGE
from depthmix.train.loop import train
from train.refused import refused


def metrics(folder) -> bytes:
    return (folder.path / "metrics.jsonl").read_bytes()


def losses(folder, key="loss"):
    return [line[key] for line in folder.read_metrics() if key in line]


def train_refused(config, *words, code=USAGE):
    return refused(lambda: train(config), *words, code=code)
