"""The training loop, top to bottom.

A run is a folder. The data order is a function of the seed and the step, so a run that was killed goes on from its last
checkpoint and ends with the same metrics, bit for bit on the CPU, as one that was not.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from depthmix.config import TrainConfig
from depthmix.data.dataset import TokenData
from depthmix.data.images import ImageData
from depthmix.data.prepared import open_data
from depthmix.device import PeakMemory, autocast, choose_device
from depthmix.errors import CHECKPOINT, DIVERGED, INTERRUPTED, UserError
from depthmix.insight.document import rounded
from depthmix.insight.dynamics import gradient_norms, magnitudes
from depthmix.runs.checkpoint import Checkpoint, latest_checkpoint, list_checkpoints, save_checkpoint
from depthmix.runs.folder import RunFolder
from depthmix.runs.init import settled, start_model
from depthmix.runs.restore import load_parameters
from depthmix.train.clock import CoreWait, StepClock, quartiles
from depthmix.train.compiled import begin_model
from depthmix.train.deterministic import deterministic
from depthmix.train.evaluate import Evaluation, ImageEvaluation
from depthmix.train.graph import GraphedBackward, record
from depthmix.train.optim import (
    build_optimizers,
    check_groups,
    learning_rate,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)
from depthmix.train.progress import TrainingProgress
from depthmix.train.signals import StopSignal
from depthmix.train.sinks import open_sinks
from depthmix.train.task import make_task

RNG = "rng/torch"  # the generator's state, saved among the optimizer's tensors
# What may change between resumes; of the data it is the place, the content is compared.
FREE = {"data", "out", "quiet", "tensorboard", "wandb", "keep", "save_every", "log_every", "dynamics_every"}
FREE |= {"device", "on_nan"}
FLOAT32 = torch.finfo(torch.float32)
WATCHED = 4096  # tokens of a batch that magnitudes are taken of, about


def check_config(config: TrainConfig) -> None:
    """UserError for a value no run can have."""
    for name in ("data", "out"):
        if not getattr(config, name):
            raise UserError(
                f"{name} is needed: {next(f.metadata['help'] for f in dataclasses.fields(config) if f.name == name)}"
            )
    for name in ("seq_len", "batch_size", "steps", "log_every", "eval_every", "save_every", "keep"):
        if getattr(config, name) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(config, name)}")
    for name in ("micro_batch_size", "eval_tokens", "dynamics_every"):
        if getattr(config, name) is not None and getattr(config, name) < 1:
            raise UserError(f"{name} must be at least 1 or none, got {getattr(config, name)}")
    if config.micro_batch_size is not None and config.batch_size % config.micro_batch_size:
        raise UserError(f"micro_batch_size must divide batch_size={config.batch_size}, got {config.micro_batch_size}")
    if config.cuda_graph and (config.micro_batch_size is not None or config.checkpoint_activations):
        raise UserError("cuda_graph records a step in one piece: leave out micro_batch_size and checkpoint_activations")
    for name in ("lr", "muon_lr", "adam_eps", "rope_theta", "norm_eps"):
        if not 0 < (value := getattr(config, name)) < math.inf:
            raise UserError(f"{name} must be a finite number above 0, got {value}")
        if not FLOAT32.tiny <= value <= FLOAT32.max:
            held = f"from {FLOAT32.tiny:.1e} to {FLOAT32.max:.1e}"
            raise UserError(f"{name} must be a number that float32 holds, {held}, got {value}")
    for name in ("warmup", "seed"):
        if getattr(config, name) < 0:
            raise UserError(f"{name} must be at least 0, got {getattr(config, name)}")
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
    """UserError for a configuration that does not fit its device, its data or itself, without building it."""
    choose_device(config.device)
    make_task(config, data).check()


def build_model(config: TrainConfig, vocab_size: int, device: torch.device) -> Any:
    """The model as training wants it: seeded, on its device, compiled or checkpointed sublayer by sublayer."""
    return prepare_model(start_model(config, vocab_size).model, config, device)


def prepare_model(model: Any, config: TrainConfig, device: torch.device) -> Any:
    """A model moved to its device, compiled or checkpointed sublayer by sublayer."""
    if config.compile != "off":
        begin_model()  # after a handful of models in one process torch would no longer compile, and not say so
    model = model.to(device)
    sublayers, norms = model.repeated_parts()
    if config.checkpoint_activations:
        for sublayer in sublayers:
            sublayer.forward = functools.partial(checkpoint, sublayer.forward, use_reentrant=False)
    if config.compile == "model":
        model.compile()
    elif config.compile == "sublayers":
        for module in (*sublayers, *norms):
            module.compile()
    return model


class Trainer:
    """A model, its optimizers and its data: everything one step needs."""

    def __init__(self, config: TrainConfig, data: TokenData | ImageData, device: torch.device) -> None:
        self.config, self.device, self.task = config, device, make_task(config, data)
        self.task.check()
        start = self.task.start()
        self.origin = start.origin  # where the weights came from; None: they are random
        if config.dynamics_every is not None and not hasattr(start.model, "sublayers"):
            raise UserError(
                "dynamics_every looks into this package's own models: leave it out for a model of Hugging Face's"
            )
        self.model = prepare_model(start.model, config, device)
        self.optimizers = build_optimizers(self.model, config)
        self.fused = all(g.get("fused") for o in self.optimizers.values() for g in o.param_groups)
        self.batches = self.task.batches
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        # A loss far above guessing has exploded. As a float32, so that host and GPU judge alike.
        self.guessing = math.log(self.task.outcomes)
        self.too_large = torch.tensor(self.task.exploded * self.guessing, dtype=torch.float32).item()
        self.clock = StepClock(device)
        self.graphed: GraphedBackward | None = None
        self.ahead: tuple[int, Tensor] | None = None  # the next step's number and batch
        self.gradients: Tensor | None = None  # norms by site, of the last step that was watched

    def step(self, step: int) -> tuple[float, float]:
        """One optimizer step on batch `step`: (loss, gradient norm). A loss that is not usable leaves the weights alone."""
        numbers = self.launch(step)
        if self.device.type == "cuda":
            self.ahead = step + 1, self.read(step + 1)  # while the GPU works on this one
        loss, norm = numbers.tolist()
        if not self.fused:
            self._update(self.usable(loss, norm))
        return loss, norm

    def launch(self, step: int) -> Tensor:
        """A step's loss and gradient norm, which a GPU may still be working on; with a fused optimizer all of the step."""
        batch = self.task.checked(self.batch(step)).to(self.device, non_blocking=True)
        micro = self.config.micro_batch_size or self.config.batch_size
        set_learning_rate(self.optimizers, learning_rate(self.config, step))
        self.clock.start()
        if self.config.cuda_graph and self.device.type == "cuda":
            self.graphed = self.graphed or record(self.loss, self.parameters, batch)
            total = self.graphed(batch)
        else:
            total = torch.zeros((), device=self.device)
            for part in batch.split(micro):
                loss = self.loss(part) * (len(part) / len(batch))
                loss.backward()
                total += loss.detach()
        if self.watches(step):
            self.gradients = gradient_norms(self.model.sublayers)  # before they are clipped
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip or math.inf)
        numbers = torch.stack([total, norm.to(total)])
        if self.fused:  # launched before the numbers are known here: the GPU itself leaves the weights alone
            unusable = (~torch.isfinite(numbers).all() | (total > self.too_large)).float()
            for optimizer in self.optimizers.values():
                optimizer.found_inf = unusable  # type: ignore[attr-defined]  # as a gradient scaler tells it
            self._update(True)
        return numbers

    def _update(self, usable: bool) -> None:
        for optimizer in self.optimizers.values() if usable else ():
            optimizer.step()
        self.clock.stop()
        if self.graphed is None:  # a replay overwrites the gradients it recorded
            self.model.zero_grad(set_to_none=True)

    def loss(self, batch: Tensor) -> Tensor:
        """The mean loss of a batch."""
        with autocast(self.device, self.config.precision):
            return self.task.loss(self.model, batch)

    def watches(self, step: int) -> bool:
        """Whether a step's dynamics are taken down."""
        every = self.config.dynamics_every
        return every is not None and (step % every == 0 or step == self.config.steps - 1)

    def magnitudes(self, step: int) -> dict[str, Any]:
        """RMS values over depth before a step, on a few rows of its batch: a pass of its own, without gradients, neither recorded nor compiled."""
        rows = self.task.checked(self.batch(step))[: max(1, WATCHED // self.task.tokens)].to(self.device)
        with ExitStack() as stack:
            stack.enter_context(autocast(self.device, self.config.precision))
            if self.config.compile != "off":  # a smaller batch would be compiled anew
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            return magnitudes(self.model, self.task.inputs(rows))

    def usable(self, loss: float, norm: float = 0.0) -> bool:
        """Whether the numbers of a step are ones to learn from."""
        return math.isfinite(loss) and math.isfinite(norm) and loss <= self.too_large

    def complaint(self, loss: float, norm: float = 0.0) -> str:
        """What is wrong with numbers that are not usable."""
        if math.isfinite(loss) and loss <= self.too_large:
            return f"gradient's norm became {norm} (at a loss of {loss:.4g})"
        times = {3: "three", 10: "ten"}[self.task.exploded]
        far = f", {times} times that of guessing ({self.guessing:.4g}) and more" if math.isfinite(loss) else ""
        return f"loss became {loss:.4g}{far}"

    def astray(self) -> bool:
        """Whether the weights are beyond use, whatever the batch: loss or gradient of validation data is not usable either."""
        loss = self.loss(next(self.task.validation()).to(self.device))
        # Not backward(): a recorded step's gradients stay where they are.
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        norm = torch.nn.utils.get_total_norm([g for g in gradients if g is not None])
        return not self.usable(loss.item(), norm.item())

    def batch(self, step: int) -> Tensor:
        """Batch `step`, read before or now."""
        return self.ahead[1] if self.ahead is not None and self.ahead[0] == step else self.read(step)

    def read(self, step: int) -> Tensor:
        """Batch `step`, for a GPU in memory that it copies from without anyone waiting."""
        batch = self.batches.get(step)
        return batch.pin_memory() if self.device.type == "cuda" else batch

    def evaluate(self) -> Evaluation | ImageEvaluation:
        """What the model makes of the validation split."""
        return self.task.evaluate(self.model, self.device)

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Everything a checkpoint holds: the model's tensors, and the optimizers' with the random generator's."""
        model = {n: p.detach() for n, p in self.model.named_parameters()}  # tied weights come once
        return model, {**optimizer_tensors(self.optimizers), RNG: torch.get_rng_state()}

    def describe(self, folder: RunFolder, checkpoint: Path) -> None:
        """Let other programs find a checkpoint in the run's folder."""
        self.task.describe(folder, checkpoint, self.model)

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint of the same model."""
        load_parameters(self.model, saved.model, self.config.mixer, f"step {saved.step}")
        optimizer = dict(saved.optimizer)
        if RNG not in optimizer or not {"seconds", "skipped", "val_loss"} <= saved.state.keys():
            raise UserError(f"the checkpoint {saved.path} was not written by `depthmix train`", CHECKPOINT)
        torch.set_rng_state(optimizer.pop(RNG))
        try:
            load_optimizer_tensors(self.optimizers, optimizer)
        except ValueError as error:
            raise UserError(
                f"the checkpoint at step {saved.step} is of another optimizer: {error}", CHECKPOINT
            ) from None


def train(config: TrainConfig, *, label: str = "") -> RunFolder:
    """Train, or go on with a run that was interrupted; a finished run is returned as it is."""
    check_config(config)
    config = settled(config)
    with deterministic(config.deterministic):
        return _train(config, label)


def _train(config: TrainConfig, label: str) -> RunFolder:
    device = choose_device(config.device)
    data = open_data(config.data)
    memory = PeakMemory(device)
    trainer = Trainer(config, data, device)  # before anything is written: what cannot be built leaves no folder
    folder = RunFolder.open_or_create(Path(config.out), config, sys.argv, FREE)

    def tell(sentence: str) -> None:
        folder.log(sentence)
        print(sentence, file=sys.stderr, flush=True)

    with folder.locked():
        trainer.task.keep(folder)
        folder.keep_origin(trainer.origin)
        if folder.has_result():
            for newest in list_checkpoints(folder.checkpoints)[:1]:
                trainer.describe(folder, newest)  # a run of an older version is not described yet
            return folder
        saved = latest_checkpoint(folder.checkpoints, warn=tell)
        if saved is not None:
            trainer.restore(saved)
            trainer.describe(folder, saved.path)  # a newer one may be broken or, after a kill, not described yet
        try:
            _run(trainer, folder, saved, memory, label or config.mixer)
        except Exception as error:
            if not isinstance(error, UserError):
                with suppress(UserError):
                    folder.log(traceback.format_exc())  # after hours of training nobody wants to run it again to see
            raise
    return folder


def _run(trainer: Trainer, folder: RunFolder, saved: Checkpoint | None, memory: PeakMemory, label: str) -> None:
    config, device = trainer.config, trainer.device
    first = 0 if saved is None else saved.step
    seconds = 0.0 if saved is None else float(saved.state["seconds"])
    skipped = 0 if saved is None else int(saved.state["skipped"])
    val_loss = None if saved is None else saved.state["val_loss"]
    folder.cut(first)
    opening = [] if saved is not None else _opening(trainer, folder)
    folder.log(f"{'starting' if saved is None else 'resuming'} at step {first} of {config.steps} on {device}")
    unit, per_step = trainer.task.unit, trainer.task.per_step
    times: list[float] = []
    waiting = CoreWait()
    sinks = open_sinks(config, folder, first)
    progress = TrainingProgress(label, first, config.steps, config.quiet, unit)

    def note(line: dict[str, Any]) -> None:
        while opening:  # not before: a run that dies in its first step has nothing to lose yet
            folder.append_metrics(opening.pop())
        folder.append_metrics(line)

    def save(step: int) -> None:
        folder.sync()
        model, optimizer = trainer.tensors()
        state = {"seconds": seconds, "skipped": skipped, "val_loss": val_loss, "config": dataclasses.asdict(config)}
        announce = functools.partial(trainer.describe, folder)
        save_checkpoint(folder.checkpoints, step, model, optimizer, state, config.keep, announce)

    def validate(step: int) -> Evaluation | ImageEvaluation:
        found = trainer.evaluate()
        if not trainer.usable(found.loss):
            _diverged(config, folder, step, f"the validation {trainer.complaint(found.loss)}", astray=True)
        return found

    try:
        with StopSignal() as stop:
            for step in range(first, config.steps):
                watched = trainer.magnitudes(step) if trainer.watches(step) else None
                begun = time.perf_counter()
                loss, norm = trainer.step(step)
                times.append(time.perf_counter() - begun)
                seconds += times[-1]
                done = step + 1
                if watched is not None and trainer.gradients is not None:
                    found = {**watched, "gradient_norm": trainer.gradients.tolist()}
                    folder.append_dynamics({"step": step, **rounded(found)})
                if not trainer.usable(loss, norm):
                    _diverged(config, folder, step, f"the {trainer.complaint(loss, norm)}", trainer.astray())
                    skipped += 1
                evaluated = None
                if done % config.eval_every == 0 or done == config.steps:
                    evaluated = validate(step)
                    val_loss = evaluated.loss
                if done % config.log_every == 0 or done == config.steps:
                    line = {
                        "step": done,
                        unit: done * per_step,
                        "loss": loss,
                        "lr": config.lr * learning_rate(config, step),
                        "grad_norm": norm,
                    }
                    note(line)
                    speed = {
                        "step": done,
                        "seconds": seconds,
                        f"{unit}_per_s": per_step / times[-1],
                        "memory_bytes": memory.read(),
                    }
                    folder.append_speed(speed)
                    sinks.write({**line, **speed})
                if evaluated is not None:
                    line = {"step": done, unit: done * per_step, **evaluated.curve()}
                    note(line)
                    sinks.write(line)
                recent = statistics.mean(times[-20:])
                shown = memory.read() if done % 20 == 0 else None
                progress.update(done, loss, per_step / recent, shown, val_loss)
                if done % config.save_every == 0 or done == config.steps or stop.requested:
                    save(done)
                if stop.requested and done < config.steps:
                    folder.log(f"stopped by {stop.name} at step {done}")
                    raise UserError(
                        f"stopped by {stop.name} after step {done} of {config.steps}, and saved; the same command goes on from there",
                        INTERRUPTED,
                    )
        evaluated = evaluated if config.steps > first and evaluated is not None else validate(config.steps - 1)
        folder.write_result(result_of(trainer, evaluated, waiting.share(), seconds, skipped, memory.read()))
        folder.log(f"finished: validation loss {evaluated.loss:.4f}")
    finally:
        progress.close()
        sinks.close()


def _opening(trainer: Trainer, folder: RunFolder) -> list[dict[str, Any]]:
    """The first line of the metrics: what a model is worth that was trained before."""
    if trainer.origin is None:
        return []
    step = "" if trainer.origin["step"] is None else f" at step {trainer.origin['step']}"
    folder.log(f"the weights are those of {trainer.origin['folder']}{step}; trained: {trainer.config.tune}")
    found = trainer.evaluate()
    if not trainer.usable(found.loss):
        what = f"the model in {trainer.config.init} is of no use on this data: its validation"
        raise UserError(f"{what} {trainer.complaint(found.loss).replace('became', 'is')}", CHECKPOINT)
    return [{"step": 0, trainer.task.unit: 0, **found.curve()}]


def _diverged(config: TrainConfig, folder: RunFolder, step: int, what: str, astray: bool) -> None:
    """End the run, unless the batch alone is to blame and may be left out: weights that went astray no batch brings back."""
    what = f"{what} at step {step + 1} (batch {step} of seed {config.seed})"
    folder.log(f"{what}; the weights are {'not usable any more' if astray else 'still usable'}")
    if config.on_nan == "skip" and not astray:
        return
    # A checkpoint at this very step holds the weights that gave the loss; an older one was trained on from.
    older = [p for p in list_checkpoints(folder.checkpoints) if p.name < f"step-{step:08d}"]
    good = f"the last good checkpoint is {older[0]}" if older else "no good checkpoint was saved before it"
    if not astray:
        advice = "the weights are still usable: the same command with --on-nan skip goes on and leaves such batches out"
        raise UserError(f"{what}; {good}; {advice}", DIVERGED)
    advice = (
        f"start again in another folder, with an lr lower than {config.lr:g} or a warmup longer than {config.warmup}"
    )
    raise UserError(f"{what}: the weights are not usable any more, whatever the batch; {good}; {advice}", DIVERGED)


def result_of(
    trainer: Trainer,
    evaluated: Evaluation | ImageEvaluation,
    core_wait: float | None,
    seconds: float,
    skipped: int,
    peak_memory: int | None,
) -> dict[str, Any]:
    """A finished training in numbers: what result.json holds."""
    config, times = trainer.config, trainer.clock.seconds()
    trained = sum(p.numel() for p in trainer.parameters)
    return {
        "mixer": config.mixer,
        "mixer_options": config.mixer_options,
        "seed": config.seed,
        "steps": config.steps,
        trainer.task.unit: config.steps * trainer.task.per_step,
        "val_loss": evaluated.loss,
        **evaluated.numbers(),
        "parameters": trainer.model.parameter_counts(),
        "step_seconds": statistics.median(times) if times else seconds / config.steps,
        "step_quartiles": quartiles(times),
        "core_wait": core_wait if trainer.device.type == "cpu" else None,  # a GPU's own time does not wait for cores
        "seconds": seconds,
        "peak_memory": peak_memory,
        "skipped_batches": skipped,
        **({} if trainer.origin is None else {"init": trainer.origin, "trained_parameters": trained}),
    }
