"""Write docs/results.md, the long study with verdicts on the papers' claims, and lab/short-trainings.md, all of it in short trainings.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthmix.compare.columns import markdown_line, markdown_text
from depthmix.compare.interval import student_t
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
    PUBLISHED,
    UNDECIDED,
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
from lab.long_pictures import plot_factors, plot_lengths
from lab.long_study import LENGTHS, LONG, RATES, gains_by_length
from lab.readme_table import NAMES, Row, rows_of, table
from lab.rules_picture import plot_rules

CLAIMS, PAGE, SHORT = Path("lab") / "claims.yaml", Path("docs") / "results.md", Path("lab") / "short-trainings.md"
# Beside the page on short trainings.
FIGURE = Path("results") / "rules"
# Drawn by `depthmix compare` when the long study has runs.
LONG_FIGURE = PUBLISHED / LONG / "differences.png"
# In the folder `results` beside the page.
FACTORS_FIGURE, LENGTHS_FIGURE = Path("results") / LONG / "multiples", Path("results") / LENGTHS / "gains"
# Claims that a study of all rules decided, measured again in the long study.
LONG_COLUMN = {"title": LONG, "study": [LONG], "of": ["mechanisms", "mechanisms-18m", "gutenberg-54m"]}
LEAD = "a lead"
# From this multiple of the paper's effect on, the page warns.
FAR = 3
# By a column's title and an arm.
Gains = dict[str, dict[str, Measurement]]
# By verdict: what the 95% interval of our number says.
MEANING = {
    CONFIRMED: "the interval excludes no effect, on the paper's side. Our effect is at least half of the paper's, or the interval contains the paper's.",
    IN_SIGN: "the same, but our effect is less than half of the paper's.",
    NOT_SEEN: "the interval includes no effect and excludes the paper's. For a claim without a number, our value is on the other side.",
    CONTRADICTED: "the interval excludes no effect, on the other side.",
    UNDECIDED: "the interval includes both no effect and the paper's. More seeds would tell.",
    NOT_MEASURED: "there are no runs yet.",
}
SHORT_INTRO = (
    "This page keeps what our studies of short trainings found, most of 0.4 to 1.5 tokens per parameter. They show which effects appear early, and nothing about long trainings."
    " [Results](../docs/results.md) has the long study, and what it says about the papers' claims."
)
REPRODUCE = [
    "## Reproduce",
    "",
    "Every study is one recipe, in [recipes/studies](../recipes/studies) or [lab/recipes](../lab/README.md). Each begins with how to prepare its data and the time that an H200 needs. For example:",
    "",
    "    python lab/study_data.py SETS --only mix",
    "    depthmix compare recipes/studies/long.yaml",
    "    python -m lab.results_page",
    "",
    f"The last command writes this page from the runs and [claims.yaml](../{CLAIMS.as_posix()}).",
    "",
]


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict, the measurement that decides it, and its measurements elsewhere by column."""

    claim: Claim
    verdict: str
    measured: Measurement | None
    study: str
    others: dict[str, Measurement | None]


def write_claims(path: Path = CLAIMS, page: Path = PAGE, short: Path = SHORT) -> Path:
    """Write the page of results and the page on short trainings.

    Args:
        path: file of claims; studies and benchmarks in it are found from the repository's root.
        page: page of results to write: the long study, and which claims it decides.
        short: page on short trainings to write, with a verdict on each claim, and with its figure in the folder results beside it.

    Returns:
        The page of results.

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
    judged = [Judged(*entry, _others(entry[0], entry[3], beside, look)) for entry in verdicts(claims, look)]
    intro = rule_table.pop("intro")
    text = ["# Results", "", *_long_study(look, page), *_long_claims(claims, look), *REPRODUCE]
    write_text(page, "\n".join(text).rstrip() + "\n")

    gains = _gains(rule_table["columns"], rule_table["rules"], look)
    rule_table["columns"] = [column for column in rule_table["columns"] if gains[column["title"]]]
    text = ["# Short trainings", "", SHORT_INTRO, "", *_claims(judged, intro), *_claims_elsewhere(judged, beside)]
    text += _which(**rule_table, gains=gains, look=look)
    panels: dict[str, Gains] = {}
    for column in rule_table["columns"]:
        if "panel" in column:
            panels.setdefault(column["panel"], {})[column["series"]] = gains[column["title"]]
    if load() and panels:
        arms = {arm for by_column in panels.values() for by_arm in by_column.values() for arm in by_arm}
        labels = {rule["arm"]: _label(rule) for rule in rule_table["rules"] if rule["arm"] in arms}
        save_figure(lambda: plot_rules(labels, panels), short.parent / FIGURE, FIGURE.name, ["png"])
    write_text(short, "\n".join(text).rstrip() + "\n")
    return page


def _others(
    claim: Claim, name: str, beside: Sequence[Mapping[str, Any]], look: Callable[[str], Results | None]
) -> dict[str, Measurement | None]:
    """Measure a claim in the columns beside the study that decides it."""
    return {column["title"]: elsewhere(claim, name, column, look) for column in beside}


def _long_study(look: Callable[[str], Results | None], page: Path = PAGE) -> list[str]:
    """Return the section on the long study: what it asks, how much of it is done, and its table; nothing without the runs that tuned it.

    Its figures are written beside the page.
    """
    rates = look(RATES)
    if rates is None:
        return []
    recipe, results, lengths = load_recipe(find_recipe(LONG)), look(LONG), look(LENGTHS)
    config = recipe.config
    tokens = config.steps * config.batch_size * config.seq_len
    tuned = [run for runs in rates.runs.values() for run in runs if run.arm == rates.first]
    parameters = tuned[0].parameters
    planned = len(recipe.run_keys)
    text = [
        "## Does a rule help in a long training?",
        "",
        f"The study `{LONG}` asks this. Each of its models has {parameters / 1e6:.0f}M parameters and trains on {tokens / 1e6:.0f}M tokens"
        f" of books, code and documentation, {tokens / parameters:.0f} per parameter."
        f" The plain residual model is tuned first: its batch size and rate are the best of {len(tuned)} pairs ([{RATES}]({_from(PAGE, find_results(RATES) / 'table.md')})).",
        "",
    ]
    if not results:
        return [*text, f"**The study is under way: 0 of its {planned} runs are done.**", ""]
    done = sum(map(len, results.runs.values()))
    text += [
        f"**{done} of its {planned} runs are done** ([table]({_from(PAGE, find_results(LONG) / 'table.md')})).",
        "",
        table(results, lengths, by_domain=True).replace("](docs/", "]("),
        "",
    ]
    if LONG_FIGURE.is_file():
        text += [f"![differences of the long study]({_from(PAGE, LONG_FIGURE)})", ""]
    return text + _long_figures(rows_of(results, lengths), gains_by_length([lengths, results]), page)


def _long_figures(rows: Sequence[Row], by_length: Mapping[str, Mapping[int, Measurement]], page: Path) -> list[str]:
    """Draw gains as multiples of tokens and time, and over lengths, as far as there are runs; return the lines that show them."""
    text: list[str] = []
    if any(row.tokens for row in rows):
        text += [f"![what gains are worth in tokens and GPU time]({FACTORS_FIGURE.as_posix()}.png)", ""]
        if load():
            save_figure(lambda: plot_factors(rows), page.parent / FACTORS_FIGURE, FACTORS_FIGURE.name, ["png"])
    if by_length:
        text += [
            "**Does a gain last?** Every point is a training with its whole schedule.",
            "",
            f"![gains by length]({LENGTHS_FIGURE.as_posix()}.png)",
            "",
        ]
        if load():
            save_figure(
                lambda: plot_lengths(by_length, NAMES), page.parent / LENGTHS_FIGURE, LENGTHS_FIGURE.name, ["png"]
            )
    return text


def _long_claims(claims: Sequence[Claim], look: Callable[[str], Results | None]) -> list[str]:
    """Return the section on claims that the long study has measured, if there are any; with one seed they have no verdict."""
    found = [(claim, measured) for claim in claims if (measured := elsewhere(claim, "", LONG_COLUMN, look))]
    if not found:
        return []
    verdict = {claim.claim: LEAD if m.seeds == 1 else judge(claim, m) for claim, m in found}
    text = [
        "## What the papers claim",
        "",
        f"The long study has measured {len(found)} of {len(claims)} claims. The others are open: we have not measured them in a long training."
        f" [Short trainings]({_from(PAGE, SHORT)}) keeps what was seen of them in short ones.",
        "",
        *(f"* {named}: {MEANING[named]}" for named in MEANING if named in verdict.values()),
        "* The papers' models are larger and use other data, so compare signs before sizes. One seed gives a lead and no verdict.",
        "",
        markdown_line(["verdict", "claim", "paper", "ours", "seeds"]),
        "|---|---|---:|---:|---:|",
    ]
    for claim, measured in found:
        value = f"{measured.value:+z.3f}" if measured.seeds == 1 else _shown(measured)
        said = f"{claim.claim} ({claim.source})"
        text.append(markdown_line([f"**{verdict[claim.claim]}**", said, _said(claim.says), value, str(measured.seeds)]))
    decided = {claim.claim for claim, _ in found}
    for source in dict.fromkeys(claim.source.partition(",")[0] for claim in claims):
        left = [c for c in claims if c.claim not in decided and c.source.partition(",")[0] == source]
        text += ["", f"**Open, of {source}:**", "", *(f"* {_claimed(claim)}" for claim in left)]
    return [*text, ""]


def _claimed(claim: Claim) -> str:
    """Return a claim with its place in the paper."""
    place = claim.source.partition(",")[2].strip()
    return f"{claim.claim}{f' ({place})' if place else ''}"


def _claims(judged: Sequence[Judged], intro: Sequence[str]) -> list[str]:
    """Return the section on the papers' claims: how verdicts are made, then a table and remarks per paper."""
    count = Counter(entry.verdict for entry in judged)
    text = [
        "## What the papers claim",
        "",
        f"Of {len(judged)} claims:",
        "",
        *(f"* {count[verdict]} {verdict}: {MEANING[verdict]}" for verdict in MEANING if count[verdict]),
        "",
        "The papers' models are larger, train longer, and use other data, so compare signs before sizes. Of so many 95% intervals, about two miss the truth.",
        "",
        *(markdown_text(line) for line in intro),
        "",
    ]
    for source in dict.fromkeys(entry.claim.source.partition(",")[0] for entry in judged):
        text += [f"### {source}", ""]
        text += [markdown_line(["verdict", "claim", "paper", "ours", "seeds", "study"]), "|---|---|---:|---:|---:|---|"]
        remarks = []
        for entry in (entry for entry in judged if entry.claim.source.partition(",")[0] == source):
            claim, measured = entry.claim, entry.measured
            seeds = "0"
            if measured:
                seeds = "–" if not measured.of else f"{measured.seeds} {measured.of}".removesuffix(" seeds")
            cells = [f"**{entry.verdict}**", _claimed(claim), _said(claim.says), _shown(measured), seeds]
            text.append(f"{markdown_line(cells)} {_link(entry.study, SHORT)} |")
            words = [*([claim.note] if claim.note else [])]
            if measured:
                words += [measured.remark, _to_tell(claim, measured), *_warnings(claim, measured, entry.others)]
            if words := [word[0].upper() + word[1:].removesuffix(".") for word in words if word]:
                remarks.append(f"{claim.claim}: {'. '.join(words)}.")
        text += ["", *(f"* {markdown_text(remark)}" for remark in remarks), *[""] * bool(remarks)]
    return text


def _claims_elsewhere(judged: Sequence[Judged], beside: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the claims' measurements at another size, on other data, and against a better plain model."""
    titles = [column["title"] for column in beside]
    if not titles:
        return []
    text = ["## The papers' claims elsewhere", "", *_counts(judged, titles)]
    text += [markdown_line(["claim", "paper", "verdict", *titles]), "|---|---:|---|" + "---:|" * len(titles)]
    for entry in judged:
        cells = [entry.claim.claim, _said(entry.claim.says), entry.verdict]
        text.append(markdown_line([*cells, *(_with_seeds(entry.others[title]) for title in titles)]))
    return [*text, ""]


def _counts(judged: Sequence[Judged], titles: Sequence[str]) -> list[str]:
    """Count, for each column beside the claims, how many of the confirmed claims are confirmed there too."""
    counts = []
    for title in titles:
        others = [judge(e.claim, e.others[title]) for e in judged if e.verdict == CONFIRMED]
        known = [verdict for verdict in others if verdict != NOT_MEASURED]
        counts += [f"* {known.count(CONFIRMED)} of {len(known)} in “{title}”"] * bool(known)
    return ["Confirmed claims that are confirmed here too:", "", *counts, ""] if counts else []


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


def _link(name: str, page: Path) -> str:
    """Link to the table of a study from a page; to the study's file where there is no table."""
    results = find_results(name) / "table.md"
    return f"[{name}]({_from(page, results if results.is_file() else find_recipe(name))})"


def _from(page: Path, path: Path) -> str:
    """Return the path of a file of this repository as a page links to it."""
    return Path(os.path.relpath(path, page.parent)).as_posix()


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
    text = ["## Gains of the rules", ""]
    if choices:
        text += [markdown_line(["you", "use", "result"]), "|---|---|---|"]
        text += [*(markdown_line([choice["you"], choice["use"], choice["gave"]]) for choice in choices), ""]
    text += [*(f"* {markdown_text(sentence)}" for sentence in answer), ""]
    if any("panel" in column for column in columns):
        text += [f"![gains of the rules]({FIGURE.as_posix()}.png)", ""]
    for name in dict.fromkeys(column["table"] for column in columns):
        titles = [column["title"] for column in columns if column["table"] == name]
        where = dict.fromkeys(n for c in columns if c["table"] == name for n in map(_name, c["study"]) if look(n))
        explanation = f"nats against the plain residual (below zero is better), with 95% intervals, from {', '.join(_link(n, SHORT) for n in where)}"
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
    runs = ", ".join(f"[{Path(name).name}]({_from(SHORT, Path(f'{name}.md'))})" for name in steps)
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
