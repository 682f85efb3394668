"""Magnitudes and gradients over depth, from a pass without gradients and from the gradients of a training step.

RMS(x) = sqrt(mean over tokens and channels of x²)
input    RMS of a site's read, before its norm
output   RMS of a site's output
stream   RMS of e + all outputs so far
block    RMS of the sum of a block's outputs
share    of source j: Σ <contribution of j to h_S, h_S> / Σ <h_S, h_S>; the shares add up to 1
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.insight.contributions import contributions
from depthmix.insight.intercept import as_ways, current_calls, intercepted, normed
from depthmix.insight.mixing import choose_mixer
from depthmix.insight.mode import eval_mode
from depthmix.insight.sampling import some_tokens
from depthmix.mixers import Mixer
from depthmix.models.with_mixer import with_mixer
from depthmix.ops.precision import compute_dtype

SHARE_TOKENS = 256


class Magnitudes:
    """Records the RMS of all tensors that pass between a model and its mixer."""

    def __init__(self, mixer: Mixer) -> None:
        self.mixer = mixer
        self.calls = current_calls(mixer)

    def watching(self) -> AbstractContextManager[None]:
        """Record the passes inside this context. Each pass replaces the one before."""
        return intercepted(self.mixer, start=self.start, read=self.read, write=self.write, finish=self.finish)

    def start(self, x: Tensor) -> Any:
        self.inputs: list[list[Tensor]] = []
        self.outputs: list[Tensor] = []
        self.streams: list[Tensor] = [rms(x)]
        self.blocks: list[Tensor] = []
        self.few = some_tokens([x], SHARE_TOKENS)
        self.stream, self.block = x.detach().to(compute_dtype(x)), torch.zeros((), device=x.device)
        return self.calls["start"](x)

    def read(self, state: Any, site: int, norm: Any = None) -> Any:
        h = as_ways(self.calls["read"](state, site))
        self.inputs.append([rms(t) for t in h])
        return normed(self.mixer, site, h, norm)

    def write(self, state: Any, site: int, y: Tensor) -> Any:
        layout = self.mixer.layout
        self.outputs.append(rms(y))
        self.few += some_tokens([y.detach()], SHARE_TOKENS)
        self.stream = self.stream + y
        self.streams.append(rms(self.stream))
        self.block = y.detach().to(compute_dtype(y)) if layout.begins[site] else self.block + y
        if layout.ends[site]:
            self.blocks.append(rms(self.block))
        return self.calls["write"](state, site, y)

    def finish(self, state: Any, norm: Any = None) -> Any:
        h = self.calls["finish"](state)
        self.inputs.append([rms(h)])
        return h if norm is None else norm(h)

    def numbers(self) -> dict[str, list[Any]]:
        """Return the numbers of the last pass, read from the device at once."""
        shares = shares_of_output(self.mixer, self.few)
        flat = torch.stack([*(t for ways in self.inputs for t in ways), *self.outputs, *self.streams, *self.blocks])
        values = iter(torch.cat([flat, shares.to(flat)]).tolist())
        return {
            "input_rms": [[next(values) for _ in ways] for ways in self.inputs],
            "output_rms": [next(values) for _ in self.outputs],
            "stream_rms": [next(values) for _ in self.streams],
            "block_rms": [next(values) for _ in self.blocks],
            "share": list(values),
        }


def rms(x: Tensor) -> Tensor:
    """Compute the root mean square over all elements, in fp32 or wider."""
    return torch.linalg.vector_norm(x.detach(), dtype=compute_dtype(x)) / math.sqrt(x.numel())


def shares_of_output(mixer: Mixer, sources: list[Tensor]) -> Tensor:
    """Compute every source's share of what finish reads: [S + 1]."""
    parts = contributions(mixer, sources)[0].parts
    h = parts.sum(0)
    return (parts * h).flatten(1).sum(1) / h.square().sum()


@torch.no_grad()
def magnitudes(model: nn.Module, *inputs: Any, mixer: Mixer | str | None = None, **kwargs: Any) -> dict[str, list[Any]]:
    """Measure magnitudes over depth in one pass model(*inputs, **kwargs).

    Args:
        model: A model with a mixer.
        inputs, kwargs: Its arguments.
        mixer: The mixer, or its name, of a model with several.

    Returns:
        input_rms [S+1][ways] (the last of finish), output_rms [S], stream_rms [S+1], block_rms [N] and share
            [S+1].

    Examples:
        >>> model = depthmix.Decoder(depthmix.DecoderConfig(11, dim=8, n_blocks=2, n_heads=2))
        >>> len(magnitudes(model, torch.zeros(2, 3, dtype=torch.int64))["output_rms"])
        4
    """
    model = with_mixer(model)
    taken = Magnitudes(choose_mixer(model, mixer))
    with taken.watching(), eval_mode(model):
        model(*inputs, **kwargs)
    return taken.numbers()


def gradient_norms(modules: Iterable[nn.Module]) -> Tensor:
    """Compute the norm of each module's gradients [len(modules)], on any device and sharded in any way, without a
    synchronisation.
    """
    return torch.stack([_gradient_norm(list(module.parameters())) for module in modules])


def _gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    whole = getattr(total, "full_tensor", None)  # for sharded gradients, the norm over all shards
    total = total if whole is None else whole()
    return total.to(parameters[0].device) if parameters else total  # without any gradient: 0 on the CPU
