"""The token explorer: choose a token of a text and see, for each site, where it read from. It shows one model or two.

Documents (docs/guides/inspecting.md) go into the page as JSON in which no HTML parser sees markup. explorer.js draws them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXPLORER_SCRIPT = (HERE / "explorer.js").read_text(encoding="utf-8")
EXPLORER_STYLE = (HERE / "explorer.css").read_text(encoding="utf-8")

INTRODUCTION = (
    "A language model sees a text as tokens, which are words or pieces of words. For every token, each site of the model (one attention or MLP) reads a mixture of what lies below it: "
    "the embedding, which is the token alone, and the outputs of earlier sites. Choose a token by clicking, or with the arrow keys and Enter. "
    "Each row of the map is a reader, and each column is a source. The last reader, finish, makes the prediction. The stronger the colour, the larger the weight. "
    "The colour of a token is its loss: how little the model expected it."
)
BOX = """<form id="explorer-form">
<label for="explorer-text">Text to look into</label>
<textarea id="explorer-text" rows="3" spellcheck="false" aria-describedby="explorer-status"></textarea>
<button type="submit">Show</button> <span id="explorer-status" role="status"></span>
</form>
"""


def explorer(documents: Sequence[Mapping[str, Any]], live: bool = False) -> str:
    """Return the explorer as HTML, or "" if there is nothing to show.

    Args:
        documents: from `depthmix inspect`; the explorer shows those that have a text.
        live: add a box for another text, which a server computes.
    """
    models = explorer_data(documents)
    if not models and not live:
        return ""
    return (
        '<section id="explorer" class="explorer" aria-labelledby="explorer-title">\n'
        '<h2 id="explorer-title">Token by token</h2>\n'
        f'<p class="soft">{INTRODUCTION}</p>\n<noscript><p>The explorer needs JavaScript.</p></noscript>\n'
        f'{BOX if live else ""}<div class="panels"></div>\n</section>\n'
        f'<script type="application/json" id="explorer-data">{script_json(models)}</script>\n'
    )


def explorer_data(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the data from which explorer.js draws each document that has a text."""
    shown = [document for document in documents if document["text"] and document["text"]["tokens"]]
    return [
        {
            "label": label,
            "readers": document["readers"],
            "sources": document["sources"],
            "mean": document["mixing"]["mean"],
            "mean_over": document["mixing"].get("over") or f"{document['mixing']['tokens']:,} tokens",
            **document["text"],
        }
        for document, label in zip(shown, labels(shown), strict=True)
    ]


def labels(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name each model: by its label, otherwise by its mixer and options. Models of the same name get their run's folder added."""
    names = [document.get("label") or _rule_of(document) for document in documents]
    return [
        f"{name} ({document['run']})" if names.count(name) > 1 else name
        for name, document in zip(names, documents, strict=True)
    ]


def _rule_of(document: Mapping[str, Any]) -> str:
    options = ",".join(f"{k}={v}" for k, v in document["mixer_options"].items())
    return f"{document['mixer']}:{options}" if options else str(document["mixer"])


def script_json(value: Any) -> str:
    """Format JSON for a script tag, escaping the characters that have a meaning in HTML or in older JavaScript."""
    # json.dumps itself escapes everything that is not ASCII.
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
