"""Format a document for a terminal: a table over depth, a table by kind of site, and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

WAYS = {1: ("",), 2: ("qk", "v"), 3: ("q", "k", "v")}
DASH = "–"


def summary(document: dict[str, Any]) -> str:
    """Format the document as text."""
    parts = [
        _title(document),
        table(*_over_depth(document)),
        _legend(document),
        table(*_by_kind(document)),
        _structure(document),
    ]
    if document["streams"]:
        parts.append(_streams(document["streams"]))
    if document["text"]:
        parts.append(table(*_by_token(document)))
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table whose columns fit their content: the first left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [head, ["─" * w for w in widths], *rows]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def number(value: float | None, form: str = ".3g") -> str:
    """Format a number, with a dash for None."""
    return DASH if value is None else format(value, form)


def way_names(reader: dict[str, Any]) -> list[str]:
    """Return the names of a reader's ways; none if it has only one."""
    return list(WAYS.get(reader["ways"], [str(w) for w in range(reader["ways"])]))


def _title(document: dict[str, Any]) -> str:
    options = "".join(f", {k}={v}" for k, v in document["mixer_options"].items())
    what = f"{document['mixer']}{options}: {len(document['sources']) - 1} sites, {document['parameters']['total']:,} parameters"
    on = f"loss {number(document['loss'], '.4f')} on {document['dynamics']['tokens']:,} tokens"
    return (
        f"{document['run']}: {what}, step {document['step']}; {on}, depth maps over {document['mixing']['tokens']:,}."
    )


def _over_depth(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    mixing, dynamics, edges, skips = (document[k] for k in ("mixing", "dynamics", "edges", "skips"))
    head = ["site", "newest", "embedding", "contribution", "effective", "RMS read", "RMS output", "gradient", "share"]
    head += ["skipped", "most needed"] if edges else []
    rows = []
    for r, reader in enumerate(document["readers"]):
        site = r < len(document["readers"]) - 1
        for w, way in enumerate(way_names(reader)):
            name = f"{r:2d} {reader['name']} {way}".rstrip() if site else "   finish"
            row = [name, *(number(mixing[k][r][w], ".2f") for k in ("newest", "embedding"))]
            row.append(number(mixing["contribution"][r][w][0], ".3f"))
            row += [f"{number(mixing['effective'][r][w], '.1f')} of {r + 1}", number(dynamics["input_rms"][r][w])]
            once_per_site = site and w == 0  # columns that do not depend on the way
            row += [number(dynamics[k][r]) if once_per_site else "" for k in ("output_rms", "gradient_norm")]
            row.append(number(dynamics["share"][r + 1], "z.2f") if once_per_site else "")
            if edges:
                row.append(number(skips["change"][r], "+z.4f") if once_per_site else "")
                row.append(_most_needed(edges["change"][r][w], document["sources"]))
            rows.append(row)
    return head, rows


def _most_needed(changes: list[float | None], sources: list[str]) -> str:
    known = [(c, source) for c, source in zip(changes, sources, strict=False) if c is not None]
    if not known:
        return DASH
    change, source = max(known)
    return f"{source} {number(change, '+z.4f')}"


def _legend(document: dict[str, Any]) -> str:
    share = "the sizes of weights, some of which are negative" if document["mixing"]["signed"] else "the weights"
    lines = [
        f"newest, embedding: share of {share} that the last output and the embedding have; effective: exp(entropy) of the shares, of all sources;",
        "contribution: the embedding's share of the sizes of what sources add to the read, which counts how large sources are;",
        "RMS read: before the norm; gradient: norm over the sublayer's parameters; share: of what finish reads"
        f" (the embedding's is {number(document['dynamics']['share'][0], 'z.2f')});",
    ]
    if document["edges"]:
        tokens = f"{document['edges']['tokens']:,} tokens"
        lines.append(
            f"skipped, most needed: rise of the loss without the sublayer, without its best source ({tokens})."
        )
    return "\n".join(lines)


def _by_kind(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = ["sites", "newest", "embedding", "contribution", "effective", "of all there are"]
    rows = []
    contributions = list(zip(document["readers"], document["mixing"]["contribution"], strict=True))[1:]
    for kind, value in document["mixing"]["by_kind"].items():
        shares = [number(value[k], ".2f") for k in ("newest", "embedding")]
        own = [fmean(way[0] for way in ways) for reader, ways in contributions if reader["name"] == kind]
        shares.append(number(fmean(own), ".3f"))
        rows.append([kind, *shares, number(value["effective"], ".2f"), number(value["effective_share"], ".2f")])
    return head, rows


def _structure(document: dict[str, Any]) -> str:
    if document["structure"] is None:
        return "Ranks of M are not measured: its entries are matrices, and too large."
    ways = way_names({"ways": len(document["structure"])})
    by_way = [
        f"{way + ': ' if way else ''}{s['semiseparable']} (at most {s['most']}), rank {s['rank']}"
        for way, s in zip(ways, document["structure"], strict=True)
    ]
    return f"Semiseparable rank of M, the streams it amounts to, for a typical token: {'; '.join(by_way)}."


def _streams(streams: dict[str, Any]) -> str:
    n = len(streams["rms"][0])
    alike = [
        sum(m[i][j] for i in range(n) for j in range(n) if i != j) / (n * (n - 1)) if n > 1 else 1.0
        for m in (streams["similarity"][0], streams["similarity"][-1])
    ]
    signals, gradients = streams["composite_gain"][-1]
    return "\n".join(
        [
            f"{n} streams: mean cosine between them {alike[0]:.2f} at the start, {alike[1]:.2f} at the end;",
            f"their maps: row sums off by {max(streams['row_error']):.2g}, column sums by {max(streams['column_error']):.2g} at most over depth;"
            f" composite gain {signals:.3g} of signals, {gradients:.3g} of gradients.",
        ]
    )


def _by_token(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Average over the readers that have a choice, and over their ways, for each token."""
    text = document["text"]
    head = ["token", "loss", "newest", "embedding", "contribution"]
    rows = []
    columns = [text[name] for name in ("tokens", "losses", "weights", "contributions")]
    for piece, loss, readers, contributions in zip(*columns, strict=True):
        shares = [[abs(v) for v in way] for reader in readers[1:] for way in reader]
        sums = [(way[-1], way[0], sum(way) or 1.0) for way in shares]
        means = [sum(s[i] / s[2] for s in sums) / len(sums) for i in (0, 1)]
        contribution = fmean(way[0] for reader in contributions[1:] for way in reader)
        shown = [*(number(m, ".2f") for m in means), number(contribution, ".3f")]
        rows.append([repr(piece), number(loss, ".3f"), *shown])
    return head, rows
