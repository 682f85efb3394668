"""The parts of a page as HTML. Everything that comes from outside (names, texts, recipes) is escaped in this file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from depthmix.report.content import Content, Table
from depthmix.report.inside import Panel, way_names

LOSS_CAPTIONS = {
    "tokens": (
        "Loss against {unit}",
        "Which arm learns more from the same {data}. The validation loss says how surprised a model is by {data} it has never seen: lower is better.",
    ),
    "time": (
        "Loss against training time",
        "Which arm is further after the same time. Only the end of a line is a finished schedule.",
    ),
}
INSIDE = (
    "A model is a stack of sites; each site is one attention or one MLP. Every later site can read a site's output, and so can finish, from which the prediction is made. "
    "The first source is the embedding, which is the token alone. The rule for mixing over depth decides how much each site reads from each source."
)


def listed(items: Sequence[str], css: str) -> str:
    return f'<ul class="{css}">' + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>" if items else ""


def opening(content: Content) -> str:
    """Return the title, the warnings, the verdict and the facts."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in content.facts)
    warnings = "".join(f'<p class="warn">{escape(warning)}</p>' for warning in content.warnings)
    return f"<h1>{escape(content.title)}</h1>\n{warnings}{listed(content.verdict, 'verdict')}{f'<dl>{facts}</dl>' if facts else ''}"


def results(content: Content) -> str:
    """Return the tables, each in a scrolling box of its own, and how to read them."""
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
        # A long name may break at these places.
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
    """Return the place where page.js draws a figure. Its height is reserved until then."""
    return (
        f'<figure><h4>{escape(title)}</h4>{extra}<div class="plot" id="{name}" role="img" aria-label="{escape(title)}" '
        f'style="min-height: {height}px"{attributes}></div><figcaption>{escape(caption)}</figcaption></figure>'
    )


def loss_section(names: Mapping[str, str], images: bool) -> str:
    """Return the section of the curves.

    Args:
        names: the figure's id for "tokens" and for "time".
        images: the models were trained on images.
    """
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
    """Return a section for each model.

    Args:
        documents: the models' documents.
        drawn: for each model, the ids and panels of its figures.
    """
    if not documents:
        return ""
    links = "".join(f'<li><a href="#run-{i}">{escape(d["label"])}</a></li>' for i, d in enumerate(documents))
    nav = f'<nav aria-label="Models"><ul class="links">{links}</ul></nav>' if len(documents) > 1 else ""
    parts = ["<h2>Inside the models</h2>" if len(documents) > 1 else "<h2>Inside the model</h2>"]
    parts += [f"<p>{INSIDE}</p>", nav]
    for i, (document, of_model) in enumerate(zip(documents, drawn, strict=True)):
        parts.append(f'<section class="run" id="run-{i}" data-run="{i}"><h3>{escape(document["label"])}</h3>')
        parts += [f'<p class="soft">{escape(_facts(document))}</p>', _ways(document, i), '<div class="grid">']
        parts += [_panel(name, panel) for name, panel in of_model]
        parts.append("</div></section>")
    return "\n".join(part for part in parts if part)


def _panel(name: str, panel: Panel) -> str:
    if panel.kind == "row":
        readout = '<p class="readout" aria-live="polite"></p>'
        return figure(name, panel.title, panel.caption, 300, ' data-kind="row"', readout)
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
    text = f"{len(document['sources']) - 1} sites, {document['parameters']['total']:,} parameters, step {document['step']:,}{loss}."
    ranks = document["structure"]
    if ranks:
        of_ways = ", ".join(f"{way['semiseparable']} of at most {way['most']}" for way in ranks)
        text += f" Streams that the rule is equivalent to (semiseparable rank): {of_ways}."
    return text


def _ways(document: Mapping[str, Any], run: int) -> str:
    names = way_names(document)
    if len(names) == 1:
        return ""
    options = "".join(f'<option value="{i}">{escape(name)}</option>' for i, name in enumerate(names))
    return f'<p><label for="way-{run}">Show the mixture for</label> <select id="way-{run}" class="way">{options}</select></p>'


def closing(content: Content) -> str:
    """Return the recipe, the environment and the command."""
    parts = []
    if content.recipe:
        parts += ["<h2>Recipe</h2>", f"<pre>{escape(content.recipe)}</pre>"]
    if content.environment:
        facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in content.environment)
        parts += ["<h2>Where it ran</h2>", f"<dl>{facts}</dl>"]
    if content.command:
        parts += ["<h2>The command that made this page</h2>", f"<pre>{escape(content.command)}</pre>"]
    return "\n".join(parts)
