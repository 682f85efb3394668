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
    """What a model makes of a text."""

    loss: float  # nats per token
    tokens: int
    bytes_per_token: float
    domains: dict[str, float] = field(default_factory=dict)  # nats per token in each named domain

    @classmethod
    def of(cls, sums: Mapping[str, Sequence[float]], bytes_per_token: float) -> Evaluation:
        """Combine each domain's sum of losses and number of tokens; a domain without a name is not reported apart."""
        total, tokens = (math.fsum(column) for column in zip(*sums.values(), strict=True))
        domains = {name: loss / count for name, (loss, count) in sums.items() if name}
        return cls(total / tokens, round(tokens), bytes_per_token, domains)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """None for tokens whose text nobody has."""
        return self.loss / math.log(2) / self.bytes_per_token if self.bytes_per_token else None

    def curve(self) -> dict[str, float]:
        """What is logged on the way."""
        return {"val_loss": self.loss, **{f"val_loss/{name}": loss for name, loss in self.domains.items()}}

    def numbers(self) -> dict[str, Any]:
        """What else a result says."""
        by_domain = {"domains": dict(self.domains)} if self.domains else {}
        return {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte, **by_domain}


def describe_learnt(perplexity: float, bits_per_byte: float | None) -> str:
    """Say perplexity and, where there are any, bits per byte."""
    return f"perplexity {perplexity:.2f}" + ("" if bits_per_byte is None else f", {bits_per_byte:.4f} bits per byte")


@dataclass
class ImageEvaluation:
    """What a model makes of images."""

    loss: float  # nats per image
    images: int
    accuracy: float  # the share whose likeliest class is the right one

    def curve(self) -> dict[str, float]:
        """What is logged on the way."""
        return {"val_loss": self.loss, "val_accuracy": self.accuracy}

    def numbers(self) -> dict[str, Any]:
        """What else a result says."""
        return {"accuracy": self.accuracy}


def check_tokens(batch: Tensor, vocab_size: int, folder: object) -> Tensor:
    """The batch, still on the CPU; UserError for a token that the embedding does not have, which no GPU survives."""
    if (largest := int(batch.max())) >= vocab_size:
        what = f"token {largest} is beyond the vocabulary of {vocab_size}"
        raise UserError(f"{folder} is damaged: {what}; prepare the data again", DATA)
    return batch


def token_losses(model: Callable[[Tensor], Tensor], batch: Tensor, own: Share = ALL) -> Tensor:
    """Nats for every token of a batch [B, T + 1] but the first of each row, or for those of them that are this process's: [B, T]."""
    logits, targets = model(own.of(batch[:, :-1], dim=1)), own.of(batch[:, 1:], dim=1)
    return token_loss(logits.flatten(0, 1), targets.flatten()).view_as(targets)


@torch.no_grad()
def summed_loss(
    model: Callable[[Tensor], Tensor],
    batch: Tensor,
    device: torch.device,
    precision: str,
    whole: Callable[[Tensor], Tensor] = lambda losses: losses,
    own: Share = ALL,
) -> tuple[float, int]:
    """The sum of a batch's losses, in fp64, and how many there are; whole: makes plain tensors of divided ones; own: tokens."""
    with autocast(device, precision):
        losses = whole(token_losses(model, batch.to(device), own))
    return float(losses.cpu().double().sum()), losses.numel()  # there: MPS has no fp64


def evaluate(
    model: nn.Module,
    parts: Mapping[str, Iterable[Tensor]],
    device: torch.device,
    precision: str,
    bytes_per_token: float,
) -> Evaluation:
    """Return the mean loss over the batches of all domains, and of each named one, summed in fp64."""
    model.eval()
    sums: dict[str, tuple[float, int]] = {}
    for name, batches in parts.items():
        total, tokens = 0.0, 0
        for batch in batches:
            found, n = summed_loss(model, batch, device, precision)
            total, tokens = total + found, tokens + n
        sums[name] = total, tokens
    model.train()
    return Evaluation.of(sums, bytes_per_token)


@torch.no_grad()
def summed_images(
    logits: Callable[[Tensor], tuple[Tensor, Tensor]], batch: Tensor, device: torch.device, precision: str
) -> tuple[float, int, int]:
    """The sum of a batch's losses, in fp64, how many images there are, and how many are right; logits(batch) gives logits and labels."""
    with autocast(device, precision):
        found, labels = logits(batch.to(device))
    losses = functional.cross_entropy(found, labels, reduction="none")
    return float(losses.cpu().double().sum()), len(labels), int((found.argmax(-1) == labels).sum())


def evaluate_images(
    logits: Callable[[Tensor], tuple[Tensor, Tensor]],
    model: nn.Module,
    batches: Iterable[Tensor],
    device: torch.device,
    precision: str,
) -> ImageEvaluation:
    """The mean loss over all batches, summed in fp64, and the accuracy."""
    model.eval()
    total, images, right = 0.0, 0, 0
    for batch in batches:
        sums = summed_images(logits, batch, device, precision)
        total, images, right = total + sums[0], images + sums[1], right + sums[2]
    model.train()
    return ImageEvaluation(total / images, images, right / images)
