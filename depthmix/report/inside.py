"""The figures of one model's inside, from its document (docs/guides/inspecting.md), beside those of the first model on the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from depthmix.report.plots import (
    Figure,
    Line,
    bar_figure,
    brief,
    category_axis,
    depth_figure,
    distinct,
    heat_figure,
    log_ticks,
    shown,
)

Document = Mapping[str, Any]
# Changes of the loss, in nats (natural-log loss units), below this are rounding.
ROUNDING = 1e-6
WAYS = {1: ("",), 2: ("queries and keys", "values"), 3: ("queries", "keys", "values")}


@dataclass(frozen=True)
class Panel:
    """A figure with the caption that a newcomer needs to read it.

    page.js draws a panel of kind "row" itself, for the row that was chosen in the panel of kind "map".
    """

    title: str
    caption: str
    figures: Sequence[Figure]  # one, or one for each way
    kind: str = "plain"


def panels(document: Document, first: Document | None) -> list[Panel]:
    """Return a panel for everything that a document holds.

    Args:
        document: the model's document (docs/guides/inspecting.md).
        first: the document of the page's first model, drawn beside this one; None for the first model itself.
    """
    result = [depth_map(document), row_of_map()]
    result += [edge_map(document), *edge_scatter(document)] if document["edges"] else []
    result += over_depth(document, first)
    if document["skips"]:
        result.append(skips(document))
    if document["streams"]:
        result += streams(document)
    return result + over_training(document)


def way_names(document: Document) -> list[str]:
    """Name the ways of the readers that have most of them. Return [""] where every reader has one way."""
    most = max(reader["ways"] for reader in document["readers"])
    return list(WAYS.get(most, [f"mixture {way + 1}" for way in range(most)]))


def names_of(document: Document) -> tuple[list[str], list[str]]:
    """Return the names of the readers (sites by name and block, then finish) and of the sources."""
    *sites, last = document["readers"]
    return distinct([*(f"{r['name']} {r['block']}" for r in sites), last["name"]]), distinct(document["sources"])


def reader_names(document: Document) -> list[str]:
    """Return the readers' names, escaped for plotly."""
    return [shown(name) for name in names_of(document)[0]]


def source_names(document: Document) -> list[str]:
    """Return the sources' names, escaped for plotly."""
    return [shown(name) for name in names_of(document)[1]]


def rows(document: Document) -> dict[str, Any]:
    """Return the data from which page.js draws the distribution of one reader's weights."""
    mixing = document["mixing"]
    readers, sources = names_of(document)
    values = {"quantiles": mixing["quantiles"], "mean": mixing["mean"], "ways": way_names(document)}
    return {"readers": readers, "sources": sources, **values}


def of_way(values: Sequence[Sequence[Any]], way: int) -> list[Any]:
    """Return the entries of one way of values [reader][way]. A reader with fewer ways stands with its last one."""
    return [ways[min(way, len(ways) - 1)] for ways in values]


def square(values: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """Pad rows of growing length to a square, with None where a reader has no such source."""
    return [[*row, *[None] * (len(values) - len(row))] for row in values]


Values = Sequence[Sequence[Sequence[float | None]]]


def largest(values: Values) -> float:
    """Return the largest magnitude in values [reader][way][source], or 1 if there is none.

    The first reader does not count: it has one source and no choice.
    """
    return max((abs(v) for ways in values[1:] for row in ways for v in row if v is not None), default=0.0) or 1.0


def depth_map(document: Document) -> Panel:
    mixing = document["mixing"]
    template = "<b>%{y}</b> reads <b>%{x}</b><br>weight %{customdata:.4f}, mean over tokens<extra></extra>"
    figures = root_maps(document, mixing["mean"], mixing["signed"], template)
    caption = (
        f"Each row is a reader and each column a source. The stronger the colour, the larger the weight (mean over {mixing['tokens']:,} tokens). Colours follow the square root, so that small weights can be told apart. The first reader, which has no choice, is drawn no stronger than the others. "
        "Hover for the number. Click a row, or choose a row with the arrow keys and Enter, to see how its weights vary from token to token."
    )
    return Panel("Who reads what: the depth map", caption, figures, "map")


def as_map(figure: Figure, sources: Sequence[str]) -> Figure:
    figure["layout"]["xaxis"] |= {**category_axis(sources), "side": "bottom"}
    return {**figure, "square": len(sources)}


def row_of_map() -> Panel:
    caption = (
        "How one reader's weights differ between tokens. A box spans the middle half of the tokens, its line is the median, and the whiskers span 90%. "
        "A long box means that the weight depends on the token, a flat box that it is the same for all tokens."
    )
    return Panel("One reader over tokens", caption, [], "row")


def edge_map(document: Document) -> Panel:
    template = "<b>%{y}</b> without <b>%{x}</b><br>loss %{customdata:+.4f}<extra></extra>"
    figures = root_maps(document, document["edges"]["change"], True, template)
    caption = (
        f"Weight is not importance. This map shows how much the loss rises when a single connection is cut, on {document['edges']['tokens']:,} tokens. "
        "Compare it with the depth map: a strong weight there that is faint here is read but hardly needed. Colours follow the square root, since few connections matter most."
    )
    return Panel("What is needed: loss without a connection", caption, figures)


def root_maps(document: Document, values: Values, signed: bool, template: str) -> list[Figure]:
    """Return one map per way of values [reader][way][source], coloured by their square roots.

    Args:
        document: names the readers, ways and sources.
        values: numbers to draw.
        signed: some values may be negative.
        template: plotly's text for the cell under the pointer.
    """
    readers, sources, size = reader_names(document), source_names(document), largest(values)
    ticks = [t for t in (-1.0, -0.25, -1 / 16, 0.0, 1 / 16, 0.25, 1.0) if signed or t >= 0]
    bar = {"tickvals": [root(t) for t in ticks], "ticktext": [brief(t * size) for t in ticks]}
    scale, least = ("diverging", -1.0) if signed else ("sequential", 0.0)
    figures = []
    for way in range(len(way_names(document))):
        cells = square(of_way(values, way))
        z = [[None if v is None else root(v / size) for v in row] for row in cells]
        heat = heat_figure(sources, readers, z, scale, (least, 1.0), template, customdata=cells, bar=bar)
        figures.append(as_map(heat, sources))
    return figures


def root(value: float) -> float:
    return math.copysign(math.sqrt(abs(value)), value)


def edge_scatter(document: Document) -> list[Panel]:
    """Return a panel of weight against need. Return none if no cut raises the loss."""
    readers, sources = reader_names(document), source_names(document)
    ways = way_names(document)
    groups: dict[str, list[tuple[float, float, str]]] = {
        "the embedding": [],
        "the newest output": [],
        "an older output": [],
    }
    all_points, n_unneeded = [], 0
    for r, (weights, changes) in enumerate(zip(document["mixing"]["mean"], document["edges"]["change"], strict=True)):
        for w, (row, change) in enumerate(zip(weights, changes, strict=True)):
            total = sum(abs(v) for v in row if v is not None) or 1.0
            for s, (weight, rise) in enumerate(zip(row, change, strict=True)):
                # The first site has nothing to choose.
                if not weight or rise is None or r == 0:
                    continue
                all_points.append((abs(weight) / total, rise))
                if rise < ROUNDING:
                    n_unneeded += 1
                    continue
                group = "the embedding" if s == 0 else "the newest output" if s == r else "an older output"
                of_way_name = f" ({ways[w]})" if len(weights) > 1 else ""
                groups[group].append(
                    (abs(weight) / total, rise, f"<b>{readers[r]}</b>{of_way_name} without <b>{sources[s]}</b>")
                )
    data = [
        {
            "x": [p[0] for p in points],
            "y": [p[1] for p in points],
            "text": [p[2] for p in points],
            "mode": "markers",
            "name": name,
            "marker": {"color": colour, "size": 7, "opacity": 0.75, "symbol": symbol},
            "hovertemplate": "%{text}<br>share of the weights %{x:.3f}<br>loss %{y:+.4f}<extra></extra>",
        }
        for (name, points), colour, symbol in zip(
            groups.items(), ("@series2", "@series1", "@soft"), ("diamond", "circle", "circle-open"), strict=True
        )
        if points
    ]
    points = [point for group in groups.values() for point in group]
    shares, rises = [point[0] for point in points], [point[1] for point in points]
    layout = {
        "xaxis": {"title": {"text": "share of the reader's weights"}, "type": "log", **log_ticks(shares)},
        "yaxis": {"title": {"text": "rise of the loss without it, nats"}, "type": "log", **log_ticks(rises)},
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    }
    correlation = rank_correlation(all_points)
    caption = (
        "Each point is one connection. Points to the right are read with more weight; higher points are missed more. If weight were importance, points would lie along a rising line"
        + ("" if correlation is None else f" (the rank correlation is {correlation:.2f}; 1 would be that line)")
        + "."
        + (
            f" {n_unneeded} of {len(all_points)} connections are left out: cutting them does not raise the loss."
            if n_unneeded
            else ""
        )
    )
    return [Panel("Weight against need", caption, [{"data": data, "layout": layout, "height": 440}])] if data else []


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation, with mean ranks for ties, or None if one side has no order."""
    if len(pairs) < 3:
        return None
    x, y = (_ranks([pair[i] for pair in pairs]) for i in (0, 1))
    middle = (len(pairs) - 1) / 2
    both = sum((a - middle) * (b - middle) for a, b in zip(x, y, strict=True))
    spread = math.sqrt(sum((a - middle) ** 2 for a in x) * sum((b - middle) ** 2 for b in y))
    return both / spread if spread else None


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks, i = [0.0] * len(values), 0
    while i < len(order):
        j = i
        while j + 1 < len(order) and values[order[j + 1]] == values[order[i]]:
            j += 1
        for k in order[i : j + 1]:
            ranks[k] = (i + j) / 2
        i = j + 1
    return ranks


def over_depth(document: Document, first: Document | None) -> list[Panel]:
    """Return a panel over depth for each quantity. The first model is drawn too if it has as many sites."""
    names = reader_names(document)
    other = first if first is not None and len(first["readers"]) == len(names) else None
    comparison = "" if other is None else f", beside {other['label']}"

    def panel(
        title: str, caption: str, axis: str, get: Callable[[Document], Sequence[float | None]], log: bool = True
    ) -> Panel:
        lines = [] if other is None else [Line(other["label"], get(other), "@ink")]
        lines.append(Line(document["label"], get(document), "@ink" if first is None else "@series1"))
        return Panel(
            title, caption.format(comparison=comparison), [depth_figure(names[: len(lines[0].y)], lines, axis, log)]
        )

    return [
        panel(
            "Size of what each site reads",
            "The size (RMS) of what a site reads before its norm{comparison}. Where it grows with depth, later outputs must be ever larger to count.",
            "RMS",
            lambda d: [mean(ways) for ways in d["dynamics"]["input_rms"]],
        ),
        panel(
            "Size of each site's output",
            "The size (RMS) of a site's output{comparison}. A rising line means that deep layers need ever larger outputs to have an effect.",
            "RMS",
            lambda d: d["dynamics"]["output_rms"],
        ),
        panel(
            "Gradient at each site",
            "Norm of the loss's gradient with respect to a site's parameters{comparison}. The flatter the line, the more evenly layers learn.",
            "gradient norm",
            lambda d: d["dynamics"]["gradient_norm"],
        ),
        panel(
            "How widely each site reads",
            "The effective number of sources of a reader{comparison}: as many equally weighted sources would have the same entropy. 1 is a single source; the plain residual reads all of them.",
            "effective sources",
            lambda d: [mean(ways) for ways in d["mixing"]["effective"]],
            log=False,
        ),
    ]


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are known; None if there are none."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def skips(document: Document) -> Panel:
    caption = (
        f"How much the loss rises when a site's output is replaced by zero, on {document['skips']['tokens']:,} tokens. "
        "The model hardly needs sites with short bars."
    )
    figure = bar_figure(reader_names(document)[:-1], document["skips"]["change"], "rise of the loss, nats")
    return Panel("What each site is worth", caption, [figure])


def streams(document: Document) -> list[Panel]:
    """Return the panels of a rule with several streams: their similarity, their sizes and the gains of their maps."""
    measured, names = document["streams"], reader_names(document)
    n = len(measured["rms"][0])
    pairs = [(i, j) for i in range(n) for j in range(i)]
    similarities = [[matrix[i][j] for i, j in pairs] for matrix in measured["similarity"]]
    lines = [
        Line("mean", [mean(values) for values in similarities], "@series1"),
        Line("most alike", [max(_known(values), default=None) for values in similarities], "@soft", "dot"),
        Line("least alike", [min(_known(values), default=None) for values in similarities], "@soft", "dash"),
    ]
    sizes = [
        Line(f"stream {i + 1}", [rms[i] for rms in measured["rms"]], "@ink" if i == 0 else f"@series{(i - 1) % 6 + 1}")
        for i in range(n)
    ]
    gains = [
        Line(name, [gain[i] for gain in measured["composite_gain"]], colour)
        for i, (name, colour) in enumerate((("of signals", "@series1"), ("of gradients", "@series2")))
    ]
    result = [
        Panel(
            "How large the streams are",
            f"The size (RMS) of each of the {n} streams over depth. Lines that part show streams that hold different amounts.",
            [depth_figure(names, sizes, "RMS")],
        ),
        Panel(
            "What the streams' maps do to a signal",
            "The largest factor by which all maps up to a site can amplify a signal on its way up, and a gradient on its way down. Near 1, nothing explodes.",
            [depth_figure(names[:-1], gains, "composite gain")],
        ),
    ]
    if pairs:
        caption = f"Cosine between the {n} streams over depth. At 1 the streams are copies, and one stream would do; near 0 they carry different things."
        result.insert(
            0,
            Panel(
                "How alike the streams are",
                caption,
                [depth_figure(names, lines if len(pairs) > 1 else lines[:1], "cosine", log=False)],
            ),
        )
    return result


def _known(values: Sequence[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def over_training(document: Document) -> list[Panel]:
    """Return maps of sizes and gradients over training, if they were recorded at several steps."""
    lines = document["training"]
    if len(lines) < 2:
        return []
    steps, names = [line["step"] for line in lines], reader_names(document)
    quantities = (
        (
            "Over training: size of what each site reads",
            "The size (RMS) of what each site reads at every recorded step, from left to right. Rows are sites; the last row is what the prediction is made from.",
            [[mean(ways) for ways in line["input_rms"]] for line in lines],
        ),
        (
            "Over training: gradient at each site",
            "The norm of the gradient with respect to each site's parameters at every recorded step, before clipping. Strong rows learn most.",
            [line["gradient_norm"] for line in lines],
        ),
    )
    result = []
    for title, caption, by_step in quantities:
        by_site = [list(site) for site in zip(*by_step, strict=True)]  # [site][step]
        logs = [[math.log10(v) if v else None for v in row] for row in by_site]
        known = [v for row in logs for v in row if v is not None]
        if not known:
            continue
        low, high = min(known), max(known)
        ticks = [low + (high - low) * i / 3 for i in range(4)]
        bar = {"tickvals": ticks, "ticktext": [brief(10**t) for t in ticks]}
        template = "step %{x}, <b>%{y}</b>: %{customdata:.4g}<extra></extra>"
        limits = (low, high if high > low else low + 1e-6)
        figure = heat_figure(
            steps, names[: len(by_site)], logs, "sequential", limits, template, customdata=by_site, bar=bar, xgap=0
        )
        figure["layout"]["xaxis"] |= {"title": {"text": "step"}}
        result.append(Panel(title, caption, [{**figure, "height": 340}]))
    return result
