"""Tasks: the parts of a training that differ between text and images, such as batches, losses and measurements."""

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
    summed_images,
    summed_loss,
    token_losses,
)

Model = Callable[[Tensor], Tensor]


class Task(Protocol):
    """A training objective with its data."""

    # Number of classes or tokens to choose from: guessing has the loss log(outcomes).
    outcomes: int
    # A loss has exploded beyond this many times that of guessing.
    exploded: int
    # What the metrics count: tokens or images.
    unit: str
    # Units per step.
    per_step: int
    # get(step) returns the batch of a step.
    batches: Any
    # Rows per forward pass.
    micro: int

    @property
    def tokens(self) -> int:
        """Number of tokens that the model makes of one row of a batch."""

    def check(self) -> DecoderConfig | VitConfig | None:
        """Return the model's configuration without building it (None for a Hugging Face model). Raises UserError if it
        does not fit the data.
        """

    def build(self) -> Any:
        """Build the model with random weights. The caller has set the seed."""

    def start(self) -> Start:
        """Return the model as it starts, and the origin of its weights."""

    def checked(self, batch: Tensor) -> Tensor:
        """Return a batch, still on the CPU, after checking that the model can take it."""

    def validation(self) -> dict[str, Iterator[Tensor]]:
        """Return the validation batches of each domain, the same at every evaluation. Data without domains use an empty
        name.
        """

    def inputs(self, batch: Tensor) -> Tensor:
        """Return the model's input of a batch, without the targets."""

    def losses(self, model: Model, batch: Tensor) -> Tensor:
        """Compute every loss of a batch: one per token or per image."""

    def sums(self, model: Model, batch: Tensor, device: torch.device, whole: Model) -> tuple[float, ...]:
        """Compute the sums of one batch that `evaluation` needs. `whole` makes a plain tensor of one that is divided
        among processes.
        """

    def evaluation(self, sums: Mapping[str, Sequence[float]]) -> Evaluation | ImageEvaluation:
        """Turn the sums over each domain of the validation split into an evaluation."""

    def keep(self, folder: RunFolder) -> None:
        """Copy into the run folder what identifies its data and what its model needs."""

    def describe(self, folder: RunFolder, checkpoint: Path, model: Any) -> None:
        """Write the files that let other programs read a checkpoint, where such programs exist."""


class Text:
    """Next-token prediction."""

    unit, exploded = "tokens", 3

    def __init__(self, config: TrainConfig, data: TokenData, rows: slice = slice(None), share: Share = ALL) -> None:
        self.config, self.data, self.share = config, data, share
        self.outcomes, self.per_step = data.vocab_size, config.batch_size * config.seq_len
        self.tokens = config.seq_len
        self.batches = Batches(data.split("train"), config.seq_len, config.batch_size, config.seed, rows)
        self.micro = config.micro_batch_size or len(self.batches.rows)
        self.val, self.end = data.split("val"), end_token(data.tokenizer_path)
        self.validation()  # raises now if the split is too short

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
        return token_losses(model, batch, self.share)

    def sums(self, model: Model, batch: Tensor, device: torch.device, whole: Model) -> tuple[float, ...]:
        return summed_loss(model, batch, device, self.config.precision, whole, self.share)

    def evaluation(self, sums: Mapping[str, Sequence[float]]) -> Evaluation:
        return Evaluation.of(sums, self.val.n_bytes / self.val.n_tokens)

    def keep(self, folder: RunFolder) -> None:
        folder.keep_data(self.data.meta_path, self.data.tokenizer_path)

    def describe(self, folder: RunFolder, checkpoint: Path, model: Any) -> None:
        describe_run(folder.path, checkpoint, model, self.config.seq_len, self.end)


class Pictures:
    """Image classification."""

    # More than for text: a model that has memorised its images may be very sure of a few wrong classes.
    unit, exploded = "images", 10

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
        """Number of patches of an image, plus the class token."""
        rows, columns = vit_config(self.config, self.data.meta).grid
        return rows * columns + (self.config.pool == "token")

    def build(self) -> Vit:
        return build_vit(self.config, self.data.meta)

    def start(self) -> Start:
        seed_random(self.config.seed)
        return Start(self.build())

    def checked(self, batch: Tensor) -> Tensor:
        return batch  # ImageData has checked all labels, and every byte is a valid pixel

    def validation(self) -> dict[str, Iterator[Tensor]]:
        return {"": image_batches(self.data.split("val"), self.micro)}

    def inputs(self, batch: Tensor) -> Tensor:
        return normalised(unpack(batch, self.data.shape)[0], self.data)

    def losses(self, model: Model, batch: Tensor) -> Tensor:
        logits, labels = self.logits(model, batch)
        return functional.cross_entropy(logits, labels, reduction="none")

    def logits(self, model: Model, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, classes] in fp32 and labels [B]."""
        return model(self.inputs(batch)).float(), unpack(batch, self.data.shape)[1]

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
    """Normalise uint8 images [B, C, H, W] by the training images' mean and standard deviation of each channel."""
    # Python numbers, not tensors: a CUDA graph cannot copy from the host.
    channels = [
        (images[:, c].float() / 255 - mean) / (std or 1.0)
        for c, (mean, std) in enumerate(zip(data.mean, data.std, strict=True))
    ]
    return torch.stack(channels, dim=1)


def make_task(config: TrainConfig, data: TokenData | ImageData, rows: slice = slice(None), share: Share = ALL) -> Task:
    """Make the task of prepared data.

    Args:
        config: The training.
        data: Tokens or images.
        rows: Rows of each batch that belong to this process.
        own: Tokens of each sequence that belong to this process.

    Raises:
        UserError: An option is given that applies to the other kind of data only.
    """
    images = isinstance(data, ImageData)
    defaults = {f.name: f.default for f in fields(TrainConfig)}
    for name in OF_TEXT if images else OF_IMAGES:
        if getattr(config, name) != defaults[name]:
            kind, other = ("images", "text") if images else ("text", "images")
            raise UserError(f"{name} is for {other}, and {config.data} holds {kind}: leave it out")
    return Pictures(config, data, rows) if isinstance(data, ImageData) else Text(config, data, rows, share)
