"""Processes that are started once and do many jobs: importing torch takes longer than most jobs.

A driver imports torch and forks as many workers as a job needs; they stay, in a process group of their own, for the next job.
"""

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Client, Listener
from pathlib import Path

import forking

HERE = Path(__file__).parent
IMPORTED_BY_JOBS = (
    "parallel.jobs parallel.pipeline_jobs torch.distributed.checkpoint depthmix.train.loop depthmix.runs.sharded yaml"
)
FAST = ("attention", "attention_decoding", "weighted_sums", "weighted_sums_decoding", "streams", "one_stream")
LIMIT = 120  # seconds until a job is taken to hang


def drive(address):
    """Do jobs until there are no more: (number of processes, module:function, arguments) in, a list of outcomes out.

    With no processes the driver does the job itself, which may fork some of its own.
    """
    sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]
    channel = Client(address)
    import torch

    torch.set_num_threads(1)
    for module in (*IMPORTED_BY_JOBS.split(), *(f"depthmix.fast.{name}" for name in FAST)):
        importlib.import_module(module)
    torch.optim.AdamW([torch.zeros(1)]).zero_grad()  # which imports the compiler
    importlib.import_module("train.small").prepare_to_fork("residual")
    pools = {}
    try:
        while (job := channel.recv()) is not None:
            size, *rest = job
            if not size:
                channel.send([outcome(*rest)])
                continue
            if size not in pools:
                pools[size] = start(size)
            channel.send(do(pools, size, rest))
    finally:
        for pool in pools.values():
            stop(pool)


def start(size):
    """Workers, each with its end of a pipe."""
    context = multiprocessing.get_context("fork")
    store, pool = tempfile.mkdtemp(), []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, rank, size, store))
        process.start()
        pool.append((process, ours))
    return pool


def do(pools, size, job):
    for _, pipe in pools[size]:
        pipe.send(job)
    outcomes = [pipe.recv() if pipe.poll(LIMIT) else (False, "no answer") for _, pipe in pools[size]]
    if not all(good for good, _ in outcomes):  # they may be out of step
        stop(pools.pop(size))
    return outcomes


def stop(pool):
    for process, _ in pool:
        process.kill()
    for process, _ in pool:
        process.join()


def work(pipe, rank, size, store):
    """One worker."""
    import torch.distributed as dist

    gc.disable()  # it would look through them for every few objects, and jobs are short
    limit = timedelta(seconds=LIMIT / 2)
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=rank, world_size=size, timeout=limit)
    while True:
        good, what = outcome(*pipe.recv())
        pipe.send((good, what if good else f"rank {rank}: {what}"))


def outcome(name, args):
    """Whether a job was done, and what it returned or what went wrong."""
    module, _, function = name.partition(":")
    try:
        return True, getattr(importlib.import_module(module), function)(*args)
    except BaseException:
        return False, traceback.format_exc()


class Workers:
    """The driver, from where the tests are."""

    def __init__(self):
        code = "import sys; from parallel.workers import drive; drive(sys.argv[1])"
        with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/socket") as listener:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
            self.process = forking.start(code, listener.address, env=environment, first=forking.TRAINING)
            self.channel = listener.accept()

    def run(self, size, name, *args):
        """What each of `size` processes returns of a job; an AssertionError with what they said if one did not."""
        self.channel.send((size, name, args))
        assert self.channel.poll(2 * LIMIT), "the workers do not answer"
        outcomes = self.channel.recv()
        wrong = [what for good, what in outcomes if not good]
        assert not wrong, "\n".join(wrong)
        return [what for _, what in outcomes]

    def close(self):
        self.channel.send(None)
        if not self.channel.poll(10):  # it ends by closing its end
            os.kill(self.process, signal.SIGKILL)
        self.channel.close()
