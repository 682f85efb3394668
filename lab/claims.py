"""Claims of the papers: what each says, what decides it, and the verdict, from whatever results there are.

A claim names a study, or several, of which the one with most seeds counts, the first of equals, and what to measure there:

    contrast: {dca @ w768: 1, residual @ w768: -1}     a sum of final losses, seed by seed, with weights; arm, or arm @ cell
    accuracy: {…}                                     the same of accuracies, in percent
    tokens_to_reach, time_to_reach: arm @ cell         the first arm's final loss, as a fraction of what the first arm needs
    step_ratio: arm @ cell                             of runs that had the machine to themselves, or timed in turns
    compute_advantage, time_advantage: arm             by fitted power laws (fits.py)
    spikes, growth, rate: {arm: …, against: …}         loss spikes; outputs' growth over depth; the largest stable rate, as a ratio

`says` is the paper's number, or `above` or `below` where it gives none. Columns `beside` show the same contrasts in a cell of
other studies, {title: …, study: [start @ cell, …], of: [mechanisms]}, for claims that `of` can decide, from the one with most seeds
of those that have the arms; `same` names more studies of the same size and data, which are then no second measurement.
The spread of a contrast is its own from six paired seeds on, else that of all arms and sizes of its domains together (spread.py),
since books and code vary differently, or of the study where those have one seed; before two seeds of anything, the largest that the
study's file assumes.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from depthmix.errors import CHECKPOINT, UserError
from depthmix.names import nearest
from depthmix.strict_yaml import read_recipe
from depthmix.study.arms import Arm
from depthmix.study.fits import advantage
from depthmix.study.interval import student_t, wilson
from depthmix.study.recipe import Study, read_study
from depthmix.study.records import RUNS, Records, read_records
from depthmix.study.rows import Run, make_rows, read_run
from depthmix.study.saved import read_json
from depthmix.study.sections import growth, largest_stable, points, spikes
from depthmix.study.sheet import as_runs, at_known_times
from depthmix.study.spread import Spread, around, group_of, pooled

RECIPES, RESULTS = Path("lab") / "recipes", Path("lab") / "results"
PUBLISHED = Path("docs") / "results"  # results that the documentation of the package rests on
CONFIRMED, IN_SIGN, NOT_SEEN = "confirmed", "confirmed in sign", "not seen at this scale"
CONTRADICTED, UNDECIDED, NOT_MEASURED = "contradicted", "not decided yet", "not measured yet"
VERDICTS = (CONFIRMED, IN_SIGN, NOT_SEEN, CONTRADICTED, UNDECIDED, NOT_MEASURED)
ASSUMED = "the spread is the one assumed in the study's file"
CHANCE = "one seed, which says nothing of chance"
MANY = 1000  # degrees of freedom of what is taken as known
SURE_TO_MISS = 6  # seeds: so many on one side come by chance in 3% of all cases
ENOUGH = 0.5  # of the paper's effect: less is confirmed in sign only
MEASURES = (
    "contrast",
    "accuracy",
    "tokens_to_reach",
    "time_to_reach",
    "step_ratio",
    "compute_advantage",
    "time_advantage",
    "spikes",
    "growth",
    "rate",
)
PAIRS = ("spikes", "growth", "rate")
RATIOS = {"tokens_to_reach", "time_to_reach", "step_ratio", "compute_advantage", "time_advantage", "growth", "rate"}
KEYS = ("claim", "source", "says", "study", "note", *MEASURES)


@dataclass(frozen=True)
class Found:
    """A measured number with the ends of its 95% interval, over how many seeds, and what must be said of it."""

    value: float
    low: float
    high: float
    seeds: int
    remark: str = ""
    of: str = "seeds"  # or what else there are so many of; nothing where no seed counts
    freedom: int = 0  # degrees of freedom of the interval of a contrast


@dataclass(frozen=True)
class Claim:
    """What a paper says, and what decides it."""

    claim: str
    source: str
    says: float | str
    studies: list[str]
    measure: str
    what: Any
    note: str = ""

    @property
    def nothing(self) -> float:
        """The number that no effect would have."""
        return 1.0 if self.measure in RATIOS else 0.0


@dataclass
class Results:
    """Everything that a study, or a comparison, has found."""

    name: str
    first: str
    runs: dict[str, list[Run]]  # by cell
    assumed: float | None = None  # spread of a paired difference
    study: Study | None = None
    records: list[dict[str, Any]] = field(default_factory=list)

    def at(self, place: str) -> tuple[str, str]:
        """`arm @ cell` taken apart; without a cell it is the first."""
        arm, _, cell = (part.strip() for part in place.partition(" @ "))
        return arm, cell or next(iter(self.runs), "")

    def like(self, cells: Iterable[str]) -> list[str]:
        """The cells that have one spread with these."""
        groups = {cell.name: group_of(self.study, cell) for cell in self.study.cells} if self.study else {}
        wanted = {groups.get(cell) for cell in cells}
        return [cell for cell in self.runs if groups.get(cell) in wanted]


# Reading.


def read_claims(path: Path) -> tuple[list[Claim], dict[str, Any]]:
    """The claims, and what the second table is made of; UserError for what makes no sense."""
    given = read_recipe("study", str(path))
    found = []
    listed = given.get("claims", [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise UserError(f"{path}: claims is a list of claims, each with {', '.join(KEYS[:4])} and what decides it")
    for item in listed:
        where = f"{path}, {str(item.get('claim', item))[:60]!r}"
        if wrong := [key for key in item if key not in KEYS]:
            raise UserError(f"{where}: unknown key {wrong[0]!r}; there are {', '.join(KEYS)}")
        if lost := [key for key in ("claim", "source", "says", "study") if key not in item]:
            raise UserError(f"{where}: {lost[0]} is needed")
        measures = [key for key in MEASURES if key in item]
        if len(measures) != 1:
            raise UserError(f"{where}: one of {', '.join(MEASURES)} is needed, got {measures or 'none'}")
        _check_shape(where, measures[0], item[measures[0]])
        says = item["says"]
        if isinstance(says, bool) or not (isinstance(says, int | float) or says in ("above", "below")):
            raise UserError(f"{where}: says is a number, above or below, got {says!r}")
        nothing = 1.0 if measures[0] in RATIOS else 0.0
        if says == nothing or (isinstance(says, float) and not math.isfinite(says)):
            raise UserError(f"{where}: says is another number than that of no effect, which has no side, got {says!r}")
        studies = item["study"] if isinstance(item["study"], list) else [item["study"]]
        if not studies or not all(
            isinstance(name, str) for name in [*studies, *(item[k] for k in ("claim", "source"))]
        ):
            raise UserError(f"{where}: claim, source and study are text, and study may be a list of names")
        found.append(
            Claim(item["claim"], item["source"], says, studies, measures[0], item[measures[0]], item.get("note", ""))
        )
    which = {key: given.get(key, []) for key in ("intro", "beside", "columns", "rules", "choices", "answer", "steps")}
    for key, needed in (
        ("beside", {"title": str, "study": list, "of": list}),
        ("columns", {"title": str, "study": list, "table": str}),
        ("rules", {"arm": str}),
        ("choices", {"you": str, "use": str, "gave": str}),
    ):
        if not isinstance(which[key], list):
            raise UserError(f"{path}: {key} is a list, got {which[key]!r}")
        for item in which[key]:
            if not isinstance(item.get("same", []) if isinstance(item, dict) else [], list):
                raise UserError(f"{path}: same is a list of studies, got {item['same']!r}")
            if not isinstance(item, dict) or not all(isinstance(item.get(k), kind) for k, kind in needed.items()):
                raise UserError(f"{path}: an entry of {key} has {' and '.join(needed)}, got {item!r}")
    for key in ("intro", "answer"):
        if not isinstance(which[key], list) or not all(isinstance(text, str) for text in which[key]):
            raise UserError(f"{path}: {key} is a list of sentences, got {which[key]!r}")
    for column in which["columns"]:
        if [type(column[k]) for k in ("panel", "series") if k in column] not in ([], [str, str]):
            raise UserError(f"{path}: a column that is drawn has the text of a panel and of a series, got {column!r}")
    titles = [column["title"] for column in which["columns"]]
    if twice := [title for title in titles if titles.count(title) > 1]:
        raise UserError(f"{path}: two columns are called {twice[0]!r}")
    for name in which["steps"]:
        if not (isinstance(name, str) and Path(f"{name}.csv").is_file()):
            raise UserError(
                f"{path}: steps names results of `python -m benchmarks step` by their paths, and {name!r} has no CSV file"
            )
    decide = sorted({name for claim in found for name in claim.studies})
    for column in which["beside"]:
        for name in (*column["of"], *column.get("same", [])):
            if name not in decide:
                raise UserError(
                    f"{path}: beside {column['title']!r}: no claim names {name!r}{nearest(str(name), decide)}"
                )
    return found, which


def _check_shape(where: str, kind: str, what: Any) -> None:
    """UserError for a measure of something else than it is of."""
    if kind in ("contrast", "accuracy"):
        needed = "arms with weights, {arm: 1, other: -1}"
        weights = list(what.values()) if isinstance(what, dict) else []
        fits = bool(weights) and all(
            isinstance(w, int | float) and not isinstance(w, bool) and math.isfinite(w) for w in weights
        )
    elif kind in PAIRS:
        fits, needed = isinstance(what, dict) and set(what) == {"arm", "against"}, "{arm: …, against: …}"
    else:
        fits, needed = isinstance(what, str), "an arm"
    if not fits:
        raise UserError(f"{where}: {kind} needs {needed}, got {what!r}")


def places(claim: Claim) -> list[str]:
    """The arms, or `arm @ cell`, that a claim is about."""
    if isinstance(claim.what, str):
        return [claim.what]
    return [claim.what["arm"], claim.what["against"]] if "against" in claim.what else list(claim.what)


def check_places(claim: Claim, study: Study) -> None:
    """UserError for an arm or a cell that the study does not have: its claim would never be measured."""
    for place in places(claim):
        arm, _, cell = place.partition(" @ ")
        if arm not in study.labels:
            raise UserError(f"claim {claim.claim!r}: {study.name} has no {arm!r}{nearest(arm, study.labels)}")
        check_cell(cell, study, f"claim {claim.claim!r}")


def check_cell(cell: str, study: Study, where: str) -> None:
    """UserError for a cell, or a domain, that the study does not have; "" is the first."""
    cells = [*(known.name for known in study.cells), *study.domains]
    if cell and cell not in cells:
        raise UserError(f"{where}: {study.name} has no {cell!r}{nearest(cell, cells)}")


def find_results(name: str) -> Path:
    """Return the folder of the results of a study or comparison, whether it exists or not."""
    return next((folder / name for folder in (PUBLISHED, RESULTS) if (folder / name).is_dir()), RESULTS / name)


def find_recipe(name: str) -> str:
    """Return the path of a study of the laboratory, and the name itself for a study of the package."""
    path = RECIPES / f"{name}.yaml"
    return path.as_posix() if path.is_file() else name


def read_results(name: str) -> Results | None:
    """Read all results of a study or comparison.

    Args:
        name: name of its folder in lab/results or docs/results.

    Returns:
        The results; None where there are none yet.
    """
    place = find_results(name)
    if (place / RUNS).is_file():
        return of_study(read_study(find_recipe(name)), read_records([place / RUNS]))
    paths = sorted(place.glob("*/seed-*/result.json"))
    if not paths:
        return None
    runs = []
    for path in paths:
        said = _saved(path)
        runs.append(read_run(path.parent, Arm(said.get("mixer", ""), said.get("mixer_options", {})).label))
    order = _saved(place / "comparison.json").get("recipe", {}).get("arms") or [runs[0].arm]
    return Results(name, order[0], {"": runs})


def _saved(path: Path) -> dict[str, Any]:
    """What a file of results holds, nothing if it is not there; UserError for a damaged one."""
    found = read_json(path)
    if found is None and path.exists():
        raise UserError(f"{path} is damaged: it should be a JSON object", CHECKPOINT)
    return found or {}


def of_study(study: Study, records: Records) -> Results | None:
    """A study's results as claims need them."""
    from depthmix.study.study import chosen

    used = chosen(study, records.runs)
    runs = {cell.name: at_known_times(study, records, cell, as_runs(used, cell)) for cell in study.cells}
    if not any(runs.values()):
        return None
    return Results(study.name, study.labels[0], runs, max(study.power["spread"], default=None), study, used)


# Measuring.


def measure(claim: Claim, results: Results) -> Found | None:
    """What the results say of a claim; None where they do not have the runs."""
    kind = claim.measure
    if kind in ("contrast", "accuracy"):
        return contrast(results, claim.what, kind == "accuracy")
    if kind in ("tokens_to_reach", "time_to_reach", "step_ratio"):
        return _of_row(results, claim.what, kind)
    if kind in ("compute_advantage", "time_advantage"):
        return _advantage(results, claim.what, kind == "time_advantage")
    return {"spikes": _spikes, "growth": _growth, "rate": _rate}[kind](
        results, claim.what["arm"], claim.what["against"]
    )


def contrast(results: Results, weights: Mapping[str, float], accuracy: bool = False) -> Found | None:
    """A weighted sum of final losses (or accuracies), over the seeds that all its terms have."""
    terms: list[tuple[float, dict[int, float]]] = []
    cells: dict[str, list[float]] = {}
    for place, weight in weights.items():
        arm, cell = results.at(place)
        cells.setdefault(cell, []).append(weight)
        own = {run.seed: _number(run, accuracy) for run in results.runs.get(cell, []) if run.arm == arm}
        terms.append((weight, {seed: value for seed, value in own.items() if value is not None}))
    seeds = sorted(set.intersection(*(set(values) for _, values in terms)))
    if not seeds:
        return None
    values = [sum(weight * values[seed] for weight, values in terms) for seed in seeds]
    number = functools.partial(_number, accuracy=accuracy)
    spread = pooled((results.runs[cell] for cell in results.like(cells)), number)
    if not spread.freedom:
        spread = pooled(results.runs.values(), number)
    mean, remark = statistics.fmean(values), ""
    half, freedom = around(values, spread, cells.values())
    if half is None:
        if results.assumed is None or accuracy:
            return Found(mean, -math.inf, math.inf, len(seeds), CHANCE)
        half, freedom = around(values, Spread(results.assumed, MANY), cells.values())
        assert half is not None
        remark = ASSUMED
    return Found(mean, mean - half, mean + half, len(seeds), remark, freedom=freedom)


def _number(run: Run, accuracy: bool) -> float | None:
    return (None if run.accuracy is None else 100 * run.accuracy) if accuracy else run.val_loss


def _of_row(results: Results, place: str, kind: str) -> Found | None:
    arm, cell = results.at(place)
    runs = [run for run in results.runs.get(cell, []) if run.arm in (arm, results.first)]
    if kind != "tokens_to_reach" and any(run.shared for run in runs):
        return None
    own = {run.seed: [r for r in runs if r.seed == run.seed] for run in runs}
    values, missed = [], 0
    for pair in own.values():
        row = next((row for row in make_rows(pair, [results.first, arm]) if row.arm == arm and row.paired), None)
        if row is not None:
            value = getattr(row, kind)
            missed += value is None
            values += [] if value is None else [value]
    if missed:
        seeds = missed + len(values)
        if seeds == 1:
            return Found(math.inf, -math.inf, math.inf, 1, CHANCE)
        # Two of two would miss it in a quarter of all cases if nothing were different.
        low = math.inf if missed == seeds >= SURE_TO_MISS else min([1.0, *values])
        return Found(math.inf, low, math.inf, seeds, f"{missed} of {seeds} seeds never reach it")
    if (
        kind == "step_ratio" and values and all(run.step_quartiles is None for run in runs)
    ):  # which runs have of their own
        said = "steps were timed in turns, apart from any seed"
        return Found(values[0], values[0], values[0], len(values), said, of="")
    return _spread_of(values) if values else None


def _spread_of(values: Sequence[float]) -> Found:
    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return Found(mean, -math.inf, math.inf, 1, CHANCE)
    half = student_t(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Found(mean, mean - half, mean + half, n)


def _advantage(results: Results, place: str, timed: bool) -> Found | None:
    if results.study is None:
        return None
    arm, domain = (part.strip() for part in f"{place} @ ".split(" @ ")[:2])
    found = points(results.study, results.records, results.runs, domain or next(iter(results.study.domains)), timed)
    if arm not in found or results.first not in found:
        return None
    saved = advantage(found[results.first], found[arm])
    if saved is None:
        return None
    return Found(saved[1].factor, saved[1].low, saved[1].high, len(found[arm]), of="sizes")


def _spikes(results: Results, arm: str, against: str) -> Found | None:
    """The share of runs with spikes, or that diverge, less that of another arm at the same rates and seeds.

    Spikes of one run come together, so runs are counted, not spikes; the interval is Newcombe's, of two shares.
    """
    own, other = (
        {
            (r["domain"], r["size"], r["seed"]): "diverged" in r or spikes([r]) > 0
            for r in results.records
            if r["arm"] == name
        }
        for name in (arm, against)
    )
    both = [key for key in own if key in other]
    if not both:
        return None
    n, m, of = sum(own[key] for key in both), sum(other[key] for key in both), len(both)
    (low, high), (other_low, other_high) = wilson(n, of), wilson(m, of)
    value = (n - m) / of
    return Found(
        value,
        value - math.hypot(n / of - low, other_high - m / of),
        value + math.hypot(high - n / of, m / of - other_low),
        len({seed for *_, seed in both}),
        f"{n} of {of} runs have spikes or diverge, against {m}",
    )


def _growth(results: Results, arm: str, against: str) -> Found | None:
    """An arm's over another's at the same rates and seeds, up to the largest rate that both stand; over rates the mean of logarithms."""
    stood = _stable(results, arm, against)
    if stood is None and results.study is not None:
        return None
    most = min(stood or [math.inf])
    own, other = (
        {
            (r["seed"], r["domain"], r["size"]): g
            for r in results.records
            if r["arm"] == name
            and "result" in r
            and (g := growth(r["result"])) is not None
            and r["config"]["lr"] <= most
        }
        for name in (arm, against)
    )
    by_seed: dict[int, list[float]] = {}
    for key in (key for key in own if key in other):
        by_seed.setdefault(key[0], []).append(math.log(own[key] / other[key]))
    return _spread_of([math.exp(statistics.fmean(logs)) for logs in by_seed.values()]) if by_seed else None


def _rate(results: Results, arm: str, against: str) -> Found | None:
    stood = _stable(results, arm, against)
    if stood is None:
        return None
    own, other = stood
    return Found(own / other, own / other, own / other, 1, f"{own:g} against {other:g}")


def _stable(results: Results, *arms: str) -> list[float] | None:
    """The largest rate that each stands; None if one of them stands none."""
    if results.study is None:
        return None
    found = [largest_stable(results.study, results.records, arm) for arm in arms]
    stood = [rate for rate in found if rate is not None]
    return stood if len(stood) == len(arms) else None


# Judging.


def judge(claim: Claim, found: Found | None) -> str:
    """The verdict: the interval against no effect, on the paper's side or the other; and for its size the paper's."""
    if found is None:
        return NOT_MEASURED
    if (found.low, found.high) == (-math.inf, math.inf):
        return UNDECIDED
    side = {"above": 1.0, "below": -1.0}.get(claim.says) if isinstance(claim.says, str) else claim.says - claim.nothing
    assert side is not None
    low, high = (found.low, found.high) if side > 0 else (-found.high, -found.low)
    nothing = claim.nothing if side > 0 else -claim.nothing
    if low > nothing:
        if isinstance(claim.says, str):
            return CONFIRMED
        near = abs(found.value - claim.nothing) >= ENOUGH * abs(side) or found.low <= claim.says <= found.high
        return CONFIRMED if near else IN_SIGN
    if high < nothing:
        return CONTRADICTED
    # Where the paper gives no number, any on its side would be its effect, and ours is the best guess.
    possible = low + high > 2 * nothing if isinstance(claim.says, str) else found.low <= claim.says <= found.high
    return UNDECIDED if possible else NOT_SEEN


def verdicts(
    claims: Sequence[Claim], look: Callable[[str], Results | None]
) -> list[tuple[Claim, str, Found | None, str]]:
    """(claim, verdict, number, study) of every claim."""
    judged = []
    for claim in claims:
        found, name = most_seeds((measure(claim, r), name) for name in claim.studies if (r := look(name)))
        judged.append((claim, judge(claim, found), found, name or claim.studies[0]))
    return judged


def elsewhere(
    claim: Claim, decided: str, column: Mapping[str, Any], look: Callable[[str], Results | None]
) -> Found | None:
    """A contrast of arms of no cell in particular, in cells (study @ cell) of another size or data than what `decided` the claim.

    A column's `same` names studies that have its size and data as well.
    """
    if decided in (*column["study"], *column.get("same", [])) or not set(claim.studies) & set(column["of"]):
        return None
    if claim.measure != "contrast" or any(" @ " in arm for arm in claim.what):
        return None
    return contrast_in(column["study"], lambda _: claim.what, look)


def contrast_in(
    places: Iterable[str], arms: Callable[[Results], Mapping[str, float]], look: Callable[[str], Results | None]
) -> Found | None:
    """A contrast of arms, with their weights, in studies or in single cells of them (study @ cell): in the one with most seeds."""
    found = []
    for place in places:
        name, _, cell = place.partition(" @ ")
        if (results := look(name)) and (weights := arms(results)):
            at = {f"{arm} @ {cell}" if cell else arm: weight for arm, weight in weights.items()}
            found.append((contrast(results, at), place))
    return most_seeds(found)[0]


def most_seeds(said: Iterable[tuple[Found | None, str]]) -> tuple[Found | None, str]:
    """What studies say, by name: of those that say anything the one with most seeds, the first of equals."""
    return max(((f, name) for f, name in said if f), key=lambda pair: pair[0].seeds, default=(None, ""))
