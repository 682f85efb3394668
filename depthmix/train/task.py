"""What the loop does not know: what a batch holds, what its loss is and what is measured, for text and for images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from depthmix.config import OF_IMAGES, OF_TEXT, TrainConfig
from depthmix.data.dataset import Batches, TokenData, validation_parts
from depthmix.data.images import ImageBatches, ImageData, image_batches, unpack
from depthmix.data.tokenizer import end_token
from depthmix.errors import UserError
from depthmix.models import Decoder, DecoderConfig, Vit, VitConfig
from depthmix.parallel.share import Share
from depthmix.randomness import seed_random
from depthmix.runs.folder import RunFolder
from depthmix.runs.init import Start, check_vocabulary, read_source, settled, start_model
from depthmix.runs.pretrained import describe_run
from depthmix.runs.restore import build_decoder, build_vit, model_config, vit_config
from depthmix.train.evaluate import (
    ALL,
    Evaluation,
    ImageEvaluation,
    check_tokens,
    evaluate,
    evaluate_images,
    summed_images,
    summed_loss,
    token_losses,
)

Model = Callable[[Tensor], Tensor]


class Task(Protocol):
    """What a model is trained to do, with its data."""

    outcomes: int  # of what there is to predict: a model that guesses has the loss log(outcomes)
    exploded: int  # a loss of so many times that of guessing is none to learn from
    unit: str  # what is counted, as metrics name it
    per_step: int  # of them in a step
    batches: Any  # get(step): what step `step` learns from
    micro: int  # rows of them at a time

    @property
    def tokens(self) -> int:
        """That a model makes of a row of a batch."""

    def check(self) -> DecoderConfig | VitConfig | None:
        """The configuration of a model of ours, without building it; UserError for one that does not fit the data."""

    def build(self) -> Any:
        """The model with random weights, after whatever seed was set."""

    def start(self) -> Start:
        """The model as it starts, and where it came from."""

    def checked(self, batch: Tensor) -> Tensor:
        """The batch, still on the CPU, if a model can take it."""

    def validation(self) -> dict[str, Iterator[Tensor]]:
        """Return the validation batches of each domain, the same at every evaluation; without domains, of an empty name."""

    def inputs(self, batch: Tensor) -> Tensor:
        """What the model takes of a batch, without what it is to find."""

    def losses(self, model: Model, batch: Tensor) -> Tensor:
        """Every loss of a batch: of its tokens, or of its images."""

    def evaluate(self, model: Any, device: torch.device) -> Evaluation | ImageEvaluation:
        """What the model makes of the validation split."""

    def sums(self, model: Model, batch: Tensor, device: torch.device, whole: Model) -> tuple[float, ...]:
        """What `evaluation` needs of each batch, to be added up; whole: makes plain tensors of divided ones."""

    def evaluation(self, sums: Mapping[str, Sequence[float]]) -> Evaluation | ImageEvaluation:
        """Return what the sums over each domain of the validation split say."""

    def keep(self, folder: RunFolder) -> None:
        """Keep with the run what says which data it is, and what it takes to use its model."""

    def describe(self, folder: RunFolder, checkpoint: Path, model: Any) -> None:
        """Let other programs find a checkpoint in the run's folder, where there are any that read such models."""


class Text:
    """Predict the next token."""

    unit, exploded = "tokens", 3

    def __init__(self, config: TrainConfig, data: TokenData, rows: slice = slice(None), own: Share = ALL) -> None:
        self.config, self.data, self.own = config, data, own
        self.outcomes, self.per_step = data.vocab_size, config.batch_size * config.seq_len
        self.tokens = config.seq_len
        self.batches = Batches(data.split("train"), config.seq_len, config.batch_size, config.seed, rows)
        self.micro = config.micro_batch_size or len(self.batches.rows)
        self.val, self.end = data.split("val"), end_token(data.tokenizer_path)
        self.validation()  # a split that is too short is said now

    def check(self) -> DecoderConfig | None:
        if self.config.init:
            settled(self.config)
            check_vocabulary(self.config, self.data)
            if read_source(self.config.init).foreign:
                if self.config.parallel:
                    what = (
                        f"parallel divides this package's own models, and that in {self.config.init} is Hugging Face's"
                    )
                    raise UserError(f"{what}: train it in one process, without parallel")
                return None
        return model_config(self.config, self.data.vocab_size)

    def build(self) -> Decoder:
        return build_decoder(self.config, self.data.vocab_size)

    def start(self) -> Start:
        return start_model(self.config, self.data.vocab_size)

    def checked(self, batch: Tensor) -> Tensor:
        return check_tokens(batch, self.data.vocab_size, self.config.data)

    def validation(self) -> dict[str, Iterator[Tensor]]:
        parts = validation_parts(self.val, self.config.seq_len, self.micro, self.config.eval_tokens)
        return {domain: map(self.checked, batches) for domain, batches in parts.items()}

    def inputs(self, batch: Tensor) -> Tensor:
        return batch[:, :-1]

    def losses(self, model: Model, batch: Tensor) -> Tensor:
        return token_losses(model, batch, self.own)

    def evaluate(self, model: Any, device: torch.device) -> Evaluation:
        return evaluate(model, self.validation(), device, self.config.precision, self.val.n_bytes / self.val.n_tokens)

    def sums(self, model: Model, batch: Tensor, device: torch.device, whole: Model) -> tuple[float, ...]:
        return summed_loss(model, batch, device, self.config.precision, whole, self.own)

    def evaluation(self, sums: Mapping[str, Sequence[float]]) -> Evaluation:
        return Evaluation.of(sums, self.val.n_bytes / self.val.n_tokens)

    def keep(self, folder: RunFolder) -> None:
        folder.keep_data(self.data.meta_path, self.data.tokenizer_path)

    def describe(self, folder: RunFolder, checkpoint: Path, model: Any) -> None:
        describe_run(folder.path, checkpoint, model, self.config.seq_len, self.end)


class Pictures:
    """Say of which class an image is."""

    unit, exploded = "images", 10  # one that is sure of a few wrong classes has only learnt its images by heart

    def __init__(self, config: TrainConfig, data: ImageData, rows: slice = slice(None)) -> None:
        self.config, self.data = config, data
        self.outcomes, self.per_step = len(data.classes), config.batch_size
        self.batches = ImageBatches(data.split("train"), config.batch_size, config.seed, config.crop, config.flip, rows)
        self.micro = config.micro_batch_size or len(self.batches.rows)

    def check(self) -> VitConfig:
        if not 0 <= self.config.crop <= min(self.data.shape[:2]):
            raise UserError(f"crop must be from 0 to the size of the images, got {self.config.crop}")
        return vit_config(self.config, self.data.meta)

    @property
    def tokens(self) -> int:
        """Patches of an image, and the class token."""
        rows, columns = vit_config(self.config, self.data.meta).grid
        return rows * columns + (self.config.pool == "token")

    def build(self) -> Vit:
        return build_vit(self.config, self.data.meta)

    def start(self) -> Start:
        seed_random(self.config.seed)
        return Start(self.build())

    def checked(self, batch: Tensor) -> Tensor:
        return batch  # ImageData has looked at all labels, and every byte is a pixel

    def validation(self) -> dict[str, Iterator[Tensor]]:
        return {"": image_batches(self.data.split("val"), self.micro)}

    def inputs(self, batch: Tensor) -> Tensor:
        return normalised(unpack(batch, self.data.shape)[0], self.data)

    def losses(self, model: Model, batch: Tensor) -> Tensor:
        logits, labels = self.logits(model, batch)
        return functional.cross_entropy(logits, labels, reduction="none")

    def logits(self, model: Model, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, classes] in fp32, and labels [B]."""
        return model(self.inputs(batch)).float(), unpack(batch, self.data.shape)[1]

    def evaluate(self, model: Vit, device: torch.device) -> ImageEvaluation:
        return evaluate_images(
            lambda batch: self.logits(model, batch), model, self.validation()[""], device, self.config.precision
        )

    def sums(self, model: Model, batch: Tensor, device: torch.device, whole: Model) -> tuple[float, ...]:
        return summed_images(lambda batch: self.logits(model, batch), batch, device, self.config.precision)

    def evaluation(self, sums: Mapping[str, Sequence[float]]) -> ImageEvaluation:
        total, images, right = sums[""]
        return ImageEvaluation(total / images, round(images), right / images)

    def keep(self, folder: RunFolder) -> None:
        folder.keep_data(self.data.meta_path, None)

    def describe(self, folder: RunFolder, checkpoint: Path, model: Vit) -> None:
        pass


def normalised(images: Tensor, data: ImageData) -> Tensor:
    """uint8 [B, C, H, W] with the training images' mean and deviation taken out, by channel."""
    # Numbers, not tensors: a recorded step copies nothing from the host.
    channels = [
        (images[:, c].float() / 255 - mean) / (std or 1.0)
        for c, (mean, std) in enumerate(zip(data.mean, data.std, strict=True))
    ]
    return torch.stack(channels, dim=1)


def make_task(config: TrainConfig, data: TokenData | ImageData, rows: slice = slice(None), own: Share = ALL) -> Task:
    """The task of prepared data; UserError for options that mean nothing to it. rows, own: of a batch and a sequence, this process's."""
    images = isinstance(data, ImageData)
    defaults = {f.name: f.default for f in fields(TrainConfig)}
    for name in OF_TEXT if images else OF_IMAGES:
        if getattr(config, name) != defaults[name]:
            kind, other = ("images", "text") if images else ("text", "images")
            raise UserError(f"{name} is for {other}, and {config.data} holds {kind}: leave it out")
    return Pictures(config, data, rows) if isinstance(data, ImageData) else Text(config, data, rows, own)
