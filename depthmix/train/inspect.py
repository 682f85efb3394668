"""`depthmix inspect`: measure a trained model from inside, as one document and as tables."""

from __future__ import annotations

import functools
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
from depthmix.insight.contributions import shares_by_token
from depthmix.insight.dynamics import gradient_norms, magnitudes
from depthmix.insight.edges import edge_effects, losses_without
from depthmix.insight.lens import logit_lens
from depthmix.insight.losses import logits_of, next_token_loss
from depthmix.insight.maps import depth_map
from depthmix.insight.mixing import choose_mixer, sources_of
from depthmix.insight.mode import eval_mode
from depthmix.insight.ranks import structure
from depthmix.insight.skips import skip_effects
from depthmix.insight.streams import stream_report
from depthmix.insight.summary import summary
from depthmix.mixers.defaults import chosen_options
from depthmix.models.with_mixer import with_mixer
from depthmix.ops.precision import compute_dtype
from depthmix.ownership import check_replaceable
from depthmix.runs.foreign import measured as measured_model
from depthmix.runs.restore import Trained, load_model
from depthmix.train.generate import check_prompt
from depthmix.train.measure import batches_of_text
from depthmix.train.progress import phases
from depthmix.values import check_at_least

Progress = Callable[[str, int, int | None], None]
PREDICTIONS = 5  # most probable next tokens of each token


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
        cuts = config.causal_tokens > 0
        measured["text"] = text_by_token(model, ids, pieces, trained.tokenizer, cuts) if pieces else None
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
    return torch.tensor([encoded.ids], device=device), pieces_of(text, encoded.offsets)


def pieces_of(text: str, offsets: Iterable[tuple[int, int]]) -> list[str]:
    """Return the piece of a text that each token stands for, from the tokens' offsets. The pieces concatenate to the text."""
    pieces, shown = [], 0
    for a, b in offsets:
        pieces.append(text[max(a, shown) : b])
        shown = max(shown, b)
    return pieces


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


@torch.no_grad()
def text_by_token(model: Any, ids: Tensor, pieces: list[str], tokenizer: Any, cuts: bool = False) -> dict[str, Any]:
    """Report, for each token of a text, what was read, what was predicted, and which connections the prediction needed.

    Args:
        model: A language model with a mixer, on the device of the ids.
        ids: Token ids [1, T], from `encode_text`.
        pieces: The pieces of text that the tokens stand for, from `encode_text`.
        tokenizer: A tokenizer, which decodes the predicted tokens.
        cuts: Whether to cut every connection, which takes S²/2 passes over the text.

    Returns:
        The field `text` of the document (docs/guides/inspecting.md).
    """
    model, name = with_mixer(model), token_names(tokenizer)
    mixer = choose_mixer(model)
    with eval_mode(model):
        logits = logits_of(model, ids)[0]
    log_p = logits.to(compute_dtype(logits)).log_softmax(-1)
    losses = -log_p[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
    best, tokens = log_p.exp().topk(min(PREDICTIONS, log_p.shape[-1]))
    predictions = [
        [{"token": name(token), "probability": p} for token, p in zip(*row, strict=True)]
        for row in zip(tokens.tolist(), best.tolist(), strict=True)
    ]
    lens = logit_lens(model, ids)
    # [token][reader]. Nothing follows the last token.
    following = [*lens.following[:, 0].T.tolist(), [None] * len(lens.tokens)]
    by_reader = [
        [{"token": name(token), "probability": p, "next": after} for token, p, after in zip(*row, strict=True)]
        for row in zip(lens.tokens[:, 0].T.tolist(), lens.probabilities[:, 0].T.tolist(), following, strict=True)
    ]
    return {
        "tokens": pieces,
        "losses": [None, *losses.tolist()],
        **doc.of_tokens(mixer, shares_by_token(mixer, [s[0] for s in sources_of(model, mixer, ids)])),
        "predictions": predictions,
        "lens": by_reader,
        "cuts": _cuts_by_token(model, ids) if cuts else None,
    }


def _cuts_by_token(model: Any, ids: Tensor) -> list[list[list[float]] | None]:
    """Cut every connection. Return the rise of the next token's loss, [token][reader][source]; None for the last token."""
    changes = []
    for reader in range(choose_mixer(model).n_sites + 1 if ids.shape[1] > 1 else 0):
        plain, *losses = losses_without(model, ids, reader, [None, *((None, s) for s in range(reader + 1))])[:, 0]
        changes.append((torch.stack(losses) - plain).T.tolist())
    return [*(list(token) for token in zip(*changes, strict=True)), None]


def losses_of_cut(model: Any, ids: Tensor, reader: int, source: int) -> list[float | None]:
    """Compute the losses of a text's tokens with one connection cut, in all ways; None for the first token.

    Args:
        model: As for `text_by_token`.
        ids: Token ids [1, T].
        reader: A site, or S for finish.
        source: 0 for the embedding, i + 1 for the output of site i.
    """
    if ids.shape[1] < 2:
        return [None]
    losses: list[float] = losses_without(model, ids, reader, [(None, source)])[0, 0].tolist()
    return [None, *losses]


def token_names(tokenizer: Any) -> Callable[[int], str]:
    """Return a function that decodes one token id, keeping a leading space.

    Args:
        tokenizer: A tokenizer of tokenizers or transformers.

    Returns:
        The function. Bytes that are no whole character become U+FFFD, the replacement character.
    """

    @functools.cache
    def name(token: int) -> str:
        # Many decoders drop the space before a text's first word, so a second copy shows the space.
        once, twice = (str(tokenizer.decode([token] * n, skip_special_tokens=False)) for n in (1, 2))
        return twice[len(once) :] if twice.startswith(once) else once

    return name


def _told(batches: list[Tensor], phase: str, tell: Progress) -> Iterator[Tensor]:
    for i, batch in enumerate(batches):
        yield batch
        tell(phase, i + 1, len(batches))
