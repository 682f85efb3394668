"""Figures as plotly reads them, in plain dictionaries: lines with their names at their ends, and maps.

Colours are names that page.js looks up in the page's style, so that a figure follows light and dark: "@ink", "@series1/0.2"
(a fifth of it), and "@sequential" or "@diverging" for scales. Plotly takes text for a small HTML of its own: `shown` makes it text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from depthmix.report.content import Curve

Figure = dict[str, Any]
SERIES = 6  # colours beside that of the first line
DASHES = ("solid", "dash", "dashdot", "dot")
FLAT = 20.0  # from this ratio of largest to smallest on, an axis is logarithmic


@dataclass(frozen=True)
class Line:
    """One line over depth; None where there is no value."""

    label: str
    y: Sequence[float | None]
    colour: str
    dash: str = "solid"


def brief(value: float) -> str:
    """Two digits, or all before the point."""
    return f"{value:.0f}" if 100 <= abs(value) < 1e5 else f"{value:.2g}"


def shown(text: str) -> str:
    """Text that plotly shows as it is, on one line."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def distinct(names: Sequence[str]) -> list[str]:
    """The names, with a number behind those that were there before: two places on an axis are two names."""
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
    left, found = dict.fromkeys(seen, 0), []
    for name in names:
        left[name] += 1
        found.append(name if left[name] == 1 else f"{name} ({left[name]})")
    return found


def colour_of(place: int) -> tuple[str, str]:
    """Colour and dashes of an arm by its place: the first has the text's colour."""
    if place == 0:
        return "@ink", DASHES[0]
    return f"@series{(place - 1) % SERIES + 1}", DASHES[(place - 1) // SERIES % len(DASHES)]


def loss_figure(curves: Sequence[Curve], axis: str, images: bool = False) -> Figure:
    """Loss against "tokens" or "time": a line an arm, a band over its seeds, and a dotted line where the first arm ended."""
    scale, unit = (1.0, "") if axis == "tokens" else time_unit(max(curve.seconds[-1] for curve in curves))
    each = "image" if images else "token"
    data: list[Figure] = []
    ends: list[Figure] = []
    for i, curve in enumerate(curves):
        colour, dash = colour_of(i)
        x = [value / scale for value in (curve.tokens if axis == "tokens" else curve.seconds)]
        if any(a < b for a, b in zip(curve.low, curve.high, strict=True)):
            around = {"x": [*x, *reversed(x)], "y": [*curve.low, *reversed(curve.high)], "fill": "toself"}
            data.append(
                {
                    **around,
                    "mode": "lines",
                    "line": {"width": 0, "color": colour},
                    "fillcolor": f"{colour}/0.18",
                    "hoverinfo": "skip",
                }
            )
        where = f"%{{x:.3s}} {each}s" if axis == "tokens" else f"%{{x:.3~f}} {unit}"
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
    far = max(end["x"] for end in ends)
    final = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": curves[0].mean[-1], "y1": curves[0].mean[-1]}
    layout: Figure = {
        "xaxis": {
            "title": {"text": f"training {each}s" if axis == "tokens" else f"training time, {unit}"},
            "range": [0, 1.01 * far],
        },
        "yaxis": {"title": {"text": f"validation loss, nats per {each}"}, "range": [least, most]},
        "shapes": [{**final, "layer": "below", "line": {"color": "@soft", "width": 1, "dash": "dot"}}],
    }
    if axis == "tokens":
        layout["xaxis"]["tickformat"] = "~s"
    return {"data": data, "layout": layout, "ends": ends, "height": 440}


def loss_limits(curves: Sequence[Curve]) -> tuple[float, float]:
    """Where a fifth of the first arm's evaluations is over: the steep start would flatten what there is to see."""
    first = curves[0].mean
    top = max(first[min(len(first) // 5, len(first) - 1)], *(curve.high[-1] for curve in curves))
    lowest = min(min(curve.low) for curve in curves)
    margin = 0.06 * (top - lowest) or 0.1
    return lowest - margin, top + margin


def time_unit(longest: float) -> tuple[float, str]:
    """Seconds in a unit that suits them, and its name."""
    return (1.0, "seconds") if longest < 180 else (60.0, "minutes") if longest < 10800 else (3600.0, "hours")


def depth_figure(names: Sequence[str], lines: Sequence[Line], title: str, log: bool = True) -> Figure:
    """Lines over depth; with log, an axis that is logarithmic where values differ much and none is zero or below."""
    values = [y for line in lines for y in line.y if y is not None]
    log = log and bool(values) and min(values) > 0 and max(values) / min(values) > FLAT
    data: list[Figure] = []
    ends: list[Figure] = []
    for line in lines:
        place = [i for i, y in enumerate(line.y) if y is not None]
        if not place:
            continue
        drawn: Figure = {"x": [names[i] for i in place], "y": [line.y[i] for i in place], "mode": "lines+markers"}
        drawn |= {"name": shown(line.label), "line": {"color": line.colour, "dash": line.dash, "width": 2}}
        template = "<b>%{fullData.name}</b><br>%{x}: %{y:.4g}<extra></extra>"
        data.append({**drawn, "marker": {"size": 5, "color": line.colour}, "hovertemplate": template})
        last = line.y[place[-1]] or 0.0
        end = {"text": line.label, "value": "", "x": place[-1], "y": math.log10(last) if log else last}
        ends.append({**end, "color": line.colour})
    span = [math.log10(v) if log else v for v in values] or [0.0, 1.0]
    low = min(span) if log or min(span) < 0 else 0.0  # sizes begin at nothing
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
    """1, 2, 5 in every decade that values reach, or decades where they are many; written out, where plotly leaves all but the digit away."""
    found = [v for v in values if v is not None and v > 0]
    if not found:
        return {}
    first, last = math.floor(math.log10(min(found))), math.ceil(math.log10(max(found)))
    steps = (1, 2, 5) if max(found) < 1000 * min(found) else (1,)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def bar_figure(names: Sequence[str], values: Sequence[float | None], title: str) -> Figure:
    """A bar for each site."""
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
    """An axis of names in their order, also where one looks like a number or a date."""
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
    """A map: y downwards, a cell for each value, nothing where there is none."""
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
