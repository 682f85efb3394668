"""`depthmix inspect`: measure a trained model from inside, as one document and as tables."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthmix.config import InspectConfig
from depthmix.device import autocast, choose_device
from depthmix.errors import CHECKPOINT, DATA, DIVERGED, UserError
from depthmix.files import check_above, write_text
from depthmix.insight import document as doc
from depthmix.insight.dynamics import gradient_norms, magnitudes
from depthmix.insight.edges import edge_effects
from depthmix.insight.losses import next_token_loss
from depthmix.insight.maps import depth_map
from depthmix.insight.mixing import depth_mixing, sources_of
from depthmix.insight.ranks import structure
from depthmix.insight.skips import skip_effects
from depthmix.insight.streams import stream_report
from depthmix.insight.summary import summary
from depthmix.mixers.defaults import chosen_options
from depthmix.ownership import check_replaceable
from depthmix.runs.foreign import measured as measured_model
from depthmix.runs.restore import Trained, load_model
from depthmix.train.evaluate import token_losses
from depthmix.train.generate import check_prompt
from depthmix.train.measure import batches_of_text
from depthmix.train.progress import phases
from depthmix.values import check_at_least

Progress = Callable[[str, int, int | None], None]


def inspect(config: InspectConfig) -> None:
    """Print the tables and, where asked for, write the document."""
    if config.json:
        check_above(Path(config.json))
        check_replaceable(Path(config.json), "inspection")
    with phases() as progress:
        document = inspect_run(config, progress)
    print(summary(document))
    if config.json:
        check_replaceable(Path(config.json), "inspection")  # again: measuring took a while
        write_text(Path(config.json), json.dumps(document, allow_nan=False) + "\n")
        print(f"Everything, token by token too: {config.json}")


def inspect_run(config: InspectConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Measure the model of a run.

    Args:
        config: What to measure, and on which text.
        progress: Called with (phase, done, total).

    Returns:
        The document, as docs/guides/inspecting.md describes it.

    Raises:
        UserError: The model is not a decoder of depthmix, has diverged, or an option is invalid.
    """
    tell = progress or (lambda phase, done, total: None)
    _check(config)
    device = choose_device(config.device)
    trained = load_model(config.run, device)
    if trained.tokenizer is None:
        what = f"{config.run} was trained on images"
        raise UserError(f"{what}: depthmix.insight measures such models from Python, on images", CHECKPOINT)
    model = measured_model(trained.model, str(config.run))
    mixer = model.mixer
    ids, pieces = encode_text(trained, config.text, config.seq_len)
    batches = [batch.to(device) for batch in _measured_on(trained, config, ids)]
    with autocast(device, trained.config.precision):
        loss, measured = _over_depth(model, batches[0])
        if not math.isfinite(loss):
            what = "the model's output is not a number"
            raise UserError(f"{what}: this run has diverged, use an older checkpoint", DIVERGED)
        inputs = [batch[:, :-1] for batch in batches]
        measured["mixing"] = doc.of_depth_map(mixer, depth_map(model, _told(inputs, "depth maps", tell)))
        sources = sources_of(model, mixer, inputs[0])
        measured["structure"] = doc.of_structure(structure(mixer, sources))
        measured["streams"] = doc.of_streams(stream_report(mixer, sources))
        del sources
        measured |= _causal(model, batches, config.causal_tokens, tell)
        measured["text"] = text_by_token(model, ids, pieces) if pieces else None
    described = {
        "schema": doc.SCHEMA,
        "run": str(config.run),
        "step": trained.step,
        "mixer": trained.config.mixer,
        "mixer_options": chosen_options(trained.config.mixer, trained.config.mixer_options),
        "parameters": model.parameter_counts(),
        **doc.describe_mixer(mixer),
        "loss": loss,
    }
    return doc.rounded({**described, **measured, "training": trained.folder.read_dynamics()})


def _check(config: InspectConfig) -> None:
    check_at_least(config, 1, "tokens", "batch_size", "seq_len")
    check_at_least(config, 0, "causal_tokens")
    if config.data and config.input:
        raise UserError("give either data or input, not both")
    check_prompt(config.text, "text")


def encode_text(trained: Trained, text: str, seq_len: int | None = None) -> tuple[Tensor, list[str]]:
    """Tokenize a text for display.

    Args:
        trained: The model, with its tokenizer.
        text: The text.
        seq_len: Maximum number of tokens; by default as in training.

    Returns:
        Token ids [1, T], and the piece of text that each token stands for. The pieces concatenate to the text: of
            several tokens that share a character's bytes, the first gets it and the others get "".

    Raises:
        UserError: The text has more than seq_len tokens.
    """
    encoded, longest = trained.tokenizer.encode(text, add_special_tokens=False), seq_len or trained.config.seq_len
    if len(encoded.ids) > longest:
        what = f"the text has {len(encoded.ids)} tokens and the model's sequences {longest}"
        raise UserError(f"{what}: give a shorter one, or a longer --seq-len")
    device = next(trained.model.parameters()).device
    pieces, shown = [], 0
    for a, b in encoded.offsets:
        pieces.append(text[max(a, shown) : b])
        shown = max(shown, b)
    return torch.tensor([encoded.ids], device=device), pieces


def _measured_on(trained: Trained, config: InspectConfig, ids: Tensor) -> Iterator[Tensor]:
    """Yield batches [B, T + 1] of about config.tokens tokens. A model without data is measured on config.text."""
    if not (config.input or config.data or trained.config.data) and config.text:
        if ids.shape[1] < 2:
            raise UserError("the text is too short to measure the model on: give another with --input", DATA)
        yield ids
        return
    parts, _ = batches_of_text(trained, config, config.data)
    yield from first_tokens(itertools.chain.from_iterable(parts.values()), config.tokens)


def first_tokens(batches: Iterable[Tensor], tokens: int) -> Iterator[Tensor]:
    """Yield rows of the batches until there are `tokens` tokens, but at least one row."""
    for batch in batches:
        length = batch.shape[1] - 1
        yield batch[: max(1, tokens // length)]
        tokens -= batch[:, 1:].numel()
        if tokens < length:
            return


def _over_depth(model: Any, batch: Tensor) -> tuple[float, dict[str, Any]]:
    """Compute the loss of a batch and the dynamics (magnitudes and gradient norms over depth) of its forward and
    backward pass.
    """
    with torch.enable_grad():
        loss = next_token_loss(model, batch).mean()
        loss.backward()
    norms = gradient_norms(model.sublayers).tolist()
    model.zero_grad(set_to_none=True)
    numbers = magnitudes(model, batch[:, :-1])
    return loss.item(), {"dynamics": {"tokens": batch[:, 1:].numel(), **numbers, "gradient_norm": norms}}


def _causal(model: Any, batches: list[Tensor], tokens: int, tell: Progress) -> dict[str, Any]:
    if not tokens:
        return {"edges": None, "skips": None}
    some = list(first_tokens(batches, tokens))
    done, n = itertools.count(1), (model.mixer.n_sites + 1) * len(some)
    edges = edge_effects(model, some, progress=lambda: tell("cut connections", next(done), n))
    skips = skip_effects(model, _told(some, "skipped sublayers", tell))
    return {"edges": doc.of_edges(edges), "skips": doc.of_skips(skips)}


def text_by_token(model: Any, ids: Tensor, pieces: list[str]) -> dict[str, Any]:
    """Report where each token of a text was read from, for the document; ids and pieces are those of `encode_text`."""
    with torch.no_grad():
        losses = token_losses(model, ids)[0].tolist() if ids.shape[1] > 1 else []
    m = depth_mixing(model, ids, per_token=True)[0]
    return doc.of_tokens(model.mixer, pieces, [None, *losses], m)


def _told(batches: list[Tensor], phase: str, tell: Progress) -> Iterator[Tensor]:
    for i, batch in enumerate(batches):
        yield batch
        tell(phase, i + 1, len(batches))
