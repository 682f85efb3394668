"""Statistics over many tokens in bounded memory: mean and deviation of all, quantiles of an even selection."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
KEPT = 2048  # maximum tokens in a sample for quantiles


class Moments:
    """Mean and standard deviation over tokens, accumulated in fp64 batch by batch."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, torch.zeros(()), torch.zeros(())

    def add(self, x: Tensor) -> None:
        """Add tokens [N, ...]."""
        if not len(x):
            return
        x = x.cpu().double()  # on the CPU, because MPS has no fp64
        count, mean = self.count + len(x), x.mean(0)
        # Squares of deviations instead of squares of values avoid cancellation.
        away = mean - self.mean
        self.squares = self.squares + (x - mean).square().sum(0) + away.square() * (self.count * len(x) / count)
        self.mean, self.count = self.mean + away * (len(x) / count), count

    def std(self) -> Tensor:
        """Return the standard deviation of the tokens seen (not an estimate for a larger population)."""
        return (self.squares / max(1, self.count)).sqrt()


class EvenSample:
    """A sample of every k-th token, where k doubles whenever the sample is too large. It is deterministic and even."""

    def __init__(self, most: int = KEPT) -> None:
        self.most, self.stride, self.seen = most, 1, 0
        self.kept: list[Tensor] = []
        self.length = 0

    def add(self, x: Tensor) -> None:
        """Add tokens [N, ...]."""
        first = -self.seen % self.stride
        self.seen += len(x)
        if len(chosen := x[first :: self.stride]):
            self.kept.append(chosen.float().cpu())
            self.length += len(chosen)
        while self.length > self.most:
            self.kept, self.stride = [torch.cat(self.kept)[::2].clone()], self.stride * 2
            self.length = len(self.kept[0])

    def quantiles(self) -> Tensor:
        """Compute quantiles [len(QUANTILES), ...] of the tokens kept."""
        return torch.quantile(torch.cat(self.kept), torch.tensor(QUANTILES), dim=0)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation, with mean ranks for ties, or None if one side has no order."""
    sides = [_ranks([pair[i] for pair in pairs]) for i in (0, 1)]
    if len(pairs) < 3 or any(len(set(side)) == 1 for side in sides):
        return None
    return statistics.correlation(*sides)


def _ranks(values: Sequence[float]) -> list[float]:
    """Rank values from 0. Equal values share the mean of their ranks."""
    order = sorted(values)
    first: dict[float, int] = {}
    count: dict[float, int] = {}
    for rank, value in enumerate(order):
        first.setdefault(value, rank)
        count[value] = count.get(value, 0) + 1
    return [first[value] + (count[value] - 1) / 2 for value in values]
