"""Print the table of docs/findings.md from the `depthmix inspect` documents of each arm.

python lab/findings.py lab/results/gutenberg-54m-inside
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median, pstdev
from typing import Any

import yaml

from depthmix.report.model_data import correlation_with_need


def evenness(values: Sequence[float]) -> float:
    """Return standard deviation over mean: 0 if all values are equal."""
    return pstdev(values) / mean(values)


def by_kind(document: dict[str, Any], field: str) -> str:
    return " / ".join(f"{document['mixing']['by_kind'][kind][field]:.2f}" for kind in ("attention", "mlp"))


def pairs(of: Callable[[Sequence[float]], float], values: Sequence[float], first: int = 0) -> str:
    """Format a statistic of attention sites and of MLP sites, which alternate."""
    return f"{of(values[first::2]):.2f} / {of(values[first + 1 :: 2]):.2f}"


def need(document: dict[str, Any], field: str) -> str:
    """Format the rank correlation between a field of `mixing` and the rise of the loss without the connection.

    Weights count by their share of the magnitudes of a read. Contributions and projections are shares already.
    """
    return f"{correlation_with_need(document, document['mixing'][field], signed=field != 'mean'):.2f}"


def rows(documents: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the quantities with each model's number. If there are two numbers, the first is of attention and the second of MLP sites."""

    def each(of: Callable[[dict[str, Any]], str]) -> list[str]:
        return [of(d) for d in documents]

    def growth(values: Sequence[float]) -> str:
        # Sites 4-11 follow the first two blocks; sites 16-23 are the last third.
        return f"{sum(values[16:24]) / sum(values[4:12]):.2f}"

    def most_needed(d: dict[str, Any]) -> str:
        finish = sorted(enumerate(d["edges"]["change"][-1][0]), key=lambda pair: -pair[1])[:4]
        return ", ".join(f"{d['sources'][source]} {change:.2f}" for source, change in finish)

    # Documents of schema 1 know weights only.
    known = all("contribution" in d["mixing"] for d in documents)
    needs = {"weight": "mean", "contribution": "contribution", "projection": "projection"} if known else {}
    return [
        ("growth of what sites read", each(lambda d: growth([x[0] for x in d["dynamics"]["input_rms"]]))),
        ("growth of what sites write", each(lambda d: growth(d["dynamics"]["output_rms"]))),
        ("unevenness of gradients", each(lambda d: pairs(evenness, d["dynamics"]["gradient_norm"]))),
        ("unevenness of gradients without the first block", each(lambda d: pairs(evenness, d["dynamics"]["gradient_norm"], 2))),
        ("effective share of sources", each(lambda d: by_kind(d, "effective_share"))),
        ("weight of the newest source", each(lambda d: by_kind(d, "newest"))),
        ("weight of the embedding", each(lambda d: by_kind(d, "embedding"))),
        ("semiseparable rank, at most 13", each(lambda d: ", ".join(str(s["semiseparable"]) for s in d["structure"]))),
        ("rise of the loss without the first MLP", each(lambda d: f"+{d['skips']['change'][1]:.2f}")),
        ("rise without another sublayer, median", each(lambda d: f"+{median(d['skips']['change'][2:]):.3f}")),
        ("sources that finish needs most, with the rise", each(most_needed)),
        *((f"rank correlation of {name} and need", each(partial(need, field=field))) for name, field in needs.items()),
    ]  # fmt: skip


def table(folder: Path) -> str:
    arms = yaml.safe_load((folder / "comparison.yaml").read_text())["arms"]
    paths = [folder / arm.replace(":", "-").replace(",", "-") / "seed-0" / "insight.json" for arm in arms]
    named_rows = rows([json.loads(path.read_text())["document"] for path in paths])
    lines = [f"| | {' | '.join(arms)} |", "|---|" + "---:|" * len(arms)]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(values)} |" for name, values in named_rows)])


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
