"""A self-contained HTML page: plotly, the style and the data are inside, and nothing is fetched.

Only the page's own scripts may run: their checksums are in its Content-Security-Policy. Data lies in the page as JSON
without a character that HTML gives a meaning. So a text stays text even if an escape were forgotten elsewhere.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from depthmix.report.content import Content
from depthmix.report.explorer import EXPLORER_SCRIPT, EXPLORER_STYLE, explorer, script_json
from depthmix.report.inside import Panel, panels, rows
from depthmix.report.plots import Figure, loss_figure
from depthmix.report.sections import closing, inside_section, loss_section, opening, results, samples

HERE = Path(__file__).parent
STYLE = (HERE / "style.css").read_text(encoding="utf-8")
LIVE_SCRIPT = (HERE / "live.js").read_text(encoding="utf-8")
MISSING = "No interactive figures: plotly is not installed (pip install plotly), everything else is complete."


def make_page(content: Content, live: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Return the page as HTML.

    Args:
        content: what the page shows.
        live: documents of a first text, if a server computes further texts. The explorer then comes first.
    """
    figures: dict[str, list[Figure]] = {}
    has_plotly = load()
    warnings = content.warnings if has_plotly else [*content.warnings, MISSING]

    def register(new: Sequence[Figure]) -> str:
        name = f"figure-{len(figures)}"
        figures[name] = list(new)
        return name

    axes = ("tokens", "time") if content.curves else ()
    curves = {axis: register([loss_figure(content.curves, axis, content.images)]) for axis in axes}
    documents = list(content.documents)
    panels_by_model = [[(register(p.figures), p) for p in _panels(documents, i)] for i in range(len(documents))]
    explorer_html = explorer(documents) if live is None else explorer(live, live=True)
    parts = [
        opening(Content(**{**vars(content), "warnings": warnings})),
        "" if live is None else explorer_html,
        results(content),
        loss_section(curves, content.images) if has_plotly else "",
        samples(content),
        inside_section(documents, panels_by_model) if has_plotly and documents else "",
        explorer_html if live is None else "",
        closing(content),
        '<p id="keys" hidden>Arrow keys choose a row, Enter shows it.</p>',
        '<noscript><p class="warn">The figures need JavaScript.</p></noscript>',
    ]
    data = {"figures": figures, "runs": [rows(document) for document in documents]}
    parts.append(f'<script type="application/json" id="page-data">{script_json(data)}</script>')
    scripts = [plotly_source(), (HERE / "page.js").read_text(encoding="utf-8")] if has_plotly and figures else []
    scripts += [EXPLORER_SCRIPT] if explorer_html else []
    scripts += [] if live is None else [LIVE_SCRIPT]
    style = STYLE + (EXPLORER_STYLE if explorer_html else "")
    extra_policy = "" if live is None else " connect-src 'self';"
    return _document(content.title, style, "\n".join(part for part in parts if part), scripts, extra_policy)


def _panels(documents: Sequence[Mapping[str, Any]], i: int) -> list[Panel]:
    return panels(documents[i], documents[0] if i else None)


def _document(title: str, style: str, body: str, scripts: Sequence[str], extra_policy: str) -> str:
    hashes = " ".join(f"'sha256-{checksum(script)}'" for script in scripts) or "'none'"
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:;{extra_policy} base-uri 'none'; form-action 'none'"
    head = '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f'\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    # A browser would ask the server for an icon.
    head += '\n<link rel="icon" href="data:,">' if extra_policy else ""
    tags = "\n".join(f"<script>{script}</script>" for script in scripts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n<title>depthmix: {escape(title)}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n{tags}\n</body>\n</html>\n"
    )


def load() -> bool:
    """Read plotly's script. Return False if plotly is not installed."""
    return bool(plotly_source())


@functools.cache
def plotly_source() -> str:
    """Return plotly's JavaScript from its package, or "" without plotly. Its Python part is not needed and slow to import."""
    spec = importlib.util.find_spec("plotly")
    folders = list(spec.submodule_search_locations or []) if spec else []
    paths = [Path(folder) / "package_data" / "plotly.min.js" for folder in folders]
    return next((path.read_text(encoding="utf-8") for path in paths if path.is_file()), "")


@functools.lru_cache(maxsize=8)
def checksum(script: str) -> str:
    """Return a script's SHA-256 in the form of a Content-Security-Policy."""
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
