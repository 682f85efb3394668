"""Loss, perplexity and bits per byte of text; loss and accuracy of images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from depthmix.device import autocast
from depthmix.errors import DATA, UserError
from depthmix.ops.token_loss import token_loss
from depthmix.parallel.share import Share

ALL = Share()  # tokens of a sequence


@dataclass
class Evaluation:
    """Loss of a model on text, with perplexity and bits per byte."""

    loss: float  # nats per token
    tokens: int
    bytes_per_token: float
    domains: dict[str, float] = field(default_factory=dict)  # nats per token in each named domain

    @classmethod
    def of(cls, sums: Mapping[str, Sequence[float]], bytes_per_token: float) -> Evaluation:
        """Combine each domain's (sum of losses, number of tokens). A domain with an empty name is not reported
        separately.
        """
        total, tokens = (math.fsum(column) for column in zip(*sums.values(), strict=True))
        domains = {name: loss / count for name, (loss, count) in sums.items() if name}
        return cls(total / tokens, round(tokens), bytes_per_token, domains)

    @property
    def perplexity(self) -> float:
        """exp(loss), capped so that it stays finite."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """Loss in bits per byte of text; None where the text of the tokens is unknown."""
        return self.loss / math.log(2) / self.bytes_per_token if self.bytes_per_token else None

    def curve(self) -> dict[str, float]:
        """Return the numbers for a line of the metrics."""
        return {"val_loss": self.loss, **{f"val_loss/{name}": loss for name, loss in self.domains.items()}}

    def numbers(self) -> dict[str, Any]:
        """Return the numbers that a result holds besides the loss."""
        by_domain = {"domains": dict(self.domains)} if self.domains else {}
        return {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte, **by_domain}


def describe_learnt(perplexity: float, bits_per_byte: float | None) -> str:
    """Format the perplexity and, where known, the bits per byte."""
    return f"perplexity {perplexity:.2f}" + ("" if bits_per_byte is None else f", {bits_per_byte:.4f} bits per byte")


@dataclass
class ImageEvaluation:
    """Loss and accuracy of a model on images."""

    loss: float  # nats per image
    images: int
    accuracy: float  # share of images whose most likely class is correct

    def curve(self) -> dict[str, float]:
        """Return the numbers for a line of the metrics."""
        return {"val_loss": self.loss, "val_accuracy": self.accuracy}

    def numbers(self) -> dict[str, Any]:
        """Return the numbers that a result holds besides the loss."""
        return {"accuracy": self.accuracy}


def check_tokens(batch: Tensor, vocab_size: int, folder: object) -> Tensor:
    """Return the batch, still on the CPU. Raises UserError for a token beyond the vocabulary, which would crash the
    GPU.
    """
    if (largest := int(batch.max())) >= vocab_size:
        what = f"token {largest} is beyond the vocabulary of {vocab_size}"
        raise UserError(f"{folder} is damaged: {what}; prepare the data again", DATA)
    return batch


def token_losses(model: Callable[[Tensor], Tensor], batch: Tensor, share: Share = ALL) -> Tensor:
    """Compute the loss of every token of a batch but the first of each row.

    Args:
        model: Maps token ids [B, T] to logits [B, T, V].
        batch: Token ids [B, T + 1].
        own: The tokens of each row that belong to this process; by default all.

    Returns:
        Losses in nats [B, T].
    """
    logits, targets = model(share.of(batch[:, :-1], dim=1)), share.of(batch[:, 1:], dim=1)
    return token_loss(logits.flatten(0, 1), targets.flatten()).view_as(targets)


@torch.no_grad()
def summed_loss(
    model: Callable[[Tensor], Tensor],
    batch: Tensor,
    device: torch.device,
    precision: str,
    whole: Callable[[Tensor], Tensor] = lambda losses: losses,
    share: Share = ALL,
) -> tuple[float, int]:
    """Sum the losses of a batch in fp64.

    Args:
        model: Maps token ids to logits.
        batch: Token ids [B, T + 1].
        device: Where the model is.
        precision: As in TrainConfig.
        whole: Makes a plain tensor of one that is divided among processes.
        own: The tokens of each row that belong to this process.

    Returns:
        The sum, and the number of tokens.
    """
    with autocast(device, precision):
        losses = whole(token_losses(model, batch.to(device), share))
    return float(losses.cpu().double().sum()), losses.numel()  # summed on the CPU, because MPS has no fp64


def evaluate(
    model: nn.Module,
    parts: Mapping[str, Iterable[Tensor]],
    device: torch.device,
    precision: str,
    bytes_per_token: float,
) -> Evaluation:
    """Measure a language model.

    Args:
        model: Maps token ids [B, T] to logits.
        parts: Batches [B, T + 1] of each domain.
        device: Where the model is.
        precision: As in TrainConfig.
        bytes_per_token: Mean bytes of text per token, for bits per byte; 0 where unknown.

    Returns:
        The mean loss over all tokens and over each named domain, summed in fp64.
    """
    model.eval()
    sums: dict[str, tuple[float, int]] = {}
    for name, batches in parts.items():
        total, tokens = 0.0, 0
        for batch in batches:
            loss, n = summed_loss(model, batch, device, precision)
            total, tokens = total + loss, tokens + n
        sums[name] = total, tokens
    model.train()
    return Evaluation.of(sums, bytes_per_token)


@torch.no_grad()
def summed_images(
    logits: Callable[[Tensor], tuple[Tensor, Tensor]], batch: Tensor, device: torch.device, precision: str
) -> tuple[float, int, int]:
    """Sum the losses of a batch of images in fp64.

    Args:
        logits: Maps a batch to (logits, labels).
        batch: The batch.
        device: Where the model is.
        precision: As in TrainConfig.

    Returns:
        The sum, the number of images, and the number classified correctly.
    """
    with autocast(device, precision):
        scores, labels = logits(batch.to(device))
    losses = functional.cross_entropy(scores, labels, reduction="none")
    return float(losses.cpu().double().sum()), len(labels), int((scores.argmax(-1) == labels).sum())
