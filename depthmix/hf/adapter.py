"""A Hugging Face model behind the calls that training, evaluation and generation make of a `Decoder`.

Nothing is wrapped: parameters and modules are the model's own, under their names, so that a checkpoint of a run is one that
`from_pretrained` reads.
"""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache

from depthmix.hf.architectures import architecture
from depthmix.hf.carried import CarriesCode
from depthmix.hf.surgery import MIXER, NORMS, restore, retrofit
from depthmix.models.exchange import auto_map, code


class Adapter:
    """Token ids in, logits out; whatever else is asked for is the model's."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, cache: Any = None, logits_to_keep: int = 0) -> Tensor:
        """Logits [B, T, vocab] of ids [B, T], or of the last logits_to_keep of them."""
        kept: dict[str, Any] = {"past_key_values": cache, "use_cache": cache is not None}
        found: Tensor = self.model(input_ids=input_ids, logits_to_keep=logits_to_keep, **kept).logits
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def to(self, *args: Any, **kwargs: Any) -> Adapter:
        """The model moved."""
        self.model.to(*args, **kwargs)
        return self

    def train(self, mode: bool = True) -> Adapter:
        """The model with dropout, where it has any."""
        self.model.train(mode)
        return self

    def eval(self) -> Adapter:
        """The model without dropout."""
        return self.train(False)

    @property
    def head(self) -> nn.Module:
        """What makes logits."""
        found: nn.Module = self.model.get_output_embeddings()
        return found

    def new_cache(self) -> DynamicCache:
        """An empty cache."""
        return DynamicCache(config=self.model.config)

    def give_mixer(self, mixer: str, options: dict[str, Any], keep: bool) -> None:
        """The mixer in the place of plain residuals; keep: the one that is there, if there is one, as it is."""
        if getattr(self.model.config, "depthmix", None) is not None:
            if keep:
                return
            restore(self.model)
        retrofit(self.model, mixer, quiet=True, **options)

    def added_by_mixer(self) -> list[str]:
        """The names of the parameters that are there for the mixer: its own, and the norms of ways after the first."""
        return [name for name, _ in self.model.named_parameters() if {MIXER, NORMS} & set(name.split("."))]

    def parameter_counts(self) -> dict[str, int]:
        """Parameters of the mixer, `total`, and `added_by_mixer`."""
        sizes = {name: p.numel() for name, p in self.model.named_parameters()}  # tied weights come once
        mixer = sum(n for name, n in sizes.items() if MIXER in name.split("."))
        added = sum(sizes[name] for name in self.added_by_mixer())
        return {"mixer": mixer, "total": sum(sizes.values()), "added_by_mixer": added}

    def repeated_parts(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """What can be recomputed or compiled piece by piece: the sublayers, and the norms before them."""
        found = architecture(self.model.config)
        layers: Any = getattr(self.model.base_model, found.layers)
        parts = [(getattr(layer, s.sublayer), getattr(layer, s.norm)) for layer in layers for s in found.sites]
        return [sublayer for sublayer, _ in parts], [norm for _, norm in parts]

    def described(self, seq_len: int) -> dict[str, Any]:
        """The model's config.json; how long the sequences of training are does not change what it was made for."""
        config: dict[str, Any] = json.loads(self.model.config.to_json_string())
        found = {} if self._classes() is None else {"auto_map": auto_map(self._classes()[0])}
        return {**config, **found, "architectures": [type(self.model).__name__], "dtype": "float32"}

    def code(self) -> str | None:
        """The code that its folders carry; None for a class of Hugging Face's own."""
        return None if self._classes() is None else code(*self._classes())

    def _classes(self) -> Any:
        config = self.model.config
        return config.classes() if isinstance(config, CarriesCode) else None
