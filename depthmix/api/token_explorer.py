"""`depthmix.insight.explore`: the page of a text, token by token, inside a notebook."""

from __future__ import annotations

from html import escape
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.errors import DIVERGED, UserError
from depthmix.insight import document as doc
from depthmix.insight.dynamics import magnitudes
from depthmix.insight.maps import depth_map
from depthmix.insight.mixing import choose_mixer, sources_of
from depthmix.insight.ranks import structure
from depthmix.insight.streams import stream_report
from depthmix.mixers import Mixer
from depthmix.models.with_mixer import with_mixer
from depthmix.report.content import Content
from depthmix.report.page import make_page
from depthmix.runs.foreign import measured
from depthmix.train.generate import check_prompt
from depthmix.train.inspect import pieces_of, text_by_token, token_names

TITLE = "Where predictions come from"
HEIGHT = 900  # pixels


class Explorer:
    """A page about one text. A notebook shows it; `html` is the whole page, for a file."""

    def __init__(self, html: str) -> None:
        self.html = html

    def _repr_html_(self) -> str:
        """Return a frame with the page. Its scripts run, but cannot reach the notebook."""
        style = f"width: 100%; height: {HEIGHT}px; border: 0"
        return f'<iframe sandbox="allow-scripts" title="{TITLE}" style="{style}" srcdoc="{escape(self.html)}"></iframe>'

    def __repr__(self) -> str:
        return f"<page of {len(self.html):,} characters; a notebook shows it, and .html is its source>"


def explore(model: Any, tokenizer: Any, text: str, *, against: Any = None, cuts: bool = False) -> Explorer:
    """Show where a model's predictions in a text come from.

    Args:
        model: A `Decoder`, a Hugging Face model with a mixer, or a language model of your own with one.
        tokenizer: Its tokenizer, of tokenizers or transformers.
        text: The text. Every token costs memory for each pair of reader and source.
        against: A second model with the same tokenizer, shown beside the first.
        cuts: Whether to measure how much the prediction of every token needs each connection. This takes about S²/2
            passes over the text for S sublayers.

    Returns:
        The page. As the last value of a notebook's cell it is shown there.

    Raises:
        UserError: The text is empty, or a model's output is not a number.
        ValueError: A model has no mixer, or several.

    Examples:
        >>> depthmix.insight.explore(trained.model, trained.tokenizer, "My fellow Americans")
        <page of ... characters; a notebook shows it, and .html is its source>
    """
    check_prompt(text, "the text")
    ids, pieces = _encode(tokenizer, text)
    if len(ids) < 2:
        raise UserError(f"the text has {len(ids)} tokens, and a prediction needs two: write a sentence")
    models = {"model": model, **({} if against is None else {"against": against})}
    documents = [_document(name, one, ids, pieces, tokenizer, cuts) for name, one in models.items()]
    return Explorer(make_page(Content(title=TITLE, documents=documents)))


def _encode(tokenizer: Any, text: str) -> tuple[list[int], list[str]]:
    """Return token ids, and the piece of text that each token stands for."""
    # transformers' fast tokenizers wrap one of tokenizers, which knows offsets.
    fast = getattr(tokenizer, "backend_tokenizer", tokenizer)
    encoded = fast.encode(text, add_special_tokens=False)
    if hasattr(encoded, "offsets"):
        return encoded.ids, pieces_of(text, encoded.offsets)
    return encoded, [token_names(tokenizer)(token) for token in encoded]


def _document(name: str, model: Any, ids: list[int], pieces: list[str], tokenizer: Any, cuts: bool) -> dict[str, Any]:
    """Return the document of a model measured on one text. It lacks what needs a backward pass or a run."""
    model = with_mixer(model) if isinstance(model, nn.Module) else measured(model, name)
    mixer = choose_mixer(model)
    batch: Tensor = torch.tensor([ids], device=next(model.parameters()).device)
    text = text_by_token(model, batch, pieces, tokenizer, cuts)
    document = doc.rounded(
        {
            "schema": doc.SCHEMA,
            "run": name,
            "step": 0,
            "mixer": mixer.name,
            "mixer_options": _chosen(mixer),
            "parameters": {"total": sum(p.numel() for p in model.parameters())},
            **doc.describe_mixer(mixer),
            "mixing": doc.of_depth_map(mixer, depth_map(model, [batch])),
            "structure": doc.of_structure(structure(mixer, sources := sources_of(model, mixer, batch))),
            "streams": doc.of_streams(stream_report(mixer, sources)),
            "dynamics": {"tokens": len(ids), **magnitudes(model, batch), "gradient_norm": [None] * mixer.n_sites},
            "edges": None,
            "skips": None,
            "text": text,
            "training": [],
        }
    )
    if None in document["text"]["losses"][1:]:
        raise UserError(f"the output of the {name} is not a number: these weights are not usable", DIVERGED)
    return document


def _chosen(mixer: Mixer) -> dict[str, Any]:
    """Return the options that differ from their defaults."""
    return {name: value for name, value in mixer.chosen.items() if value != mixer.options[name].default}
