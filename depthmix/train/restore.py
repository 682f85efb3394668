"""A trained model from its run folder."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from depthmix.models import Decoder
from depthmix.train.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint
from depthmix.train.config import TrainConfig
from depthmix.train.errors import CHECKPOINT, UserError
from depthmix.train.folder import RunFolder
from depthmix.train.loop import load_parameters, model_config


@dataclass
class Trained:
    """A model with what it takes to use it."""

    model: Decoder
    tokenizer: Any  # of the tokenizers library
    config: TrainConfig
    step: int


def load_model(run: str | Path, device: torch.device) -> Trained:
    """The newest good checkpoint of a run folder, or the checkpoint given itself."""
    from tokenizers import Tokenizer

    path = Path(run)
    if not str(run) or not path.exists():
        raise UserError(f"run {str(run)!r} does not exist: give the folder that `depthmix train` wrote", CHECKPOINT)
    saved: Checkpoint | None
    if path.parent.name == "checkpoints":
        folder, saved = RunFolder.open(path.parent.parent), load_checkpoint(path)
    else:
        folder = RunFolder.open(path)
        saved = latest_checkpoint(folder.checkpoints, warn=folder.log)
    if saved is None:
        raise UserError(f"run {run} has no checkpoint yet", CHECKPOINT)
    known = {f.name for f in fields(TrainConfig)}
    config = TrainConfig(**{k: v for k, v in folder.read_recipe().items() if k in known})
    try:
        tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    except Exception:  # the library raises plain Exception, for a missing file as for a broken one
        raise UserError(f"{folder.path / 'tokenizer.json'} is missing or no tokenizer", CHECKPOINT) from None
    vocab_size = (
        len(saved.model["embedding.weight"]) if "embedding.weight" in saved.model else tokenizer.get_vocab_size()
    )
    model = Decoder(model_config(config, vocab_size)).to(device)
    load_parameters(model, saved.model, config.mixer, f"step {saved.step} of {folder.path}")
    return Trained(model.eval(), tokenizer, config, saved.step)
