"""Generate text with a trained model, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthmix.device import choose_device
from depthmix.errors import CHECKPOINT, DIVERGED, UserError
from depthmix.models import Decoder
from depthmix.models.decoding import CHUNK, Decoding
from depthmix.runs.restore import accelerate_loaded, load_model


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Sample one token.

    Args:
        logits: Logits [V].
        temperature: 0 takes the most likely token.
        top_p: Probability mass of the most likely tokens to sample from.
        generator: Source of randomness, on the CPU.

    Returns:
        The token's id.
    """
    if temperature == 0:
        return int(logits.argmax())
    p = torch.softmax((logits - logits.max()).double() / temperature, dim=-1)  # avoids overflow at low temperatures
    p, order = p.sort(descending=True, stable=True)
    p = torch.where(p.cumsum(-1) - p < top_p, p, 0.0)  # the token that crosses top_p stays
    return int(order[torch.multinomial(p, 1, generator=generator)])


@torch.no_grad()
def generate_tokens(
    model: Decoder, prompt: list[int], max_tokens: int, temperature: float, top_p: float, seed: int, end: int | None
) -> Iterator[int]:
    """Continue a prompt, yielding token ids until `end` or max_tokens.

    Args:
        model: The model, which is put in eval mode.
        prompt: Token ids.
        max_tokens: Maximum number of tokens to yield.
        temperature: 0 takes the most likely token.
        top_p: Probability mass of the most likely tokens to sample from.
        seed: Seed of the sampling.
        end: Id of the token that ends the text, if any.

    Raises:
        UserError: The logits are not finite.
    """
    device = next(model.parameters()).device
    generator, advance = torch.Generator().manual_seed(seed), _steps(model, len(prompt) + max_tokens)
    ids = torch.tensor([prompt], device=device)
    model.eval()
    for _ in range(max_tokens):
        logits = advance(ids).float().cpu()
        if not logits.isfinite().all():
            raise UserError(
                "the model's output is not a number: this run has diverged, use an older checkpoint", DIVERGED
            )
        token = sample(logits, temperature, top_p, generator)
        if token == end:
            return
        yield token
        ids = torch.tensor([[token]], device=device)


def _steps(model: Decoder, length: int) -> Callable[[Tensor], Tensor]:
    """Return a function that appends tokens [1, T] to a sequence and returns the next token's logits [V]. Prompts run
    in chunks.
    """
    if isinstance(model, Decoder) and model.embedding.weight.is_cuda:
        decoding = Decoding(model, 1, length)
        return lambda ids: (decoding.prefill(ids) if ids.shape[1] > 1 else decoding.step(ids[:, 0]))[0]
    cache = model.new_cache()

    def advance(ids: Tensor) -> Tensor:
        for part in ids.split(CHUNK, dim=1):
            logits = model(part, cache=cache, logits_to_keep=1)
        return logits[0, -1]

    return advance


def stream_text(tokenizer: Any, tokens: Iterator[int]) -> Iterator[str]:
    """Decode tokens, yielding pieces of text as soon as their bytes form complete characters."""
    ids: list[int] = []
    shown = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # a character of several bytes is not finished yet
            yield text[len(shown) :]
            shown = text
    text = tokenizer.decode(ids)
    if len(text) > len(shown):
        yield text[len(shown) :]


def check_prompt(prompt: str, name: str = "prompt") -> None:
    """Raise UserError for text that is not valid UTF-8. Python keeps such bytes as lone surrogates."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} must be UTF-8 text, and its character {error.start + 1} is not") from None


def generate_stream(
    run: str | Path,
    prompt: str,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    device: str = "auto",
    accelerate: bool = False,
) -> Iterator[str]:
    """Continue a prompt with the model in a run folder, piece by piece.

    Args:
        run: Run folder, checkpoint, or folder of `save_pretrained`.
        prompt: Text to continue; may be empty.
        max_tokens: Maximum number of tokens to generate.
        temperature: 0 takes the most likely token.
        top_p: Probability mass of the most likely tokens to sample from.
        seed: Seed of the sampling.
        device: cpu, cuda, cuda:N, mps or auto.
        accelerate: Run the mixing of a Hugging Face model that mixes over depth on this package's operators.

    Returns:
        An iterator over pieces of text.

    Raises:
        UserError: An argument is invalid, the prompt is too long, or the model has diverged.
    """
    if max_tokens < 1:
        raise UserError(f"max_tokens must be at least 1, got {max_tokens}")
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature must be a finite number of at least 0, got {temperature}")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p must be above 0 and at most 1, got {top_p}")
    if not 0 <= seed < 2**64:
        raise UserError(f"seed must be at least 0 and below 2**64, got {seed}")
    check_prompt(prompt)
    trained = load_model(run, choose_device(device))
    if trained.tokenizer is None:
        raise UserError(f"{run} was trained on images: it has no text to continue", CHECKPOINT)
    if accelerate:
        accelerate_loaded(trained)
    end = trained.end
    ids = trained.tokenizer.encode(prompt, add_special_tokens=trained.special).ids or ([0] if end is None else [end])
    if len(ids) > trained.config.seq_len:
        what = f"the prompt has {len(ids)} tokens and the model was trained on sequences of {trained.config.seq_len}"
        raise UserError(f"{what}: shorten the prompt")
    positions = getattr(trained.model.config, "max_position_embeddings", None)  # set for Hugging Face models
    if positions is not None and len(ids) + max_tokens > positions:
        what = f"the prompt has {len(ids)} tokens, {max_tokens} more are asked for, and the model has {positions} positions"
        raise UserError(f"{what}: lower max_tokens")
    return stream_text(
        trained.tokenizer, generate_tokens(trained.model, ids, max_tokens, temperature, top_p, seed, end)
    )


def generate_text(
    run: str | Path,
    prompt: str,
    max_tokens: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    device: str = "auto",
) -> str:
    """Return the whole continuation at once; arguments as for `generate_stream`."""
    return "".join(generate_stream(run, prompt, max_tokens, temperature, top_p, seed, device))
