"""A self-contained HTML page: style, scripts and data are inside, and nothing is fetched.

Only the page's own script may run: its checksum is in its Content-Security-Policy. Data lies in the page as JSON without a character
that HTML gives a meaning. So a text stays text even if an escape were forgotten elsewhere.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from depthmix.report.content import Content, time_unit
from depthmix.report.effects import effects
from depthmix.report.model_data import explorer_data, models_data, script_json
from depthmix.report.sections import closing, curves, inside, maps, opening, over_depth, results, samples, words

WEB = Path(__file__).parent / "web"
# In the order in which they use each other.
SCRIPTS = ("basics", "export", "maps", "plots", "effects", "river", "sentence", "words", "overview", "live", "start")


def make_page(content: Content, live: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Return the page as HTML.

    Args:
        content: What the page shows.
        live: Documents of a first text, if a server computes further texts. The words then come first.
    """
    models = models_data(content.documents)
    scale, time = time_unit(max((curve.seconds[-1] for curve in content.curves), default=0.0))
    data = {
        "models": models,
        "curves": [{**asdict(curve), "seconds": [s / scale for s in curve.seconds]} for curve in content.curves],
        "units": ["images" if content.images else "tokens", time],
        "effects": [asdict(effect) for effect in content.effects],
        "baseline": content.baseline,
        "live": None if live is None else explorer_data(live),
    }
    has_words = live is not None or any(model["text"] for model in models)
    parts = [
        f'<header class="top"><div>{opening(content)}</div>{effects(content)}</header>',
        words(live is not None) if has_words else "",
        maps(models),
        over_depth(models),
        curves(content),
        results(content),
        samples(content),
        inside(models, content.documents),
        closing(content),
        f'<script type="application/json" id="page-data">{script_json(data)}</script>',
    ]
    return _document(content.title, "\n".join(part for part in parts if part), live is not None)


def _document(title: str, body: str, live: bool) -> str:
    code, style = script(), (WEB / "style.css").read_text(encoding="utf-8")
    extra_policy = " connect-src 'self';" if live else ""
    policy = f"default-src 'none'; script-src 'sha256-{checksum(code)}'; style-src 'unsafe-inline'; img-src data: blob:;{extra_policy} base-uri 'none'; form-action 'none'"
    head = '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f'\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    # A browser would ask the server for an icon.
    head += '\n<link rel="icon" href="data:,">' if live else ""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n<title>depthmix: {escape(title)}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n<script>{code}</script>\n</body>\n</html>\n"
    )


@functools.cache
def script() -> str:
    """Return the files of SCRIPTS as one script, whose names stay inside it."""
    files = [(WEB / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    return '"use strict";\n(() => {\n' + "\n".join(files) + "})();\n"


@functools.lru_cache(maxsize=8)
def checksum(code: str) -> str:
    """Return a script's SHA-256 in the form of a Content-Security-Policy."""
    return base64.b64encode(hashlib.sha256(code.encode("utf-8")).digest()).decode("ascii")
