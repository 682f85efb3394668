"""Write docs/results.md: verdicts on the papers' claims, and a table and a figure for the question which rule to use.

python -m lab.results_page
"""

from __future__ import annotations

import csv
import functools
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from depthmix.errors import UserError
from depthmix.files import write_text
from depthmix.study.figures import load, save_figure
from depthmix.study.interval import OWN_SEEDS, student_t
from depthmix.study.power import MOST, POWER, seeds_needed
from depthmix.study.recipe import Study, find_study, read_study
from depthmix.study.table import markdown_line, markdown_text
from lab.claims import (
    ASSUMED,
    CONFIRMED,
    CONTRADICTED,
    IN_SIGN,
    NOT_MEASURED,
    NOT_SEEN,
    UNDECIDED,
    VERDICTS,
    Claim,
    Found,
    Results,
    check_cell,
    check_places,
    contrast_in,
    elsewhere,
    find_recipe,
    find_results,
    judge,
    read_claims,
    read_results,
    verdicts,
)
from lab.rules_picture import plot_rules

CLAIMS, PAGE = Path("lab") / "claims.yaml", Path("docs") / "results.md"
FIGURE = Path("results") / "rules"  # beside the page
FAR = 3  # times the paper's effect
Gains = dict[str, dict[str, Found]]  # by a column's title and an arm


def write_claims(path: Path = CLAIMS, page: Path = PAGE) -> Path:
    """Write the page of verdicts.

    Args:
        path: file of claims; studies and benchmarks in it are found from the repository's root.
        page: page to write, with its figure in the folder results beside it.

    Returns:
        The page.

    Raises:
        UserError: the file is missing, or something in it makes no sense.
    """
    if not path.is_file():
        raise UserError(f"there is no {path} here: run this in the root of depthmix's repository")
    claims, which = read_claims(path)
    look = functools.cache(read_results)

    @functools.cache
    def said(name: str) -> Study:
        return read_study(find_recipe(name))

    for claim in claims:
        for name in claim.studies:
            if not (find_results(name) / "comparison.json").is_file():
                check_places(claim, said(name))
    beside = which.pop("beside")
    for place in (place for column in (*beside, *which["columns"]) for place in column["study"]):
        name, _, cell = place.partition(" @ ")
        if not (find_results(name) / "comparison.json").is_file():
            check_cell(cell, said(name), path.name)
    judged = verdicts(claims, look)
    count = Counter(verdict for _, verdict, _, _ in judged)
    summary = ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict])
    text = [
        "# What the papers claim, and what we found",
        "",
        f"Of {len(judged)} claims: {summary}. Made by `python -m lab.results_page` from [claims.yaml](../{CLAIMS.as_posix()}) and the results beside it.",
        "",
        f"“{CONFIRMED}”: the 95% interval leaves no effect out, on the paper's side, and ours is at least half of the paper's or the interval holds it; “{IN_SIGN}”: on the paper's side, but less than half of it; “{NOT_SEEN}”: the interval holds no effect, and not the paper's, or, of a claim without a number, ours is on the other side; “{UNDECIDED}”: it holds no effect and the paper's, and more seeds would tell; “{CONTRADICTED}”: it is on the other side. The papers' models are larger and train longer, on other data: compare signs before sizes; of so many 95% intervals about two leave the truth out. Intervals of losses are Student's, over seeds alone, with the spread that all arms of a study have together on the same data, which also an arm with one seed borrows, and from {OWN_SEEDS} paired seeds on with their own; those of advantages are of the jackknife over sizes, and say how much hangs on one of them.",
        "",
        *(markdown_text(line) for line in which.pop("intro")),
        *_elsewhere(judged, beside, look),
        "",
    ]
    for source in dict.fromkeys(claim.source.partition(",")[0] for claim in claims):
        heading = ["verdict", "claim", "paper", "ours", "seeds", "where", *(column["title"] for column in beside)]
        own = [entry for entry in judged if entry[0].source.partition(",")[0] == source]
        text += [f"## {source}", "", markdown_line(heading), "|---|---|---:|---:|---:|---|" + "---:|" * len(beside)]
        remarks = []
        for claim, verdict, found, name in own:
            place = claim.source.partition(",")[2].strip()
            cells = [
                f"**{verdict}**",
                f"{claim.claim}{f' ({place})' if place else ''}",
                _said(claim.says),
                _shown(found),
            ]
            too = {column["title"]: elsewhere(claim, name, column, look) for column in beside}
            seeds = ("–" if not found.of else f"{found.seeds} {found.of}".removesuffix(" seeds")) if found else "0"
            line = markdown_line([*cells, seeds]) + f" {_link(name)} |"
            text.append(line + "".join(f" {_with_seeds(other)} |" for other in too.values()))
            words = [claim.note]
            if found:
                words += [found.remark, _to_tell(claim, found), *_warnings(claim, found, too)]
            if any(words):
                remarks.append(f"{claim.claim}: {'; '.join(filter(None, words))}.")
        text += ["", *(f"* {markdown_text(remark)}" for remark in remarks), *[""] * bool(remarks)]
    gains = _gains(which["columns"], which["rules"], look)
    which["columns"] = [column for column in which["columns"] if gains[column["title"]]]
    text += _which(**which, gains=gains, look=look)
    panels: dict[str, Gains] = {}
    for column in which["columns"]:
        if "panel" in column:
            panels.setdefault(column["panel"], {})[column["series"]] = gains[column["title"]]
    if load() and panels:
        measured = {arm for by_column in panels.values() for found in by_column.values() for arm in found}
        labels = {rule["arm"]: _label(rule) for rule in which["rules"] if rule["arm"] in measured}
        save_figure(lambda: plot_rules(labels, panels), page.parent / FIGURE, FIGURE.name, ["png"])
    write_text(page, "\n".join(text).rstrip() + "\n")
    return page


def _elsewhere(
    judged: Sequence[tuple[Claim, str, Found | None, str]],
    beside: Sequence[Mapping[str, Any]],
    look: Callable[[str], Results | None],
) -> list[str]:
    """How many of the claims that are confirmed are so in each column beside them, where it has them."""
    said = []
    for column in beside:
        others = [judge(c, elsewhere(c, name, column, look)) for c, verdict, _, name in judged if verdict == CONFIRMED]
        known = [verdict for verdict in others if verdict != NOT_MEASURED]
        said += [f"{known.count(CONFIRMED)} of {len(known)} in “{column['title']}”"] * bool(known)
    words = f"Of the claims that are confirmed, where they were measured once more, these are confirmed again: {'; '.join(said)}."
    return ["", words] if said else []


def _warnings(claim: Claim, found: Found, too: Mapping[str, Found | None]) -> list[str]:
    """What a verdict alone would hide: an effect far larger than the paper's, and columns beside it that have another verdict."""
    words = []
    if not isinstance(claim.says, str) and not found.low <= claim.says <= found.high:
        times = (found.value - claim.nothing) / (claim.says - claim.nothing)
        words += [f"{times:.0f} times the paper's"] * (FAR <= times < math.inf)
    for title, other in too.items():
        there = judge(claim, other)
        if there not in (judge(claim, found), UNDECIDED, NOT_MEASURED):
            words.append(f"{there} in “{title}”")
    return words


def _to_tell(claim: Claim, found: Found) -> str:
    """The seeds that would decide a claim which these leave open, where it is a difference of some size."""
    if judge(claim, found) != UNDECIDED or isinstance(claim.says, str) or not found.freedom:
        return ""
    deviation = (found.high - found.low) / 2 / student_t(found.freedom) * math.sqrt(found.seeds)
    needed = seeds_needed(claim.says - claim.nothing, deviation, found.freedom)
    run = ", which were run and left it open" if needed and needed <= found.seeds else ""
    return f"an effect of the paper's size takes {needed or f'more than {MOST}'} paired seeds to be shown with a chance of {POWER:.0%}{run}"


def _said(says: float | str) -> str:
    return says if isinstance(says, str) else f"{says:+z.3f}" if abs(says) < 0.3 else f"{says:.2f}"


def _shown(found: Found | None) -> str:
    if found is None:
        return "–"
    if math.isinf(found.value):
        return "never"
    value = f"{found.value:+z.3f}" if abs(found.value) < 0.5 else f"{found.value:.2f}"
    if math.isinf(found.low) or found.low == found.high:
        return value
    ends = [f"{end:+.{_decimals(end)}f}" if abs(found.value) < 0.5 else f"{end:.2f}" for end in (found.low, found.high)]
    return f"{value} ({ends[0]} to {ends[1]})"


def _decimals(end: float) -> int:
    """Return the decimals for the end of an interval: enough to see on which side of zero it is."""
    return next((n for n in (3, 4, 5, 6) if round(abs(end), n)), 3)


def _with_seeds(found: Found | None) -> str:
    said = f", {found.seeds} seeds" if found and found.seeds > 1 else ""
    return _shown(found) + said + (", assumed spread" if found and found.remark == ASSUMED else "")


def _link(name: str) -> str:
    """Link to the table of a study from the page; to the study's file where there is no table."""
    table = find_results(name) / "table.md"
    return f"[{name}]({_from_page(table if table.is_file() else find_study(find_recipe(name)))})"


def _from_page(path: Path) -> str:
    """Return the path of a file of this repository as the page links to it."""
    return Path(os.path.relpath(path, PAGE.parent)).as_posix()


def _which(
    columns: Sequence[Mapping[str, Any]],
    rules: Sequence[Mapping[str, Any]],
    choices: Sequence[Mapping[str, str]],
    answer: Sequence[str],
    steps: Sequence[str],
    gains: Gains,
    look: Callable[[str], Results | None],
) -> list[str]:
    """The answer, in short and at length, then what is behind it: gains in columns of studies, step ratios, what a rule asks for."""
    ratios: dict[tuple[str, str], float] = {}
    for name in steps:  # the newest last
        for line in csv.DictReader(Path(f"{name}.csv").read_text().splitlines()):
            if line["metric"].startswith("step / "):
                ratios[line["who"], line["case"].partition(":")[0]] = float(line["value"])
    cases = sorted({case for _, case in ratios})
    text = ["## Which rule should I use?", ""]
    if choices:
        text += [markdown_line(["you", "use", "what it gave"]), "|---|---|---|"]
        text += [*(markdown_line([choice["you"], choice["use"], choice["gave"]]) for choice in choices), ""]
    text += [*(f"* {markdown_text(sentence)}" for sentence in answer), ""]
    if any("panel" in column for column in columns):
        text += [f"![gains of the rules]({FIGURE.as_posix()}.png)", ""]
    for name in dict.fromkeys(column["table"] for column in columns):
        titles = [column["title"] for column in columns if column["table"] == name]
        where = dict.fromkeys(n for c in columns if c["table"] == name for n in map(_name, c["study"]) if look(n))
        said = f"nats against the plain residual, below zero is better, with 95% intervals, from {', '.join(_link(n) for n in where)}"
        text += [
            f"**{markdown_text(name)}**: {said}.",
            "",
            markdown_line(["rule", *titles]),
            "|---|" + "---:|" * len(titles),
        ]
        for rule in rules:
            found = [gains[title].get(rule["arm"]) for title in titles]
            if any(found):
                text.append(markdown_line([_label(rule), *map(_with_seeds, found)]))
        text.append("")
    runs = ", ".join(f"[{Path(name).name}]({_from_page(Path(f'{name}.md'))})" for name in steps)
    words = f": steps are from {runs}, the last one that has the rule, each against the plain step of its own run"
    text += [f"**What a rule takes**{words * bool(steps)}.", ""]
    text.append(markdown_line(["rule", *(f"step, {case}" for case in cases), "what it takes"]))
    text.append("|---|" + "---:|" * len(cases) + "---|")
    for rule in rules:
        cells = [f"{ratios[rule['arm'], case]:.2f}" if (rule["arm"], case) in ratios else "–" for case in cases]
        text.append(markdown_line([_label(rule), *cells, rule.get("takes", "")]))
    return text


def _label(rule: Mapping[str, Any]) -> str:
    return str(rule.get("label", rule["arm"]))


def _gains(
    columns: Sequence[Mapping[str, Any]], rules: Sequence[Mapping[str, Any]], look: Callable[[str], Results | None]
) -> Gains:
    """Every rule's gain in every column, where it was measured."""

    def gain(arm: str, places: Sequence[str]) -> Found | None:
        return contrast_in(places, lambda r: {} if arm == r.first else {arm: 1, r.first: -1}, look)

    by_column = {c["title"]: {rule["arm"]: gain(rule["arm"], c["study"]) for rule in rules} for c in columns}
    return {title: {arm: gain for arm, gain in by_arm.items() if gain} for title, by_arm in by_column.items()}


def _name(place: str) -> str:
    return place.partition(" @ ")[0]


def main() -> int:
    """Write the page and print its path; a UserError ends in one sentence and its exit code, as in `depthmix`."""
    try:
        print(write_claims())
    except UserError as error:
        print(f"lab: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
