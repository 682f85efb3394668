"""Depth-mixing matrices of a model on a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from depthmix.insight.intercept import record_sources
from depthmix.insight.mode import eval_mode
from depthmix.mixers import Mixer
from depthmix.models.with_mixer import with_mixer
from depthmix.names import nearest


def depth_mixing(
    model: nn.Module, *inputs: Any, per_token: bool = False, mixer: Mixer | str | None = None, **kwargs: Any
) -> Tensor:
    """Compute the depth-mixing matrix M of a model on one batch: model(*inputs, **kwargs), in eval mode.

    M[w, s, 0] is the weight with which site s reads the embedding, and M[w, s, i + 1] that of site i's raw output. The
    last row is finish.

    Args:
        model: A model with a mixer, or one of transformers that already mixes over depth (DeepSeek-V4, GLM-5-Next, Hunyuan V4, Inkling 2).
        *inputs: Its positional arguments.
        **kwargs: Its keyword arguments.
        per_token: Whether to average over channels only, and not over tokens.
        mixer: The mixer, or its name in the model, of a model with several, such as an encoder and a decoder.

    Returns:
        M [W, S+1, S+1], or [..., W, S+1, S+1] per token.

    Raises:
        ValueError: The model has no mixer or several, or did not use this one.

    Examples:
        >>> model = depthmix.Decoder(depthmix.DecoderConfig(11, dim=8, n_blocks=2, n_heads=2, mixer="attnres"))
        >>> depth_mixing(model, torch.zeros(2, 3, dtype=torch.int64)).shape
        torch.Size([1, 5, 5])
    """
    model = with_mixer(model)
    chosen = choose_mixer(model, mixer)
    return chosen.mixing(sources_of(model, chosen, *inputs, **kwargs), per_token)


def sources_of(model: nn.Module, mixer: Mixer, *inputs: Any, **kwargs: Any) -> list[Tensor]:
    """Run a model on a batch and return the embedding and the raw output of every site.

    Args:
        model: The model, called as model(*inputs, **kwargs) in eval mode.
        mixer: Its mixer.
        inputs, kwargs: The model's arguments.

    Returns:
        S + 1 tensors [..., D].

    Raises:
        ValueError: The model did not use the mixer.
    """
    with torch.no_grad(), eval_mode(model), record_sources(mixer) as sources:
        model(*inputs, **kwargs)
    if not sources:
        raise ValueError("depth_mixing: the model did not use this mixer on this batch")
    return sources


def choose_mixer(model: nn.Module, mixer: Mixer | str | None = None) -> Mixer:
    """Return the model's mixer or, where it has several, the one given as a module or by name. Raises ValueError if
    there is none.
    """
    mixers = {name: m for name, m in model.named_modules() if isinstance(m, Mixer)}
    if mixer is None:
        if len(mixers) == 1:
            return next(iter(mixers.values()))
        which = f"; say which with mixer=, one of {', '.join(map(repr, mixers))}" if mixers else ""
        raise ValueError(f"depth_mixing: expected a model with one mixer, found {len(mixers)}{which}")
    for name, candidate in mixers.items():
        if mixer is candidate or (isinstance(mixer, str) and mixer == name):
            return candidate
    given = repr(mixer) if isinstance(mixer, str) else "this module"
    known = f"its mixers are {', '.join(map(repr, mixers))}" if mixers else "it has none"
    raise ValueError(f"depth_mixing: {given} is no mixer of the model; {known}{nearest(str(mixer), mixers)}")
