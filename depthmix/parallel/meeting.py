"""Processes that torchrun starts again meet in the store of those that died: they agree on a corner of it that is new.

Torch itself would connect to the addresses that are still written there. How often a process was restarted does not help:
torchrun counts that for each node by itself.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore


def new_corner(store: Any, rank: int, size: int, patience: timedelta) -> Any:
    """A part of the store that only the processes of this start share; RuntimeError if they do not come in time."""
    own = uuid.uuid4().hex
    store.set_timeout(patience)
    store.set(f"hello/{rank}", own)
    if rank:
        corner = store.get(f"answer/{own}").decode()  # waits
        store.set(f"{corner}/{rank}", "")
    else:
        corner, until, waiting, answered = own, time.monotonic() + patience.total_seconds(), set(range(1, size)), set()
        while waiting:
            for other in list(waiting):
                if store.check([f"{corner}/{other}"]):
                    waiting.discard(other)
                elif store.check([f"hello/{other}"]) and (name := store.get(f"hello/{other}")) not in answered:
                    answered.add(
                        name
                    )  # maybe of one that died: then the answer is for nobody, and a new name will come
                    store.set(f"answer/{name.decode()}", corner)
            if waiting and time.monotonic() > until:
                missing = ", ".join(map(str, sorted(waiting)))
                raise RuntimeError(f"no word of rank {missing} within {patience.total_seconds():.0f} seconds")
            time.sleep(0.01 if waiting else 0)
    return PrefixStore(corner, store)
