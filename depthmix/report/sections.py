"""The parts of a page as HTML. Whatever comes from outside, names, texts, recipes, is escaped here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from depthmix.report.content import Content, Table
from depthmix.report.inside import Panel, way_names

LOSS_CAPTIONS = {
    "tokens": (
        "Loss against {unit}",
        "Who learns more from the same {data}: validation loss, how surprised a model is by {data} it has never seen, so lower is better.",
    ),
    "time": (
        "Loss against training time",
        "Who is further after the same wait. Only the end of a line is a finished schedule.",
    ),
}
INSIDE = (
    "A model is a stack of sites, an attention or an MLP each. What a site puts out can be read by every site above it, and at the end by finish, which the prediction is made from; "
    "below all of them lies the embedding, the token alone. The rule for mixing over depth says who reads how much of whom."
)


def listed(items: Sequence[str], css: str) -> str:
    return f'<ul class="{css}">' + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>" if items else ""


def opening(content: Content) -> str:
    """Title, what must be known first, the verdict and the facts."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in content.facts)
    warnings = "".join(f'<p class="warn">{escape(warning)}</p>' for warning in content.warnings)
    return f"<h1>{escape(content.title)}</h1>\n{warnings}{listed(content.verdict, 'verdict')}{f'<dl>{facts}</dl>' if facts else ''}"


def results(content: Content) -> str:
    """The tables, each in a box of its own that scrolls, and how to read them."""
    if not (content.tables or content.notes):
        return ""
    parts = ["<h2>Results</h2>", *(table(t) for t in content.tables), listed(content.notes, "soft")]
    if content.reading:
        parts += ["<h2>How to read this</h2>", *(f"<p>{escape(sentence)}</p>" for sentence in content.reading)]
    return "\n".join(parts)


def table(content: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in content.heading)
    lines = []
    for i, (name, *cells) in enumerate(content.lines):
        css = ' class="best"' if i in content.best else ""
        # Where a long name may go on below.
        broken = escape(name).replace(":", ":<wbr>").replace(",", ",<wbr>").replace("/", "/<wbr>")
        rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr{css}><th scope="row">{broken}</th>{rest}</tr>')
    title = f"<h3>{escape(content.title)}</h3>" if content.title else ""
    label = escape(content.title or "Results")
    return (
        f'{title}<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
        f'<table class="results"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def figure(name: str, title: str, caption: str, height: int, attributes: str = "", extra: str = "") -> str:
    """Where page.js draws; the height is kept free until it does."""
    return (
        f'<figure><h4>{escape(title)}</h4>{extra}<div class="plot" id="{name}" role="img" aria-label="{escape(title)}" '
        f'style="min-height: {height}px"{attributes}></div><figcaption>{escape(caption)}</figcaption></figure>'
    )


def loss_section(names: Mapping[str, str], images: bool) -> str:
    """names: the figure's id for "tokens" and for "time"."""
    parts = ["<h2>Curves</h2>"] if names else []
    words = {"unit": "images", "data": "images"} if images else {"unit": "tokens", "data": "text"}
    for axis, name in names.items():
        title, caption = (text.format(**words) for text in LOSS_CAPTIONS[axis])
        parts.append(figure(name, title, caption, 440))
    return "\n".join(parts)


def samples(content: Content) -> str:
    if not content.samples:
        return ""
    html = ["<h2>Samples</h2>", '<p class="soft">The same prompt (bold) and the same random numbers for every arm.</p>']
    for sample in content.samples:
        html.append(f"<h3>{escape(sample['arm'])}</h3>")
        rest = sample["text"].removeprefix(sample["prompt"])
        html.append(f'<div class="sample"><b>{escape(sample["prompt"])}</b>{escape(rest)}</div>')
    return "\n".join(html)


def inside_section(documents: Sequence[Mapping[str, Any]], drawn: Sequence[Sequence[tuple[str, Panel]]]) -> str:
    """A section for each model; drawn: its figures' ids and panels."""
    if not documents:
        return ""
    links = "".join(f'<li><a href="#run-{i}">{escape(d["label"])}</a></li>' for i, d in enumerate(documents))
    nav = f'<nav aria-label="Models"><ul class="links">{links}</ul></nav>' if len(documents) > 1 else ""
    parts = ["<h2>Inside the models</h2>" if len(documents) > 1 else "<h2>Inside the model</h2>"]
    parts += [f"<p>{INSIDE}</p>", nav]
    for i, (document, own) in enumerate(zip(documents, drawn, strict=True)):
        parts.append(f'<section class="run" id="run-{i}" data-run="{i}"><h3>{escape(document["label"])}</h3>')
        parts += [f'<p class="soft">{escape(_facts(document))}</p>', _ways(document, i), '<div class="grid">']
        parts += [_panel(name, panel) for name, panel in own]
        parts.append("</div></section>")
    return "\n".join(part for part in parts if part)


def _panel(name: str, panel: Panel) -> str:
    if panel.kind == "row":
        said = '<p class="readout" aria-live="polite"></p>'
        return figure(name, panel.title, panel.caption, 300, ' data-kind="row"', said)
    height = panel.figures[0].get("height", 380)
    if panel.kind != "map":
        return figure(name, panel.title, panel.caption, height)
    keys = ' tabindex="0" data-kind="map" aria-describedby="keys"'
    return figure(name, panel.title, panel.caption, height, keys).replace('role="img"', 'role="application"', 1)


def _facts(document: Mapping[str, Any]) -> str:
    loss = (
        ""
        if document["loss"] is None
        else f"; loss {document['loss']:.4f} on {document['dynamics']['tokens']:,} tokens"
    )
    said = f"{len(document['sources']) - 1} sites, {document['parameters']['total']:,} parameters, step {document['step']:,}{loss}."
    ranks = document["structure"]
    if ranks:
        own = ", ".join(f"{way['semiseparable']} of at most {way['most']}" for way in ranks)
        said += f" The streams that its rule amounts to (semiseparable rank): {own}."
    return said


def _ways(document: Mapping[str, Any], run: int) -> str:
    names = way_names(document)
    if len(names) == 1:
        return ""
    options = "".join(f'<option value="{i}">{escape(name)}</option>' for i, name in enumerate(names))
    return f'<p><label for="way-{run}">Attention reads a mixture each for</label> <select id="way-{run}" class="way">{options}</select></p>'


def closing(content: Content) -> str:
    """Recipe, environment and command."""
    parts = []
    if content.recipe:
        parts += ["<h2>Recipe</h2>", f"<pre>{escape(content.recipe)}</pre>"]
    if content.environment:
        facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in content.environment)
        parts += ["<h2>Where it ran</h2>", f"<dl>{facts}</dl>"]
    if content.command:
        parts += ["<h2>The command that made this page</h2>", f"<pre>{escape(content.command)}</pre>"]
    return "\n".join(parts)
