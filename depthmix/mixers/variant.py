"""The variant of a rule, as a state dict carries it: weights of other options often have the same names and shapes.

The entry `_extra_state` is JSON, one byte in each number of an fp32 tensor: safetensors, torch.distributed.checkpoint and
`torch.load(weights_only=True)` keep tensors, and fp32 survives whoever averages or rounds all entries of a state dict.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from depthmix.mixers.options import OptionError

if TYPE_CHECKING:
    from depthmix.mixers.base import Mixer

KEY = "_extra_state"  # the name that nn.Module gives to what get_extra_state returns
UNIT = 256  # entries are this long, or a multiple: torch.distributed.checkpoint loads into tensors of the same shape


def variant_entry(mixer: Mixer) -> Tensor:
    """Make the entry of a mixer's state dict that says which variant it is."""
    return _packed({"rule": mixer.name, "options": mixer.weight_options()})


def silent_entry() -> Tensor:
    """Make an entry that says nothing, for weights whose options somebody else has looked after."""
    return _packed({})


def check_variant(mixer: Mixer, entry: Tensor) -> None:
    """Raise OptionError unless the weights with this entry are those of the mixer's variant."""
    said, here = _unpacked(mixer, entry), mixer.weight_options()
    if not said:
        return
    rule, options = said["rule"], said["options"]
    if rule != mixer.name:
        raise OptionError(f"the weights are those of mixer {rule!r}, and this one is {mixer.name!r}; build {rule!r}")
    for name in (*here, *(n for n in options if n not in here)):
        default = mixer.options[name].default if name in mixer.options else None
        theirs, ours = options.get(name, default), here.get(name)
        if theirs != ours or isinstance(theirs, bool) is not isinstance(ours, bool):
            what = f"the weights were made with {name}={theirs!r}, and this mixer has {name}={ours!r}"
            raise OptionError(f"{mixer.name}: {what}; build it with the options of the weights")


def check_entry(mixer: Mixer, state: Mapping[str, Any], prefix: str) -> None:
    """Check the variant of the weights under a prefix; warn where there are weights that do not say theirs."""
    entry = state.get(prefix + KEY)
    if entry is not None:
        check_variant(mixer, entry)
    elif not mixer.variant_elsewhere and any(name.startswith(prefix) for name in state):
        said = f"these weights do not say with which options they were made; they are taken for {mixer.signature}"
        warnings.warn(said, stacklevel=2)


def _packed(said: Mapping[str, Any]) -> Tensor:
    text = json.dumps(said).encode()
    text += b" " * (-len(text) % UNIT)
    return torch.tensor(list(text), dtype=torch.float32, device="cpu")


def _unpacked(mixer: Mixer, entry: Tensor) -> dict[str, Any]:
    try:
        numbers = [round(number) for number in entry.detach().cpu().flatten().tolist()]
        said = json.loads(bytes(numbers))
        if not said or (isinstance(said["rule"], str) and isinstance(said["options"], dict)):
            return dict(said)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        pass
    raise OptionError(f"{mixer.name}: the entry {KEY}, which names the options of the weights, is damaged; remove it")
