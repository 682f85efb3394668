"""Measure the papers' claims in the results at hand, and judge them.

A claim names one study or several. Of several, the study with most seeds counts, and among equals the first. It also names what to
measure there:

    contrast: {dca @ w768: 1, residual @ w768: -1}     a weighted sum of final losses, seed by seed; arm, or arm @ cell
    accuracy: {…}                                     a weighted sum of accuracies, in percent
    tokens_to_reach, time_to_reach: arm @ cell         tokens or time to the first arm's final loss, relative to the first arm
    step_ratio: arm @ cell                             of runs that had the machine to themselves, or timed in turns
    compute_advantage, time_advantage: arm             by fitted power laws (power_laws.py)
    spikes, growth, rate: {arm: …, against: …}         loss spikes; outputs' growth over depth; the largest stable rate, as a ratio

`says` is the paper's number, or `above` or `below` if it gives none.

Columns `beside` repeat contrasts in a cell of other studies: {title: …, study: [start @ cell, …], of: [mechanisms]}. They serve
claims that `of` can decide, and take the study with most seeds that has the arms. `same` names more studies of the same size and
data, which would be no second measurement.

The spread of a contrast comes from the first of these that is known:

    its own seeds, if there are six paired ones or more
    all arms and sizes of its domains together (spread.py), since books and code vary differently
    all of the study
    the largest spread that the study's file assumes
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from depthmix.compare import results as comparison
from depthmix.compare.interval import CONFIDENCE, student_t
from depthmix.compare.recipe import Recipe, load_recipe
from depthmix.compare.records import RUNS, read_records
from depthmix.compare.report import RECIPE
from depthmix.compare.rows import Run, make_rows
from depthmix.compare.sections import growth, largest_stable, spikes
from depthmix.compare.spread import Spread, around, group_of, pooled
from depthmix.compare.table import spreads_assumed
from depthmix.errors import UserError
from depthmix.names import nearest
from depthmix.strict_yaml import read_recipe
from lab.power_laws import advantage, points

RECIPES, RESULTS = (Path("lab") / "recipes", Path("recipes") / "studies"), Path("lab") / "results"
# Results on which the package's documentation rests.
PUBLISHED = Path("docs") / "results"
CONFIRMED, IN_SIGN, NOT_SEEN = "confirmed", "confirmed in sign", "not seen at this scale"
CONTRADICTED, UNDECIDED, NOT_MEASURED = "contradicted", "not decided yet", "not measured yet"
ASSUMED = "the spread is the one assumed in the study's file"
CHANCE = "one seed, which says nothing of chance"
# Degrees of freedom of a spread that is taken as known.
MANY = 1000
# So many seeds fall on one side by chance in 3% of all cases.
SURE_TO_MISS = 6
# Share of the paper's effect; a smaller effect is confirmed in sign only.
ENOUGH = 0.5
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
class Measurement:
    """A measured number with its 95% interval."""

    value: float
    low: float
    high: float
    seeds: int
    remark: str = ""
    of: str = "seeds"  # what `seeds` counts, if not seeds; "" if nothing is counted
    freedom: int = 0  # degrees of freedom of a contrast's interval


@dataclass(frozen=True)
class Claim:
    """A paper's claim, and the measurement that decides it."""

    claim: str
    source: str
    says: float | str
    studies: list[str]
    measure: str
    what: Any
    note: str = ""

    @property
    def nothing(self) -> float:
        """The value that means no effect."""
        return 1.0 if self.measure in RATIOS else 0.0


@dataclass
class Results:
    """All results of a study or comparison."""

    name: str
    first: str
    runs: dict[str, list[Run]]  # by cell
    assumed: float | None = None  # spread of a paired difference
    study: Recipe | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    comparison: comparison.Results | None = None

    def at(self, place: str) -> tuple[str, str]:
        """Split `arm @ cell`. Without a cell, the study's first one is returned."""
        arm, _, cell = (part.strip() for part in place.partition(" @ "))
        return arm, cell or next(iter(self.runs), "")

    def like(self, cells: Iterable[str]) -> list[str]:
        """Return the cells that share one spread with the given cells."""
        groups = {cell.name: group_of(self.study, cell) for cell in self.study.cells} if self.study else {}
        wanted = {groups.get(cell) for cell in cells}
        return [cell for cell in self.runs if groups.get(cell) in wanted]


def read_claims(path: Path) -> tuple[list[Claim], dict[str, Any]]:
    """Read the claims, and the recipe of the second table.

    Raises:
        UserError: something in the file makes no sense.
    """
    given = read_recipe("study", str(path))
    claims = []
    entries = given.get("claims", [])
    if not isinstance(entries, list) or not all(isinstance(item, dict) for item in entries):
        raise UserError(f"{path}: claims is a list of claims, each with {', '.join(KEYS[:4])} and what decides it")
    for item in entries:
        where = f"{path}, {str(item.get('claim', item))[:60]!r}"
        if unknown := [key for key in item if key not in KEYS]:
            raise UserError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(KEYS)}")
        if missing := [key for key in ("claim", "source", "says", "study") if key not in item]:
            raise UserError(f"{where}: {missing[0]} is needed")
        measures = [key for key in MEASURES if key in item]
        if len(measures) != 1:
            raise UserError(f"{where}: one of {', '.join(MEASURES)} is needed, got {measures or 'none'}")
        _check_shape(where, measures[0], item[measures[0]])
        says = item["says"]
        if isinstance(says, bool) or not (isinstance(says, int | float) or says in ("above", "below")):
            raise UserError(f"{where}: says is a number, above or below, got {says!r}")
        nothing = 1.0 if measures[0] in RATIOS else 0.0
        if says == nothing or (isinstance(says, float) and not math.isfinite(says)):
            raise UserError(
                f"{where}: says must be finite and differ from {nothing:g}, which means no effect, got {says!r}"
            )
        studies = item["study"] if isinstance(item["study"], list) else [item["study"]]
        if not studies or not all(
            isinstance(name, str) for name in [*studies, *(item[k] for k in ("claim", "source"))]
        ):
            raise UserError(f"{where}: claim, source and study are text, and study may be a list of names")
        claims.append(
            Claim(item["claim"], item["source"], says, studies, measures[0], item[measures[0]], item.get("note", ""))
        )
    page = {key: given.get(key, []) for key in ("intro", "beside", "columns", "rules", "choices", "answer", "steps")}
    for key, needed in (
        ("beside", {"title": str, "study": list, "of": list}),
        ("columns", {"title": str, "study": list, "table": str}),
        ("rules", {"arm": str}),
        ("choices", {"you": str, "use": str, "gave": str}),
    ):
        if not isinstance(page[key], list):
            raise UserError(f"{path}: {key} is a list, got {page[key]!r}")
        for item in page[key]:
            if not isinstance(item.get("same", []) if isinstance(item, dict) else [], list):
                raise UserError(f"{path}: same is a list of studies, got {item['same']!r}")
            if not isinstance(item, dict) or not all(isinstance(item.get(k), kind) for k, kind in needed.items()):
                raise UserError(f"{path}: an entry of {key} has {' and '.join(needed)}, got {item!r}")
    for key in ("intro", "answer"):
        if not isinstance(page[key], list) or not all(isinstance(text, str) for text in page[key]):
            raise UserError(f"{path}: {key} is a list of sentences, got {page[key]!r}")
    for column in page["columns"]:
        if [type(column[k]) for k in ("panel", "series") if k in column] not in ([], [str, str]):
            raise UserError(f"{path}: a column that is drawn has the text of a panel and of a series, got {column!r}")
    titles = [column["title"] for column in page["columns"]]
    if repeated := [title for title in titles if titles.count(title) > 1]:
        raise UserError(f"{path}: two columns are called {repeated[0]!r}")
    for name in page["steps"]:
        if not (isinstance(name, str) and Path(f"{name}.csv").is_file()):
            raise UserError(
                f"{path}: steps names results of `python -m benchmarks step` by their paths, and {name!r} has no CSV file"
            )
    deciding = sorted({name for claim in claims for name in claim.studies})
    for column in page["beside"]:
        for name in (*column["of"], *column.get("same", [])):
            if name not in deciding:
                raise UserError(
                    f"{path}: beside {column['title']!r}: no claim names {name!r}{nearest(str(name), deciding)}"
                )
    return claims, page


def _check_shape(where: str, kind: str, what: Any) -> None:
    """Refuse arms that do not fit the kind of a measurement."""
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
    """Return the arms, or `arm @ cell`, that a claim is about."""
    if isinstance(claim.what, str):
        return [claim.what]
    return [claim.what["arm"], claim.what["against"]] if "against" in claim.what else list(claim.what)


def check_places(claim: Claim, study: Recipe) -> None:
    """Refuse a claim about an arm or a cell that the study lacks: it would never be measured."""
    for place in places(claim):
        arm, _, cell = place.partition(" @ ")
        if arm not in study.labels:
            raise UserError(f"claim {claim.claim!r}: {study.name} has no {arm!r}{nearest(arm, study.labels)}")
        check_cell(cell, study, f"claim {claim.claim!r}")


def check_cell(cell: str, study: Recipe, where: str) -> None:
    """Refuse a cell or domain that the study lacks. "" stands for the first."""
    cells = [*(known.name for known in study.cells), *study.domains]
    if cell and cell not in cells:
        raise UserError(f"{where}: {study.name} has no {cell!r}{nearest(cell, cells)}")


def find_results(name: str) -> Path:
    """Return the folder of the results of a study or comparison, whether it exists or not."""
    return next((folder / name for folder in (PUBLISHED, RESULTS) if (folder / name).is_dir()), RESULTS / name)


def find_recipe(name: str) -> Path:
    """Return the recipe of a comparison by its name: of the laboratory, of the package, or beside its results.

    Raises:
        UserError: There is none.
    """
    places = [*(folder / f"{name}.yaml" for folder in RECIPES), find_results(name) / RECIPE]
    if found := next((path for path in places if path.is_file()), None):
        return found
    known = sorted(path.stem for folder in RECIPES for path in folder.glob("*.yaml"))
    raise UserError(f"unknown study {name!r}; there are {', '.join(known)}{nearest(name, known)}")


def read_results(name: str) -> Results | None:
    """Read all results of a comparison.

    Args:
        name: name of its folder in lab/results or docs/results.

    Returns:
        The results; None where there are none yet.
    """
    place = find_results(name)
    if not (place / RUNS).is_file():
        return None
    return as_results(comparison.Results(load_recipe(find_recipe(name)), read_records([place / RUNS])))


def as_results(found: comparison.Results) -> Results | None:
    """Return a comparison's results as claims need them, or None if it has no runs."""
    recipe = found.recipe
    if not any(found.runs.values()):
        return None
    assumed = max(spreads_assumed(recipe), default=None)
    return Results(recipe.name, recipe.labels[0], found.runs, assumed, recipe, found.used, found)


def measure(claim: Claim, results: Results) -> Measurement | None:
    """Measure a claim in results. Return None if they lack the runs."""
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


def contrast(results: Results, weights: Mapping[str, float], accuracy: bool = False) -> Measurement | None:
    """Measure a weighted sum of final losses (or accuracies) over the seeds that all its terms share."""
    terms: list[tuple[float, dict[int, float]]] = []
    cells: dict[str, list[float]] = {}
    for place, weight in weights.items():
        arm, cell = results.at(place)
        cells.setdefault(cell, []).append(weight)
        by_seed = {run.seed: _number(run, accuracy) for run in results.runs.get(cell, []) if run.arm == arm}
        terms.append((weight, {seed: value for seed, value in by_seed.items() if value is not None}))
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
            return Measurement(mean, -math.inf, math.inf, len(seeds), CHANCE)
        half, freedom = around(values, Spread(results.assumed, MANY), cells.values())
        assert half is not None
        remark = ASSUMED
    return Measurement(mean, mean - half, mean + half, len(seeds), remark, freedom=freedom)


def _number(run: Run, accuracy: bool) -> float | None:
    return (None if run.accuracy is None else 100 * run.accuracy) if accuracy else run.val_loss


def _of_row(results: Results, place: str, kind: str) -> Measurement | None:
    arm, cell = results.at(place)
    runs = [run for run in results.runs.get(cell, []) if run.arm in (arm, results.first)]
    if kind != "tokens_to_reach" and any(run.shared for run in runs):
        return None
    by_seed = {run.seed: [r for r in runs if r.seed == run.seed] for run in runs}
    values, missed = [], 0
    for pair in by_seed.values():
        row = next((row for row in make_rows(pair, [results.first, arm]) if row.arm == arm and row.paired), None)
        if row is not None:
            value = getattr(row, kind)
            missed += value is None
            values += [] if value is None else [value]
    if missed:
        seeds = missed + len(values)
        if seeds == 1:
            return Measurement(math.inf, -math.inf, math.inf, 1, CHANCE)
        # Without any difference, two of two seeds would miss the loss in a quarter of all cases.
        low = math.inf if missed == seeds >= SURE_TO_MISS else min([1.0, *values])
        return Measurement(math.inf, low, math.inf, seeds, f"{missed} of {seeds} seeds never reach it")
    # A run that measured its own steps has quartiles.
    if kind == "step_ratio" and values and all(run.step_quartiles is None for run in runs):
        remark = "steps were timed in turns, apart from any seed"
        return Measurement(values[0], values[0], values[0], len(values), remark, of="")
    return _spread_of(values) if values else None


def _spread_of(values: Sequence[float]) -> Measurement:
    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return Measurement(mean, -math.inf, math.inf, 1, CHANCE)
    half = student_t(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Measurement(mean, mean - half, mean + half, n)


def _advantage(results: Results, place: str, timed: bool) -> Measurement | None:
    if results.comparison is None:
        return None
    arm, domain = (part.strip() for part in f"{place} @ ".split(" @ ")[:2])
    points_by_arm = points(results.comparison, domain or next(iter(results.comparison.recipe.domains)), timed)
    if arm not in points_by_arm or results.first not in points_by_arm:
        return None
    fitted = advantage(points_by_arm[results.first], points_by_arm[arm])
    if fitted is None:
        return None
    return Measurement(fitted[1].factor, fitted[1].low, fitted[1].high, len(points_by_arm[arm]), of="sizes")


def wilson(n: int, of: int) -> tuple[float, float]:
    """Return the 95% interval of a share, `n` of `of`, by Wilson's score."""
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    middle = (n + z * z / 2) / (of + z * z)
    half = z * math.sqrt(n * (of - n) / of + z * z / 4) / (of + z * z)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _spikes(results: Results, arm: str, against: str) -> Measurement | None:
    """Measure the share of runs with spikes or divergence, minus that of another arm at the same rates and seeds.

    Runs are counted instead of spikes, since the spikes of one run come together. The interval is Newcombe's for two shares.
    """
    spiky, other_spiky = (
        {
            (r["domain"], r["size"], r["seed"]): "diverged" in r or spikes([r]) > 0
            for r in results.records
            if r["arm"] == name
        }
        for name in (arm, against)
    )
    shared = [key for key in spiky if key in other_spiky]
    if not shared:
        return None
    n, m, total = sum(spiky[key] for key in shared), sum(other_spiky[key] for key in shared), len(shared)
    (low, high), (other_low, other_high) = wilson(n, total), wilson(m, total)
    value = (n - m) / total
    return Measurement(
        value,
        value - math.hypot(n / total - low, other_high - m / total),
        value + math.hypot(high - n / total, m / total - other_low),
        len({seed for *_, seed in shared}),
        f"{n} of {total} runs have spikes or diverge, against {m}",
    )


def _growth(results: Results, arm: str, against: str) -> Measurement | None:
    """Measure an arm's growth over another's at the same rates and seeds, up to the largest rate at which both are stable.

    Rates are averaged geometrically.
    """
    stable_rates = _stable(results, arm, against)
    if stable_rates is None and results.study is not None:
        return None
    largest = min(stable_rates or [math.inf])
    growths, other_growths = (
        {
            (r["seed"], r["domain"], r["size"]): g
            for r in results.records
            if r["arm"] == name
            and "result" in r
            and (g := growth(r["result"])) is not None
            and r["config"]["lr"] <= largest
        }
        for name in (arm, against)
    )
    by_seed: dict[int, list[float]] = {}
    for key in (key for key in growths if key in other_growths):
        by_seed.setdefault(key[0], []).append(math.log(growths[key] / other_growths[key]))
    return _spread_of([math.exp(statistics.fmean(logs)) for logs in by_seed.values()]) if by_seed else None


def _rate(results: Results, arm: str, against: str) -> Measurement | None:
    stable_rates = _stable(results, arm, against)
    if stable_rates is None:
        return None
    rate, other_rate = stable_rates
    return Measurement(rate / other_rate, rate / other_rate, rate / other_rate, 1, f"{rate:g} against {other_rate:g}")


def _stable(results: Results, *arms: str) -> list[float] | None:
    """Return each arm's largest stable rate, or None if one of them has none."""
    if results.study is None:
        return None
    rates = [largest_stable(results.records, arm) for arm in arms]
    stable = [rate for rate in rates if rate is not None]
    return stable if len(stable) == len(arms) else None


def judge(claim: Claim, measured: Measurement | None) -> str:
    """Judge a claim from its measurement.

    The interval is compared with no effect, on the paper's side and on the other, and then with the size that the paper gives.
    """
    if measured is None:
        return NOT_MEASURED
    if (measured.low, measured.high) == (-math.inf, math.inf):
        return UNDECIDED
    side = {"above": 1.0, "below": -1.0}.get(claim.says) if isinstance(claim.says, str) else claim.says - claim.nothing
    assert side is not None
    low, high = (measured.low, measured.high) if side > 0 else (-measured.high, -measured.low)
    nothing = claim.nothing if side > 0 else -claim.nothing
    if low > nothing:
        if isinstance(claim.says, str):
            return CONFIRMED
        is_large_enough = (
            abs(measured.value - claim.nothing) >= ENOUGH * abs(side) or measured.low <= claim.says <= measured.high
        )
        return CONFIRMED if is_large_enough else IN_SIGN
    if high < nothing:
        return CONTRADICTED
    # If the paper gives no number, any value on its side would be its effect, and ours is the best guess.
    possible = low + high > 2 * nothing if isinstance(claim.says, str) else measured.low <= claim.says <= measured.high
    return UNDECIDED if possible else NOT_SEEN


def verdicts(
    claims: Sequence[Claim], look: Callable[[str], Results | None]
) -> list[tuple[Claim, str, Measurement | None, str]]:
    """(claim, verdict, number, study) of every claim."""
    judged = []
    for claim in claims:
        measured, name = most_seeds((measure(claim, r), name) for name in claim.studies if (r := look(name)))
        judged.append((claim, judge(claim, measured), measured, name or claim.studies[0]))
    return judged


def elsewhere(
    claim: Claim, decided: str, column: Mapping[str, Any], look: Callable[[str], Results | None]
) -> Measurement | None:
    """Measure a contrast of arms again in a column's cells (study @ cell), which have another size or data than the study that decided.

    Args:
        claim: the claim; only contrasts of arms without a cell can be measured again.
        decided: the study that decided the claim.
        column: the column. Its `same` names studies that have its size and data as well.
        look: reads the results of a study.
    """
    if decided in (*column["study"], *column.get("same", [])) or not set(claim.studies) & set(column["of"]):
        return None
    if claim.measure != "contrast" or any(" @ " in arm for arm in claim.what):
        return None
    return contrast_in(column["study"], lambda _: claim.what, look)


def contrast_in(
    places: Iterable[str], arms: Callable[[Results], Mapping[str, float]], look: Callable[[str], Results | None]
) -> Measurement | None:
    """Measure a contrast in the study, or single cell (study @ cell), that has the most seeds for it."""
    candidates = []
    for place in places:
        name, _, cell = place.partition(" @ ")
        if (results := look(name)) and (weights := arms(results)):
            placed = {f"{arm} @ {cell}" if cell else arm: weight for arm, weight in weights.items()}
            candidates.append((contrast(results, placed), place))
    return most_seeds(candidates)[0]


def most_seeds(candidates: Iterable[tuple[Measurement | None, str]]) -> tuple[Measurement | None, str]:
    """Return the measurement with most seeds, and the name of its study. The first of equals wins."""
    return max(((f, name) for f, name in candidates if f), key=lambda pair: pair[0].seeds, default=(None, ""))
