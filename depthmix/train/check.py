"""Checks of a training that run before it starts."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

import torch

import depthmix
from depthmix.config import TrainConfig
from depthmix.data.dataset import TokenData
from depthmix.data.images import ImageData
from depthmix.device import choose_device
from depthmix.errors import UserError
from depthmix.mixers import Mixer, OptionError, create_mixer
from depthmix.mixers.leaks import check_rule
from depthmix.parallel.layout import Layout
from depthmix.train.optim import check_groups
from depthmix.train.task import make_task
from depthmix.values import check_at_least

FLOAT32 = torch.finfo(torch.float32)
# Options in which the processes of one run may differ. The folder of the data may differ, not their content.
MAY_DIFFER = {"device", "data", "quiet"}


def check_config(config: TrainConfig) -> None:
    """Raise UserError for an option with an impossible value."""
    for name in ("data", "out"):
        if not getattr(config, name):
            raise UserError(
                f"{name} is needed: {next(f.metadata['help'] for f in dataclasses.fields(config) if f.name == name)}"
            )
    check_at_least(config, 1, "seq_len", "batch_size", "steps", "log_every", "eval_every", "save_every", "keep")
    check_at_least(config, 1, "micro_batch_size", "eval_tokens", "dynamics_every")
    check_at_least(config, 0, "warmup", "seed")
    if config.micro_batch_size is not None and config.batch_size % config.micro_batch_size:
        raise UserError(f"micro_batch_size must divide batch_size={config.batch_size}, got {config.micro_batch_size}")
    if config.cuda_graph and (config.micro_batch_size is not None or config.checkpoint_activations):
        raise UserError("cuda_graph records a step in one piece: leave out micro_batch_size and checkpoint_activations")
    for name in ("lr", "muon_lr", "adam_eps", "rope_theta", "norm_eps", "hang_limit"):
        if not 0 < (value := getattr(config, name)) < math.inf:
            raise UserError(f"{name} must be a finite number above 0, got {value}")
        if not FLOAT32.tiny <= value <= FLOAT32.max:
            held = f"from {FLOAT32.tiny:.1e} to {FLOAT32.max:.1e}"
            raise UserError(f"{name} must be within the range of float32, {held}, got {value}")
    for name in ("weight_decay", "clip"):
        if not 0 <= getattr(config, name) < math.inf:
            raise UserError(f"{name} must be a finite number of at least 0, got {getattr(config, name)}")
    for name in ("final_lr", "decay_fraction"):
        if not 0 <= getattr(config, name) <= 1:
            raise UserError(f"{name} must be from 0 to 1, got {getattr(config, name)}")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"{name} must be at least 0 and below 1, got {getattr(config, name)}")
    if config.seed >= 2**64:
        raise UserError(f"seed must be below 2**64, got {config.seed}")
    check_groups(config.groups)
    if config.warmup >= config.steps:
        raise UserError(f"warmup must be shorter than the run of {config.steps} steps, got {config.warmup}")


def check_run(config: TrainConfig, data: TokenData | ImageData) -> None:
    """Raise UserError for a configuration that does not fit its device, its data or itself, without building the model."""
    choose_device(config.device)
    Layout.of(config.parallel).check(config, make_task(config, data).check())
    check_start(config)
    check_own_rule(config, text=isinstance(data, TokenData))


def check_own_rule(config: TrainConfig, text: bool) -> None:
    """Raise UserError for a user-defined rule that reads later tokens, other rows of the batch or uninitialised memory.

    Args:
        config: The training.
        text: Whether the data are text, where a rule must not read later tokens.
    """
    try:
        check_rule(config.mixer, config.mixer_options, config.dim, config.n_blocks, text)
    except OptionError as error:
        raise UserError(str(error)) from None


def check_start(config: TrainConfig) -> None:
    """Raise UserError where sublayer outputs stay at zero: if two factors both start at zero, neither gets a gradient."""
    if config.output_scale or config.init:
        return
    with torch.device("meta"):
        gains = _mixer(config).output_gains()
    if gains and not all(gain.any() for gain in _mixer(config).output_gains().values()):
        both = f"output projections start at zero (output_scale=0), and so do the output gains of {config.mixer}"
        raise UserError(
            f"{both}: sublayers would never learn; use output_scale=1 or another initial value of the gains"
        )


def _mixer(config: TrainConfig) -> Mixer:
    try:
        return create_mixer(config.mixer, dim=config.dim, n_blocks=config.n_blocks, **config.mixer_options)
    except OptionError as error:
        raise UserError(str(error)) from None


def facts(config: TrainConfig, data: TokenData | ImageData) -> dict[str, Any]:
    """Collect all that the processes of one run must agree on: recipe, data, code, torch."""
    recipe = {name: value for name, value in dataclasses.asdict(config).items() if name not in MAY_DIFFER}
    code, package = hashlib.sha256(), Path(depthmix.__file__).parent
    for path in sorted(package.rglob("*.py")):
        code.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return {
        **recipe,
        "the data": data.sha256[:16],
        "the version of depthmix": f"{depthmix.__version__} ({code.hexdigest()[:16]})",
        "the version of torch": torch.__version__,
    }
