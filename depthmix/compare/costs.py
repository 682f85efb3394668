"""Step times that a busy machine has distorted: how they are recognised, and what replaces them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from depthmix.compare.rows import Run

# Largest ratio of the step times of two seeds of one arm.
SEEDS_APART = 1.1
# Largest distance between the quartiles of a run's steps, as a fraction of their median.
MIDDLE_HALF = 0.25
# Largest share of the wanted CPU time in which a run waited for a core.
WAITED = 0.1


def doubts(runs: Sequence[Run], arms: Sequence[str]) -> list[str]:
    """Describe the arms whose step times other programs have disturbed, one phrase per arm. Skips runs that shared
    their machine.
    """
    reasons = _doubts_by_arm(runs)
    return [f"{arm} {reasons[arm]}" for arm in arms if arm in reasons]


def busy_arms(runs: Sequence[Run]) -> set[str]:
    """Return the arms whose step times are no costs: they shared their machine, or other programs disturbed them."""
    return {run.arm for run in runs if run.shared} | _doubts_by_arm(runs).keys()


def _doubts_by_arm(runs: Sequence[Run]) -> dict[str, str]:
    by_arm: dict[str, list[Run]] = {}
    for run in runs:
        if not run.shared:
            by_arm.setdefault(run.arm, []).append(run)
    return {arm: doubt for arm, own in by_arm.items() if (doubt := _doubt(own))}


def _doubt(runs: Sequence[Run]) -> str:
    """Describe how the step times of an arm's runs were disturbed; empty if they were not."""
    waited = max(run.core_wait or 0.0 for run in runs)
    if waited > WAITED:
        return f"waited for a core {waited:.0%} of the time it wanted one"
    times = [run.step_seconds for run in runs]
    if max(times) > SEEDS_APART * min(times):
        return f"took {_ms(min(times))} to {_ms(max(times))} ms per step, depending on the seed"
    for run in runs:
        if run.step_quartiles and run.step_quartiles[1] - run.step_quartiles[0] > MIDDLE_HALF * run.step_seconds:
            low, high = run.step_quartiles
            return f"took {_ms(low)} to {_ms(high)} ms in the middle half of its steps with seed {run.seed}"
    return ""


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


def cost_notes(phrases: Sequence[str], in_turns: bool, equal_time: bool = False) -> list[str]:
    """Return the note under the table on a busy machine; nothing if there is no doubt.

    Args:
        phrases: Result of `doubts`.
        in_turns: Whether the costs come from step times measured in turns.
        equal_time: Whether these also decided the numbers of steps, and with them the losses.
    """
    if not phrases:
        return []
    begin = f"A busy machine: step times of the runs are not to be trusted ({'; '.join(phrases)})"
    columns = "“step”, “ratio”, “time” and “time to reach”"
    if in_turns:
        steps = ", which also decided how many steps each arm takes: if the machine was busy then, too, losses are not those of equal time"
        return [f"{begin}, so {columns} are from timing the arms in turns{steps * equal_time}."]
    return [f"{begin}, nor are {columns}; run on a machine of its own to compare costs."]


def moved_step_times(runs: Sequence[Run], baseline: str) -> list[str]:
    """Name the arms that at equal time trained more than 5% longer or shorter than the baseline by their runs' own step times."""
    times: dict[str, float] = {}
    for arm in dict.fromkeys(run.arm for run in runs if not run.shared):
        times[arm] = statistics.fmean(run.train_seconds for run in runs if run.arm == arm)
    steps = {run.arm: run.steps for run in runs}
    notes: list[str] = []
    for arm, seconds in times.items() if baseline in times else ():
        off = seconds / times[baseline] - 1
        # An arm with few steps cannot come closer than half a step.
        if abs(off) > max(0.05, 1 / steps[arm]):
            word = "longer" if off > 0 else "shorter"
            notes.append(
                f"{arm} trained {abs(off):.0%} {word} than {baseline}: step times moved after they were measured."
            )
    return notes


def at_step_time(run: Run, seconds: float) -> Run:
    """Return a run as if each step had taken this time. What else the run measured on a shared machine is no cost."""
    scale = seconds / run.step_seconds
    return replace(
        run,
        step_seconds=seconds,
        curve=[(tokens, s * scale, loss) for tokens, s, loss in run.curve],
        step_quartiles=None,
        core_wait=None,
        peak_memory=None if run.shared else run.peak_memory,
        shared=False,
    )
