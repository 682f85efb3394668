"""Write the README's table and headline: what each rule gains in a long training, and what it costs.

python -m lab.readme_table

Rows come from the runs of the study `long` (docs/results/long), as far as they are there. A rule without such runs keeps its row of
`LEADS`, figures of single runs that were made outside this repository. Both texts lie between markers; nothing else changes.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from depthmix.compare.rows import Run
from depthmix.files import write_text
from lab.claims import Results, contrast, read_results

README = Path("README.md")
LONG, RATES = "long", "long-rates"
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
    "denseformer": "DenseFormer",
    "grn:version=3": "GRN-v3",
    "hyper": "Hyper-Connections",
    "layerscale": "LayerScale",
    "mhc": "Manifold-constrained Hyper-Connections",
    "mudd": "MUDD",
}
# Words of these names that need a definition.
TERMS = {
    "Block": "Block attends to sums of four outputs each. One block attends to the embedding and the sum of all outputs.",
    "values apart": "Values apart: the values of attention have a mixture of their own."
    " DeepCrossAttention has three mixtures, for queries, keys and values.",
    "outputs scaled": "Outputs scaled: a learned vector scales each output.",
}
# One seed, H200, 18M parameters, 300M tokens of books and code, batch 32, rate 0.003, zero start: difference in validation loss
# and tokens per second of the plain model over those of the rule.
LEADS = {
    "attnres:block_size=all,ways=2,output_gain=0.1": (-0.059, 2.00 / 1.99),
    "dca": (-0.058, 2.00 / 1.61),
    "attnres:block_size=4": (-0.051, 2.00 / 1.87),
}
# Parameters and tokens of these.
LEAD_SIZE = (18e6, 300e6)
# Of the leads, the one whose gain held for both starts.
FIRST = "attnres:block_size=4"


@dataclass(frozen=True)
class Row:
    """A rule's line of the table."""

    arm: str
    difference: float
    half: float | None
    seeds: int
    step_ratio: float | None
    committed: bool

    @property
    def lead(self) -> bool:
        """True if only one seed has finished."""
        return self.seeds < 2

    @property
    def nearest_end(self) -> float:
        """The end of the interval that is closest to no gain, or beyond it."""
        return self.difference + (self.half or 0)

    def __str__(self) -> str:
        name = f"{NAMES[self.arm]} (`{self.arm}`)" if self.arm in NAMES else f"`{self.arm}`"
        gain = f"{self.difference:+.3f}"
        if self.half is not None and not self.lead:
            gain += f" ({self.difference - self.half:+.3f} to {self.difference + self.half:+.3f})"
        evidence = "1 seed: a lead" if self.lead else f"{self.seeds} seeds"
        evidence += "" if self.committed else ", made outside"
        return f"| {name} | {gain} | {f'{self.step_ratio:.2f}' if self.step_ratio else '–'} | {evidence} |"


def committed_rows(results: Results) -> list[Row]:
    """Return a row for every rule that shares a seed with the plain model in a study of one cell.

    Args:
        results: of a study whose first arm is the plain model. Arms and seeds may be missing.
    """
    runs = next(iter(results.runs.values()))
    rows = []
    for arm in dict.fromkeys(run.arm for run in runs if run.arm != results.first):
        measured = contrast(results, {arm: 1.0, results.first: -1.0})
        if measured is not None and not math.isnan(measured.value):
            half = measured.high - measured.value
            ratio = _step_ratio(runs, arm, results.first)
            rows.append(Row(arm, measured.value, half if math.isfinite(half) else None, measured.seeds, ratio, True))
    return rows


def _step_ratio(runs: Iterable[Run], arm: str, baseline: str) -> float | None:
    """Return the ratio of step times, taken over runs that had the machine to themselves."""
    alone = [run for run in runs if not run.shared]
    times = [[run.step_seconds for run in alone if run.arm == name] for name in (arm, baseline)]
    return statistics.median(times[0]) / statistics.median(times[1]) if all(times) else None


def lead_rows(measured: Iterable[str]) -> list[Row]:
    """Return the rows of `LEADS` for rules that no committed run has measured."""
    known = set(measured)
    return [Row(arm, gain, None, 1, ratio, False) for arm, (gain, ratio) in LEADS.items() if arm not in known]


def tuning_gain(rates: Results) -> float:
    """Return what the best batch and rate give the plain model over the leads' batch of 32 and rate of 0.003."""
    losses = {cell: run.val_loss for cell, runs in rates.runs.items() for run in runs if run.arm == rates.first}
    return losses["batch 32, lr 0.003"] - min(losses.values())


def rows_of(results: Results | None) -> list[Row]:
    """Return all rows, the largest gain first. `results` are those of the long study, if there are any."""
    rows = committed_rows(results) if results else []
    return sorted([*rows, *lead_rows(row.arm for row in rows)], key=lambda row: row.difference)


def headline(results: Results | None) -> str:
    """Return the gain of the rule with the strongest evidence; of `FIRST` as long as no rule has two seeds."""
    rows = rows_of(results)
    shown = [row for row in rows if not row.lead]
    row = min(shown, key=lambda row: row.nearest_end) if shown else next(row for row in rows if row.arm == FIRST)
    size, tokens = LEAD_SIZE
    if row.committed:
        assert results is not None
        run = _first_run(results)
        size, tokens = run.parameters, run.tokens
    side = "below" if row.difference < 0 else "above"
    text = (
        f"- **Lower loss for the same text.** {NAMES.get(row.arm, row.arm)} (`{row.arm}`) ended {abs(row.difference):.3f}"
        f" nats {side} a residual model. Both had {size / 1e6:.0f}M parameters and {tokens / 1e6:.0f}M training tokens."
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


def table(results: Results | None, rates: Results) -> str:
    """Return the table and the conditions under it.

    Args:
        results: of the long study, if there are any.
        rates: of the study that tuned its plain model.
    """
    rows = rows_of(results)
    terms = [text for mark, text in TERMS.items() if any(mark in str(row) for row in rows)]
    lines = [
        "| rule | validation loss against the residual model, nats | step time | evidence |",
        "|---|---:|---:|---|",
        *(str(row) for row in rows),
        "",
        "* Lower is better. A nat is a unit of loss with the natural logarithm. Brackets hold 95% intervals.",
        "* Step time is relative to the residual model, on an H200. A row with one seed is a lead, not a result.",
        *([f"* {' '.join(terms)}"] if terms else []),
    ]
    if results and any(row.committed for row in rows):
        run = _first_run(results)
        lines += [
            f"* Runs here: {run.parameters / 1e6:.0f}M parameters and {run.tokens / 1e6:.0f}M tokens of books, code and"
            f" documentation, {run.tokens / run.parameters:.0f} per parameter. All rules use the batch size and rate that"
            f" are best for the residual model ([runs](docs/results/{LONG}/table.md), [tuning](docs/results/{RATES}/table.md)).",
        ]
    if not all(row.committed for row in rows):
        lines += [
            "* Rows made outside this repository: 18M parameters, and 300M tokens of books and code in batches of 32.",
            f"* Their residual model was not at its best. A batch of 128 gives it {tuning_gain(rates):.3f} nats"
            f" ([tuning](docs/results/{RATES}/table.md)), about as much as these rules gained.",
            "* With an embedding that starts at a standard deviation of 1 instead of 0.02, Block kept 0.040 nats."
            " One block kept 0.006.",
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
    results, rates = read_results(LONG), read_results(RATES)
    assert rates is not None
    return replace(replace(page, "headline", headline(results)), "table", table(results, rates))


if __name__ == "__main__":
    write_text(README, updated(README.read_text()))
