"""The variant of a rule, as a state dict carries it: weights of other options often have the same names and shapes.

The entry `_extra_state` is JSON, one byte in each number of an fp32 tensor: safetensors, torch.distributed.checkpoint and
`torch.load(weights_only=True)` keep tensors, and fp32 survives whoever averages or rounds all entries of a state dict.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from depthmix.mixers.options import Option, OptionError

KEY = "_extra_state"  # the name that nn.Module gives to what get_extra_state returns
UNIT = 256  # entries are this long, or a multiple: torch.distributed.checkpoint loads into tensors of the same shape


class NamesVariant(nn.Module):
    """A rule whose state dict names the rule and the options that its weights are for."""

    name: ClassVar[str]  # set by `register`
    options: ClassVar[dict[str, Option]]  # set by `register`
    # Hugging Face's models say True: their configuration file names rule and options, so their state dicts need not.
    variant_elsewhere: bool = False

    # Set by `register`, the first before the constructor runs.
    chosen: dict[str, Any]  # every option's value, as given or its default
    signature: str  # the rule, its size and its options in words: what its states carry

    def weight_options(self) -> dict[str, Any]:
        """Return the options that weights depend on, by name, as JSON has them.

        Weights with other ones are refused. By default these are all options. A rule leaves out what only says how weights
        begin, and gives values that mean the same in one form.
        """
        return dict(self.chosen)

    def get_extra_state(self) -> Tensor:
        """Return the entry of the state dict that names rule and options."""
        return _packed({"rule": self.name, "options": self.weight_options()})

    def set_extra_state(self, state: Any) -> None:
        """Check the entry of a state dict: OptionError if its weights are of another variant."""
        check_variant(self, state)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.variant_elsewhere:
            del destination[prefix + KEY]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        check_entry(self, state_dict, prefix)  # before any weight is copied
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing: list[str] = args[2]
        if prefix + KEY in missing:  # older weights have no entry, of which check_entry has warned
            missing.remove(prefix + KEY)


def silent_entry() -> Tensor:
    """Make an entry that says nothing, for weights whose options somebody else has looked after."""
    return _packed({})


def named_entry(mixer: NamesVariant, notes: Mapping[str, str]) -> Tensor:
    """Make the entry of a mixer's weights, with notes on options, which the message of a difference repeats."""
    return _packed({"rule": mixer.name, "options": mixer.weight_options(), "notes": dict(notes)})


def check_variant(mixer: NamesVariant, entry: Tensor) -> None:
    """Raise OptionError unless the weights with this entry are those of the mixer's variant."""
    saved, own_options = _unpacked(mixer, entry), mixer.weight_options()
    if not saved:
        return
    rule, options = saved["rule"], saved["options"]
    if rule != mixer.name:
        raise OptionError(f"the weights are those of mixer {rule!r}, and this one is {mixer.name!r}; build {rule!r}")
    for name in (*own_options, *(n for n in options if n not in own_options)):
        default = mixer.options[name].default if name in mixer.options else None
        theirs, ours = options.get(name, default), own_options.get(name)
        if theirs != ours or isinstance(theirs, bool) is not isinstance(ours, bool):
            what = f"the weights were made with {name}={theirs!r}, and this mixer has {name}={ours!r}"
            note = f" ({saved['notes'][name]})" if name in saved.get("notes", ()) else ""
            raise OptionError(f"{mixer.name}: {what}{note}; build it with the options of the weights")


def check_entry(mixer: NamesVariant, state: Mapping[str, Any], prefix: str) -> None:
    """Check the variant of the weights under a prefix; warn where there are weights that do not say theirs."""
    entry = state.get(prefix + KEY)
    if entry is not None:
        check_variant(mixer, entry)
    elif not mixer.variant_elsewhere and any(name.startswith(prefix) for name in state):
        message = f"these weights do not say with which options they were made; they are taken for {mixer.signature}"
        warnings.warn(message, stacklevel=2)


def _packed(content: Mapping[str, Any]) -> Tensor:
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % UNIT)
    return torch.tensor(list(text), dtype=torch.float32, device="cpu")


def _unpacked(mixer: NamesVariant, entry: Tensor) -> dict[str, Any]:
    try:
        numbers = [round(number) for number in entry.detach().cpu().flatten().tolist()]
        content = json.loads(bytes(numbers))
        if not content or (isinstance(content["rule"], str) and isinstance(content["options"], dict)):
            return dict(content)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        pass
    raise OptionError(f"{mixer.name}: the entry {KEY}, which names the options of the weights, is damaged; remove it")
