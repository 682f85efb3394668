"""The training loop, top to bottom: `train` opens a run, `_Run.train` loops over the steps, `Trainer.step` takes one.

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
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthmix.config import FREE, TrainConfig
from depthmix.data.dataset import TokenData
from depthmix.data.images import ImageData
from depthmix.data.prepared import open_data
from depthmix.device import PeakMemory, autocast
from depthmix.errors import CHECKPOINT, DIVERGED, INTERRUPTED, UserError
from depthmix.insight.document import rounded
from depthmix.insight.dynamics import gradient_norms, magnitudes
from depthmix.parallel.alone import Alone
from depthmix.parallel.layout import Layout
from depthmix.parallel.world import Lost, World, join
from depthmix.randomness import OwnRandom, ProcessRandom
from depthmix.runs.agreement import (
    check_run_files,
    checkpoint_to_go_on_from,
    describe_run_files,
    spell_out,
)
from depthmix.runs.checkpoint import Checkpoint, list_checkpoints, remove_old
from depthmix.runs.code_checksums import code_of
from depthmix.runs.code_record import record_code
from depthmix.runs.folder import DYNAMICS, METRICS, SPEED, RunFolder
from depthmix.runs.init import settled
from depthmix.runs.ranks import RankFolder
from depthmix.runs.restore import load_parameters
from depthmix.runs.saver import open_saver
from depthmix.schedule import learning_rate
from depthmix.train.build import divide_model, prepare_model
from depthmix.train.check import check_config, check_own_rule, check_run, check_start, facts
from depthmix.train.clock import CoreWait, StepClock, quartiles
from depthmix.train.evaluate import Evaluation, ImageEvaluation
from depthmix.train.events import OnStep, StepEvent
from depthmix.train.extend import can_take_more_steps, set_result_aside
from depthmix.train.graph import GraphedBackward, record
from depthmix.train.optim import (
    build_optimizers,
    load_optimizer_tensors,
    optimizer_place,
    optimizer_tensors,
    set_learning_rate,
)
from depthmix.train.progress import TrainingProgress
from depthmix.train.sharing import settings_of
from depthmix.train.signals import StopSignal
from depthmix.train.sinks import Sinks
from depthmix.train.task import Model, make_task
from depthmix.values import typed

# Name of the random generator's state among the optimizer's tensors in a checkpoint.
RNG = "rng/torch"
# Tokens of a batch, approximately, on which magnitudes over depth are measured.
MAGNITUDE_TOKENS = 4096


def train(config: TrainConfig, *, label: str = "", on_step: OnStep | None = None) -> RunFolder:
    """Train one model, or resume a run that was interrupted. A finished run is returned as it is.

    Args:
        config: The training.
        label: Name on the progress bar; by default the mixer's.
        on_step: Called with a `StepEvent` after every step, in the first process only.

    Returns:
        The run folder.

    Raises:
        UserError: The configuration, the data or the folder cannot be used, or the run diverged or was
            interrupted.
    """
    config = typed("train", config)
    with (
        settings_of(config),
        join(Layout.of(config.parallel), config.device, bool(config.parallel), config.hang_limit) as world,
    ):
        return train_in(world, config, label, on_step)


def train_in(world: World, config: TrainConfig, label: str = "", on_step: OnStep | None = None) -> RunFolder:
    """Train as one process of a world: check, build the model, open the run folder, restore the newest checkpoint, run.

    `world.together` runs a function in every process and raises an error of one process in all of them. `world.by_first`
    runs it in the first process only.
    """
    world.together(lambda: check_config(config))
    config = world.together(lambda: settled(config))
    # Looked up here, so that an error in the recipe is reported before a missing device.
    device = world.device
    data = world.together(lambda: open_data(config.data))
    if world.several:
        # Every process checks by itself before any of them waits for the others.
        world.together(lambda: check_run(config, data))
        world.agree(facts(config, data))
    else:
        check_start(config)
        check_own_rule(config, text=isinstance(data, TokenData))
    memory = PeakMemory(device)
    # The model is built before the folder, so that a model that cannot be built leaves no folder behind.
    trainer = world.together(lambda: Trainer(config, data, device, world))
    path = Path(config.out)
    folder = world.together(lambda: _open_folder(path, config) if world.first else None)
    folder = folder or RankFolder(path, world.rank)

    def tell(sentence: str) -> None:
        folder.log(sentence)
        print(sentence, file=sys.stderr, flush=True)

    with folder.locked():
        world.write_to(folder)
        world.together(lambda: trainer.task.keep(folder))
        world.together(lambda: folder.keep_origin(trainer.origin))
        world.together(lambda: set_result_aside(folder, config) if world.first else None)
        if world.by_first(folder.has_result):
            world.by_first(lambda: check_run_files(folder))
            # Restores the description of the newest checkpoint if its files were deleted.
            for newest in list_checkpoints(folder.checkpoints)[:1] if world.first else ():
                trainer.describe(folder, newest)
            return folder
        saved = world.by_first(lambda: checkpoint_to_go_on_from(folder, tell, tensors=not world.several))
        if saved is not None:
            world.together(lambda: trainer.restore(saved))
            if world.first:
                # The folder may describe a newer, broken checkpoint or, after a kill, an older one. A kill right after a
                # save also leaves checkpoints that should have been removed.
                trainer.describe(folder, saved.path)
                remove_old(folder.checkpoints, saved.step, config.keep)
        world.together(lambda: _record_code(folder, config, data, saved, tell) if world.first else None)
        try:
            _Run(trainer, folder, saved, memory, label or config.mixer, on_step).train()
        except Exception as error:
            if isinstance(error, Lost) or not isinstance(error, UserError):
                # The traceback goes into the log, so that nobody has to repeat hours of training to see it.
                with suppress(UserError):
                    folder.log(traceback.format_exc())
            raise
    return folder


def _open_folder(path: Path, config: TrainConfig) -> RunFolder:
    """Open the run folder, or create it; a run that can be extended accepts another number of steps."""
    free = FREE | {"steps"} if can_take_more_steps(path, config) else FREE
    return RunFolder.open_or_create(path, config, free)


def _record_code(
    folder: RunFolder,
    config: TrainConfig,
    data: TokenData | ImageData,
    saved: Checkpoint | None,
    tell: Callable[[str], None],
) -> None:
    """Record which code makes the run from here on, and warn where it differs from the code so far."""
    step = 0 if saved is None else saved.step
    changed = record_code(folder, step, config.mixer, code_of(config.mixer, images=isinstance(data, ImageData)))
    if changed:
        what = f"the code has changed since step {step} ({', '.join(changed)})"
        tell(f"{what}: the steps from here on are made by other code; train again in another folder to compare the run")


class _Run:
    """A run from its first or restored step to its last: the loop over steps, and all that it writes on the way."""

    def __init__(
        self,
        trainer: Trainer,
        folder: RunFolder,
        saved: Checkpoint | None,
        memory: PeakMemory,
        label: str,
        on_step: OnStep | None,
    ) -> None:
        config, world = trainer.config, trainer.world
        self.trainer, self.folder, self.memory, self.on_step = trainer, folder, memory, on_step
        self.config, self.world = config, world
        self.first_step = 0 if saved is None else saved.step
        self.seconds = 0.0 if saved is None else float(saved.state["seconds"])
        self.skipped = 0 if saved is None else int(saved.state["skipped"])
        self.val_loss = None if saved is None else saved.state["val_loss"]
        self.step_times: list[float] = []
        folder.cut(self.first_step, 0 if saved is None else saved.state["run"]["metrics"]["bytes"])
        self.opening = [] if saved is not None else _evaluate_start(trainer, folder)
        verb = "starting" if saved is None else "resuming"
        folder.log(f"{verb} at step {self.first_step} of {config.steps} on {trainer.device}")
        self.core_wait = CoreWait()
        self.sinks = Sinks(config if world.first else TrainConfig(), folder, self.first_step)
        quiet = config.quiet or not world.first
        self.progress = TrainingProgress(label, self.first_step, config.steps, quiet, trainer.task.unit)
        describe = functools.partial(trainer.describe, folder)
        self.saver = open_saver(world, folder.checkpoints, config.keep, describe, trainer.parameter_names)

    def train(self) -> None:
        """Train to the last step: log, evaluate and save on the way, and write the result at the end."""
        config, trainer, world = self.config, self.trainer, self.world
        evaluation: Evaluation | ImageEvaluation | None = None
        try:
            with StopSignal() as stop, world.naming_the_dead():
                if 0 < self.first_step < config.steps:
                    trainer.restore_sum_order(self.first_step)
                for step in range(self.first_step, config.steps):
                    done = step + 1
                    world.at("step", done)
                    loss, norm, stopping = self.train_step(step, stop)
                    if not trainer.is_usable(loss, norm):
                        self.skip_or_raise(
                            step, f"the {trainer.describe_unusable(loss, norm)}", trainer.is_beyond_repair()
                        )
                        self.skipped += 1
                    evaluation = self.evaluate(step) if self.is_due(done, config.eval_every) else None
                    if self.is_due(done, config.log_every):
                        self.log_step(done, loss, norm)
                    if evaluation is not None:
                        self.log_evaluation(done, evaluation)
                    self.show_progress(done, loss)
                    saving = stopping or self.is_due(done, config.save_every)
                    if saving:
                        self.save(done)
                    if self.on_step is not None and world.first:
                        val_loss = None if evaluation is None else evaluation.loss
                        event = StepEvent(config.mixer, config.seed, done, config.steps, loss, val_loss)
                        self.call_back(self.on_step, event, saving)
                    if stopping and done < config.steps:
                        self.raise_interrupted(done, stop)
            world.at("the end", slow=True)
            evaluation = evaluation or self.evaluate(config.steps - 1)
            self.saver.wait()
            waited, peak = self.core_wait.share(), self.memory.read()
            self.folder.write_result(result_of(trainer, evaluation, waited, self.seconds, self.skipped, peak))
            self.folder.log(f"finished: validation loss {evaluation.loss:.4f}")
        finally:
            self.progress.close()
            self.sinks.close()

    def is_due(self, done: int, every: int) -> bool:
        """Tell whether something is due after `done` steps that is done every so many steps and after the last one."""
        return done % every == 0 or done == self.config.steps

    def train_step(self, step: int, stop: StopSignal) -> tuple[float, float, bool]:
        """Take one optimizer step and time it; returns (loss, gradient norm, whether the run has to stop)."""
        trainer, world = self.trainer, self.world
        magnitudes = trainer.magnitudes(step) if trainer.records_dynamics(step) else None
        start = time.perf_counter()
        trainer.asked_to_stop = stop.requested
        loss, norm = trainer.step(step)
        stopping = world.stopping() if world.several else stop.requested
        self.step_times.append(time.perf_counter() - start)
        self.seconds += self.step_times[-1]
        if magnitudes is not None and trainer.gradients is not None:
            dynamics = {**magnitudes, "gradient_norm": trainer.gradients.tolist()}
            self.folder.append(DYNAMICS, {"step": step, **rounded(dynamics)})
        return loss, norm, stopping

    def evaluate(self, step: int) -> Evaluation | ImageEvaluation:
        """Evaluate the weights after batch `step`. A validation loss that is not usable ends the run."""
        evaluation = self.trainer.evaluate()
        if not self.trainer.is_usable(evaluation.loss):
            what = f"the validation {self.trainer.describe_unusable(evaluation.loss)}"
            self.skip_or_raise(step, what, beyond_repair=True)
        self.val_loss = evaluation.loss
        return evaluation

    def skip_or_raise(self, step: int, what: str, beyond_repair: bool) -> None:
        """Skip a batch whose loss is not usable, or end the run: no batch repairs weights that have diverged."""
        self.saver.wait()  # the last good checkpoint may still be being written
        config, folder = self.config, self.folder
        what = f"{what} at step {step + 1} (batch {step} of seed {config.seed})"
        folder.log(f"{what}; the weights are {'not usable any more' if beyond_repair else 'still usable'}")
        if config.on_nan == "skip" and not beyond_repair:
            return
        # A checkpoint at this very step holds the weights that gave the loss. Weights of an older one were trained further.
        older = [p for p in list_checkpoints(folder.checkpoints) if p.name < f"step-{step:08d}"]
        good = f"the last good checkpoint is {older[0]}" if older else "no good checkpoint was saved before it"
        if not beyond_repair:
            advice = (
                "the weights are still usable: the same command with --on-nan skip goes on and leaves such batches out"
            )
            raise self.world.error(f"{what}; {good}; {advice}", DIVERGED)
        lower = f"an lr lower than {config.lr:g} or a warmup longer than {config.warmup}"
        advice = f"start again in another folder, with {lower}"
        raise self.world.error(
            f"{what}: the weights are not usable any more, whatever the batch; {good}; {advice}", DIVERGED
        )

    def log_step(self, done: int, loss: float, norm: float) -> None:
        """Write a line of the metrics and one of the speed."""
        task = self.trainer.task
        lr = self.config.lr * learning_rate(self.config, done - 1)
        metrics = {"step": done, task.unit: done * task.per_step, "loss": loss, "lr": lr, "grad_norm": norm}
        self.append_metrics(metrics)
        speed = {
            "step": done,
            "seconds": self.seconds,
            f"{task.unit}_per_s": task.per_step / self.step_times[-1],
            "memory_bytes": self.memory.read(),
        }
        self.folder.append(SPEED, speed)
        self.sinks.write({**metrics, **speed})

    def log_evaluation(self, done: int, evaluation: Evaluation | ImageEvaluation) -> None:
        """Write a line of the metrics with the validation loss."""
        task = self.trainer.task
        metrics = {"step": done, task.unit: done * task.per_step, **evaluation.curve()}
        self.append_metrics(metrics)
        self.sinks.write(metrics)

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl, after the opening line if that is not written yet."""
        # The opening line waits for the first step: a run that dies in that step may start over with another recipe.
        while self.opening:
            self.folder.append(METRICS, self.opening.pop())
        self.folder.append(METRICS, line)

    def show_progress(self, done: int, loss: float) -> None:
        """Update the progress bar; reading the memory takes a while, so only every 20 steps."""
        speed = self.trainer.task.per_step / statistics.mean(self.step_times[-20:])
        memory = self.memory.read() if done % 20 == 0 else None
        self.progress.update(done, loss, speed, memory, self.val_loss)

    def save(self, done: int) -> None:
        """Begin to write a checkpoint."""
        self.world.at("saving after step", done, slow=True)
        self.folder.sync()
        state = {
            "seconds": self.seconds,
            "skipped": self.skipped,
            "val_loss": self.val_loss,
            "config": asdict(spell_out(self.config)),
            "data": {"sha256": self.trainer.data.sha256},
        }
        if self.world.first:
            state["run"] = describe_run_files(self.folder)
        self.saver.save(done, *self.trainer.checkpoint_tensors(), state)

    def call_back(self, on_step: OnStep, event: StepEvent, saved: bool) -> None:
        """Call on_step. An exception in it ends the run, which can be resumed from this very step."""
        try:
            on_step(event)
        except BaseException as error:
            # Several processes save together or not at all.
            if not saved and not self.world.several:
                self.save(event.step)
            self.saver.wait()
            self.folder.log(f"stopped by {type(error).__name__} in on_step after step {event.step}")
            raise

    def raise_interrupted(self, done: int, stop: StopSignal) -> None:
        """End the run on a signal, once its checkpoint is written."""
        self.saver.wait()
        by = stop.name or "a signal to another process"
        self.folder.log(f"stopped by {by} at step {done}")
        what = f"stopped by {by} after step {done} of {self.config.steps}, and saved"
        raise self.world.error(f"{what}; the same command goes on from there", INTERRUPTED)


def _evaluate_start(trainer: Trainer, folder: RunFolder) -> list[dict[str, Any]]:
    """Evaluate a pretrained model before its first step; returns the first line of the metrics, or nothing for random
    weights.
    """
    if trainer.origin is None:
        return []
    step = "" if trainer.origin["step"] is None else f" at step {trainer.origin['step']}"
    folder.log(f"the weights are those of {trainer.origin['folder']}{step}; trained: {trainer.config.tune}")
    evaluation = trainer.evaluate()
    if not trainer.is_usable(evaluation.loss):
        what = f"the model in {trainer.config.init} is of no use on this data: its validation"
        problem = trainer.describe_unusable(evaluation.loss).replace("became", "is")
        raise trainer.world.error(f"{what} {problem}", CHECKPOINT)
    return [{"step": 0, trainer.task.unit: 0, **evaluation.curve()}]


class Trainer:
    """Takes optimizer steps. Holds all that a step needs: a model, its optimizers, its data and its random numbers.

    Attributes:
        task: What a batch holds and what its loss is.
        engine: Runs the model's forward and backward pass, on one device or divided among processes.
        model: The model, or this process's part of it.
        origin: The folder that the weights come from; None: they are random.
        optimizers: By name.
    """

    def __init__(
        self, config: TrainConfig, data: TokenData | ImageData, device: torch.device, world: World | None = None
    ) -> None:
        self.config, self.device, self.world = config, device, world or World(Layout(), device)
        self.data = data
        at_a_time = dataclasses.replace(config, micro_batch_size=self.world.layout.micro_batch_size(config))
        self.task = make_task(at_a_time, data, self.world.rows(config.batch_size), self.world.share)
        self.task.check()
        self.engine: Alone
        self.random = ProcessRandom() if self.world.several else OwnRandom(config.seed, device)
        if self.world.several:
            self.engine, self.origin = divide_model(config, self.task, self.world)
        else:
            with self.random.building():
                start = self.task.start()
            # The folder that the weights come from; None: they are random.
            self.origin = start.origin
            self.engine = Alone(prepare_model(start.model, config, device))
        self.model, self.parameters = self.engine.model, self.engine.parameters
        if config.dynamics_every is not None and not hasattr(self.model, "sublayers"):
            raise UserError(
                "dynamics_every looks into this package's own models: leave it out for a model of Hugging Face's"
            )
        self.optimizers = build_optimizers(self.model, config, self.engine.blueprint, self.engine.title)
        self.fused = all(g.get("fused") for o in self.optimizers.values() for g in o.param_groups)
        self.batches = self.task.batches
        self.asked_to_stop = False  # whether this process got a signal
        # A loss far above that of guessing has exploded. The limit is a float32, so that host and GPU decide alike.
        self.guessing_loss = math.log(self.task.outcomes)
        self.loss_limit = torch.tensor(self.task.exploded * self.guessing_loss, dtype=torch.float32).item()
        self.clock = StepClock(device)
        self.graphed: GraphedBackward | None = None
        # The next step's number and batch.
        self.prefetched: tuple[int, Tensor] | None = None
        # Gradient norms by site, of the last step whose dynamics were recorded.
        self.gradients: Tensor | None = None

    def step(self, step: int) -> tuple[float, float]:
        """Take one optimizer step on batch `step`; returns (loss, gradient norm). A loss that is not usable leaves the
        weights unchanged.
        """
        numbers = self.launch(step)
        if self.device.type == "cuda":
            self.prefetched = step + 1, self.load_batch(step + 1)  # while the GPU computes this step
        loss, norm = numbers.tolist()
        if not self.fused:
            self._update(self.is_usable(loss, norm))
        return loss, norm

    def launch(self, step: int) -> Tensor:
        """Launch a step and return its (loss, gradient norm) [2], which a GPU may still be computing.

        With a fused optimizer this is the whole step. Otherwise the caller updates the weights once it knows the
        numbers.
        """
        batch = self.task.checked(self.get_batch(step)).to(self.device, non_blocking=True)
        set_learning_rate(self.optimizers, learning_rate(self.config, step))
        self.clock.start()
        with self.random.exchanged(self.model):
            if self.config.cuda_graph and self.device.type == "cuda":
                self.graphed = self.graphed or record(self.loss, self.parameters, batch)
                total = self.graphed(batch)
            else:
                total = self.engine.backward(self.loss, batch, self.task.micro)
        if self.records_dynamics(step):
            self.gradients = gradient_norms(self.model.sublayers)  # before they are clipped
        norm = self.engine.clip(self.config.clip or math.inf)
        numbers = self.world.average(torch.stack([total, norm.to(total)]), self.asked_to_stop)
        if self.fused:
            # The update is launched before the host knows the numbers. As with a gradient scaler's found_inf, the fused
            # optimizer itself leaves the weights alone where they are not usable.
            unusable = (~torch.isfinite(numbers).all() | (numbers[0] > self.loss_limit)).float()
            for optimizer in self.optimizers.values():
                optimizer.found_inf = unusable  # type: ignore[attr-defined]
            self._update(True)
        return numbers

    def _update(self, usable: bool) -> None:
        """Update the weights, if the step is usable, and free the gradients."""
        for optimizer in self.optimizers.values() if usable else ():
            optimizer.step()
        self.clock.stop()
        if self.graphed is None:  # a replay overwrites the gradients it recorded
            self.model.zero_grad(set_to_none=True)

    def loss(self, batch: Tensor, model: Model | None = None) -> Tensor:
        """Compute the mean loss of a batch. `model` gives the logits; by default the engine."""
        with autocast(self.device, self.config.precision):
            return self.engine.whole(self.task.losses(model or self.engine, batch)).mean()

    def records_dynamics(self, step: int) -> bool:
        """Tell whether the dynamics (magnitudes and gradient norms over depth) of a step are recorded."""
        every = self.config.dynamics_every
        return every is not None and (step % every == 0 or step == self.config.steps - 1)

    def magnitudes(self, step: int) -> dict[str, Any]:
        """Measure RMS values over depth before a step, in a separate forward pass on a few rows of the step's batch,
        neither recorded nor compiled.
        """
        count = min(max(1, MAGNITUDE_TOKENS // self.task.tokens), self.config.batch_size)
        # Several processes all take the first rows of the whole batch, whichever process trains on them.
        rows = self.batches.get(step, range(count)) if self.world.several else self.get_batch(step)[:count]
        with ExitStack() as stack:
            stack.enter_context(autocast(self.device, self.config.precision))
            if self.config.compile != "off":
                # torch.compile would compile the model again for the smaller batch.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self.random.exchanged(self.model))
            by_depth = magnitudes(self.model, self.task.inputs(self.task.checked(rows).to(self.device)))
        self.engine.rest()
        return by_depth

    def is_usable(self, loss: float, norm: float = 0.0) -> bool:
        """Tell whether loss and gradient norm are finite and the loss has not exploded."""
        return math.isfinite(loss) and math.isfinite(norm) and loss <= self.loss_limit

    def describe_unusable(self, loss: float, norm: float = 0.0) -> str:
        """Describe what is wrong with a loss and gradient norm that are not usable."""
        if math.isfinite(loss) and loss <= self.loss_limit:
            return f"gradient's norm became {norm} (at a loss of {loss:.4g})"
        times = {3: "three", 10: "ten"}[self.task.exploded]
        far = f", {times} times that of guessing ({self.guessing_loss:.4g}) and more" if math.isfinite(loss) else ""
        return f"loss became {loss:.4g}{far}"

    def is_beyond_repair(self) -> bool:
        """Tell whether the weights are unusable whatever the batch: the loss or gradient on validation data is not
        usable either.
        """
        with self.random.exchanged(self.model):
            loss, norm = self.engine.probe(self.loss, next(next(iter(self.task.validation().values()))).to(self.device))
        return not self.is_usable(loss.item(), norm.item())

    def get_batch(self, step: int) -> Tensor:
        """Return batch `step`, prefetched or loaded now."""
        return (
            self.prefetched[1] if self.prefetched is not None and self.prefetched[0] == step else self.load_batch(step)
        )

    def load_batch(self, step: int) -> Tensor:
        """Load batch `step`, into pinned memory for a GPU, so that the copy to the device is asynchronous."""
        batch = self.batches.get(step)
        return batch.pin_memory() if self.device.type == "cuda" else batch

    def evaluate(self) -> Evaluation | ImageEvaluation:
        """Measure the model on the validation split, which several processes share among them."""
        self.world.at("the evaluation")
        self.model.eval()
        sums = {
            domain: self.engine.sums(
                lambda model, batch: self.task.sums(model, batch, self.device, self.engine.whole),
                self.world.deal(batches),
            )
            for domain, batches in self.task.validation().items()
        }
        self.model.train()
        return self.task.evaluation({domain: self.world.add_up(*parts) for domain, parts in sums.items()})

    def checkpoint_tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of a checkpoint: the model's, and the optimizers' with the random generator's state."""
        model = {n: p.detach() for n, p in self.model.named_parameters()}  # tied weights come once
        optimizer = self.engine.saved(optimizer_tensors(self.optimizers))
        return self.engine.saved(model), {**optimizer, RNG: self.random.state()}

    def restore_sum_order(self, step: int) -> None:
        """Restore the order in which the engine adds gradients to that of a training that was not interrupted before
        `step`.
        """
        self.engine.order_sums(self.loss, self.task.checked(self.get_batch(step)).to(self.device), self.task.micro)

    def parameter_names(self) -> list[str]:
        """List the parameters of the undivided model."""
        return [name for name, _ in self.engine.blueprint.named_parameters()]

    def describe(self, folder: RunFolder, checkpoint: Path) -> None:
        """Write the files that let other programs find a checkpoint in the run folder."""
        self.task.describe(folder, checkpoint, self.engine.blueprint)

    def restore(self, saved: Checkpoint) -> None:
        """Restore model, optimizers and random generator from a checkpoint.

        Args:
            saved: The checkpoint; without tensors if several processes train, which read their own parts.

        Raises:
            UserError: The checkpoint is of another model or optimizer, or was not written by `depthmix train`.
        """
        if self.world.several:
            from depthmix.runs.sharded import load_into  # slow to import

            def place(name: str, shape: torch.Size) -> Tensor | None:
                return self.random.state() if name == RNG else optimizer_place(self.optimizers, name, shape)

            optimizer = self.engine.load(functools.partial(load_into, saved.path), place)
        else:
            load_parameters(self.model, saved.model, self.config.mixer, f"step {saved.step}")
            optimizer = dict(saved.optimizer)
        if RNG not in optimizer or not {"seconds", "skipped", "val_loss"} <= saved.state.keys():
            raise UserError(f"the checkpoint {saved.path} was not written by `depthmix train`", CHECKPOINT)
        self.random.restore(optimizer.pop(RNG))
        try:
            load_optimizer_tensors(self.optimizers, optimizer)
        except ValueError as error:
            raise UserError(
                f"the checkpoint at step {saved.step} is of another optimizer: {error}", CHECKPOINT
            ) from None


def result_of(
    trainer: Trainer,
    evaluated: Evaluation | ImageEvaluation,
    core_wait: float | None,
    seconds: float,
    skipped: int,
    peak_memory: int | None,
) -> dict[str, Any]:
    """Summarise a finished training: the content of result.json."""
    config, times = trainer.config, trainer.clock.seconds()
    model = trainer.engine.blueprint
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "mixer": config.mixer,
        "mixer_options": config.mixer_options,
        "seed": config.seed,
        "steps": config.steps,
        trainer.task.unit: config.steps * trainer.task.per_step,
        "val_loss": evaluated.loss,
        **evaluated.numbers(),
        "parameters": model.parameter_counts(),
        "step_seconds": statistics.median(times) if times else seconds / config.steps,
        "step_quartiles": quartiles(times),
        "core_wait": core_wait if trainer.device.type == "cpu" else None,  # a GPU's own time does not wait for cores
        "seconds": seconds,
        "peak_memory": peak_memory,
        "skipped_batches": skipped,
        **({} if trainer.origin is None else {"init": trainer.origin, "trained_parameters": trained}),
    }
