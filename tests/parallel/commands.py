"""Command lines as torchrun starts them, but forked from a process that has imported torch already."""

import importlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

LIMIT = 60  # seconds until they are taken to hang


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def hang_at(step):
    """Let this process never come back from reading the batch of a step."""
    from depthmix.data.dataset import Batches

    read = Batches.get

    def never(self, at, rows=None):
        if at == step:
            time.sleep(2 * LIMIT)
        return read(self, at, rows)

    Batches.get = never


def start(argv, rank, size, port, output, patch, hangs=None):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        for number in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        from depthmix.cli import main

        for name, value in patch.items():
            *modules, name = name.split(".")
            setattr(importlib.import_module(".".join(["depthmix", *modules])), name, value)
        if hangs is not None and rank == hangs[0]:
            hang_at(hangs[1])
        code = main(argv)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(argvs, folder, signalled=None, patches=None, hangs=None, size=None):
    """(exit code, output, seconds after the signal) of every process; of one that hung the code is None.

    signalled: (rank, signal, file, lines): that rank gets the signal when the file has as many lines.
    hangs: (rank, step): that rank never comes back from reading the batch of that step.
    size: how many processes the others are told of, if some are never started.
    """
    port, started, patches = free_port(), len(argvs), patches or {}
    size = size or started
    outputs = [Path(folder) / f"output-{rank}.txt" for rank in range(started)]
    children = [start(argvs[r], r, size, port, outputs[r], patches.get(r, {}), hangs) for r in range(started)]
    running, found = dict(enumerate(children)), {}
    since = time.monotonic()
    until = since + LIMIT
    while running and time.monotonic() < until:
        if signalled is not None:
            rank, number, file, lines = signalled
            if os.path.exists(file) and Path(file).read_bytes().count(b"\n") >= lines:
                os.kill(children[rank], number)
                since, signalled = time.monotonic(), None
        for rank, child in list(running.items()):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                del running[rank]
                found[rank] = os.waitstatus_to_exitcode(status), time.monotonic() - since
        time.sleep(0.01)
    for rank, child in running.items():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found[rank] = None, LIMIT
    return [(found[r][0], outputs[r].read_text(), found[r][1]) for r in range(started)]


def elastic(argv, folder, metrics, kills):
    """A command line under torchrun's own engine, with forked processes; so often a random one is killed at a random instant."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        max_restarts=kills,
        monitor_interval=0.1,
        start_method="fork",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
    )
    elastic_launch(config, killed_at_random)(argv, metrics, kills)


def killed_at_random(argv, metrics, kills):
    """One process of `elastic`."""
    from depthmix.cli import main

    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    chance = random.Random(attempt)
    if attempt < kills and rank == chance.randrange(2):
        threading.Thread(
            target=kill_this, args=(metrics, chance.randint(4, 7), chance.random() / 20), daemon=True
        ).start()
    if code := main(argv):
        sys.exit(code)


def kill_this(metrics, more, seconds):
    """Kill this process a while after it has gone on for some steps."""

    def steps():
        lines = Path(metrics).read_text().splitlines() if os.path.exists(metrics) else []
        return max((json.loads(line)["step"] for line in lines[:-1]), default=0)

    first = steps()
    while steps() < first + more:
        time.sleep(0.01)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)
