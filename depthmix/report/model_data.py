"""Shorten documents of `depthmix inspect` to what the page's scripts draw.

Shares are whole numbers of 1/1000 and changes of the loss whole numbers of 1/1000 nats, which keeps a page of several models small.
Weights of a reader are shares of the sum of their magnitudes, sent along as `total`, so that all rules have one scale.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from depthmix.errors import CHECKPOINT, UserError
from depthmix.insight.document import SCHEMA
from depthmix.insight.statistics import rank_correlation
from depthmix.report.documents import Document, labels, mean, names_of, way_names

SHARE, NATS = 1_000, 1_000
# How the page calls finish, which newcomers do not know.
PREDICTION = "prediction"


def models_data(documents: Sequence[Document]) -> list[dict[str, Any]]:
    """Return what the page draws of each document: maps, values over depth, its text, and what is inside.

    Raises:
        UserError: A document was made by another version of depthmix.
    """
    for document in documents:
        if document.get("schema") != SCHEMA:
            problem = f"the measurements of {document.get('run', 'a model')} have schema {document.get('schema')}"
            raise UserError(
                f"{problem}, and this version of depthmix needs {SCHEMA}: inspect the model again", CHECKPOINT
            )
    return [
        {**_named(document, label), "depth": _over_depth(document), "inside": _inside(document)}
        for document, label in zip(documents, labels(documents), strict=True)
    ]


def explorer_data(documents: Sequence[Document]) -> list[dict[str, Any]]:
    """Return what the page draws of each document that has a text: its maps and its text."""
    names = labels(documents)
    # A server knows each model by its place among all documents.
    return [
        {**_named(document, names[i]), "place": i}
        for i, document in enumerate(documents)
        if document["text"] and len(document["text"]["tokens"]) > 1
    ]


def _named(document: Document, label: str) -> dict[str, Any]:
    readers, sources = names_of(document)
    text, ways = document["text"], way_names(document)
    weights, totals = _weights(document["mixing"]["mean"])
    return {
        "label": label,
        "readers": [*readers[:-1], PREDICTION],
        "kinds": [reader["name"] for reader in document["readers"][:-1]],
        "sources": sources,
        "ways": ways if len(ways) > 1 else [],
        "share": _shares(document["mixing"]["contribution"]),
        "weight": weights,
        "total": totals,
        "text": _text(text) if text and len(text["tokens"]) > 1 else None,
    }


def _text(text: Document) -> dict[str, Any]:
    weights, totals = zip(*(_weights(token) for token in text["weights"]), strict=True)
    cuts, guesses = text["cuts"], text["lens"]
    return {
        "tokens": text["tokens"],
        "losses": text["losses"],
        "share": [_shares(token) for token in text["contributions"]],
        "weight": weights,
        "total": totals,
        "cuts": cuts and [token and [[_whole(v, NATS) for v in reader] for reader in token] for token in cuts],
        "predictions": [[[p["token"], _brief(p["probability"])] for p in token] for token in text["predictions"]],
        "lens": guesses and [[[p["token"], _brief(p["probability"])] for p in token] for token in guesses],
    }


def _shares(values: Any) -> Any:
    """Convert shares [reader][way][source] to whole numbers."""
    return [[[_whole(v, SHARE) for v in row] for row in ways] for ways in values]


def _weights(values: Any) -> tuple[Any, list[list[float]]]:
    """Split weights [reader][way][source] into shares of the sum of their magnitudes, as whole numbers, and that sum."""
    totals = [[sum(abs(v) for v in row if v is not None) for row in ways] for ways in values]
    shares = [
        [
            [None if v is None else _whole(v / total if total else 0.0, SHARE) for v in row]
            for row, total in zip(ways, own, strict=True)
        ]
        for ways, own in zip(values, totals, strict=True)
    ]
    return shares, [[_brief(total) or 0.0 for total in own] for own in totals]


def _whole(value: float | None, unit: int) -> int | None:
    return None if value is None else round(value * unit)


def _brief(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def _over_depth(document: Document) -> dict[str, Any]:
    """Return values of each site, and of finish where it has one, for the chart with all models."""
    dynamics, mixing, skips = document["dynamics"], document["mixing"], document["skips"]
    return {
        "input_rms": [mean(ways) for ways in dynamics["input_rms"]],
        "output_rms": dynamics["output_rms"],
        "gradient_norm": dynamics["gradient_norm"],
        "embedding": [mean([row[0] for row in ways]) for ways in mixing["contribution"]],
        "effective": [mean(ways) for ways in mixing["effective"]],
        "skips": skips and skips["change"],
    }


def _inside(document: Document) -> dict[str, Any]:
    """Return what was measured inside one model: needed connections, streams, and sites during training."""
    edges = document["edges"]
    sizes = ("output_rms", "gradient_norm")
    return {
        "edges": edges
        and {
            "tokens": edges["tokens"],
            "change": edges["change"],
            "correlation": {
                "contribution": correlation_with_need(document, document["mixing"]["contribution"]),
                "weight": correlation_with_need(document, document["mixing"]["mean"]),
            },
        },
        "streams": document["streams"],
        "training": [{key: line[key] for key in ("step", *sizes)} for line in document["training"]],
    }


def correlation_with_need(document: Document, values: Any, signed: bool = False) -> float | None:
    """Return the rank correlation of each connection's share of its read with the rise of the loss without it.

    Args:
        document: A document with `edges`.
        values: Contributions or weights, [reader][way][source]. The first reader has no choice and does not count.
        signed: Whether the values are shares already, whose sign counts. Otherwise shares are taken of their magnitudes.

    Returns:
        Spearman's correlation, or None if there is no order.
    """
    pairs = []
    for ways, changes in zip(values[1:], document["edges"]["change"][1:], strict=True):
        for row, change in zip(ways, changes, strict=True):
            total = sum(abs(v) for v in row if v is not None) or 1.0
            shares = row if signed else [v and abs(v) / total for v in row]
            pairs += [(v, rise) for v, rise in zip(shares, change, strict=True) if v and rise is not None]
    return rank_correlation(pairs)


def script_json(value: Any) -> str:
    """Format JSON for a script tag, escaping the characters that have a meaning in HTML or in older JavaScript."""
    # json.dumps itself escapes everything that is not ASCII.
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
