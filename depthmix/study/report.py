"""One self-contained page: what was compared, the table, the figures, samples, and how to read them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from depthmix.study.figures import INK, NAMES, PAPER
from depthmix.study.rows import Row
from depthmix.study.table import AGAINST, COSTS, VAL_LOSS, Column, cells, human, human_time, learnt, of_images
from depthmix.study.verdict import footnotes, verdict

CAPTIONS = {
    "tokens": "Loss against {unit}: who learns more from the same {data}.",
    "time": "Loss against training time: who is further after the same wait. Only the end of a line is a finished schedule.",
}
STYLE = """
:root { color-scheme: light dark; --ink: #1f2428; --soft: #57606a; --page: #ffffff; --card: #f5f7f9; --line: #d5dbe1; --best: #0b7a4b; --shade: #8a919966; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaee; --soft: #9aa5b1; --page: #14181c; --card: #1d2328; --line: #353d45; --best: #4cc38a; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.2rem 4rem; max-width: 76rem; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .4rem; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; } h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p, li { max-width: 50rem; } .soft, figcaption { color: var(--soft); } .soft { font-size: .92rem; }
ul { padding-left: 1.2rem; } .verdict li { margin: .15rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: 1rem 0; } dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; background: linear-gradient(to left, var(--page) 40%, transparent) right / 3rem 100% no-repeat local, linear-gradient(to left, var(--shade), transparent) right / 1.2rem 100% no-repeat scroll; }
table { border-collapse: separate; border-spacing: 0; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .75rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); } th { font-weight: 600; color: var(--soft); vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; position: sticky; left: 0; background: var(--page); } td:first-child { font-weight: 600; } tr.best td:first-child { color: var(--best); }
figure { margin: 0 0 1.5rem; } figure svg, figure img { width: 100%; max-width: 56rem; height: auto; display: block; }
pre, .sample { background: var(--card); border-radius: 8px; padding: .8rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere; max-width: 56rem; }
pre { font-size: .88rem; } .sample { margin: .3rem 0 1.1rem; } .sample b { font-weight: 600; } .warn { border-left: 4px solid #d98200; padding-left: .8rem; }
@media (max-width: 40rem) {
  body { padding: 1.2rem .9rem 3rem; } table { font-size: .8rem; } th, td { padding: .4rem .45rem; } td:first-child { min-width: 6rem; }
  figure svg { min-width: 36rem; }
}
"""


def make_report(
    recipe: Mapping[str, Any],
    rows: Sequence[Row],
    samples: Sequence[Mapping[str, str]],
    notes: Sequence[str],
    figures: Path,
    finished: bool = True,
) -> str:
    """The page as HTML; figures is the folder that holds the .svg files (a missing one is left out)."""
    arms = [str(arm) for arm in recipe.get("arms", [])]
    title = f"{len(arms)} ways to mix over depth, compared" if len(arms) > 1 else "One way to mix over depth"
    parts = [f"<h1>{escape(title)}</h1>"]
    if not finished:
        parts.append('<p class="warn">This comparison is not finished: run the same command again and it goes on.</p>')
    parts += [_list(verdict(rows), "verdict"), _facts(recipe, rows), "<h2>Results</h2>"]
    parts.append(_table(rows, (AGAINST, VAL_LOSS, *learnt(rows))))  # what counts first, where a narrow screen shows it
    parts += ["<h3>What it cost</h3>", _table(rows, COSTS)] if rows else []
    parts += [_list([*notes, *footnotes(rows)] if rows else notes, "soft"), _how_to_read(recipe, rows)]
    parts += [_figure(axis, figures, of_images(rows)) for axis in NAMES]
    parts += [_samples(samples), "<h2>Recipe</h2>", f"<pre>{escape(_recipe_text(recipe))}</pre>"]
    head = '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">'
    # Nothing on the page runs or loads: text from a corpus or a model stays text even if an escape were forgotten.
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    head += f'\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n<title>depthmix: {escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _list(items: Sequence[str], css: str) -> str:
    return f'<ul class="{css}">' + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>" if items else ""


def _facts(recipe: Mapping[str, Any], rows: Sequence[Row]) -> str:
    get = recipe.get
    size = f"{get('n_blocks')} blocks, width {get('dim')}, {get('n_heads')} heads"
    if rows:
        size += f", {human(rows[0].parameters)} parameters"
    images = of_images(rows)
    kind = "images" if images else f"sequences of {get('seq_len')} tokens" if rows else "examples"
    batch = f"{get('batch_size')} {kind}"
    per_step = f"{batch} per step, {get('optimizer')}, {get('schedule')} schedule"
    if get("budget") == "time":
        budget = (
            "equal time: each arm gets as many steps as fit into the first arm's time, and a full schedule over them"
        )
        budget += f" ({human_time(rows[0].train_seconds)})" if rows else ""
    else:
        budget = f"equal {'images' if images else 'tokens'}: every arm makes {get('steps'):,} steps"
        budget += f" ({human(rows[0].tokens)} {'images' if images else 'tokens'})" if rows else ""
    seeds = ", ".join(str(seed) for seed in get("seeds", []))
    facts = (
        ("arms", ", ".join(str(arm) for arm in get("arms", []))),
        ("data", f"{get('data')}, in the same order for every arm"),
        ("model", size),
        ("training", per_step),
        ("budget", budget),
        ("seeds", seeds),
    )
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts) + "</dl>"


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    if not rows:
        return "<p>No run has finished yet.</p>"
    heading, *lines = cells(rows, columns)
    best = min(row.val_loss for row in rows)
    html = ["<tr>" + "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heading) + "</tr>"]
    for row, line in zip(rows, lines, strict=True):
        css = ' class="best"' if row.val_loss == best else ""
        arm, *rest = map(escape, line)
        arm = arm.replace(":", ":<wbr>").replace(",", ",<wbr>")  # where a long name may go on below
        html.append(f"<tr{css}><td>{arm}</td>" + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>")
    return f'<div class="scroll"><table><thead>{html[0]}</thead><tbody>{"".join(html[1:])}</tbody></table></div>'


def _how_to_read(recipe: Mapping[str, Any], rows: Sequence[Row]) -> str:
    first = escape(rows[0].baseline if rows else "the first arm")
    data, each = ("images", "image") if of_images(rows) else ("text", "token")
    cost = "training time" if recipe.get("budget") == "time" else f"training {data}"
    return (
        f"<h2>How to read this</h2>\n<p>Validation loss says how surprised a model is by {data} it has never seen, so lower is better, and all arms got the same amount of {cost}. "
        f"The column “against {first}” is what counts: believe a difference when the sentence at the top gives an interval that leaves zero out, and remember that it speaks of one arm at a time. "
        f"“Ratio” and “time to reach” are the price: an arm that learns more from each {each} but whose steps are much slower can still be the worse choice for your time.</p>"
    )


def _figure(axis: str, folder: Path, images: bool) -> str:
    words = {"unit": "images", "data": "images"} if images else {"unit": "tokens", "data": "text"}
    caption = escape(CAPTIONS[axis].format(**words))
    try:
        svg = (folder / f"{NAMES[axis]}.svg").read_text(encoding="utf-8")
    except OSError:
        return ""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )
    svg = (
        svg.replace(INK, "currentColor")
        .replace(PAPER, "none")
        .replace("<svg", f'<svg role="img" aria-label="{caption}"', 1)
    )
    svg = re.sub(r'\bid="(figure_|axes_|patch_|line2d_|text_|matplotlib)', rf'id="{axis}-\1', svg)
    figure = f'<figure><div class="scroll">{svg}</div><figcaption>{caption}</figcaption></figure>'
    return f"<h2>{caption.partition(':')[0]}</h2>\n{figure}"


def continuation(sample: Mapping[str, str]) -> str:
    """What the model added to the prompt, whether or not the generator repeated it."""
    return sample["text"].removeprefix(sample["prompt"])


def _samples(samples: Sequence[Mapping[str, str]]) -> str:
    if not samples:
        return ""
    html = ["<h2>Samples</h2>", '<p class="soft">The same prompt (bold) and the same random numbers for every arm.</p>']
    for sample in samples:
        html.append(f"<strong>{escape(sample['arm'])}</strong>")
        html.append(f'<div class="sample"><b>{escape(sample["prompt"])}</b>{escape(continuation(sample))}</div>')
    return "\n".join(html)


def _recipe_text(recipe: Mapping[str, Any]) -> str:
    """JSON values are YAML values: these lines can be pasted into a recipe."""
    return "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in recipe.items())
