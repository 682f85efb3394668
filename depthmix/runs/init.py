"""`--init`: start a training from a model in a folder, with its own mixer or, if it is plain, with another.

The folder holds a run, a model that `save_pretrained` wrote, or a model of `depthmix retrofit`. One checkpoint of a run works, too.
A plain model gets its mixer as in `depthmix.retrofit`: the loss at step 0 is the plain model's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from depthmix.config import TrainConfig
from depthmix.data.dataset import TokenData
from depthmix.data.tokenizer import load_tokenizer
from depthmix.errors import CHECKPOINT, DATA, UserError
from depthmix.mixers import Mixer, OptionError, create_mixer
from depthmix.mixers.defaults import all_options, chosen_options
from depthmix.mixers.plain import is_plain, why_not_plain
from depthmix.models.exchange import MODEL_TYPE
from depthmix.randomness import seed_random
from depthmix.runs import foreign
from depthmix.runs.agreement import check_tokenizer
from depthmix.runs.folder import RECIPE, TOKENIZER, RunFolder
from depthmix.runs.pretrained import is_pretrained, model_type, read_config, read_pretrained
from depthmix.runs.restore import (
    build_decoder,
    model_config,
    model_of_pretrained,
    model_of_run,
    naming_description,
    open_checkpoint,
    read_train_config,
    shared_fields,
)

AT_RANDOM = ("embedding_std", "output_scale")  # options of random initial weights
NOT_SHAPE = ("mixer", "mixer_options", "plain_eps", *AT_RANDOM)  # fields that may differ from the folder's model


@dataclass
class Source:
    """Description of the model in a folder."""

    path: Path
    folder: Path  # the run folder, if `path` is a checkpoint
    values: dict[str, Any]  # fields of TrainConfig that the model decides
    sites: dict[str, Any]  # arguments of create_mixer that describe the model's sites
    foreign: bool  # whether it is one of Hugging Face's own models
    run: bool
    vocab_size: int | None = None  # if known without the weights
    seq_len: int | None = None  # the longest sequence that the model accepts

    def mixer(self, name: str, options: dict[str, Any]) -> Mixer:
        """Build a mixer for this model's sites on the meta device. Raises UserError for options that do not fit."""
        try:
            with torch.device("meta"):
                return create_mixer(name, dim=self.values["dim"], **self.sites, **options)
        except OptionError as error:
            raise UserError(str(error)) from None


def read_source(init: str) -> Source:
    """Describe the model that `init` names, without its weights."""
    path = Path(init).absolute()
    if not path.exists():
        raise UserError(f"init {init!r} does not exist: give a run folder, or one with a saved model", CHECKPOINT)
    checkpoint = path.parent.name == "checkpoints"
    folder, run = (path.parent.parent if checkpoint else path), not is_pretrained(path)
    if run and "classes" in RunFolder.open(folder).data_meta():
        raise UserError(f"init {init!r} was trained on images: only models of text can be started from", CHECKPOINT)
    if model_type(folder) not in (None, MODEL_TYPE):
        return _read_foreign(path, folder, run)
    if run:
        config = read_train_config(RunFolder(folder))
        # The vocabulary is known from the weights alone.
        with naming_description(folder / RECIPE):
            decoder = model_config(config, vocab_size=1)
    else:
        decoder = read_config(path)
    values = {name: getattr(decoder, name) for name in shared_fields()}
    return Source(path, folder, values, {"n_blocks": decoder.n_blocks}, False, run, None if run else decoder.vocab_size)


def _read_foreign(path: Path, folder: Path, run: bool) -> Source:
    description = foreign.describe(folder, "init")
    rule = description.mixer or {"mixer": TrainConfig.mixer, "options": {}}
    values = {**description.shape, "mixer": rule["mixer"], "mixer_options": rule["options"]}
    return Source(path, folder, values, description.sites, True, run, description.vocab_size, description.seq_len)


def init_values(init: str, mixer: bool = True) -> dict[str, Any]:
    """Return the fields of TrainConfig that the model in a folder decides: its shape and, unless `mixer` is False, its
    mixer.
    """
    values = read_source(init).values
    return values if mixer else {name: value for name, value in values.items() if name not in NOT_SHAPE}


def settled(config: TrainConfig) -> TrainConfig:
    """Fill in the fields that follow from `init`. Raises UserError where they contradict the configuration."""
    if not config.init:
        if config.tune != "all":
            raise UserError(f"tune {config.tune} needs init: a model with random weights has to learn all of them")
        return config
    source = read_source(config.init)
    mixer = source.mixer(config.mixer, config.mixer_options)
    if config.tune == "mixer" and next(mixer.parameters(), None) is None:
        raise UserError(f"tune mixer: {config.mixer} has no parameters to train")
    _check_shape(config, source)
    if source.seq_len is not None and config.seq_len > source.seq_len:
        what = f"the positions of the model in {config.init}"
        raise UserError(f"seq_len must be at most {source.seq_len}, {what}, got {config.seq_len}")
    if _same_mixer(config, source):
        return dataclasses.replace(config, plain_eps=bool(source.values.get("plain_eps")))
    _check_exchange(config, source, mixer)
    return dataclasses.replace(config, plain_eps=True)


def _check_shape(config: TrainConfig, source: Source) -> None:
    given: Any = config if source.foreign else model_config(config, 1)
    for name, value in source.values.items():
        if name not in NOT_SHAPE and getattr(given, name) != value:
            what = f"{name} is {getattr(config, name)!r} and that of the model in {config.init} is {value!r}"
            raise UserError(f"{what}: leave {name} out, the model decides its shape")
    for name in AT_RANDOM:
        value = getattr(config, name)
        if value not in (getattr(TrainConfig, name), source.values.get(name)):
            what = f"{name} is about random initial weights, and those of the model in {config.init} are loaded"
            raise UserError(f"{what}: leave {name} out")


def _same_mixer(config: TrainConfig, source: Source) -> bool:
    if config.mixer != source.values["mixer"]:
        return False
    new_options, old_options = config.mixer_options, source.values["mixer_options"]
    return all_options(config.mixer, new_options) == all_options(config.mixer, old_options)


def _check_exchange(config: TrainConfig, source: Source, mixer: Mixer) -> None:
    """Raise UserError unless the folder's mixer is plain and the new one starts as plain residuals."""
    old = source.mixer(source.values["mixer"], source.values["mixer_options"])
    if not is_plain(old):
        options = "".join(f" {k}={v}" for k, v in chosen_options(old.name, source.values["mixer_options"]).items())
        what = f"the model in {config.init} was trained with {old.name}{options}"
        raise UserError(f"{what}: continue with that rule, since only plain residuals can be replaced by another")
    if reason := why_not_plain(mixer):
        raise UserError(f"init: {reason}, so the outputs of the model in {config.init} would change")


def check_vocabulary(config: TrainConfig, data: TokenData) -> None:
    """Raise UserError if the data's tokens differ from those of the model that a training starts from."""
    if not config.init:
        return
    source = read_source(config.init)
    _check_size(config, data.vocab_size, source.vocab_size)
    path = source.folder / TOKENIZER
    if not path.is_file():
        return  # the model has no tokenizer to compare with
    if source.run:
        check_tokenizer(RunFolder(source.folder))
    model_tokens, data_tokens = (load_tokenizer(p, add_end=False).get_vocab() for p in (path, data.tokenizer_path))
    if any(
        data_tokens.get(token) != number for token, number in model_tokens.items()
    ):  # more of them need but rows of the embedding
        advice = f"prepare it with `depthmix data --tokenizer {path}`"
        raise UserError(f"{config.data} has other tokens than the model in {config.init}: {advice}", DATA)


def _check_size(config: TrainConfig, data: int, model: int | None) -> None:
    if model is not None and model < data:
        what = f"the vocabulary of {config.data} has {data} entries and that of the model in {config.init} {model}"
        advice = f"a model to start from needs a row for every token, which its resize_token_embeddings({data}) adds"
        raise UserError(f"{what}: {advice}", DATA)


@dataclass
class Start:
    """A model to train, and its origin."""

    model: Any  # a Decoder, or a model with its interface
    origin: dict[str, Any] | None = None


def start_model(config: TrainConfig, vocab_size: int) -> Start:
    """Build the model that a training starts with: random weights, or those of `init`. `vocab_size` is the data's."""
    seed_random(config.seed)
    if not config.init:
        return Start(build_decoder(config, vocab_size))
    source = read_source(config.init)
    model, step = _load(source)
    seed_random(config.seed)  # loading may have drawn numbers
    _check_size(config, vocab_size, model.config.vocab_size)
    if source.foreign:
        model.give_mixer(config.mixer, config.mixer_options, keep=_same_mixer(config, source))
    elif not _same_mixer(config, source):
        model.change_mixer(model_config(config, model.config.vocab_size))
    origin = {"folder": str(source.path), "mixer": source.values["mixer"], "options": source.values["mixer_options"]}
    model.train()
    if config.tune == "mixer":
        added = set(model.added_by_mixer())
        for name, p in model.named_parameters():
            p.requires_grad_(name in added)
    return Start(model, {**origin, "step": step})


def _load(source: Source) -> tuple[Any, int | None]:
    """Load a model with its weights; returns (model, step of its run or None)."""
    if not source.run:
        if source.foreign:
            return foreign.load_adapted(source.path, "init"), None
        return model_of_pretrained(source.path, read_pretrained(source.path)), None
    folder, saved = open_checkpoint(source.path)
    return model_of_run(folder, saved, read_train_config(folder), 1), saved.step


def check_finished(init: str) -> None:
    """Raise UserError for an unfinished run, whose newest weights depend on the time at which a training loads them."""
    source = read_source(init) if init else None
    if source is None or not source.run or source.path != source.folder or RunFolder(source.folder).has_result():
        return
    what = f"init {init} is a run that has not finished, and every arm must start from the same weights"
    raise UserError(f"{what}: give one checkpoint in it", CHECKPOINT)
