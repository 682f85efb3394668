"""Figures as plotly reads them, in plain dictionaries: lines with their names at their ends, and maps.

Colours are names that page.js looks up in the page's style, so that a figure follows light and dark: "@ink", "@series1/0.2"
(a fifth of it), and "@sequential" or "@diverging" for scales. Plotly parses text as a small HTML of its own; `shown` escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from depthmix.report.content import Curve

Figure = dict[str, Any]
# Colours besides that of the first line.
SERIES = 6
DASHES = ("solid", "dash", "dashdot", "dot")
# From this ratio of largest to smallest value on, an axis is logarithmic.
FLAT = 20.0


@dataclass(frozen=True)
class Line:
    """A line over depth. None marks a missing value."""

    label: str
    y: Sequence[float | None]
    colour: str
    dash: str = "solid"


def brief(value: float) -> str:
    """Format a number with two significant digits, or with all digits before the point."""
    return f"{value:.0f}" if 100 <= abs(value) < 1e5 else f"{value:.2g}"


def shown(text: str) -> str:
    """Escape text for plotly and put it on one line."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def distinct(names: Sequence[str]) -> list[str]:
    """Make names distinct by numbering repeated ones. Two equal names would share one place on an axis."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    used, result = dict.fromkeys(counts, 0), []
    for name in names:
        used[name] += 1
        result.append(name if used[name] == 1 else f"{name} ({used[name]})")
    return result


def colour_of(place: int) -> tuple[str, str]:
    """Return the colour and dash style of an arm by its position. The first arm has the text's colour."""
    if place == 0:
        return "@ink", DASHES[0]
    return f"@series{(place - 1) % SERIES + 1}", DASHES[(place - 1) // SERIES % len(DASHES)]


def loss_figure(curves: Sequence[Curve], axis: str, images: bool = False) -> Figure:
    """Draw loss against "tokens" or "time".

    Each arm has a line and a band over its seeds. A dotted line marks the final loss of the first arm.
    """
    scale, unit = (1.0, "") if axis == "tokens" else time_unit(max(curve.seconds[-1] for curve in curves))
    item = "image" if images else "token"
    data: list[Figure] = []
    ends: list[Figure] = []
    for i, curve in enumerate(curves):
        colour, dash = colour_of(i)
        x = [value / scale for value in (curve.tokens if axis == "tokens" else curve.seconds)]
        if any(a < b for a, b in zip(curve.low, curve.high, strict=True)):
            band = {"x": [*x, *reversed(x)], "y": [*curve.low, *reversed(curve.high)], "fill": "toself"}
            data.append(
                {
                    **band,
                    "mode": "lines",
                    "line": {"width": 0, "color": colour},
                    "fillcolor": f"{colour}/0.18",
                    "hoverinfo": "skip",
                }
            )
        where = f"%{{x:.3s}} {item}s" if axis == "tokens" else f"%{{x:.3~f}} {unit}"
        line: Figure = {
            "x": x,
            "y": list(curve.mean),
            "mode": "lines+markers",
            "line": {"color": colour, "dash": dash, "width": 2},
        }
        line |= {"marker": {"size": 5, "color": colour}, "name": shown(curve.label)}
        data.append(
            {**line, "hovertemplate": f"<b>%{{fullData.name}}</b><br>{where}<br>loss %{{y:.4f}}<extra></extra>"}
        )
        ends.append(
            {"text": curve.label, "value": f"{curve.mean[-1]:.3f}", "x": x[-1], "y": curve.mean[-1], "color": colour}
        )
    least, most = loss_limits(curves)
    last_x = max(end["x"] for end in ends)
    final_loss = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": curves[0].mean[-1], "y1": curves[0].mean[-1]}
    layout: Figure = {
        "xaxis": {
            "title": {"text": f"training {item}s" if axis == "tokens" else f"training time, {unit}"},
            "range": [0, 1.01 * last_x],
        },
        "yaxis": {"title": {"text": f"validation loss, nats per {item}"}, "range": [least, most]},
        "shapes": [{**final_loss, "layer": "below", "line": {"color": "@soft", "width": 1, "dash": "dot"}}],
    }
    if axis == "tokens":
        layout["xaxis"]["tickformat"] = "~s"
    return {"data": data, "layout": layout, "ends": ends, "height": 440}


def loss_limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return limits for the loss axis that skip the first fifth of the first arm's evaluations.

    The steep start would flatten everything else.
    """
    first = curves[0].mean
    top = max(first[min(len(first) // 5, len(first) - 1)], *(curve.high[-1] for curve in curves))
    lowest = min(min(curve.low) for curve in curves)
    margin = 0.06 * (top - lowest) or 0.1
    return lowest - margin, top + margin


def time_unit(longest: float) -> tuple[float, str]:
    """Return the number of seconds in a suitable unit, and the unit's name."""
    return (1.0, "seconds") if longest < 180 else (60.0, "minutes") if longest < 10800 else (3600.0, "hours")


def depth_figure(names: Sequence[str], lines: Sequence[Line], title: str, log: bool = True) -> Figure:
    """Draw lines over depth.

    Args:
        names: of the places on the x axis.
        lines: what to draw.
        title: of the y axis.
        log: allow a logarithmic y axis. It is used if values differ by more than FLAT and all are positive.
    """
    values = [y for line in lines for y in line.y if y is not None]
    log = log and bool(values) and min(values) > 0 and max(values) / min(values) > FLAT
    data: list[Figure] = []
    ends: list[Figure] = []
    for line in lines:
        known = [i for i, y in enumerate(line.y) if y is not None]
        if not known:
            continue
        drawn: Figure = {"x": [names[i] for i in known], "y": [line.y[i] for i in known], "mode": "lines+markers"}
        drawn |= {"name": shown(line.label), "line": {"color": line.colour, "dash": line.dash, "width": 2}}
        template = "<b>%{fullData.name}</b><br>%{x}: %{y:.4g}<extra></extra>"
        data.append({**drawn, "marker": {"size": 5, "color": line.colour}, "hovertemplate": template})
        last = line.y[known[-1]] or 0.0
        end = {"text": line.label, "value": "", "x": known[-1], "y": math.log10(last) if log else last}
        ends.append({**end, "color": line.colour})
    span = [math.log10(v) if log else v for v in values] or [0.0, 1.0]
    # An axis of sizes starts at zero.
    low = min(span) if log or min(span) < 0 else 0.0
    margin = 0.08 * (max(span) - low) or 0.1
    low -= margin if low else 0.0
    layout: Figure = {
        "xaxis": category_axis(names),
        "yaxis": {"title": {"text": title}, "range": [low, max(span) + margin], "type": "log" if log else "linear"},
    }
    if log:
        layout["yaxis"] |= log_ticks(values)
    return {"data": data, "layout": layout, "ends": ends, "height": 320}


def log_ticks(values: Sequence[float | None]) -> Figure:
    """Return ticks at 1, 2 and 5 of every decade that values reach, or at decades if there are many.

    The labels are written out: plotly would show only the digit.
    """
    positive = [v for v in values if v is not None and v > 0]
    if not positive:
        return {}
    first, last = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    steps = (1, 2, 5) if max(positive) < 1000 * min(positive) else (1,)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def bar_figure(names: Sequence[str], values: Sequence[float | None], title: str) -> Figure:
    """Draw a bar for each site."""
    template = "%{x}: %{y:+.4f}<extra></extra>"
    bars = {
        "type": "bar",
        "x": list(names),
        "y": list(values),
        "marker": {"color": "@series1"},
        "hovertemplate": template,
    }
    layout: Figure = {"xaxis": category_axis(names), "yaxis": {"title": {"text": title}, "zeroline": True}}
    return {"data": [bars], "layout": layout, "height": 320}


def category_axis(names: Sequence[str]) -> dict[str, Any]:
    """Return an axis of names in their order, even if a name looks like a number or a date."""
    return {"type": "category", "categoryarray": list(names)}


def heat_figure(
    x: Sequence[Any],
    y: Sequence[str],
    z: Sequence[Sequence[float | None]],
    scale: str,
    limits: tuple[float, float],
    template: str,
    **more: Any,
) -> Figure:
    """Draw a map with y downwards and one cell per value. None leaves a gap."""
    bar = {"thickness": 10, "outlinewidth": 0, "len": 0.9, **more.pop("bar", {})}
    heat: Figure = {"type": "heatmap", "x": list(x), "y": list(y), "z": z, "colorscale": f"@{scale}", "colorbar": bar}
    heat |= {
        "zmin": limits[0],
        "zmax": limits[1],
        "hovertemplate": template,
        "hoverongaps": False,
        "xgap": 1,
        "ygap": 1,
        **more,
    }
    layout: Figure = {"yaxis": {**category_axis(y), "autorange": "reversed", "showgrid": False}}
    return {"data": [heat], "layout": {**layout, "xaxis": {"showgrid": False}}}
