"""Whether costs can be trusted: what a busy machine leaves in step times, and what then takes their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from depthmix.compare.rows import Run

SEEDS_APART = 1.1  # the slowest seed's step time over the fastest's
MIDDLE_HALF = 0.25  # of a run's steps: from the first to the third quartile, over the median
WAITED = 0.1  # of the CPU time a run wanted, until a core was free


def doubts(runs: Sequence[Run], arms: Sequence[str]) -> list[str]:
    """Why the step times of an arm are not its own: nothing, or what was seen, one phrase for each such arm."""
    found = []
    for arm in arms:
        own = [run for run in runs if run.arm == arm]
        if reason := own and _doubt(own):
            found.append(f"{arm} {reason}")
    return found


def _doubt(own: Sequence[Run]) -> str:
    waited = max(run.core_wait or 0.0 for run in own)
    if waited > WAITED:
        return f"waited for a core {waited:.0%} of the time it wanted one"
    times = [run.step_seconds for run in own]
    if max(times) > SEEDS_APART * min(times):
        return f"took {_ms(min(times))} to {_ms(max(times))} ms per step, depending on the seed"
    for run in own:
        if run.step_quartiles and run.step_quartiles[1] - run.step_quartiles[0] > MIDDLE_HALF * run.step_seconds:
            low, high = run.step_quartiles
            return f"took {_ms(low)} to {_ms(high)} ms in the middle half of its steps with seed {run.seed}"
    return ""


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


def cost_note(found: Sequence[str], in_turns: bool, equal_time: bool = False) -> list[str]:
    """The doubts as a sentence under the table; at equal time the arms' steps come of what was timed, and with them losses."""
    if not found:
        return []
    begin = f"A busy machine: step times of the runs are not to be trusted ({'; '.join(found)})"
    columns = "“step”, “ratio”, “time” and “time to reach”"
    if in_turns:
        steps = ", which also said how many steps each of them makes: if the machine was busy then, too, losses are not those of equal time"
        return [f"{begin}, so {columns} are from timing the arms in turns{steps * equal_time}."]
    return [f"{begin}, nor are {columns}; run on a machine of its own to compare costs."]


def at_step_times(runs: Sequence[Run], times: Mapping[str, float]) -> list[Run]:
    """The runs as if each step had taken its arm's time given."""
    return [_at(run, times[run.arm]) for run in runs]


def _at(run: Run, seconds: float) -> Run:
    scale = seconds / run.step_seconds
    return replace(run, step_seconds=seconds, curve=[(tokens, s * scale, loss) for tokens, s, loss in run.curve])
