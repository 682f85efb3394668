"""A comparison of some seconds, made once a process."""

import functools

import depthmix as dm
from train import small

ARMS = ["residual", "attnres:block_size=2"]
OPTIONS = {"dim": 16, "n_blocks": 2, "n_heads": 2, "seq_len": 16, "batch_size": 4, "warmup": 2, "lr": 0.01}
OPTIONS |= {"steps": 4, "eval_every": 2, "save_every": 2, "eval_tokens": 64, "device": "cpu"}


@functools.cache
def result_and_events():
    """The result of two arms with two seeds, and what on_step was told."""
    events = []
    return dm.compare(small.data(), ARMS, seeds=2, on_step=events.append, **OPTIONS), events
