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

from depthmix.compare.columns import markdown_line, markdown_text
from depthmix.compare.interval import OWN_SEEDS, student_t
from depthmix.compare.power import MOST, POWER, seeds_needed
from depthmix.compare.recipe import Recipe, load_recipe
from depthmix.errors import UserError
from depthmix.files import write_text
from depthmix.report.figures import load, save_figure
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
    Measurement,
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
# Beside the page.
FIGURE = Path("results") / "rules"
# From this multiple of the paper's effect on, the page warns.
FAR = 3
# By a column's title and an arm.
Gains = dict[str, dict[str, Measurement]]


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
    claims, rule_table = read_claims(path)
    look = functools.cache(read_results)

    @functools.cache
    def study_named(name: str) -> Recipe:
        return load_recipe(find_recipe(name))

    for claim in claims:
        for name in claim.studies:
            check_places(claim, study_named(name))
    beside = rule_table.pop("beside")
    for place in (place for column in (*beside, *rule_table["columns"]) for place in column["study"]):
        name, _, cell = place.partition(" @ ")
        check_cell(cell, study_named(name), path.name)
    judged = verdicts(claims, look)
    count = Counter(verdict for _, verdict, _, _ in judged)
    summary = ", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict])
    text = [
        "# What the papers claim, and what we found",
        "",
        f"Of {len(judged)} claims: {summary}. Made by `python -m lab.results_page` from [claims.yaml](../{CLAIMS.as_posix()}) and the results beside it.",
        "",
        "The 95% interval of our number decides the verdict:",
        "",
        f"* “{CONFIRMED}”: it excludes no effect on the paper's side, and our effect is at least half of the paper's or the interval contains the paper's.",
        f"* “{IN_SIGN}”: it excludes no effect on the paper's side, but our effect is less than half of the paper's.",
        f"* “{NOT_SEEN}”: it includes no effect and excludes the paper's. For a claim without a number, our value is on the other side.",
        f"* “{UNDECIDED}”: it includes both no effect and the paper's; more seeds would tell.",
        f"* “{CONTRADICTED}”: it excludes no effect on the other side.",
        "",
        "The papers' models are larger and train longer, on other data, so compare signs before sizes. Of so many 95% intervals, about two miss the truth.",
        "",
        f"Intervals of losses are Student's, over seeds alone. Up to {OWN_SEEDS - 1} paired seeds, the spread is that of all arms of the study on the same data, so an arm with one seed has an interval too. From {OWN_SEEDS} paired seeds on, it is the arm's own. Intervals of advantages come from the jackknife over sizes and show how much depends on a single size.",
        "",
        *(markdown_text(line) for line in rule_table.pop("intro")),
        *_elsewhere(judged, beside, look),
        "",
    ]
    for source in dict.fromkeys(claim.source.partition(",")[0] for claim in claims):
        heading = ["verdict", "claim", "paper", "ours", "seeds", "study", *(column["title"] for column in beside)]
        entries = [entry for entry in judged if entry[0].source.partition(",")[0] == source]
        text += [f"## {source}", "", markdown_line(heading), "|---|---|---:|---:|---:|---|" + "---:|" * len(beside)]
        remarks = []
        for claim, verdict, measured, name in entries:
            place = claim.source.partition(",")[2].strip()
            cells = [
                f"**{verdict}**",
                f"{claim.claim}{f' ({place})' if place else ''}",
                _said(claim.says),
                _shown(measured),
            ]
            others = {column["title"]: elsewhere(claim, name, column, look) for column in beside}
            seeds = (
                ("–" if not measured.of else f"{measured.seeds} {measured.of}".removesuffix(" seeds"))
                if measured
                else "0"
            )
            line = markdown_line([*cells, seeds]) + f" {_link(name)} |"
            text.append(line + "".join(f" {_with_seeds(other)} |" for other in others.values()))
            words = [claim.note]
            if measured:
                words += [measured.remark, _to_tell(claim, measured), *_warnings(claim, measured, others)]
            if any(words):
                remarks.append(f"{claim.claim}: {'; '.join(filter(None, words))}.")
        text += ["", *(f"* {markdown_text(remark)}" for remark in remarks), *[""] * bool(remarks)]
    gains = _gains(rule_table["columns"], rule_table["rules"], look)
    rule_table["columns"] = [column for column in rule_table["columns"] if gains[column["title"]]]
    text += _which(**rule_table, gains=gains, look=look)
    panels: dict[str, Gains] = {}
    for column in rule_table["columns"]:
        if "panel" in column:
            panels.setdefault(column["panel"], {})[column["series"]] = gains[column["title"]]
    if load() and panels:
        arms = {arm for by_column in panels.values() for by_arm in by_column.values() for arm in by_arm}
        labels = {rule["arm"]: _label(rule) for rule in rule_table["rules"] if rule["arm"] in arms}
        save_figure(lambda: plot_rules(labels, panels), page.parent / FIGURE, FIGURE.name, ["png"])
    write_text(page, "\n".join(text).rstrip() + "\n")
    return page


def _elsewhere(
    judged: Sequence[tuple[Claim, str, Measurement | None, str]],
    beside: Sequence[Mapping[str, Any]],
    look: Callable[[str], Results | None],
) -> list[str]:
    """Count, for each column beside the claims, how many of the confirmed claims are confirmed there too."""
    counts = []
    for column in beside:
        others = [judge(c, elsewhere(c, name, column, look)) for c, verdict, _, name in judged if verdict == CONFIRMED]
        known = [verdict for verdict in others if verdict != NOT_MEASURED]
        counts += [f"{known.count(CONFIRMED)} of {len(known)} in “{column['title']}”"] * bool(known)
    words = f"Confirmed claims that were measured again elsewhere, and confirmed there too: {'; '.join(counts)}."
    return ["", words] if counts else []


def _warnings(claim: Claim, measured: Measurement, others: Mapping[str, Measurement | None]) -> list[str]:
    """Return what a verdict alone would hide: an effect far larger than the paper's, and columns with another verdict."""
    words = []
    if not isinstance(claim.says, str) and not measured.low <= claim.says <= measured.high:
        times = (measured.value - claim.nothing) / (claim.says - claim.nothing)
        words += [f"{times:.0f} times the paper's"] * (FAR <= times < math.inf)
    for title, other in others.items():
        verdict = judge(claim, other)
        if verdict not in (judge(claim, measured), UNDECIDED, NOT_MEASURED):
            words.append(f"{verdict} in “{title}”")
    return words


def _to_tell(claim: Claim, measured: Measurement) -> str:
    """Return the number of seeds that would decide an open claim, in words, if the paper gives a size."""
    if judge(claim, measured) != UNDECIDED or isinstance(claim.says, str) or not measured.freedom:
        return ""
    deviation = (measured.high - measured.low) / 2 / student_t(measured.freedom) * math.sqrt(measured.seeds)
    needed = seeds_needed(claim.says - claim.nothing, deviation, measured.freedom)
    were_run = "; so many were run, and the claim is still open" if needed and needed <= measured.seeds else ""
    return f"showing an effect of the paper's size with a chance of {POWER:.0%} takes {needed or f'more than {MOST}'} paired seeds{were_run}"


def _said(says: float | str) -> str:
    return says if isinstance(says, str) else f"{says:+z.3f}" if abs(says) < 0.3 else f"{says:.2f}"


def _shown(measured: Measurement | None) -> str:
    if measured is None:
        return "–"
    if math.isinf(measured.value):
        return "never"
    value = f"{measured.value:+z.3f}" if abs(measured.value) < 0.5 else f"{measured.value:.2f}"
    if math.isinf(measured.low) or measured.low == measured.high:
        return value
    ends = [
        f"{end:+.{_decimals(end)}f}" if abs(measured.value) < 0.5 else f"{end:.2f}"
        for end in (measured.low, measured.high)
    ]
    return f"{value} ({ends[0]} to {ends[1]})"


def _decimals(end: float) -> int:
    """Return the decimals for the end of an interval: enough to see on which side of zero it is."""
    return next((n for n in (3, 4, 5, 6) if round(abs(end), n)), 3)


def _with_seeds(measured: Measurement | None) -> str:
    seeds = f", {measured.seeds} seeds" if measured and measured.seeds > 1 else ""
    return _shown(measured) + seeds + (", assumed spread" if measured and measured.remark == ASSUMED else "")


def _link(name: str) -> str:
    """Link to the table of a study from the page; to the study's file where there is no table."""
    table = find_results(name) / "table.md"
    return f"[{name}]({_from_page(table if table.is_file() else find_recipe(name))})"


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
    """Return the section on choosing a rule: the answer, then gains in columns of studies, step ratios and what a rule needs."""
    ratios: dict[tuple[str, str], float] = {}
    # The newest results come last and win.
    for name in steps:
        for line in csv.DictReader(Path(f"{name}.csv").read_text().splitlines()):
            if line["metric"].startswith("step / "):
                ratios[line["who"], line["case"].partition(":")[0]] = float(line["value"])
    cases = sorted({case for _, case in ratios})
    text = ["## Which rule should I use?", ""]
    if choices:
        text += [markdown_line(["you", "use", "result"]), "|---|---|---|"]
        text += [*(markdown_line([choice["you"], choice["use"], choice["gave"]]) for choice in choices), ""]
    text += [*(f"* {markdown_text(sentence)}" for sentence in answer), ""]
    if any("panel" in column for column in columns):
        text += [f"![gains of the rules]({FIGURE.as_posix()}.png)", ""]
    for name in dict.fromkeys(column["table"] for column in columns):
        titles = [column["title"] for column in columns if column["table"] == name]
        where = dict.fromkeys(n for c in columns if c["table"] == name for n in map(_name, c["study"]) if look(n))
        explanation = f"nats against the plain residual (below zero is better), with 95% intervals, from {', '.join(_link(n) for n in where)}"
        text += [
            f"**{markdown_text(name)}**: {explanation}.",
            "",
            markdown_line(["rule", *titles]),
            "|---|" + "---:|" * len(titles),
        ]
        for rule in rules:
            measurements = [gains[title].get(rule["arm"]) for title in titles]
            if any(measurements):
                text.append(markdown_line([_label(rule), *map(_with_seeds, measurements)]))
        text.append("")
    runs = ", ".join(f"[{Path(name).name}]({_from_page(Path(f'{name}.md'))})" for name in steps)
    source = f": step times come from {runs}, from the last one that has the rule, relative to the plain step of the same run"
    text += [f"**What a rule needs**{source * bool(steps)}.", ""]
    text.append(markdown_line(["rule", *(f"step, {case}" for case in cases), "what it needs"]))
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
    """Measure every rule's gain in every column that has it."""

    def gain(arm: str, places: Sequence[str]) -> Measurement | None:
        return contrast_in(places, lambda r: {} if arm == r.first else {arm: 1, r.first: -1}, look)

    by_column = {c["title"]: {rule["arm"]: gain(rule["arm"], c["study"]) for rule in rules} for c in columns}
    return {title: {arm: gain for arm, gain in by_arm.items() if gain} for title, by_arm in by_column.items()}


def _name(place: str) -> str:
    return place.partition(" @ ")[0]


def main() -> int:
    """Write the page and print its path. A UserError ends in one sentence and its exit code, as in `depthmix`."""
    try:
        print(write_claims())
    except UserError as error:
        print(f"lab: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
