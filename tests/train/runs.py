"""What tests ask of a run: its metrics and losses, or that it is refused."""

import pytest

from depthmix.train.errors import USAGE, UserError
from depthmix.train.loop import train


def metrics(folder) -> bytes:
    return (folder.path / "metrics.jsonl").read_bytes()


def losses(folder, key="loss"):
    return [line[key] for line in folder.read_metrics() if key in line]


def refused(config, *words, code=USAGE):
    with pytest.raises(UserError) as caught:
        train(config)
    message = str(caught.value)
    assert caught.value.exit_code == code, message
    assert "\n" not in message
    for word in words:
        assert str(word) in message
    return message
