"""The processes of a run and their communication: identity, agreement, errors.

A world of one process is a world too, in which nothing is sent. Under `torchrun` the processes meet where its environment says.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from depthmix.device import choose_device
from depthmix.errors import INTERNAL, UserError
from depthmix.parallel.layout import Layout
from depthmix.parallel.liveness import ADVICE, Heartbeat, Log
from depthmix.parallel.meeting import new_corner, open_store
from depthmix.parallel.progress import FIRST_TIMES, Progress, begun_collectives
from depthmix.parallel.share import Share

Result = TypeVar("Result")
# Seconds without progress. A process that dies is noticed at once, by its connections.
HANG_LIMIT = 300.0
# Dimensions of the mesh.
PIPELINE, REPLICATE, SHARD, TENSOR = "pp", "dp", "shard", "tp"
# The dimension of context parallelism.
CONTEXT = "cp"


class SharedError(UserError):
    """An error that all processes have agreed on; one of them prints it."""

    shared = True


class Lost(UserError):
    """Another process has gone."""


class World:
    """A run's processes, seen from this one."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device | str,
        rank: int = 0,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.layout, self.rank, self.size, self.mesh = layout, rank, layout.size, mesh
        self._device = device
        # None in a world of one process.
        self.beat: Heartbeat | None = None
        self.first = rank == 0
        _, self.data_rank, sharing = layout.place(rank)
        # This process's part of every sequence.
        self.share = Share(sharing // layout.tp, layout.cp)
        self._asked = torch.zeros(1)
        # A separate group for work beside the training, such as saving.
        self.beside: Any = None

    @functools.cached_property
    def device(self) -> torch.device:
        """Device of this process. Chosen on first use, so that errors in the recipe come before a missing device."""
        return choose_device(self._device) if isinstance(self._device, str) else self._device

    @functools.cached_property
    def context(self) -> DeviceMesh:
        """Mesh of the processes that hold the parts of the same sequences."""
        sizes = (self.size // self.layout.cp, self.layout.cp)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=("others", CONTEXT))[CONTEXT]

    @property
    def several(self) -> bool:
        """True if processes were started for this run, even a single one, so that torch's engine holds the model."""
        return self.mesh is not None

    def rows(self, batch_size: int) -> slice:
        """Return the rows of a batch that belong to this process."""
        size = batch_size // self.layout.data
        return slice(self.data_rank * size, (self.data_rank + 1) * size)

    def average(self, numbers: Tensor, asked: bool = False) -> Tensor:
        """Average numbers [n] over all processes. `asked`: whether this process was asked to stop (see `stopping`)."""
        if not self.several:
            return numbers
        # One message for both. Filled where it is: a number sent to a GPU from here would wait for all that was launched before it.
        sent = torch.cat([numbers, torch.full_like(numbers[:1], float(asked))])
        dist.all_reduce(sent)
        numbers, self._asked = (sent / self.size).split([len(numbers), 1])
        return numbers

    def stopping(self) -> bool:
        """Tell whether any process had been asked to stop at the last `average`, so that all stop after the same step."""
        return bool(self._asked)

    def at(self, kind: str, number: int | None = None, slow: bool = False) -> None:
        """Record what this process does, as `step 12`, for the watchdog. `slow`: it may take as long as compilation
        does, each time.
        """
        if self.beat is not None:
            self.beat.progress.at(kind, number, slow)

    def moved(self) -> None:
        """Record that this process makes progress."""
        if self.beat is not None:
            self.beat.progress.moved()

    def write_to(self, log: Log) -> None:
        """Let the watchdog write into this process's log."""
        if self.beat is not None:
            self.beat.write_to(log)

    def deal(self, batches: Iterable[Tensor]) -> Iterator[tuple[Tensor, bool]]:
        """Yield this process's batches, each with whether it counts. All processes run equally many passes, the last
        perhaps on a copy.
        """
        n, dealt = self.layout.data, []
        for batch in batches:
            dealt.append(batch)
            self.moved()
            if len(dealt) == n:
                yield dealt[self.data_rank], True
                dealt = []
        if dealt:
            counts = self.data_rank < len(dealt)
            yield dealt[self.data_rank if counts else 0], counts

    def add_up(self, *numbers: float) -> list[float]:
        """Sum numbers over the processes that have tokens of their own. The result is bitwise the same in all.

        Of a pipeline the end has them.
        """
        places = map(self.layout.place, range(self.size))
        counted = [stage == self.layout.pp - 1 and sharing % self.layout.tp == 0 for stage, _, sharing in places]
        rows = [
            numbers_of_rank for numbers_of_rank, counts in zip(self.gather(numbers), counted, strict=True) if counts
        ]
        return [math.fsum(column) for column in zip(*rows, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every process, in the order of their ranks."""
        if not self.several:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def together(self, call: Callable[[], Result]) -> Result:
        """Call a function in every process and return its result. If it raises a UserError in some, all raise it, with
        the ranks.
        """
        result: Any = None
        failed: tuple[str, int] | None = None
        try:
            result = call()
        except UserError as error:
            if not self.several:
                raise
            failed = str(error), error.exit_code
        wrong = {rank: f for rank, f in enumerate(self.gather(failed)) if f is not None} if self.several else {}
        if not wrong:
            return result
        (message, code), *others = wrong.values()
        if len(wrong) == self.size and all(other == (message, code) for other in others):
            raise SharedError(message, code)
        raise SharedError("; ".join(f"rank {rank}: {text}" for rank, (text, _) in wrong.items()), code)

    def by_first(self, call: Callable[[], Result]) -> Result:
        """Call a function in the first process and return its result in all. All raise its UserError."""
        return self.gather(self.together(lambda: call() if self.first else None))[0]

    def error(self, message: str, exit_code: int) -> UserError:
        """Make an error that all processes raise."""
        return SharedError(message, exit_code) if self.several else UserError(message, exit_code)

    @contextmanager
    def naming_the_dead(self) -> Iterator[None]:
        """Turn an error of torch's into one that says which process is gone, if one is.

        Within what holds back signals: torchrun ends the others, too, and they should have said why.
        """
        try:
            yield
        except RuntimeError as error:
            dead = None if self.beat is None else self.beat.find_the_dead()
            if dead is None:
                raise
            raise Lost(f"{dead}; {ADVICE}", INTERNAL) from error

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise UserError, naming rank and difference, unless the facts are the same in every process."""
        by_rank = self.gather(dict(facts))
        differences = [
            f"rank {rank} differs from rank 0: {name} is {facts_of_rank.get(name)!r} there and {by_rank[0].get(name)!r} on rank 0"
            for rank, facts_of_rank in enumerate(by_rank)
            for name in dict.fromkeys((*by_rank[0], *facts_of_rank))
            if facts_of_rank.get(name) != by_rank[0].get(name)
        ]
        if differences:
            more = f" (and {len(differences) - 3} more differences)" if len(differences) > 3 else ""
            advice = "start all processes with the same recipe, data and version of depthmix"
            raise SharedError(f"{'; '.join(differences[:3])}{more}: {advice}")


@contextmanager
def join(layout: Layout, device: str, given: bool, hang_limit: float = HANG_LIMIT) -> Iterator[World]:
    """Meet the other processes of a run, and leave them at its end.

    Args:
        given: Whether the recipe has a layout.
        hang_limit: Seconds without progress after which the run ends.
    """
    # Set by torchrun or by hand.
    started = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    size = int(os.environ["WORLD_SIZE"]) if started else 1
    layout.check_world(size, given)
    if not given:
        yield World(layout, device)
        return
    local = int(os.environ.get("LOCAL_RANK", 0))
    chosen = choose_device(device)
    if chosen.type == "cuda":
        if chosen.index is None:
            # Raises UserError if there are fewer GPUs than processes.
            chosen = choose_device(f"cuda:{local}")
        torch.cuda.set_device(chosen)
    store: Any = dist.HashStore()
    rank = 0
    # An invalid limit is reported once all processes have met.
    limit = hang_limit if 0 < hang_limit < math.inf else HANG_LIMIT
    if started:
        rank, patience = int(os.environ["RANK"]), timedelta(seconds=FIRST_TIMES * limit)
        store = new_corner(open_store(rank, patience), rank, size, patience)
    # torch's own timeout, which only reports that something timed out.
    timeout = timedelta(seconds=2 * FIRST_TIMES * limit + 60)
    progress = Progress(limit, functools.partial(begun_collectives, chosen))
    # A connection of its own: a client of the store does one thing at a time, and the main thread's may wait in it.
    alive = dist.PrefixStore("alive", store.clone())
    world = World(layout, chosen, rank)
    world.beat = beat = Heartbeat(alive, rank, size, progress, in_order=layout.pp == 1)
    try:
        with world.naming_the_dead():
            backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
            prefix_store = dist.PrefixStore("depthmix", store)
            dist.init_process_group(backend, store=prefix_store, rank=rank, world_size=size, timeout=timeout)
            world.mesh = _mesh(layout, chosen)
            world.beside = dist.new_group(backend="gloo", timeout=timeout)
            yield world
            # No process may close its connections while another still uses them.
            dist.barrier()
    except SharedError:
        with suppress(RuntimeError):
            dist.barrier()
        raise
    except Lost:
        raise
    except BaseException as error:
        # The error concerns this process, but the others need to know.
        beat.leave(str(error) or type(error).__name__)
        raise
    finally:
        beat.stop()
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Build the device mesh: neighbouring processes share matrices (tp), then shards, then pipelines, since nearer ones
    send more.

    Those that share a sequence (cp) have the gradients of other tokens, as those with other sequences have: parameters are shared out
    among them, too, or copied.
    """
    sizes = {REPLICATE: layout.dp, SHARD: layout.shard or 1, TENSOR: layout.tp}
    sizes[SHARD if layout.sharded else REPLICATE] *= layout.cp
    if layout.pp > 1:
        sizes = {PIPELINE: layout.pp, **sizes}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
