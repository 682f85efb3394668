"""Load a trained model from its run folder, or from a folder of Hugging Face's `save_pretrained`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthmix.config import TrainConfig
from depthmix.data.tokenizer import END, load_tokenizer, vocabulary
from depthmix.errors import CHECKPOINT, DATA, UserError
from depthmix.mixers import OptionError
from depthmix.models import Decoder, DecoderConfig, Vit, VitConfig
from depthmix.models.exchange import MODEL_TYPE
from depthmix.runs import foreign
from depthmix.runs.agreement import check_agreement, check_tokenizer
from depthmix.runs.checkpoint import Checkpoint, load_checkpoint, newest_checkpoint
from depthmix.runs.folder import RECIPE, TOKENIZER, RunFolder, check_options
from depthmix.runs.pretrained import CONFIG, Pretrained, is_pretrained, model_type, read_end, read_pretrained
from depthmix.shown import shown


@dataclass
class Trained:
    """A trained model and all that is needed to use it."""

    # In eval mode: a Decoder, a Hugging Face model with a Decoder's interface, or a Vit for images.
    model: Any
    tokenizer: Any  # a tokenizers.Tokenizer; None for images
    config: TrainConfig  # for a model that was not trained here: the known fields, without data
    step: int  # of the checkpoint; 0 for a model without checkpoints
    folder: RunFolder
    end: int | None = None  # id of the token that ends a text
    special: bool = False  # whether the tokenizer's special tokens come before a prompt


def load_model(run: str | Path, device: torch.device) -> Trained:
    """Load a trained model.

    Args:
        run: A run folder (its newest checkpoint is loaded), one checkpoint, or a folder of `save_pretrained`.
        device: Where to put the model.

    Raises:
        UserError: The folder does not exist, or its content cannot be used.
    """
    if not str(run):
        raise UserError("run is needed: the folder that `depthmix train` wrote, or one checkpoint in it")
    path = Path(run).absolute()
    if not path.exists():
        raise UserError(f"run {str(run)!r} does not exist: give the folder that `depthmix train` wrote", CHECKPOINT)
    if is_pretrained(path):
        is_decoder = model_type(path) in (None, MODEL_TYPE)
        return _load_pretrained(path, device) if is_decoder else _load_foreign(path, device)
    folder, saved = open_checkpoint(path)
    config = read_train_config(folder)
    if "classes" in (meta := folder.data_meta()):
        return _load_vit(folder, config, meta, saved, device)
    has_end = meta.get("end_of_text", True) is not None  # data prepared from token ids may have none
    tokenizer = _tokenizer(folder, add_end=has_end)
    check_tokenizer(folder)
    model = model_of_run(folder, saved, config, vocabulary(tokenizer))
    return Trained(model.to(device).eval(), tokenizer, config, saved.step, folder, tokenizer.token_to_id(END))


def accelerate_loaded(trained: Trained) -> None:
    """Run the mixing of a Hugging Face model that mixes over depth on this package's operators.

    Raises:
        UserError: The model is not one.
    """
    if isinstance(trained.model, Decoder | Vit):
        what = f"{trained.folder.path} holds a model of depthmix, which runs on its operators already"
        raise UserError(f"accelerate: {what}: leave the option out")
    foreign.accelerate(trained.model.model)


def open_checkpoint(path: Path) -> tuple[RunFolder, Checkpoint]:
    """Load the newest checkpoint of a run folder, or the given checkpoint. Raises UserError unless it fits the rest of
    the folder.
    """
    saved: Checkpoint | None
    if path.parent.name == "checkpoints":
        folder, saved = RunFolder.open(path.parent.parent), load_checkpoint(path)
    else:
        folder = RunFolder.open(path)
        saved = newest_checkpoint(folder.checkpoints)
    if saved is None:
        raise UserError(f"run {path} has no checkpoint yet", CHECKPOINT)
    check_agreement(folder, saved)
    return folder, saved


def model_of_run(folder: RunFolder, saved: Checkpoint, config: TrainConfig, tokens: int) -> Any:
    """Build a run's model with the weights of a checkpoint. `tokens`: minimum size of its vocabulary."""
    kind = model_type(folder.path)
    if kind not in (None, MODEL_TYPE):
        model = foreign.from_description(folder.path)
    else:
        embedding = saved.model.get("embedding.weight")
        vocab_size = len(embedding) if embedding is not None and embedding.ndim else tokens
        with naming_description(folder.path / RECIPE):
            model = build_decoder(config, vocab_size)
    _check_vocabulary(folder, tokens, model.config.vocab_size, "run")
    load_parameters(model, saved.model, config.mixer, f"step {saved.step} of {folder.path}")
    return model


def model_of_pretrained(path: Path, saved: Pretrained) -> Decoder:
    """Build the decoder that `save_pretrained` wrote, with its weights."""
    with naming_description(path / CONFIG):
        model = Decoder(saved.decoder)
    buffers = dict(model.named_buffers())  # constants, which the model computes
    tensors = {name: t for name, t in saved.tensors.items() if name not in buffers}
    load_parameters(model, tensors, saved.decoder.mixer, str(path))
    return model


def _load_vit(
    folder: RunFolder, config: TrainConfig, meta: dict[str, Any], saved: Checkpoint, device: torch.device
) -> Trained:
    with naming_description(folder.path):
        model = build_vit(config, meta).to(device)
    load_parameters(model, saved.model, config.mixer, f"step {saved.step} of {folder.path}")
    return Trained(model.eval(), None, config, saved.step, folder)


def _load_pretrained(path: Path, device: torch.device) -> Trained:
    saved, folder = read_pretrained(path), RunFolder(path)
    tokenizer = _tokenizer(folder, add_end=False)
    _check_vocabulary(folder, vocabulary(tokenizer), saved.decoder.vocab_size, "model")
    config = TrainConfig(**{name: getattr(saved.decoder, name) for name in shared_fields()})
    config.seq_len = saved.seq_len or config.seq_len
    model = model_of_pretrained(path, saved).to(device)
    return Trained(
        model.eval(), tokenizer, config, 0, folder, _end(path, tokenizer, saved.end, saved.decoder.vocab_size)
    )


def _load_foreign(path: Path, device: torch.device) -> Trained:
    """Load a Hugging Face model, retrofitted or plain, with the tokenizer next to it."""
    description, folder = foreign.describe(path, "run", mixing=True), RunFolder(path)
    tokenizer = _tokenizer(folder, add_end=False)
    _check_vocabulary(folder, vocabulary(tokenizer), description.vocab_size, "model")
    end = _end(path, tokenizer, read_end(path), description.vocab_size)
    config = TrainConfig(**description.shape)  # type: ignore[arg-type]
    if description.mixer is not None:
        config.mixer, config.mixer_options = description.mixer["mixer"], description.mixer["options"]
    config.seq_len = description.seq_len or config.seq_len
    model = foreign.load_adapted(path, "run").to(device).eval()
    return Trained(model, tokenizer, config, 0, folder, end, special=True)


def _end(path: Path, tokenizer: Any, recorded: int | None, vocab_size: int) -> int | None:
    """Return the id of the token that ends a text, as the folder records it or else as the tokenizer names it."""
    end = tokenizer.token_to_id(END) if recorded is None else recorded
    if end is not None and end >= vocab_size:
        what = f"the token {end} that ends a text is beyond the vocabulary of {vocab_size}"
        raise UserError(f"{path} cannot be used: {what}", CHECKPOINT)
    return end


def _check_vocabulary(folder: RunFolder, tokens: int, vocab_size: int, owner: str) -> None:
    if tokens > vocab_size:
        what = f"has {tokens} entries and the model {vocab_size}"
        raise UserError(f"{folder.path / TOKENIZER} {what}: it is of another {owner}", CHECKPOINT)


def read_train_config(folder: RunFolder) -> TrainConfig:
    """Return the run's recipe. Raises UserError if a value does not have its field's type."""
    recipe, plain = folder.read_recipe(), TrainConfig()
    check_options(folder, recipe, [f.name for f in fields(TrainConfig)])
    known = {f.name: recipe[f.name] for f in fields(TrainConfig) if f.name in recipe}
    for name, value in known.items():
        default = getattr(plain, name)
        kinds = {float: (int, float), type(None): (int, type(None))}.get(type(default), (type(default),))
        if type(value) not in kinds:
            raise UserError(f"{folder.path / RECIPE} is damaged: {name} is {shown(value)}", CHECKPOINT)
    return TrainConfig(**known)


def _tokenizer(folder: RunFolder, add_end: bool = True) -> Any:
    try:
        return load_tokenizer(folder.path / TOKENIZER, add_end)
    except UserError as error:
        code = CHECKPOINT if error.exit_code == DATA else error.exit_code
        raise UserError(f"run {folder.path} cannot be used: {error}", code) from None


@contextmanager
def naming_description(path: Path) -> Iterator[None]:
    """Name the file or folder whose description of a model cannot be built."""
    try:
        yield
    except (UserError, OptionError) as error:
        raise UserError(f"{path} describes no model: {error}", CHECKPOINT) from None


def shared_fields(model: type = DecoderConfig) -> set[str]:
    """Return the names of the fields that a model's configuration shares with TrainConfig."""
    return {f.name for f in fields(model)} & {f.name for f in fields(TrainConfig)}


def model_config(config: TrainConfig, vocab_size: int) -> DecoderConfig:
    """Return the decoder configuration that a training describes. Raises UserError if it is invalid."""
    try:
        return DecoderConfig(vocab_size=vocab_size, **{name: getattr(config, name) for name in shared_fields()})
    except ValueError as error:
        raise UserError(str(error)) from error


def build_decoder(config: TrainConfig, vocab_size: int) -> Decoder:
    """Build the decoder that a training describes. Raises UserError for mixer options that contradict each other."""
    described = model_config(config, vocab_size)
    try:
        return Decoder(described)
    except OptionError as error:
        raise UserError(str(error)) from error


def vit_config(config: TrainConfig, meta: dict[str, Any]) -> VitConfig:
    """Return the vision transformer that a training describes, for images with this meta.json. Raises UserError if it
    is invalid.
    """
    try:
        shape = {"image_size": (meta["height"], meta["width"]), "channels": meta["channels"]}
        options = {name: getattr(config, name) for name in shared_fields(VitConfig)}
        return VitConfig(n_classes=len(meta["classes"]), **shape, **options)
    except (KeyError, TypeError) as error:
        raise UserError(f"the meta.json of its images is damaged ({error})", DATA) from None
    except ValueError as error:
        raise UserError(str(error)) from error


def build_vit(config: TrainConfig, meta: dict[str, Any]) -> Vit:
    """Build the vision transformer that a training describes. Raises UserError for mixer options that contradict each
    other.
    """
    described = vit_config(config, meta)
    try:
        return Vit(described)
    except OptionError as error:
        raise UserError(str(error)) from error


def load_parameters(model: Any, tensors: dict[str, Tensor], mixer: str, what: str) -> None:
    """Copy a checkpoint's tensors into the model. Raises UserError if they are of another mixer or size."""
    named = dict(model.named_parameters())
    for name in (*named, *tensors):
        if name not in named or name not in tensors:
            kind = "has" if name in tensors else "lacks"
            raise UserError(
                f"the checkpoint at {what} {kind} {name}: it is of another rule or size than {mixer} as configured",
                CHECKPOINT,
            )
        if named[name].shape != tensors[name].shape:
            shapes = f"{list(tensors[name].shape)}, not {list(named[name].shape)}"
            raise UserError(f"the checkpoint at {what} has {name} of shape {shapes}: it is of another size", CHECKPOINT)
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(tensors[name])
