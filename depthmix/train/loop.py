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
    metrics_length,
    spell_out,
)
from depthmix.runs.checkpoint import Checkpoint, list_checkpoints, remove_old
from depthmix.runs.code_checksums import code_of
from depthmix.runs.code_record import record_code
from depthmix.runs.folder import RunFolder
from depthmix.runs.init import settled
from depthmix.runs.ranks import RankFolder
from depthmix.runs.restore import load_parameters
from depthmix.runs.saver import open_saver
from depthmix.schedule import learning_rate
from depthmix.train.build import divide_model, prepare_model
from depthmix.train.check import check_config, check_own_rule, check_run, check_start, facts
from depthmix.train.clock import CoreWait, StepClock, quartiles
from depthmix.train.evaluate import Evaluation, ImageEvaluation
from depthmix.train.events import OnStep, StepEvent, call_back
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
from depthmix.train.sinks import open_sinks
from depthmix.train.task import Model, make_task
from depthmix.values import typed

RNG = "rng/torch"  # the generator's state, saved among the optimizer's tensors
WATCHED = 4096  # tokens of a batch that magnitudes are taken of, about


class Trainer:
    """A model, its optimizers and its data: everything one step needs."""

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
            self.origin = start.origin  # where the weights came from; None: they are random
            self.engine = Alone(prepare_model(start.model, config, device))
        self.model, self.parameters = self.engine.model, self.engine.parameters
        if config.dynamics_every is not None and not hasattr(self.model, "sublayers"):
            raise UserError(
                "dynamics_every looks into this package's own models: leave it out for a model of Hugging Face's"
            )
        self.optimizers = build_optimizers(self.model, config, self.engine.blueprint, self.engine.title)
        self.fused = all(g.get("fused") for o in self.optimizers.values() for g in o.param_groups)
        self.batches = self.task.batches
        self.asked_to_stop = False  # by a signal to this process
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
        set_learning_rate(self.optimizers, learning_rate(self.config, step))
        self.clock.start()
        with self.random.exchanged(self.model):
            if self.config.cuda_graph and self.device.type == "cuda":
                self.graphed = self.graphed or record(self.loss, self.parameters, batch)
                total = self.graphed(batch)
            else:
                total = self.engine.backward(self.loss, batch, self.task.micro)
        if self.watches(step):
            self.gradients = gradient_norms(self.model.sublayers)  # before they are clipped
        norm = self.engine.clip(self.config.clip or math.inf)
        numbers = self.world.average(torch.stack([total, norm.to(total)]), self.asked_to_stop)
        if self.fused:  # launched before the numbers are known here: the GPU itself leaves the weights alone
            unusable = (~torch.isfinite(numbers).all() | (numbers[0] > self.too_large)).float()
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

    def loss(self, batch: Tensor, model: Model | None = None) -> Tensor:
        """The mean loss of a batch; model: what gives its logits, if not the engine."""
        with autocast(self.device, self.config.precision):
            return self.engine.whole(self.task.losses(model or self.engine, batch)).mean()

    def watches(self, step: int) -> bool:
        """Whether a step's dynamics are taken down."""
        every = self.config.dynamics_every
        return every is not None and (step % every == 0 or step == self.config.steps - 1)

    def magnitudes(self, step: int) -> dict[str, Any]:
        """RMS values over depth before a step, on a few rows of its batch: a pass of its own, without gradients, neither recorded nor compiled."""
        count = min(max(1, WATCHED // self.task.tokens), self.config.batch_size)
        # The first rows of the batch, whosever they are: several processes look at the same ones.
        rows = self.batches.get(step, range(count)) if self.world.several else self.batch(step)[:count]
        with ExitStack() as stack:
            stack.enter_context(autocast(self.device, self.config.precision))
            if self.config.compile != "off":  # a smaller batch would be compiled anew
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self.random.exchanged(self.model))
            found = magnitudes(self.model, self.task.inputs(self.task.checked(rows).to(self.device)))
        self.engine.rest()
        return found

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
        with self.random.exchanged(self.model):
            loss, norm = self.engine.probe(self.loss, next(next(iter(self.task.validation().values()))).to(self.device))
        return not self.usable(loss.item(), norm.item())

    def batch(self, step: int) -> Tensor:
        """Batch `step`, read before or now."""
        return self.ahead[1] if self.ahead is not None and self.ahead[0] == step else self.read(step)

    def read(self, step: int) -> Tensor:
        """Batch `step`, for a GPU in memory that it copies from without anyone waiting."""
        batch = self.batches.get(step)
        return batch.pin_memory() if self.device.type == "cuda" else batch

    def evaluate(self) -> Evaluation | ImageEvaluation:
        """What the model makes of the validation split, which the processes find out together."""
        self.world.at("the evaluation")
        if not self.world.several:
            return self.task.evaluate(self.model, self.device)
        self.model.eval()
        sums = {
            domain: self.engine.sums(
                lambda model, batch: self.task.sums(model, batch, self.device, self.engine.whole),
                self.world.deal(batches),
            )
            for domain, batches in self.task.validation().items()
        }
        self.model.train()
        return self.task.evaluation({domain: self.world.add_up(*own) for domain, own in sums.items()})

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Everything a checkpoint holds: the model's tensors, and the optimizers' with the random generator's."""
        model = {n: p.detach() for n, p in self.model.named_parameters()}  # tied weights come once
        optimizer = self.engine.saved(optimizer_tensors(self.optimizers))
        return self.engine.saved(model), {**optimizer, RNG: self.random.state()}

    def order_sums(self, step: int) -> None:
        """Add gradients as a training does that was not interrupted before `step`."""
        self.engine.order_sums(self.loss, self.task.checked(self.batch(step)).to(self.device), self.task.micro)

    def names(self) -> list[str]:
        """The parameters of the model in one piece."""
        return [name for name, _ in self.engine.blueprint.named_parameters()]

    def describe(self, folder: RunFolder, checkpoint: Path) -> None:
        """Let other programs find a checkpoint in the run's folder."""
        self.task.describe(folder, checkpoint, self.engine.blueprint)

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint of the same model."""
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


def train(config: TrainConfig, *, label: str = "", on_step: OnStep | None = None) -> RunFolder:
    """Train, or go on with a run that was interrupted; a finished run is returned as it is. on_step: called after every step."""
    config = typed("train", config)
    with (
        settings_of(config),
        join(Layout.of(config.parallel), config.device, bool(config.parallel), config.hang_limit) as world,
    ):
        return train_in(world, config, label, on_step)


def train_in(world: World, config: TrainConfig, label: str = "", on_step: OnStep | None = None) -> RunFolder:
    """The same as one process of a world."""
    world.together(lambda: check_config(config))
    config = world.together(lambda: settled(config))
    device = world.device
    data = world.together(lambda: open_data(config.data))
    if world.several:
        world.together(lambda: check_run(config, data))  # before any of them waits for the others
        world.agree(facts(config, data))
    else:
        check_start(config)
        check_own_rule(config, text=isinstance(data, TokenData))
    memory = PeakMemory(device)
    # Before anything is written: what cannot be built leaves no folder.
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
            for newest in list_checkpoints(folder.checkpoints)[:1] if world.first else ():
                trainer.describe(folder, newest)  # a run of an older version is not described yet
            return folder
        saved = world.by_first(lambda: checkpoint_to_go_on_from(folder, tell, tensors=not world.several))
        if saved is not None:
            world.together(lambda: trainer.restore(saved))
            if world.first:
                trainer.describe(folder, saved.path)  # a newer one may be broken or, after a kill, not described yet
                remove_old(folder.checkpoints, saved.step, config.keep)  # as a kill after the last save left them
        world.together(lambda: _record_code(folder, config, data, saved, tell) if world.first else None)
        try:
            _run(trainer, folder, saved, memory, label or config.mixer, on_step)
        except Exception as error:
            if isinstance(error, Lost) or not isinstance(error, UserError):
                with suppress(UserError):
                    folder.log(traceback.format_exc())  # after hours of training nobody wants to run it again to see
            raise
    return folder


def _open_folder(path: Path, config: TrainConfig) -> RunFolder:
    free = FREE | {"steps"} if can_take_more_steps(path, config) else FREE
    return RunFolder.open_or_create(path, config, sys.argv, free)


def _record_code(
    folder: RunFolder,
    config: TrainConfig,
    data: TokenData | ImageData,
    saved: Checkpoint | None,
    tell: Callable[[str], None],
) -> None:
    """Note which code makes the run from here on, and say where it is not the code that began it."""
    step = 0 if saved is None else saved.step
    changed = record_code(folder, step, config.mixer, code_of(config.mixer, images=isinstance(data, ImageData)))
    if changed:
        what = f"the code has changed since step {step} ({', '.join(changed)})"
        tell(f"{what}: the steps from here on are made by other code; train again in another folder to compare the run")


def _run(
    trainer: Trainer,
    folder: RunFolder,
    saved: Checkpoint | None,
    memory: PeakMemory,
    label: str,
    on_step: OnStep | None = None,
) -> None:
    config, device = trainer.config, trainer.device
    first = 0 if saved is None else saved.step
    seconds = 0.0 if saved is None else float(saved.state["seconds"])
    skipped = 0 if saved is None else int(saved.state["skipped"])
    val_loss = None if saved is None else saved.state["val_loss"]
    folder.cut(first, metrics_length(saved))
    opening = [] if saved is not None else _opening(trainer, folder)
    folder.log(f"{'starting' if saved is None else 'resuming'} at step {first} of {config.steps} on {device}")
    unit, per_step = trainer.task.unit, trainer.task.per_step
    times: list[float] = []
    waiting = CoreWait()
    sinks = open_sinks(config if trainer.world.first else TrainConfig(), folder, first)
    progress = TrainingProgress(label, first, config.steps, config.quiet or not trainer.world.first, unit)
    saver = open_saver(
        trainer.world, folder.checkpoints, config.keep, functools.partial(trainer.describe, folder), trainer.names
    )

    def note(line: dict[str, Any]) -> None:
        while opening:  # not before: a run that dies in its first step has nothing to lose yet
            folder.append_metrics(opening.pop())
        folder.append_metrics(line)

    def save(step: int) -> None:
        trainer.world.at("saving after step", step, slow=True)
        folder.sync()
        state = {"seconds": seconds, "skipped": skipped, "val_loss": val_loss, "config": asdict(spell_out(config))}
        state["data"] = {"sha256": trainer.data.sha256}
        if trainer.world.first:
            state["run"] = describe_run_files(folder)
        saver.save(step, *trainer.tensors(), state)

    def diverged(step: int, what: str, astray: bool) -> None:
        saver.wait()  # the last good checkpoint may still be on its way
        _diverged(trainer, folder, step, what, astray)

    def validate(step: int) -> Evaluation | ImageEvaluation:
        found = trainer.evaluate()
        if not trainer.usable(found.loss):
            diverged(step, f"the validation {trainer.complaint(found.loss)}", astray=True)
        return found

    try:
        with StopSignal() as stop, trainer.world.naming_the_dead():
            if 0 < first < config.steps:
                trainer.order_sums(first)
            for step in range(first, config.steps):
                trainer.world.at("step", step + 1)
                watched = trainer.magnitudes(step) if trainer.watches(step) else None
                begun = time.perf_counter()
                trainer.asked_to_stop = stop.requested
                loss, norm = trainer.step(step)
                stopping = trainer.world.stopping() if trainer.world.several else stop.requested
                times.append(time.perf_counter() - begun)
                seconds += times[-1]
                done = step + 1
                if watched is not None and trainer.gradients is not None:
                    found = {**watched, "gradient_norm": trainer.gradients.tolist()}
                    folder.append_dynamics({"step": step, **rounded(found)})
                if not trainer.usable(loss, norm):
                    diverged(step, f"the {trainer.complaint(loss, norm)}", trainer.astray())
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
                saving = done % config.save_every == 0 or done == config.steps or stopping
                if saving:
                    save(done)
                if on_step is not None and trainer.world.first:
                    losses = loss, None if evaluated is None else evaluated.loss
                    event = StepEvent(config.mixer, config.seed, done, config.steps, *losses)
                    # Several processes save together or not at all.
                    call_back(on_step, event, None if saving or trainer.world.several else save, saver.wait, folder.log)
                if stopping and done < config.steps:
                    saver.wait()
                    by = stop.name or "a signal to another process"
                    folder.log(f"stopped by {by} at step {done}")
                    raise trainer.world.error(
                        f"stopped by {by} after step {done} of {config.steps}, and saved; the same command goes on from there",
                        INTERRUPTED,
                    )
        trainer.world.at("the end", slow=True)
        evaluated = evaluated if config.steps > first and evaluated is not None else validate(config.steps - 1)
        saver.wait()
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
        complaint = trainer.complaint(found.loss).replace("became", "is")
        raise trainer.world.error(f"{what} {complaint}", CHECKPOINT)
    return [{"step": 0, trainer.task.unit: 0, **found.curve()}]


def _diverged(trainer: Trainer, folder: RunFolder, step: int, what: str, astray: bool) -> None:
    """End the run, unless the batch alone is to blame and may be left out: weights that went astray no batch brings back."""
    config = trainer.config
    what = f"{what} at step {step + 1} (batch {step} of seed {config.seed})"
    folder.log(f"{what}; the weights are {'not usable any more' if astray else 'still usable'}")
    if config.on_nan == "skip" and not astray:
        return
    # A checkpoint at this very step holds the weights that gave the loss; an older one was trained on from.
    older = [p for p in list_checkpoints(folder.checkpoints) if p.name < f"step-{step:08d}"]
    good = f"the last good checkpoint is {older[0]}" if older else "no good checkpoint was saved before it"
    if not astray:
        advice = "the weights are still usable: the same command with --on-nan skip goes on and leaves such batches out"
        raise trainer.world.error(f"{what}; {good}; {advice}", DIVERGED)
    advice = (
        f"start again in another folder, with an lr lower than {config.lr:g} or a warmup longer than {config.warmup}"
    )
    raise trainer.world.error(
        f"{what}: the weights are not usable any more, whatever the batch; {good}; {advice}", DIVERGED
    )


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
