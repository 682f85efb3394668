"""Adapt a Hugging Face model to the interface of a `Decoder` that training, evaluation and generation use.

Parameters and modules are the model's own and keep their names, so that `from_pretrained` can read the checkpoints of a run.
"""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache

from depthmix.hf.architectures import architecture
from depthmix.hf.carried import CarriesCode
from depthmix.hf.surgery import MIXER, NORMS, mixer_of, restore, retrofit
from depthmix.mixers import Mixer
from depthmix.models.exchange import auto_map, code


class Adapter:
    """A Hugging Face model with a `Decoder`'s interface. All other attributes come from the model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, cache: Any = None, logits_to_keep: int = 0) -> Tensor:
        """Compute logits [B, T, vocab] of token ids [B, T], or of the last `logits_to_keep` of them."""
        kept: dict[str, Any] = {"past_key_values": cache, "use_cache": cache is not None}
        logits: Tensor = self.model(input_ids=input_ids, logits_to_keep=logits_to_keep, **kept).logits
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def to(self, *args: Any, **kwargs: Any) -> Adapter:
        """Move the model."""
        self.model.to(*args, **kwargs)
        return self

    def train(self, mode: bool = True) -> Adapter:
        """Put the model in train mode, with dropout where it has any."""
        self.model.train(mode)
        return self

    def eval(self) -> Adapter:
        """Put the model in eval mode."""
        return self.train(False)

    @property
    def head(self) -> nn.Module:
        """The module that computes logits."""
        head: nn.Module = self.model.get_output_embeddings()
        return head

    @property
    def has_mixer(self) -> bool:
        """Tell whether the model is retrofitted."""
        return hasattr(self.model.base_model, MIXER)

    @property
    def mixer(self) -> Mixer:
        """The mixer of a retrofitted model."""
        return mixer_of(self.model)

    @property
    def sublayers(self) -> list[nn.Module]:
        """The modules of every site, in order."""
        structure, (sublayers, _) = architecture(self.model.config), self.repeated_parts()
        size = len(structure.sites)
        if not structure.parallel:
            return sublayers
        return [nn.ModuleList(sublayers[i : i + size]) for i in range(0, len(sublayers), size)]

    def new_cache(self) -> DynamicCache:
        """Make an empty cache."""
        return DynamicCache(config=self.model.config)

    def give_mixer(self, mixer: str, options: dict[str, Any], keep: bool) -> None:
        """Replace the plain residuals, or another mixer, by a mixer. `keep`: leave an existing mixer unchanged."""
        if getattr(self.model.config, "depthmix", None) is not None:
            if keep:
                return
            restore(self.model)
        retrofit(self.model, mixer, quiet=True, **options)

    def added_by_mixer(self) -> list[str]:
        """List the parameters that exist because of the mixer: its own, and the norms of ways after the first."""
        return [name for name, _ in self.model.named_parameters() if {MIXER, NORMS} & set(name.split("."))]

    def parameter_counts(self) -> dict[str, int]:
        """Count the parameters of the mixer, `total`, and `added_by_mixer`."""
        sizes = {name: p.numel() for name, p in self.model.named_parameters()}  # tied weights come once
        mixer = sum(n for name, n in sizes.items() if MIXER in name.split("."))
        added = sum(sizes[name] for name in self.added_by_mixer())
        return {"mixer": mixer, "total": sum(sizes.values()), "added_by_mixer": added}

    def repeated_parts(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return (sublayers, norms): the modules to checkpoint or compile one by one."""
        names = architecture(self.model.config)
        layers: Any = getattr(self.model.base_model, names.layers)
        parts = [(getattr(layer, s.sublayer), getattr(layer, s.norm)) for layer in layers for s in names.sites]
        return [sublayer for sublayer, _ in parts], [norm for _, norm in parts]

    def described(self, seq_len: int) -> dict[str, Any]:
        """Return the model's config.json. The length of training sequences leaves the model's own maximum as it is."""
        config: dict[str, Any] = json.loads(self.model.config.to_json_string())
        carried = {} if self._classes() is None else {"auto_map": auto_map(self._classes()[0])}
        return {**config, **carried, "architectures": [type(self.model).__name__], "dtype": "float32"}

    def code(self) -> str | None:
        """Return the source of the modeling file that saved folders carry; None for a class of Hugging Face's own."""
        return None if self._classes() is None else code(*self._classes())

    def _classes(self) -> Any:
        config = self.model.config
        return config.classes() if isinstance(config, CarriesCode) else None
