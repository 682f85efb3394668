"""Simulate the step of a pipeline: 1F1B, and interleaved 1F1B with several virtual stages per rank.

Rank r of P holds the V stages r, r + P, r + 2P, … It first runs some forwards: P - r - 1 with one stage per rank, otherwise
2 (P - r - 1) + (V - 1) P, in groups of P micro-batches per stage. Then it alternates one forward and one backward. At the end
it runs the remaining backwards.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple


# A tuple: a simulation looks thousands of tasks up, and a dataclass hashes ten times as slowly.
class Task(NamedTuple):
    """The forward or backward of a micro-batch in a stage."""

    stage: int
    micro: int
    backward: bool


@dataclass(frozen=True)
class Step:
    """The result of a simulation."""

    seconds: float
    bubble: float  # the share of the time in which ranks wait, on average
    in_flight: list[int]  # by rank: the most forwards of stages whose backward is still to come


def orders(ranks: int, virtual: int, micros: int) -> list[list[Task]]:
    """Return the tasks of every rank, in order.

    Args:
        ranks: of the pipeline.
        virtual: stages per rank.
        micros: micro-batches; with virtual stages a multiple of ranks.
    """

    def nth(rank: int, k: int, backward: bool) -> Task:
        group, inside = divmod(k, ranks * virtual)
        chunk = inside // ranks
        chunk = virtual - 1 - chunk if backward else chunk
        return Task(chunk * ranks + rank, group * ranks + inside % ranks, backward)

    total, orders_by_rank = micros * virtual, []
    for rank in range(ranks):
        warmup = ranks - rank - 1 if virtual == 1 else 2 * (ranks - rank - 1) + (virtual - 1) * ranks
        warmup = min(total, warmup)
        order = [nth(rank, k, False) for k in range(warmup)]
        for k in range(total - warmup):
            order += [nth(rank, warmup + k, False), nth(rank, k, True)]
        orders_by_rank.append([*order, *(nth(rank, k, True) for k in range(total - warmup, total))])
    return orders_by_rank


def simulate(ranks: int, virtual: int, micros: int, forward: float, backward: float, hop: float = 0.0) -> Step:
    """Simulate one step.

    Args:
        ranks: of the pipeline.
        virtual: stages per rank.
        micros: micro-batches.
        forward: seconds per stage and micro-batch.
        backward: seconds per stage and micro-batch.
        hop: seconds until the next stage has received an output.
    """
    order = orders(ranks, virtual, micros)
    last = ranks * virtual - 1
    ended: dict[Task, float] = {}
    clock, position = [0.0] * ranks, [0] * ranks
    most_in_flight, in_flight = [0] * ranks, [0] * ranks
    n_left = sum(map(len, order))
    while n_left:
        n_left_before = n_left
        for rank in range(ranks):
            while position[rank] < len(order[rank]):
                task = order[rank][position[rank]]
                needs: Task | None = Task(task.stage - 1, task.micro, False) if task.stage else None
                if task.backward:
                    # The last stage waits for its own forward, the others for the stage after them.
                    is_last = task.stage == last
                    needs = Task(task.stage + (not is_last), task.micro, not is_last)
                if needs is not None and needs not in ended:
                    break
                travels = hop if needs is not None and needs.stage != task.stage and ranks > 1 else 0.0
                ready = 0.0 if needs is None else ended[needs] + travels
                clock[rank] = max(clock[rank], ready) + (backward if task.backward else forward)
                ended[task] = clock[rank]
                in_flight[rank] += -1 if task.backward else 1
                most_in_flight[rank] = max(most_in_flight[rank], in_flight[rank])
                position[rank] += 1
                n_left -= 1
        if n_left == n_left_before:
            raise ValueError(
                f"the schedule of {ranks} ranks, {virtual} stages each and {micros} micro-batches waits for itself"
            )
    seconds, busy = max(clock), micros * virtual * (forward + backward)
    return Step(seconds, 1 - busy / seconds if seconds else 0.0, most_in_flight)


# From this many micro-batches per rank on, one more only adds its own time.
STEADY = 4


@functools.cache
def play(ranks: int, virtual: int, micros: int, forward: float, backward: float, hop: float = 0.0) -> Step:
    """Simulate one step, with only as many micro-batches as the pipeline needs to run evenly, and add the time of the others."""
    simulated = min(micros, STEADY * ranks)
    step = simulate(ranks, virtual, simulated, forward, backward, hop)
    seconds = step.seconds + (micros - simulated) * virtual * (forward + backward)
    return Step(seconds, 1 - micros * virtual * (forward + backward) / seconds, step.in_flight)
