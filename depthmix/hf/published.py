"""Read the mixing over depth of a published model from its files, and only that."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from depthmix.errors import CHECKPOINT, UserError
from depthmix.files import read_json_object
from depthmix.mixers.base import Mixer
from depthmix.mixers.options import OptionError
from depthmix.mixers.published import (
    SOURCES,
    find_names,
    meta_mixer,
    published_weights,
    source_of,
    text_config,
)

CONFIG, INDEX = "config.json", "model.safetensors.index.json"


def published_mixer(folder: str | Path, layers: Sequence[int] | None = None, *, prefix: str = "") -> Mixer:
    """Read the mixer of a published model from its folder: config.json, and the few tensors of its mixing.

    DeepSeek-V4, GLM-5-Next, Hunyuan V4, Inkling 2, Qwen4-Exp, Kimi K3 and models of flash-linear-attention are known. A mixer of later layers alone begins with one
    stream: what earlier layers have put into the streams or blocks is not there.

    Args:
        folder: The folder with config.json and the safetensors files. Files without such tensors may be missing.
        layers: The layers to take, such as range(24, 28); by default all of them.
        prefix: What the names begin with, such as "mtp.0." for a layer that predicts a further token.

    Returns:
        The mixer in fp32 on the CPU, with the options of the configuration. If the files have no weights for the last read, a
        warning says what `finish` returns instead.

    Raises:
        UserError: The folder has no such model, or its tensors do not fit its configuration.

    Examples:
        >>> mixer = depthmix.hf.published_mixer("DeepSeek-V4-Flash", layers=range(24, 28))
    """
    folder = Path(folder)
    config = read_json_object(folder / CONFIG)
    places = _places(folder)
    try:
        source = source_of(config)
        n_layers = text_config(config).get("num_hidden_layers")
        found = find_names(source, list(places), layers, prefix, n_layers)
        tensors = _read(folder, found.names(), places)
        weights = published_weights(source, tensors, config=config, layers=list(found.layers), prefix=prefix)
        mixer = meta_mixer(source, config, list(found.layers), bool(found.head))
    except OptionError as error:
        raise UserError(f"the mixer in {folder} cannot be read: {error}", CHECKPOINT) from None
    if SOURCES[source].head and not found.head:
        what = f"the files in {folder} have no weights for the last read of {found.stack or prefix}"
        warnings.warn(f"{what}: finish returns the mean of what it reads", stacklevel=2)
    mixer = mixer.to_empty(device="cpu")
    mixer.load_state_dict(weights)
    return mixer


def mixer_of_published(model: Any) -> Mixer:
    """Return a copy of the mixing of a loaded model of transformers as a mixer, on the model's device. Raises OptionError."""
    config = model.config.to_dict()
    source = source_of(config)
    state = model.state_dict()
    found = find_names(source, list(state))
    tensors = {name: state[name] for name in found.names()}
    if any(tensor.is_meta for tensor in tensors.values()):
        raise UserError(
            "the weights of this model's mixing are offloaded or not loaded: load the model without offloading"
        )
    weights = published_weights(source, tensors, config=config)
    mixer = meta_mixer(source, config, list(found.layers), bool(found.head))
    mixer = mixer.to_empty(device=next(model.parameters()).device)
    mixer.load_state_dict(weights)
    return mixer


def _places(folder: Path) -> dict[str, str]:
    """Return the file of every tensor in a folder, by the tensor's name."""
    if (folder / INDEX).is_file():
        places = read_json_object(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(_is_file_name(place) for place in places.values()):
            raise UserError(f"{folder / INDEX} is damaged: its weight_map does not name files beside it", CHECKPOINT)
        return places
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} has neither {INDEX} nor files of safetensors", CHECKPOINT)
    with ExitStack() as stack:
        return {name: file for file in files for name in _open(stack, folder / file).keys()}  # noqa: SIM118


def _is_file_name(place: Any) -> bool:
    return isinstance(place, str) and Path(place).name == place


def _open(stack: ExitStack, path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"{path} has tensors of the mixing and is missing: download it too", CHECKPOINT)
    try:
        return stack.enter_context(safe_open(path, "pt"))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({error})", CHECKPOINT) from None


def _read(folder: Path, names: Iterable[str], places: dict[str, str]) -> dict[str, Tensor]:
    """Read tensors by name, each file once."""
    by_file: dict[str, list[str]] = {}
    for name in names:
        by_file.setdefault(places[name], []).append(name)
    tensors: dict[str, Tensor] = {}
    for file, wanted in by_file.items():
        with ExitStack() as stack:
            opened = _open(stack, folder / file)
            try:
                tensors |= {name: opened.get_tensor(name) for name in wanted}
            except SafetensorError as error:
                raise UserError(f"{folder / file} does not have what {INDEX} says ({error})", CHECKPOINT) from None
    return tensors
