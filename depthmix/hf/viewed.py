"""See a transformers model that already mixes over depth as a model with a mixer, for measurements.

The mixer has copies of the model's own weights. Hooks let it do the mixing during a call:

    first layer     receives e in all streams                   mixer.start(e)
    attn_hc         returns (..., what attention reads)         <- mixer.read
    self_attn       returns y                                   mixer.write(y)
    ffn_hc, mlp     the same
    hc_head         returns what the final norm reads           <- mixer.finish;  without a head: the last layer returns it, in all streams

The layers still compute their own streams, which nobody reads. Between calls the model has no hooks.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from depthmix.hf.accelerated.streams import CONNECTIONS
from depthmix.hf.adapter import Adapter
from depthmix.hf.published import mixer_of_published
from depthmix.mixers import Mixer
from depthmix.mixers.published import find_names, source_of

SUBLAYERS = ("self_attn", "mlp")
_lock = threading.RLock()  # hooks belong to modules, which threads share


class Viewed(nn.Module):
    """A model whose `mixer` does the mixing during a call. All other attributes are the model's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.mixer = model, mixer_of_published(model)
        where = find_names(source_of(model.config.to_dict()), list(model.state_dict())).stack
        self.layers = list(model.get_submodule(where))
        self.head = getattr(model.get_submodule(where.rpartition(".")[0]), "hc_head", None)

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
            mixing = _Mixing(self.mixer)
            hooks.enter_context(_removed(self.layers[0].register_forward_pre_hook(mixing.start, with_kwargs=True)))
            for i, layer in enumerate(self.layers):
                for k, (connection, sublayer) in enumerate(zip(CONNECTIONS, SUBLAYERS, strict=True)):
                    reads, writes = mixing.at(2 * i + k)
                    hooks.enter_context(_removed(getattr(layer, connection).register_forward_hook(reads)))
                    hooks.enter_context(_removed(getattr(layer, sublayer).register_forward_hook(writes)))
            if self.head is not None:
                hooks.enter_context(_removed(self.head.register_forward_hook(mixing.finish)))
            else:
                hooks.enter_context(_removed(self.layers[-1].register_forward_hook(mixing.finish_in_streams)))
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

    def __init__(self, mixer: Any) -> None:
        self.mixer = mixer
        self.state: Any = None

    def start(self, layer: Any, args: Any, kwargs: Any) -> None:
        streams = args[0] if args else kwargs["hidden_states"]
        self.state = self.mixer.start(streams[..., 0, :].contiguous())

    def at(self, site: int) -> tuple[Any, Any]:
        """Return the hooks of a site's connection and of its sublayer."""

        def read(module: Any, args: Any, out: Any) -> Any:
            return (*out[:-1], self.mixer.read(self.state, site))

        def write(module: Any, args: Any, out: Any) -> None:
            y: Tensor = out[0] if isinstance(out, tuple) else out
            self.state = self.mixer.write(self.state, site, y)

        return read, write

    def finish(self, head: Any, args: Any, out: Any) -> Tensor:
        h: Tensor = self.mixer.finish(self.state)
        return h

    def finish_in_streams(self, layer: Any, args: Any, out: Any) -> Any:
        streams = out[0] if isinstance(out, tuple) else out
        h: Tensor = self.mixer.finish(self.state)
        h = h.unsqueeze(-2).expand(*h.shape[:-1], *streams.shape[-2:])
        return (h, *out[1:]) if isinstance(out, tuple) else h


class _removed:
    """A hook inside this context."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.handle.remove()
