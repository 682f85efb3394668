"""See a transformers model that already mixes over depth as a model with a mixer, for measurements.

The mixer has copies of the model's own weights. Hooks let it do the mixing during a call:

    first layer     receives e, or e in all streams             mixer.start(e)
    attn_hc         returns (..., what attention reads)         <- mixer.read
    self_attn       returns y                                   mixer.write(y)
    ffn_hc, mlp     the same
    hc_head         returns what the final norm reads           <- mixer.finish;  without a head: the last layer returns it, in all streams

The layers still compute their own streams or blocks, which nobody reads. Between calls the model has no hooks.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor, nn

from depthmix.errors import UserError
from depthmix.hf.adapter import Adapter
from depthmix.hf.published import mixer_of_published
from depthmix.mixers import Mixer
from depthmix.mixers.published import find_names, source_of

SUBLAYERS = ("self_attn", "mlp")


class Modules(NamedTuple):
    """Names of a layer's modules that mix: those that return what a sublayer reads, and those that return what it puts out."""

    reads: tuple[str, str]
    outputs: tuple[str, str]
    head: str  # beside the layers; a model may lack it
    streams: bool  # whether layers pass on streams
    several: bool  # whether all that a read returns are mixtures, one per way


STREAMS = Modules(("attn_hc", "ffn_hc"), SUBLAYERS, "hc_head", streams=True, several=False)
BLOCKS = Modules(
    ("attention_input", "mlp_input"),
    ("post_attention_convolution", "post_mlp_convolution"),
    "final_input",
    streams=False,
    several=True,
)
MODULES = {"deepseek-v4": STREAMS, "glm-5-next": STREAMS, "hunyuan-v4": STREAMS, "inkling-2": BLOCKS}
_lock = threading.RLock()  # hooks belong to modules, which threads share


class Viewed(nn.Module):
    """A model whose `mixer` does the mixing during a call. All other attributes are the model's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        source = source_of(model.config.to_dict())
        if source not in MODULES:
            raise UserError(
                f"{source} has other sources than the outputs of its sublayers, so no mixer can stand in for it"
            )
        self.modules_of = MODULES[source]
        self.model, self.mixer = model, mixer_of_published(model)
        where = find_names(source, list(model.state_dict())).stack
        self.layers = list(model.get_submodule(where))
        self.head = getattr(model.get_submodule(where.rpartition(".")[0]), self.modules_of.head, None)

    @property
    def sublayers(self) -> list[nn.Module]:
        """List attention and MLP of every layer, in order."""
        return [getattr(layer, name) for layer in self.layers for name in SUBLAYERS]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, and let the mixer do its mixing."""
        with _lock, ExitStack() as hooks:
            names, mixing = self.modules_of, _Mixing(self.mixer, self.modules_of)
            hooks.callback(self.layers[0].register_forward_pre_hook(mixing.start, with_kwargs=True).remove)
            for i, layer in enumerate(self.layers):
                for k, (reader, output) in enumerate(zip(names.reads, names.outputs, strict=True)):
                    read, write = mixing.at(2 * i + k)
                    if getattr(layer, reader) is not None:
                        hooks.callback(getattr(layer, reader).register_forward_hook(read).remove)
                    hooks.callback(getattr(layer, output).register_forward_hook(write).remove)
            if self.head is not None:
                hooks.callback(self.head.register_forward_hook(mixing.finish).remove)
            else:
                hooks.callback(self.layers[-1].register_forward_hook(mixing.finish_in_streams).remove)
            return self.model(*args, **kwargs)


class ViewedAdapter(Adapter):
    """A view with a `Decoder`'s interface."""

    @property
    def mixer(self) -> Mixer:
        """The mixer of the view."""
        return self.model.mixer

    @property
    def sublayers(self) -> list[nn.Module]:
        """The modules of every site, in order."""
        return self.model.sublayers

    def parameter_counts(self) -> dict[str, int]:
        """Count the parameters of the mixing and of the whole model."""
        mixer = sum(p.numel() for p in self.model.mixer.parameters())
        return {"mixer": mixer, "total": sum(p.numel() for p in self.model.model.parameters()), "added_by_mixer": mixer}


class _Mixing:
    """Hooks for one call of a model."""

    def __init__(self, mixer: Any, names: Modules) -> None:
        self.mixer, self.names = mixer, names
        self.state: Any = None
        self.has_read = -1  # the last site that did

    def start(self, layer: Any, args: Any, kwargs: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        e = x[..., 0, :].contiguous() if self.names.streams else x
        self.state = self.mixer.start(e.to(next(self.mixer.parameters()).device))

    def at(self, site: int) -> tuple[Any, Any]:
        """Return the hooks of a site's connection and of its sublayer."""

        def read(module: Any, args: Any, out: Any) -> Any:
            self.has_read = site
            h = self.mixer.read(self.state, site)
            ways = tuple(way.to(out[-1].device) for way in (h if isinstance(h, tuple) else (h,)))
            return ways[: len(out)] if self.names.several else (*out[:-1], *ways)

        def write(module: Any, args: Any, out: Any) -> None:
            if self.has_read < site:  # the model's first sublayer reads e, and has no module for it
                self.mixer.read(self.state, site)
            y: Tensor = out[0] if isinstance(out, tuple) else out
            self.state = self.mixer.write(self.state, site, y.to(self.state.template().device))

        return read, write

    def finish(self, head: Any, args: Any, out: Any) -> Any:
        h = self.mixer.finish(self.state)
        return (h.to(out[0].device),) if self.names.several else h.to(out.device)

    def finish_in_streams(self, layer: Any, args: Any, out: Any) -> Any:
        streams = out[0] if isinstance(out, tuple) else out
        h: Tensor = self.mixer.finish(self.state).to(streams.device)
        h = h.unsqueeze(-2).expand(*h.shape[:-1], *streams.shape[-2:])
        return (h, *out[1:]) if isinstance(out, tuple) else h
