"""Explain why a folder cannot be loaded with another number of layers: a mixer has parameters for each site."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig

from depthmix.errors import CHECKPOINT, UserError
from depthmix.hf.architectures import PREFIX

PLACE = (
    "subfolder",
    "revision",
    "token",
    "cache_dir",
    "local_files_only",
)  # arguments of `from_pretrained` that select the folder
RUN_ALL = {"gpt2", "gpt_neox"}  # model types that ignore a later change of num_hidden_layers


@contextmanager
def explained(folder: Any, given: dict[str, Any]) -> Iterator[None]:
    """Explain the error of weights that do not fit, if the cause is the number of layers.

    Args:
        folder: The folder that a model is loaded from inside this context.
        given: The keyword arguments of `from_pretrained`.

    Raises:
        UserError: The numbers of layers differ. The message has both numbers and advice.
    """
    # Read first, because loading removes arguments.
    config, place = given.get("config"), {name: given[name] for name in PLACE if name in given}
    asked = given.get("num_hidden_layers", given.get("n_layer", getattr(config, "num_hidden_layers", None)))
    try:
        yield
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error) or asked is None:
            raise
        saved, _ = PreTrainedConfig.get_config_dict(folder, **place)
        layers = saved.get("num_hidden_layers", saved.get("n_layer"))
        if layers is None or layers == asked:
            raise
        what = f"the mixer in {folder} is for {layers} layers, so the model cannot be loaded with {asked}"
        advice = "train a model of that depth instead"
        if asked < layers and saved.get("model_type", "").removeprefix(PREFIX) not in RUN_ALL:
            advice = f"load all and set model.config.num_hidden_layers = {asked}, which exits after that many layers"
        raise UserError(f"{what}: {advice}", CHECKPOINT) from None
