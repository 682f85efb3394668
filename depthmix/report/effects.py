"""A dot and an interval for each arm, with the price of its steps: HTML that fits every width and needs no script."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from depthmix.report.content import Content, Effect

NARROWEST = 1e-3  # nats: a scale finer than this would enlarge noise


def effects(content: Content) -> str:
    """Return the figure of a page's effects as HTML, or "" if there is none."""
    if not content.effects:
        return ""
    low, high, step = _scale(content.effects)

    def place(value: float) -> str:
        return f"{100 * (value - low) / (high - low):.2f}%"

    lines = "".join(_line(effect, place) for effect in content.effects)
    n = round((high - low) / step)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = "".join(
        f'<span{_is_zero(low + i * step)} style="left: {place(low + i * step)}">{_tick(low + i * step, decimals)}</span>'
        for i in range(n + 1)
    )
    shown, hidden = (any(e.shown is is_shown for e in content.effects) for is_shown in (True, False))
    keys = [
        '<span><span class="dot shown"></span> interval excludes zero</span>' if shown else "",
        '<span><span class="dot"></span> no difference shown</span>' if hidden else "",
        '<span class="tag">busy</span> step times of a busy machine' if any(e.busy for e in content.effects) else "",
    ]
    where = f" on {content.cell}" if content.cell else ""
    each = "image" if content.images else "token"
    caption = f"Validation loss{where} against {content.baseline}, in nats per {each} (natural-log loss units), with the 95% interval. Left is better."
    head = "<tr><th>rule</th><th>interval</th><th>difference in nats, time of a step</th></tr>"
    return (
        '<figure class="effects"><table><caption class="unseen">Differences from the baseline</caption>'
        f'<colgroup><col class="names"><col><col class="prices"></colgroup><thead class="unseen">{head}</thead>'
        f'<tbody>{lines}</tbody><tfoot aria-hidden="true"><tr><td></td><td><div class="ticks">{ticks}</div></td>'
        f"<td></td></tr></tfoot></table><figcaption>{escape(caption)} {' '.join(key for key in keys if key)}</figcaption></figure>"
    )


def _line(effect: Effect, place: Callable[[float], str]) -> str:
    half = effect.interval
    said = f"{effect.difference:+.3f}".replace("-", "−")
    bar = ""
    if half is not None:
        begin, end = (place(effect.difference + side) for side in (-half, half))
        bar = f'<span class="interval" style="left: {begin}; width: calc({end} - {begin})"></span>'
        said += f" ± {half:.3f}"
    dot = f'<span class="dot{" shown" if effect.shown else ""}" style="left: {place(effect.difference)}"></span>'
    price = "" if effect.step_ratio is None else f"{effect.step_ratio:.2f}× step"
    busy = ' <span class="tag">busy</span>' if effect.busy and price else ""
    label = escape(effect.label).replace(":", ":<wbr>").replace(",", ",<wbr>")
    name = f"{escape(effect.title)}<small>{label}</small>" if effect.title else label
    told = "" if half is None else "excludes zero" if effect.shown else "includes zero: no difference shown"
    return (
        f'<tr><th scope="row">{name}</th><td class="track"><span class="zero" style="left: {place(0.0)}"></span>{bar}{dot}'
        f'<span class="unseen">{told}</span></td><td class="price"><b>{said}</b> {price}{busy}</td></tr>'
    )


def _is_zero(value: float) -> str:
    """Return the attribute of the tick that a narrow screen keeps."""
    return ' class="same"' if abs(value) < 1e-12 else ""


def _tick(value: float, decimals: int) -> str:
    return "same" if abs(value) < 1e-12 else f"{value:+.{decimals}f}".replace("-", "−")


def _scale(shown: Sequence[Effect]) -> tuple[float, float, float]:
    """Return the ends of the axis and the distance of its ticks: round numbers around all intervals and zero."""
    ends = [0.0]
    for effect in shown:
        half = effect.interval or 0.0
        ends += [effect.difference - half, effect.difference + half]
    width = max(max(ends) - min(ends), NARROWEST)
    power = 10.0 ** math.floor(math.log10(width / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= width / 4)
    return math.floor(min(ends) / step - 0.1) * step, math.ceil(max(ends) / step + 0.1) * step, step
