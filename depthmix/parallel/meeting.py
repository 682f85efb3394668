"""Rendezvous of a run's processes, in a store that the first process or torchrun keeps.

Processes that torchrun starts again meet in the store of those that died: they agree on a corner of it that is new. Torch itself
would connect to the addresses that are still written there. How often a process was restarted does not help: torchrun counts that
for each node by itself.

    rank 1, 2   hello/1 = a name of its own   ->   waits for answer/<name> = corner   ->   corner/1 = ""   ->   waits for corner/met
    rank 0      answers whoever says hello, until all have written into the corner; corner/met = "", or who never came
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from depthmix.errors import INTERNAL, UserError
from depthmix.parallel.watchdog import WARN_AFTER, ranks

ADVICE = (
    "check that every process is started and reaches the first one; nothing is lost, and the same command starts again"
)
# Seconds.
POLL = 0.01
# Seconds between two attempts to connect.
KNOCK = 0.1
# Seconds for which the first process keeps the store if some never came.
LEAVING = 1.0


class NeverCame(UserError):
    """A process of the run did not arrive in time. The first process reports it for all that did."""

    shared = True

    def __init__(self, message: str) -> None:
        super().__init__(message, INTERNAL)


def open_store(rank: int, patience: timedelta) -> Any:
    """Connect to the store that MASTER_ADDR and MASTER_PORT name; the first process keeps it, unless torchrun does.

    Raises:
        UserError: The store cannot be reached in time, or the port is taken.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not keeps:
        with _said_to_wait_for(rank, f"the store of rank 0 at {host}:{port}"):
            _knock(host, port, patience.total_seconds())
    try:
        # Nobody waits here for the others: that comes later, where they have names.
        return TCPStore(host, port, None, keeps, timeout=patience, wait_for_workers=False, multi_tenant=keeps)
    except RuntimeError as error:
        if keeps and "EADDRINUSE" in str(error):
            advice = "choose another with torchrun's --master-port, or MASTER_PORT"
            raise UserError(f"port {port} of {host} is in use: {advice}") from None
        reason = str(error).splitlines()[0]
        raise UserError(f"there is no store at {host}:{port} ({reason}); {ADVICE}", INTERNAL) from None


def _knock(host: str, port: int, seconds: float) -> None:
    """Wait until something answers; torch's own attempts fill the screen with stacks of C++ and grow rare."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=seconds).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                what = f"nothing answers at {host}:{port} within {seconds:g} s ({error.strerror or error})"
                raise UserError(f"rank 0 never came: {what}; {ADVICE}", INTERNAL) from None
        time.sleep(KNOCK)


def new_corner(store: Any, rank: int, size: int, patience: timedelta) -> Any:
    """Meet the other processes of this start, and return a part of the store that only they share.

    Raises:
        NeverCame: Some were not there in time, with their ranks.
    """
    name = uuid.uuid4().hex
    store.set_timeout(patience)
    store.set(f"hello/{rank}", name)
    if rank:
        with _said_to_wait_for(rank, "rank 0"):
            corner = _get(store, f"answer/{name}")
        store.set(f"{corner}/{rank}", "")
        # Rank 0 decides which processes were in time.
        store.set_timeout(2 * patience)
        if missing := _get(store, f"{corner}/met"):
            raise NeverCame(missing)
    else:
        corner = name
        missing = _answer(store, corner, size, patience.total_seconds())
        store.set(f"{corner}/met", missing)
        if missing:
            # The others read the message in this process's store.
            time.sleep(LEAVING)
            raise NeverCame(missing)
    return PrefixStore(corner, store)


def _get(store: Any, key: str) -> str:
    """Wait for a key that rank 0 writes, and return its value."""
    try:
        return str(store.get(key).decode())
    except RuntimeError as error:
        raise UserError(f"rank 0 never came, or has gone ({str(error).splitlines()[0]}); {ADVICE}", INTERNAL) from None


def _answer(store: Any, corner: str, size: int, seconds: float) -> str:
    """Tell each arriving process where to meet, until all have come; returns a message if some are late."""
    begun, warned = time.monotonic(), False
    waiting, answered = list(range(1, size)), set()
    while True:
        for other in list(waiting):
            if store.check([f"{corner}/{other}"]):
                waiting.remove(other)
            elif store.check([f"hello/{other}"]) and (name := store.get(f"hello/{other}")) not in answered:
                # This name may belong to a process that died. Then nobody reads the answer, and a new name will come.
                answered.add(name)
                store.set(f"answer/{name.decode()}", corner)
        if not waiting:
            return ""
        waited = time.monotonic() - begun
        if waited > seconds:
            return f"{ranks(waiting, size)} never came, within {seconds:g} s; {ADVICE}"
        if waited > WARN_AFTER and not warned:
            warned = True
            _warn(0, f"{ranks(waiting, size)} has not come for {waited:.0f} s; the run ends after {seconds:g} s")
        time.sleep(POLL)


@contextmanager
def _said_to_wait_for(rank: int, what: str) -> Iterator[None]:
    """Warn, when the code inside this context waits for too long, what it waits for."""
    timer = threading.Timer(WARN_AFTER, _warn, (rank, f"still waiting for {what}"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _warn(rank: int, sentence: str) -> None:
    with suppress(OSError):
        print(f"depthmix: rank {rank}: warning: {sentence}", file=sys.stderr, flush=True)
