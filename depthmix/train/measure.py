"""`depthmix eval`: measure a trained model on any text, or on its validation images."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from depthmix.config import EvalConfig, InspectConfig
from depthmix.data.alphabet import Alphabet
from depthmix.data.corpus import documents
from depthmix.data.dataset import TokenData, validation_parts
from depthmix.data.images import ImageData
from depthmix.data.tokenizer import load_tokenizer
from depthmix.device import choose_device
from depthmix.errors import DATA, UserError
from depthmix.runs.restore import Trained, accelerate_loaded, load_model
from depthmix.train.check import check_own_rule
from depthmix.train.evaluate import Evaluation, ImageEvaluation, check_tokens, describe_learnt, evaluate
from depthmix.train.task import Pictures
from depthmix.values import check_at_least


def evaluate_run(config: EvalConfig) -> tuple[Evaluation | ImageEvaluation, int]:
    """Measure a run's model on text files, or on its validation split.

    Args:
        config: What to measure.

    Returns:
        The loss, with perplexity and bits per byte or, of images, with accuracy; and the step of the checkpoint, 0 for
            a model without checkpoints.

    Raises:
        UserError: The model or the text cannot be used.
    """
    check_at_least(config, 1, "batch_size", "seq_len")
    device = choose_device(config.device)
    trained = load_model(config.run, device)
    if config.accelerate:
        accelerate_loaded(trained)
    check_own_rule(trained.config, text=trained.tokenizer is not None)
    if trained.tokenizer is None:
        return _on_images(trained, config, device), trained.step
    parts, ratio = batches_of_text(trained, config)
    return evaluate(trained.model, parts, device, trained.config.precision, ratio), trained.step


def _on_images(trained: Trained, config: EvalConfig, device: torch.device) -> ImageEvaluation:
    if config.input or config.seq_len is not None:
        raise UserError(f"{trained.folder.path} was trained on images: leave input and seq_len out")
    data = ImageData.open(trained.folder.find_data(trained.config.data))
    task = Pictures(replace(trained.config, micro_batch_size=config.batch_size), data)
    sums = [task.sums(trained.model, batch, device, lambda losses: losses) for batch in task.validation()[""]]
    return task.evaluation({"": [sum(column) for column in zip(*sums, strict=True)]})


def batches_of_text(
    trained: Trained, config: EvalConfig | InspectConfig, data: str = ""
) -> tuple[dict[str, Iterator[Tensor]], float]:
    """Return validation batches, or batches of the input.

    Args:
        trained: The model.
        config: Says which input to use, batch_size and seq_len.
        data: Prepared data to use instead of those the model was trained with.

    Returns:
        Batches [B, T + 1] of each domain, under an empty name for input, and mean bytes per token.

    Raises:
        UserError: There is no text, or it was prepared with another tokenizer.
    """
    seq_len = config.seq_len or trained.config.seq_len
    if config.input:
        ids, n_bytes = _encode(trained, config)
        return {"": _windows(ids, seq_len, config.batch_size)}, n_bytes / len(ids)
    if not data and not trained.config.data:
        what = f"{trained.folder.path} does not name the data that its model was trained on"
        raise UserError(f"{what}: give the text to measure it on with --input", DATA)
    opened = TokenData.open(data or trained.folder.find_data(trained.config.data))
    rows = trained.model.config.vocab_size
    # A pretrained model may have more rows than its tokenizer has entries.
    if opened.vocab_size != rows and not (trained.config.init and opened.vocab_size < rows):
        what = f"has {opened.vocab_size} entries and the model's {rows}"
        raise UserError(f"the vocabulary of {opened.folder} {what}: the model was trained on other data", DATA)
    if (
        data
        and load_tokenizer(opened.tokenizer_path, add_end=trained.end is not None).get_vocab()
        != trained.tokenizer.get_vocab()
    ):
        raise UserError(f"{opened.folder} was prepared with another tokenizer than the model's: use --input", DATA)
    val = opened.split("val")
    check = functools.partial(check_tokens, vocab_size=opened.vocab_size, folder=opened.folder)
    parts = validation_parts(val, seq_len, config.batch_size)
    return {domain: map(check, batches) for domain, batches in parts.items()}, val.n_bytes / val.n_tokens


def _encode(trained: Trained, config: EvalConfig | InspectConfig) -> tuple[np.ndarray, int]:
    end = trained.end
    ids: list[int] = []
    n_bytes, alphabet = 0, Alphabet(trained.tokenizer)
    for text in documents(config.input, config.text_field, "file"):
        alphabet.check(text)
        ids += trained.tokenizer.encode(text, add_special_tokens=False).ids + ([] if end is None else [end])
        n_bytes += len(text.encode())
    if len(ids) < 2:
        raise UserError("the text is too short to measure: it has fewer than two tokens", DATA)
    return np.asarray(ids), n_bytes


def _windows(ids: np.ndarray, seq_len: int, batch_size: int) -> Iterator[Tensor]:
    """Yield batches of rows of seq_len + 1 tokens that overlap by one token. The last, shorter row comes alone."""
    starts = range(0, len(ids) - 1, seq_len)
    rows = [ids[s : s + seq_len + 1] for s in starts]
    full = [r for r in rows if len(r) == seq_len + 1]
    for i in range(0, len(full), batch_size):
        yield torch.from_numpy(np.stack(full[i : i + batch_size]))
    if len(rows) > len(full):
        yield torch.from_numpy(rows[-1][None])


def measure(config: EvalConfig) -> None:
    """Print what `evaluate_run` measures."""
    evaluation, step = evaluate_run(config)
    numbers: dict[str, Any] = {"step": step or None, "loss": evaluation.loss, **evaluation.numbers()}
    if isinstance(evaluation, ImageEvaluation):
        numbers["images"] = evaluation.images
        text = f"loss {evaluation.loss:.4f} nats per image, accuracy {evaluation.accuracy:.2%}, {evaluation.images:,} images"
    else:
        numbers["tokens"] = evaluation.tokens
        learnt = describe_learnt(evaluation.perplexity, evaluation.bits_per_byte)
        text = f"loss {evaluation.loss:.4f} nats per token, {learnt}, {evaluation.tokens:,} tokens"
        text += "".join(f"\n    {domain}: loss {loss:.4f}" for domain, loss in evaluation.domains.items())
    print(json.dumps(numbers) if config.json else text)
