"""Read the long study as far as it is done: gains by domain, how many times the tokens they are worth, and gains by length.

The study `long` has all rules at one length. The study `long-tokens` has the plain model, and a few rules, at other lengths. Every
length has its whole schedule. Either study may lack arms, seeds and lengths, or be missing.

    gain(x) = loss of plain − loss of plain with x times the tokens, mean over the seeds that both have; linear in log x between lengths
    a rule whose gain is g:   plain needs x times the tokens, with gain(x) = g;   that is x / (step time of the rule / that of plain)
                              times the GPU time

The interval of x has the x at the ends of the interval of g. It holds those x at which the rule's loss is not shown to differ from
that of plain, since a difference of two runs varies alike at all lengths.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from depthmix.compare.rows import Run
from lab.claims import Measurement, Results, contrast

LONG, LENGTHS, RATES = "long", "long-tokens", "long-rates"
# Times the tokens, and what the plain model gains by them.
Point = tuple[float, float]


@dataclass(frozen=True)
class Factor:
    """A factor on the plain model's tokens or GPU time with its interval; 0 and inf stand for values outside `known`."""

    value: float
    low: float
    high: float
    known: tuple[float, float]

    def over(self, ratio: float) -> Factor:
        """Return the factor divided by a ratio."""
        low, high = self.known
        return Factor(self.value / ratio, self.low / ratio, self.high / ratio, (low / ratio, high / ratio))

    def show(self, interval: bool = True) -> str:
        """Return the factor in a cell of a table."""
        ends = f" ({self._end(self.low)} to {self._end(self.high)})" if interval else ""
        return self._end(self.value) + ends

    def _end(self, value: float) -> str:
        if value == 0:
            return f"below {self.known[0]:.2f}"
        return f"above {self.known[1]:.2f}" if math.isinf(value) else f"{value:.2f}"


def plain_gains(long: Results, lengths: Results | None) -> list[Point]:
    """Return (x, gain) of the plain model for every length from that of `long` on, x = 1 first; only that where there is no other."""
    base = _plain(long)
    if not base:
        return []
    tokens = statistics.median(run.tokens for run in base.values())
    points = [(1.0, 0.0)]
    for runs in lengths.runs.values() if lengths else ():
        longer = {run.seed: run for run in runs if run.arm == long.first and run.tokens > tokens}
        if shared := [(base[seed].val_loss - run.val_loss, run.tokens) for seed, run in longer.items() if seed in base]:
            points.append((shared[0][1] / tokens, statistics.fmean(gain for gain, _ in shared)))
    return sorted(points)


def tokens_factor(points: Sequence[Point], gain: Measurement) -> Factor | None:
    """Return how many times the tokens the plain model needs for a gain, as a difference in loss; None without longer runs."""
    if len(points) < 2:
        return None
    known = (points[0][0], points[-1][0])
    value, low, high = (_needed(points, -difference) for difference in (gain.value, gain.high, gain.low))
    return Factor(value, low, high, known)


def _needed(points: Sequence[Point], gain: float) -> float:
    """Find the first x with a gain; 0 below the first point and inf beyond the last."""
    if math.isnan(gain) or gain < 0:
        return 0.0
    for (x, before), (longer, after) in itertools.pairwise(points):
        if gain <= after:
            share = (gain - before) / (after - before) if after > before else 0.0
            return math.exp(math.log(x) + max(share, 0.0) * math.log(longer / x))
    return math.inf


def gains_by_length(studies: Iterable[Results | None]) -> dict[str, dict[int, Measurement]]:
    """Return each rule's gain by the number of tokens, of rules that have more than one length."""
    found: dict[str, dict[int, Measurement]] = {}
    for results in studies:
        if results is None:
            continue
        for cell, runs in results.runs.items():
            for arm in dict.fromkeys(run.arm for run in runs if run.arm != results.first):
                at = f" @ {cell}" if cell else ""
                measured = contrast(results, {f"{arm}{at}": 1.0, f"{results.first}{at}": -1.0})
                if measured is not None:
                    found.setdefault(arm, {})[runs[0].tokens] = measured
    return {arm: dict(sorted(own.items())) for arm, own in found.items() if len(own) > 1}


def domains_of(results: Results) -> list[str]:
    """Return the domains that runs were evaluated on."""
    return list(dict.fromkeys(name for record in results.records for name in _losses(record)))


def of_domain(results: Results, domain: str) -> Results:
    """Return the results with each run's loss on one domain. Runs that were not evaluated on it are left out."""
    losses = {
        (" ".join(word for word in (r["domain"], r["size"]) if word), r["arm"], r["seed"]): _losses(r).get(domain)
        for r in results.records
    }
    cells = {
        cell: [
            dataclasses.replace(run, val_loss=loss)
            for run in runs
            if (loss := losses.get((cell, run.arm, run.seed))) is not None
        ]
        for cell, runs in results.runs.items()
    }
    return dataclasses.replace(results, runs=cells)


def _losses(record: Mapping[str, Any]) -> dict[str, float]:
    losses: dict[str, float] = record.get("result", {}).get("domains") or {}
    return losses


def _plain(results: Results) -> dict[int, Run]:
    """Return the plain model's runs by seed, of a study's first cell."""
    return {run.seed: run for run in next(iter(results.runs.values()), []) if run.arm == results.first}
