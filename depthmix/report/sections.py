"""The parts of a page as HTML. Everything that comes from outside (names, texts, recipes) is escaped in this file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from depthmix.report.content import BUSY, Content, Table

WORDS_FORM = """<form id="words-form">
<label for="words-text">Text to look into</label>
<textarea id="words-text" rows="2" spellcheck="false" aria-describedby="words-status words-count"></textarea>
<button type="submit">Show</button> <span id="words-count" class="soft"></span> <span id="words-status" role="status"></span>
</form>
"""
MODEL = (
    "A model is a stack of sites; each site is one attention or one MLP. Every later site can read a site's output, and so can the prediction. "
    "Who reads is a reader, and what is read is a source. The first source is the embedding, which is the token alone. The rule for mixing over depth decides how much each reader takes from each source."
)


def listed(items: Sequence[str], css: str) -> str:
    return f'<ul class="{css}">' + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>" if items else ""


def opening(content: Content) -> str:
    """Return the finding, what was compared, and what a reader must know before anything else."""
    badge = f' <span class="badge">{escape(content.badge)}</span>' if content.badge else ""
    subtitle = f'<p class="subtitle">{escape(content.subtitle)}{badge}</p>' if content.subtitle or badge else ""
    warnings = "".join(f'<p class="warn">{escape(warning)}</p>' for warning in content.warnings)
    noscript = '<noscript><p class="warn">The figures need JavaScript.</p></noscript>'
    return f"<h1>{escape(content.title)}</h1>\n{subtitle}{warnings}{noscript}{listed(content.verdict, 'verdict')}"


def words(live: bool) -> str:
    """Return the place of the words and their rivers, with a box for other texts if a server computes them."""
    return f'<section id="words" aria-label="words">{WORDS_FORM if live else ""}<div class="panels"></div></section>'


def maps(models: Sequence[Mapping[str, Any]]) -> str:
    if not models:
        return ""
    title = "The same map for all models, on one scale" if len(models) > 1 else "Who reads what"
    return f'<section id="maps" class="later" aria-label="depth maps"><h2>{title}</h2><p class="soft">{MODEL}</p></section>'


def over_depth(models: Sequence[Mapping[str, Any]]) -> str:
    if not models:
        return ""
    return '<section id="depth" class="later" aria-label="over depth"><h2>What happens over depth</h2></section>'


def curves(content: Content) -> str:
    if not content.curves:
        return ""
    return '<section id="curves" class="later" aria-label="loss curves"><h2>Who learns faster</h2></section>'


def results(content: Content) -> str:
    """Return the tables, each in a scrolling box of its own, and how to read them."""
    if not (content.tables or content.notes):
        return ""
    reading = "".join(f"<p>{escape(sentence)}</p>" for sentence in content.reading)
    folded = f"<details><summary>How to read this</summary>{reading}</details>" if reading else ""
    return "\n".join(["<h2>Results</h2>", *(table(t) for t in content.tables), listed(content.notes, "soft"), folded])


def table(content: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in content.heading)
    lines = []
    for i, (name, *cells) in enumerate(content.lines):
        # A long name may break at these places.
        broken = escape(name).replace(":", ":<wbr>").replace(",", ",<wbr>").replace("/", "/<wbr>")
        rest = "".join(_cell(cell, content.marks.get((i, j), "")) for j, cell in enumerate(cells, start=1))
        lines.append(f'<tr><th scope="row">{broken}</th>{rest}</tr>')
    title = f"<h3>{escape(content.title)}</h3>" if content.title else ""
    label = escape(content.title or "Results")
    return (
        f'{title}<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
        f'<table class="results"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
    )


def _cell(text: str, mark: str) -> str:
    if mark == BUSY:
        return f'<td>{escape(text)} <span class="tag">busy</span></td>'
    css = f' class="{mark}"' if mark else ""
    return f"<td{css}>{escape(text)}</td>"


def samples(content: Content) -> str:
    if not content.samples:
        return ""
    html = ['<p class="soft">The same prompt (bold) and the same random numbers for every arm.</p>']
    for sample in content.samples:
        html.append(f"<h3>{escape(sample['arm'])}</h3>")
        rest = sample["text"].removeprefix(sample["prompt"])
        html.append(f'<div class="sample"><b>{escape(sample["prompt"])}</b>{escape(rest)}</div>')
    return folded("Samples of text", "\n".join(html))


def inside(models: Sequence[Mapping[str, Any]], documents: Sequence[Mapping[str, Any]]) -> str:
    """Return a folded section for each model, which the script fills when it is opened."""
    if not models:
        return ""
    parts = [
        f'<details class="inside"><summary>{escape(model["label"])}</summary><p class="soft">{escape(_facts(document))}</p></details>'
        for model, document in zip(models, documents, strict=True)
    ]
    title = "Inside each model" if len(models) > 1 else "Inside the model"
    return "\n".join(['<section class="folded">', f"<h2>{title}</h2>", *parts, "</section>"])


def _facts(document: Mapping[str, Any]) -> str:
    text = f"{len(document['sources']) - 1} sites, {document['parameters']['total']:,} parameters, step {document['step']:,}. "
    text += f"Contributions and weights are means over {document['mixing']['tokens']:,} tokens."
    if ranks := document["structure"]:
        of_ways = ", ".join(f"{way['semiseparable']} of at most {way['most']}" for way in ranks)
        text += f" Streams that the rule is equivalent to (semiseparable rank): {of_ways}."
    return text


def closing(content: Content) -> str:
    """Return the method, the recipe, the environment and the command, folded."""
    parts = []
    if content.facts:
        parts.append(folded("How this was made", _definitions(content.facts)))
    if content.recipe:
        parts.append(folded("Recipe", f"<pre>{escape(content.recipe)}</pre>"))
    if content.environment:
        parts.append(folded("Where it ran", _definitions(content.environment)))
    if content.command:
        parts.append(folded("The command that made this page", f"<pre>{escape(content.command)}</pre>"))
    return "\n".join(['<section class="folded">', "<h2>Methods</h2>", *parts, "</section>"] if parts else [])


def folded(title: str, html: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{html}</details>"


def _definitions(facts: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts) + "</dl>"
