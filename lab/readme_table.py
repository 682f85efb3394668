"""Write the README's table and headline: what each rule gains in a long training, and what it costs.

python -m lab.readme_table

Rows come from the runs of the study `long` (docs/results/long), as far as they are there. Both texts lie between markers; nothing
else changes. docs/results.md has the same table with the losses on each domain.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from depthmix.compare.costs import busy_arms
from depthmix.compare.rows import Run
from depthmix.files import write_text
from lab.claims import Measurement, Results, contrast, read_results
from lab.long_study import LENGTHS, LONG, RATES, Factor, domains_of, of_domain, plain_gains, tokens_factor

README = Path("README.md")
MARKERS = "<!-- {name}: written by python -m lab.readme_table -->", "<!-- end of {name} -->"

# Rules as the table names them. Other rules go by their label.
NAMES = {
    "attnres": "Attention Residuals, Full",
    "attnres:block_size=4": "Attention Residuals, Block",
    "attnres:block_size=8": "Attention Residuals, Block of 8",
    "attnres:block_size=4,ways=2": "Block, values apart",
    "attnres:block_size=4,ways=3": "Block, queries, keys and values apart",
    "attnres:block_size=all,ways=2,output_gain=0.1": "One block, values apart, outputs scaled",
    "dca": "DeepCrossAttention",
    "dca:window=8": "DeepCrossAttention, last 8 blocks",
    "delta, usual start": "Deep Delta Learning",
    "denseformer": "DenseFormer",
    "grn:version=3": "GRN-v3",
    "hyper": "Hyper-Connections",
    "lambdas:backout=true, normed embedding": "Lambdas of stream and embedding, backout",
    "layerscale": "LayerScale",
    "mhc": "Manifold-constrained Hyper-Connections",
    "mudd": "MUDD",
    "residual, normed embedding": "Residual, normed embedding",
    "residual, value residual": "Value residual",
    "unet, skips at a rate of 0.04": "U-Net skips over depth",
}
# Words of these names that need a definition.
TERMS = {
    "Residuals, Block": "Block attends to sums of four outputs each.",
    "One block": "One block attends to the embedding and the sum of all outputs.",
    "values apart": "Values apart: the values of attention have a mixture of their own."
    " DeepCrossAttention has three mixtures, for queries, keys and values.",
    "outputs scaled": "Outputs scaled: a learned vector scales each output.",
}
FACTORS = (
    "* Tokens: how many times the tokens the residual model needs for the rule's loss, read between its own longer trainings."
    " GPU time: the same in time, so more than 1 means that the rule saves time."
)


@dataclass(frozen=True)
class Row:
    """A rule's line of the table."""

    arm: str
    difference: float
    half: float | None
    seeds: int
    step_ratio: float | None
    domains: Mapping[str, Measurement] = field(default_factory=dict)
    tokens: Factor | None = None

    @property
    def lead(self) -> bool:
        """True if only one seed has finished."""
        return self.seeds < 2

    @property
    def nearest_end(self) -> float:
        """The end of the interval that is closest to no gain, or beyond it."""
        return self.difference + (self.half or 0)

    @property
    def name(self) -> str:
        """The rule's name, or its arm."""
        return NAMES.get(self.arm, self.arm)

    @property
    def time(self) -> Factor | None:
        """The plain model's GPU time for this loss, as a multiple."""
        return self.tokens.over(self.step_ratio) if self.tokens and self.step_ratio else None

    def cells(self, domains: Iterable[str] = (), factors: bool = False, steps: bool = True) -> list[str]:
        """Return the row's cells, with columns for domains, for factors on the plain model's tokens and GPU time, and for step times."""
        name = f"{NAMES[self.arm]} (`{self.arm}`)" if self.arm in NAMES else f"`{self.arm}`"
        shown = [name, self._difference(self.difference, self.half)]
        for domain in domains:
            measured = self.domains.get(domain)
            half = measured.high - measured.value if measured else math.inf
            shown.append(self._difference(measured.value, half if math.isfinite(half) else None) if measured else "–")
        if factors:
            shown += [factor.show(interval=not self.lead) if factor else "–" for factor in (self.tokens, self.time)]
        if steps:
            shown.append(f"{self.step_ratio:.2f}" if self.step_ratio else "–")
        return [*shown, "1 seed: a lead" if self.lead else f"{self.seeds} seeds"]

    def _difference(self, value: float, half: float | None) -> str:
        ends = "" if half is None or self.lead else f" ({value - half:+z.3f} to {value + half:+z.3f})"
        return f"{value:+z.3f}{ends}"

    def __str__(self) -> str:
        return f"| {' | '.join(self.cells())} |"


def rows_of(results: Results, lengths: Results | None = None) -> list[Row]:
    """Return a row for every rule that shares a seed with the plain model in a study of one cell, the largest gain first.

    Args:
        results: of a study whose first arm is the plain model. Arms and seeds may be missing.
        lengths: of the study that has the plain model at other lengths, if there are any.
    """
    runs = next(iter(results.runs.values()))
    points, rows = plain_gains(results, lengths), []
    by_domain = {domain: of_domain(results, domain) for domain in domains_of(results)}
    for arm in dict.fromkeys(run.arm for run in runs if run.arm != results.first):
        weights = {arm: 1.0, results.first: -1.0}
        measured = contrast(results, weights)
        domains = {domain: found for domain, own in by_domain.items() if (found := contrast(own, weights))}
        if measured is not None and not math.isnan(measured.value):
            ratio = _step_ratio(runs, arm, results.first)
            half = measured.high - measured.value if math.isfinite(measured.high) else None
            tokens = tokens_factor(points, measured)
            rows.append(Row(arm, measured.value, half, measured.seeds, ratio, domains, tokens))
    return sorted(rows, key=lambda row: row.difference)


def _step_ratio(runs: Iterable[Run], arm: str, baseline: str) -> float | None:
    """Return the ratio of step times; None where other programs shared the machine or disturbed it."""
    runs = list(runs)
    if busy_arms(runs) & {arm, baseline}:
        return None
    times = [[run.step_seconds for run in runs if run.arm == name] for name in (arm, baseline)]
    return statistics.median(times[0]) / statistics.median(times[1]) if all(times) else None


def headline(results: Results) -> str:
    """Return the gain of the rule with the strongest evidence."""
    rows = rows_of(results)
    shown = [row for row in rows if not row.lead] or rows
    row = min(shown, key=lambda row: row.nearest_end)
    run = _first_run(results)
    side = "below" if row.difference < 0 else "above"
    text = (
        f"- **Lower loss for the same text.** {NAMES.get(row.arm, row.arm)} (`{row.arm}`) ended {abs(row.difference):.3f}"
        f" nats (natural-log loss units) {side} a residual model. Both had {run.parameters / 1e6:.0f}M parameters and {run.tokens / 1e6:.0f}M training tokens."
    )
    if row.lead:
        evidence = "That is a lead from one seed"
    elif row.half is None:
        evidence = f"That is a mean over {row.seeds} seeds"
    else:
        near, far = sorted(abs(end) for end in (row.difference - row.half, row.difference + row.half))
        evidence = f"The 95% interval over {row.seeds} seeds is {near:.3f} to {far:.3f}"
        if row.half >= abs(row.difference):
            evidence = f"The 95% interval over {row.seeds} seeds includes zero"
    return f"{text} {evidence}; see [Does it help?](#does-it-help)"


def table(results: Results, lengths: Results | None = None, by_domain: bool = False) -> str:
    """Return the table and the conditions under it.

    Args:
        results: of the long study.
        lengths: of the study of other lengths, if there are any.
        by_domain: add the difference on each domain.
    """
    rows, run = rows_of(results, lengths), _first_run(results)
    domains = list(dict.fromkeys(name for row in rows for name in row.domains)) if by_domain else []
    factors = any(row.tokens for row in rows)
    heading = ["rule", "validation loss minus the residual model's, nats", *domains]
    # Without a step time there is no GPU time either.
    steps = any(row.step_ratio for row in rows)
    heading += ["tokens that the residual model needs", "its GPU time"] * factors + ["step time"] * steps + ["evidence"]
    shown = [row.cells(domains, factors, steps) for row in rows]
    terms = [text for mark, text in TERMS.items() if any(mark in cells[0] for cells in shown)]
    lines = [
        f"| {' | '.join(heading)} |",
        f"|---|{'---:|' * (len(heading) - 2)}---|",
        *(f"| {' | '.join(cells)} |" for cells in shown),
        "",
        "* Lower is better." + " Brackets hold 95% intervals." * any("(" in cells[1] for cells in shown),
        *(
            ["* With two seeds, intervals rest on the spread of all rules together, and may be too narrow."]
            if any(row.seeds == 2 for row in rows)
            else []
        ),
        *(["* Step time is relative to the residual model, on an H200."] if steps else []),
        *(["* A row with one seed is a lead, not a result."] if any(row.lead for row in rows) else []),
        *([FACTORS] if factors else []),
        *([f"* {' '.join(terms)}"] if terms else []),
        f"* The models have {run.parameters / 1e6:.0f}M parameters and train on {run.tokens / 1e6:.0f}M tokens of books, code and"
        f" documentation, {run.tokens / run.parameters:.0f} per parameter. All rules use the batch size and rate that"
        f" are best for the residual model ([runs](docs/results/{LONG}/table.md), [tuning](docs/results/{RATES}/table.md)).",
    ]
    return "\n".join(lines)


def _first_run(results: Results) -> Run:
    return next(iter(results.runs.values()))[0]


def replace(page: str, name: str, text: str) -> str:
    """Return the page with the text between the markers of `name` replaced."""
    begin, end = (marker.format(name=name) for marker in MARKERS)
    page, found = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{text}\n{end}", page, flags=re.S
    )
    if found != 1:
        raise SystemExit(f"{README} has {found} texts between {begin} and {end}; leave exactly one")
    return page


def updated(page: str) -> str:
    """Return the page with both texts as the committed results give them."""
    results, lengths = map(read_results, (LONG, LENGTHS))
    assert results is not None
    return replace(replace(page, "headline", headline(results)), "table", table(results, lengths))


if __name__ == "__main__":
    write_text(README, updated(README.read_text()))
