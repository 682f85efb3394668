"""depthmix: mixing over depth in Transformers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from depthmix import ops
    from depthmix.api.comparison import compare
    from depthmix.api.depth_map_plot import plot_depth_map
    from depthmix.api.prepared_data import PreparedData, prepare
    from depthmix.api.run_losses import compare_runs
    from depthmix.api.training import train
    from depthmix.config import TrainConfig
    from depthmix.errors import UserError
    from depthmix.insight import depth_mixing
    from depthmix.mixers import (
        ContractError,
        Mixer,
        OptionError,
        State,
        create_mixer,
        list_mixers,
        param_groups,
        register,
        register_state,
        shard_mixer,
    )
    from depthmix.models import Decoder, DecoderConfig, Vit, VitConfig
    from depthmix.runs.restore import Trained
    from depthmix.testing import check_mixer
    from depthmix.train.events import StepEvent

__version__ = "0.1.0"
__all__ = [
    "ContractError",
    "Decoder",
    "DecoderConfig",
    "Mixer",
    "OptionError",
    "PreparedData",
    "State",
    "StepEvent",
    "TrainConfig",
    "UserError",
    "Vit",
    "VitConfig",
    "check_mixer",
    "compare",
    "compare_runs",
    "create_mixer",
    "depth_mixing",
    "list_mixers",
    "load",
    "ops",
    "param_groups",
    "plot_depth_map",
    "prepare",
    "register",
    "register_state",
    "restore",
    "retrofit",
    "shard_mixer",
    "train",
]
# Looked up on first use: torch takes seconds to import, which `depthmix --version` and a mistyped flag need not wait for.
_HOMES = {
    "depthmix.api.depth_map_plot": ("plot_depth_map",),
    "depthmix.api.prepared_data": ("PreparedData", "prepare"),
    "depthmix.api.run_losses": ("compare_runs",),
    "depthmix.compare": (),  # the package itself is the function: importing its modules binds this name to it
    "depthmix.config": ("TrainConfig",),
    "depthmix.errors": ("UserError",),
    "depthmix.insight": ("depth_mixing",),
    "depthmix.mixers": (
        "ContractError",
        "Mixer",
        "OptionError",
        "State",
        "create_mixer",
        "list_mixers",
        "param_groups",
        "register",
        "register_state",
        "shard_mixer",
    ),
    "depthmix.models": ("Decoder", "DecoderConfig", "Vit", "VitConfig"),
    "depthmix.ops": (),
    "depthmix.testing": ("check_mixer",),
    "depthmix.train": (),  # the package itself is the function, too
    "depthmix.train.events": ("StepEvent",),
}


def load(run: str | Path, device: str | torch.device = "auto") -> Trained:
    """Load a trained model.

    Args:
        run: A run folder of `depthmix train`, one of its checkpoints, or a folder of Hugging Face's
            `save_pretrained`.
        device: cpu, cuda, cuda:N, mps or auto.

    Returns:
        The model in eval mode, with its tokenizer, the configuration it was trained with and its step.

    Raises:
        UserError: The model cannot be loaded. The message says why.

    Examples:
        >>> trained = depthmix.load("runs/attnres")
        >>> trained.model(torch.tensor([trained.tokenizer.encode("My fellow").ids])).shape
        torch.Size([1, 3, 512])
    """
    from depthmix.device import choose_device
    from depthmix.runs.restore import load_model

    return load_model(run, choose_device(str(device)))


def retrofit(model: Any, mixer: str, *, quiet: bool = False, **options: Any) -> Any:
    """Give a Hugging Face decoder a rule for mixing over depth, in place. `depthmix.hf.retrofit` documents the arguments.

    Examples:
        >>> model = depthmix.retrofit(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"), "attnres", block_size=4)
    """
    from depthmix.hf import retrofit as change

    return change(model, mixer, quiet=quiet, **options)


def restore(model: Any) -> Any:
    """Undo `retrofit`, in place, and return the model. The mixer's trained parameters are dropped."""
    from depthmix.hf import restore as undo

    return undo(model)


def __getattr__(name: str) -> Any:
    if f"depthmix.{name}" in _HOMES:
        return importlib.import_module(f"depthmix.{name}")
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = getattr(importlib.import_module(home), name)
            return globals()[name]
    raise AttributeError(f"module 'depthmix' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
