"""Sentences about the rows of a table, which claim no more than its seeds allow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from depthmix.compare.interval import CONFIDENCE, student_t
from depthmix.compare.rows import Row

# Most decimals of a loss. Smaller differences do not matter.
FINEST = 4
SURE = f"{CONFIDENCE:.0%} interval"


def verdict(rows: Sequence[Row], pooled: bool = False) -> list[str]:
    """Say for every arm but the baseline whether its difference is one: whether the paired interval excludes zero.

    Args:
        rows: One row per arm, the baseline first.
        pooled: Whether intervals of few seeds use the spread of all arms instead of their own.
    """
    return [_sentence(row, row.difference, pooled) for row in rows if row.difference is not None]


def _sentence(row: Row, difference: float, pooled: bool) -> str:
    if max(abs(difference), row.difference_spread or 0) < 10**-FINEST / 2:
        seeds = "one seed" if row.paired == 1 else f"each of {row.paired} seeds"
        return f"{row.arm}: the same loss as {row.baseline} to {FINEST} decimals with {seeds}."
    half = row.difference_interval
    if half is None:
        size = f"{_rounded(0.01, difference)[0]} nats {_side(difference)} {row.baseline}"
        return f"{row.arm}: {size} with one seed, which says nothing about chance; run three or more."
    near, far = sorted((difference - half, difference + half), key=abs)
    size, from_, to = _rounded(half, difference, near, far)
    begin = f"{row.arm}: {size} nats {_side(difference)} {row.baseline}"
    over = f"over {row.paired} seeds" if row.paired > 1 else "with one seed, by the spread of the others"
    wide = f", wide since t = {student_t(1):.1f} for two" if row.paired == 2 and not pooled else ""
    if abs(difference) > half:
        return f"{begin} ({SURE} {from_} to {to} {over}{wide})."
    reach = f"reaches from {to} {_side(far)} to {from_} {_side(near)}"
    return f"{begin}, but the {SURE} {over}{wide}{',' * bool(wide or row.paired == 1)} {reach}: no difference shown."


def _side(difference: float) -> str:
    return "below" if difference < 0 else "above"


def _rounded(uncertainty: float, *values: float) -> list[str]:
    """Round values to two digits of the uncertainty, finer where one of them would read as zero."""
    decimals = 2 if uncertainty <= 0 else min(max(1 - math.floor(math.log10(uncertainty)), 2), FINEST)
    while decimals < FINEST and any(round(abs(value), decimals) == 0 for value in values):
        decimals += 1
    return [f"{abs(value):.{decimals}f}" for value in values]


def summary(
    rows: Sequence[Row],
    cell: str = "",
    equal_time: bool = False,
    timed: bool = True,
    titles: Mapping[str, str] | None = None,
) -> str:
    """Say to a newcomer whether the best arm is better than the baseline, by how much and at what cost.

    Args:
        rows: One row per arm, the baseline first.
        cell: Name of the domain and size, if there are several.
        equal_time: Whether the arms trained for equal time instead of equal steps.
        timed: Whether the step times can be trusted.
        titles: What the labels of arms stand for, where that is known.
    """
    where = f"On {cell}, after" if cell else "After"
    after = f"{where} the same training time" if equal_time and len(rows) > 1 else f"{where} {rows[0].steps:,} steps"
    others = [row for row in rows if row.difference is not None]
    if not others:
        return f"{after}, {rows[0].arm} ended with a validation loss of {rows[0].val_loss:.4f} nats."
    best = min(others, key=lambda row: row.difference or 0.0)
    difference, half = best.difference or 0.0, best.difference_interval
    arm, baseline = (
        f"{label} ({titles[label]})" if titles and titles.get(label) else label for label in (best.arm, best.baseline)
    )
    if half is None:
        found = f"{arm} ended {_rounded(0.01, difference)[0]} nats {_side(difference)} {baseline}"
        return f"{after}, {found}; one seed says nothing about chance, so run three or more."
    near, far = sorted((difference - half, difference + half), key=abs)
    size, near_size, far_size = _rounded(half, difference, near, far)
    timed = timed and not equal_time and best.step_ratio is not None
    cost = f", at {best.step_ratio:.2f} times the time per step" if timed else ""
    if abs(difference) <= half:
        reach = f"from {far_size} {_level(far)} to {near_size} {_level(near)}"
        found = f"{best.arm} ended {size} nats {_level(difference)}, but the {SURE} reaches {reach}"
        return f"No difference is shown between {arm} and {baseline}. {after}, {found}{cost}."
    does = "predicts unseen text" if best.accuracy is None else "classifies unseen images"
    word = "better" if difference < 0 else "worse"
    found = f"its loss is {size} nats {_level(difference)} ({SURE} {near_size} to {far_size}; lower is better)"
    return f"With {arm} the model {does} {word} than with {baseline}. {after}, {found}{cost}."


def headline(rows: Sequence[Row], equal_time: bool = False, titles: Mapping[str, str] | None = None) -> str:
    """Say in one short sentence what a comparison found, for the top of a page.

    Args:
        rows: One row per arm, the baseline first.
        equal_time: Whether the arms trained for equal time instead of equal steps.
        titles: What the labels of arms stand for, where that is known.

    Examples:
        "All 3 rules reach residual's loss with 12–20% fewer tokens".
    """
    others = [row for row in rows if row.difference is not None]
    if not others:
        return f"{rows[0].arm}: validation loss {rows[0].val_loss:.4f} nats"
    name = {row.arm: (titles or {}).get(row.arm) or row.arm for row in others}
    baseline, images = others[0].baseline, others[0].accuracy is not None
    one, many = ("classifies images", "classify images") if images else ("predicts text", "predict text")
    best = min(others, key=lambda row: row.difference or 0.0)
    if all(row.difference_interval is None for row in others):
        size, side = _rounded(0.01, best.difference or 0.0)[0], _side(best.difference or 0.0)
        return f"{name[best.arm]} ended {size} nats {side} {baseline}, in one run"
    halves = [(row, math.inf if row.difference_interval is None else row.difference_interval) for row in others]
    shown = [row for row, half in halves if abs(row.difference or 0.0) > half]
    better = [row for row in shown if (row.difference or 0.0) < 0]
    n, alone = len(others), len(others) == 1
    if not shown:
        return f"No difference is shown between {name[best.arm] if alone else f'any of {n} rules'} and {baseline}"
    if not better:
        return f"{name[best.arm]} {one} worse than {baseline}" if alone else f"No rule is shown to beat {baseline}"
    if len(better) < n:
        which, verb = (name[better[0].arm], one) if len(better) == 1 else (str(len(better)), many)
        return f"Of {n} rules, {which} {verb} better than {baseline}"
    who, verb, reach = (name[best.arm], one, "reaches") if alone else (f"All {n} rules", many, "reach")
    saved = sorted(round(100 * (1 - row.tokens_to_reach)) for row in better if row.tokens_to_reach is not None)
    if len(saved) == n and saved[0] > 0 and not equal_time:
        span = f"{saved[0]}%" if saved[0] == saved[-1] else f"{saved[0]}–{saved[-1]}%"
        return f"{who} {reach} {baseline}'s loss with {span} fewer {'images' if images else 'tokens'}"
    return f"{who} {verb} better than {baseline}"


def _level(difference: float) -> str:
    return "lower" if difference < 0 else "higher"


def footnotes(rows: Sequence[Row]) -> list[str]:
    """Explain the columns."""
    first = rows[0].baseline if rows else "the first arm"
    notes = [
        f"“to reach”: what an arm needs to come down to {first}'s final validation loss, as a fraction of what {first} needs; below 1 is better.",
        "“ratio”: step time against the first arm's; “time”: steps at the median step time, without compilation, evaluation and pauses.",
    ]
    if any(row.difference_interval is not None for row in rows):
        notes.insert(
            0,
            f"“±”: half the {SURE} of the mean difference (Student's), which is taken seed by seed and holds for one arm at a time.",
        )
    return notes
