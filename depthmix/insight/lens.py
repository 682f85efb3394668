"""The logit lens: what a model would predict if its final norm and head were applied to what an earlier reader reads.

The pass runs as usual up to finish. There the batch grows: it becomes one copy for each reader, which holds the reader's mixture before
its norm (of several ways, their mean). The model itself then applies its final norm and its head to all copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.insight.intercept import as_ways, current_calls, intercepted, normed
from depthmix.insight.losses import logits_of
from depthmix.insight.mixing import choose_mixer
from depthmix.insight.mode import eval_mode
from depthmix.mixers import Mixer
from depthmix.models.with_mixer import with_mixer
from depthmix.ops.precision import compute_dtype

AT_ONCE = 1 << 27  # logits per pass, over all copies


@dataclass
class LogitLens:
    """The prediction at every reader, the last for finish, and every token of token ids [B, T]."""

    tokens: Tensor  # [S+1, B, T], the most probable next tokens
    probabilities: Tensor  # [S+1, B, T], of those tokens
    following: Tensor  # [S+1, B, T-1], probabilities of the tokens that do follow


class _Reading:
    """A pass whose output is what the head makes of some readers' mixtures, one copy of the batch for each."""

    def __init__(self, mixer: Mixer, readers: Sequence[int]) -> None:
        self.mixer, self.readers = mixer, readers
        self.calls = current_calls(mixer)

    def logits(self, model: Any, ids: Tensor) -> Tensor:
        """Return the logits of all copies: [len(readers), B, T, V]."""
        self.mixtures: list[Tensor] = []
        calls: dict[str, Callable[..., Any]] = {"read": self.read, "finish": self.finish}
        with torch.no_grad(), eval_mode(model), intercepted(self.mixer, **calls):
            return logits_of(model, ids).unflatten(0, (len(self.readers), -1))

    def read(self, state: Any, site: int, norm: Any = None) -> Any:
        if site not in self.readers:
            return self.calls["read"](state, site, norm)
        ways = as_ways(self.calls["read"](state, site))
        self.mixtures.append(ways[0] if len(ways) == 1 else torch.stack(ways).mean(0))
        return normed(self.mixer, site, ways, norm)

    def finish(self, state: Any, norm: Any = None) -> Any:
        if self.mixer.n_sites in self.readers:
            self.mixtures.append(self.calls["finish"](state))
        h = torch.cat(self.mixtures)
        return h if norm is None else norm(h)


def logit_lens(model: nn.Module, ids: Tensor, mixer: Mixer | str | None = None, at_once: int = AT_ONCE) -> LogitLens:
    """Apply a model's final norm and head to what every reader reads.

    Args:
        model: A language model with a mixer: model(ids) returns logits. Their first dimension may be longer than the ids'.
        ids: Token ids [B, T].
        mixer: The mixer, or its name, of a model with several.
        at_once: Logits per pass.

    Returns:
        The most probable next token at every reader and token, its probability, and that of the token which follows. The
            last reader's prediction is the model's own.

    Raises:
        ValueError: The mixer is not found.

    Examples:
        >>> model = depthmix.Decoder(depthmix.DecoderConfig(11, dim=8, n_blocks=2, n_heads=2))
        >>> logit_lens(model, torch.zeros(1, 3, dtype=torch.int64)).tokens.shape
        torch.Size([5, 1, 3])
    """
    model = with_mixer(model)
    chosen = choose_mixer(model, mixer)
    finish = _Reading(chosen, [chosen.n_sites]).logits(model, ids)
    size = max(1, at_once // finish.numel())
    parts = []
    for first in range(0, chosen.n_sites, size):
        readers = range(first, min(first + size, chosen.n_sites))
        parts += [_predictions(copy, ids) for copy in _copies(model, chosen, ids, readers)]
    parts.append(_predictions(finish[0], ids))
    return LogitLens(*(torch.stack(each) for each in zip(*parts, strict=True)))


def _copies(model: Any, mixer: Mixer, ids: Tensor, readers: Sequence[int]) -> list[Tensor]:
    """Compute the logits of all readers at once, or one by one in a model whose tensors fix the batch size."""
    if len(readers) > 1:
        with suppress(RuntimeError):
            return list(_Reading(mixer, readers).logits(model, ids))
    return [_Reading(mixer, [reader]).logits(model, ids)[0] for reader in readers]


def _predictions(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best tokens [B, T], their probabilities, and those [B, T-1] of the tokens that follow."""
    p = logits.to(compute_dtype(logits)).softmax(-1)
    best, tokens = p.max(-1)
    return tokens, best, p[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
