"""A pipeline's step, played through: 1F1B, and its interleaved form with several virtual stages a rank.

Rank r of P holds the stages r, r + P, r + 2P, …, V of them. With one stage a rank it first runs P - r - 1 forwards, with several
2 (P - r - 1) + (V - 1) P, in groups of P micro-batches a stage; then one forward and one backward in turns; then what is left.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """The forward or backward of a micro-batch in a stage."""

    stage: int
    micro: int
    backward: bool


@dataclass(frozen=True)
class Step:
    """What came out."""

    seconds: float
    bubble: float  # the share of the time in which ranks wait, on average
    in_flight: list[int]  # by rank: the most forwards of stages whose backward is still to come


def orders(ranks: int, virtual: int, micros: int) -> list[list[Task]]:
    """What every rank does, in order. With virtual stages micros is a multiple of ranks."""

    def nth(rank: int, k: int, backward: bool) -> Task:
        group, inside = divmod(k, ranks * virtual)
        chunk = inside // ranks
        chunk = virtual - 1 - chunk if backward else chunk
        return Task(chunk * ranks + rank, group * ranks + inside % ranks, backward)

    total, found = micros * virtual, []
    for rank in range(ranks):
        ahead = ranks - rank - 1 if virtual == 1 else 2 * (ranks - rank - 1) + (virtual - 1) * ranks
        ahead = min(total, ahead)
        order = [nth(rank, k, False) for k in range(ahead)]
        for k in range(total - ahead):
            order += [nth(rank, ahead + k, False), nth(rank, k, True)]
        found.append([*order, *(nth(rank, k, True) for k in range(total - ahead, total))])
    return found


def simulate(ranks: int, virtual: int, micros: int, forward: float, backward: float, hop: float = 0.0) -> Step:
    """A step whose stages take so many seconds each for a micro-batch; hop: until the next stage has what one sends."""
    order = orders(ranks, virtual, micros)
    last = ranks * virtual - 1
    ended: dict[Task, float] = {}
    clock, place = [0.0] * ranks, [0] * ranks
    most, flying = [0] * ranks, [0] * ranks
    left = sum(map(len, order))
    while left:
        before = left
        for rank in range(ranks):
            while place[rank] < len(order[rank]):
                task = order[rank][place[rank]]
                needs: Task | None = Task(task.stage - 1, task.micro, False) if task.stage else None
                if task.backward:
                    own = task.stage == last  # its forward is what it waits for, others for the stage after them
                    needs = Task(task.stage + (not own), task.micro, not own)
                if needs is not None and needs not in ended:
                    break
                travels = hop if needs is not None and needs.stage != task.stage and ranks > 1 else 0.0
                ready = 0.0 if needs is None else ended[needs] + travels
                clock[rank] = max(clock[rank], ready) + (backward if task.backward else forward)
                ended[task] = clock[rank]
                flying[rank] += -1 if task.backward else 1
                most[rank] = max(most[rank], flying[rank])
                place[rank] += 1
                left -= 1
        if left == before:
            raise ValueError(
                f"the schedule of {ranks} ranks, {virtual} stages each and {micros} micro-batches waits for itself"
            )
    seconds, busy = max(clock), micros * virtual * (forward + backward)
    return Step(seconds, 1 - busy / seconds if seconds else 0.0, most)


STEADY = 4  # micro-batches a rank, from which on one more only adds its own time


@functools.cache
def play(ranks: int, virtual: int, micros: int, forward: float, backward: float, hop: float = 0.0) -> Step:
    """`simulate`, of no more micro-batches than it takes until a pipeline runs evenly."""
    some = min(micros, STEADY * ranks)
    step = simulate(ranks, virtual, some, forward, backward, hop)
    seconds = step.seconds + (micros - some) * virtual * (forward + backward)
    return Step(seconds, 1 - micros * virtual * (forward + backward) / seconds, step.in_flight)
