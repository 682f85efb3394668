"""Checks that refuse an impossible pipeline before anything starts."""

from __future__ import annotations

import itertools
from typing import Protocol

import torch

from depthmix.errors import UserError
from depthmix.mixers.base import Mixer
from depthmix.mixers.registry import create_mixer
from depthmix.models.decoder import DecoderConfig
from depthmix.names import nearest
from depthmix.parallel.packing import Form, state_forms
from depthmix.parallel.pipeline.hops import CACHES
from depthmix.parallel.plan.hops import cuts
from depthmix.parallel.row_owners import why_not_divided

# Spelled as torch does.
SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
# Schedules with one stage per rank.
ONE_STAGE = ("GPipe", "1F1B")
# Largest state between stages, in activations. Sending a larger one takes longer than computing with it.
MOST_ACTIVATIONS = 64


class Stages(Protocol):
    """Attributes of a layout that a pipeline needs."""

    @property
    def pp(self) -> int:
        """Ranks of a pipeline."""

    @property
    def virtual(self) -> int:
        """Stages per rank."""


def schedule_named(name: str) -> str:
    """Return the schedule's name as torch spells it. Raises UserError for an unknown or unsupported schedule."""
    by_lower = {schedule.lower(): schedule for schedule in SCHEDULES}
    if name.lower() in ("zbvzerobubble", "dualpipev"):
        why = "puts neighbouring stages on one rank, of which the kept state knows nothing"
        raise UserError(f"parallel: schedule={name} {why}; there are {', '.join(SCHEDULES)}")
    if name.lower() not in by_lower:
        choices = f"there are {', '.join(SCHEDULES)}{nearest(name, SCHEDULES)}"
        raise UserError(f"parallel: unknown schedule {name!r}; {choices}")
    return by_lower[name.lower()]


def check_pipeline(
    config: DecoderConfig,
    layout: Stages,
    schedule: str,
    microbatches: int,
    batch_size: int | None = None,
    processes: int | None = None,
    cache: str = "all",
    most: float = MOST_ACTIVATIONS,
    dtype: torch.dtype = torch.float32,
) -> list[Form]:
    """Return the form of the state before every stage. Raises UserError, with the reason, for a pipeline that is
    impossible.

    most: activations that a state between stages may have. dtype: of an activation.
    """
    name, stages = schedule_named(schedule), layout.pp * layout.virtual
    if layout.pp < 2:
        raise UserError(f"parallel: a pipeline needs pp of at least 2, got {layout.pp}")
    if processes is not None and processes != layout.pp:
        raise UserError(f"parallel: pp={layout.pp} needs {layout.pp} processes, and {processes} are here")
    if cache not in CACHES:
        raise UserError(f"parallel: cache must be one of {', '.join(CACHES)}, got {cache!r}{nearest(cache, CACHES)}")
    if stages > config.n_blocks:
        what = f"{stages} stages (pp={layout.pp} x virtual={layout.virtual})"
        raise UserError(f"parallel: {what} are more than the {config.n_blocks} blocks of the model")
    if name in ONE_STAGE and layout.virtual > 1:
        others = ", ".join(s for s in SCHEDULES if s not in ONE_STAGE)
        raise UserError(f"parallel: schedule={name} has one stage a rank; virtual={layout.virtual} is for {others}")
    if name == "Interleaved1F1B" and layout.virtual == 1:
        raise UserError(
            "parallel: schedule=Interleaved1F1B is for virtual of at least 2; with one stage a rank use 1F1B"
        )
    if microbatches < 1:
        raise UserError(f"parallel: a step needs at least one micro-batch, got {microbatches}")
    if name == "1F1B" and microbatches < stages:
        raise UserError(f"parallel: schedule=1F1B needs a micro-batch for each of {stages} stages, got {microbatches}")
    if name.startswith("Interleaved") and microbatches % layout.pp:
        what = f"a multiple of pp={layout.pp} micro-batches"
        raise UserError(f"parallel: schedule={name} goes through them in groups: it needs {what}, got {microbatches}")
    if batch_size is not None and batch_size % microbatches:
        raise UserError(f"parallel: {batch_size} sequences cannot be divided into {microbatches} equal micro-batches")
    return stage_forms(config, stages, dtype, most)


def whole_mixer(config: DecoderConfig) -> Mixer:
    """Build the model's mixer on the meta device."""
    return _mixer(config, config.n_blocks)


def _mixer(config: DecoderConfig, n_blocks: int) -> Mixer:
    with torch.device("meta"):
        return create_mixer(config.mixer, dim=config.dim, n_blocks=n_blocks, **config.mixer_options)


def stage_sites(config: DecoderConfig, stages: int) -> list[range]:
    """Return the sites of every stage: whole blocks, with the longer stages first."""
    starts = [*cuts(config.n_blocks, stages), 2 * config.n_blocks]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def stage_forms(config: DecoderConfig, stages: int, dtype: torch.dtype, most: float = MOST_ACTIVATIONS) -> list[Form]:
    """Return the form of the state before every stage. Raises UserError for a mixer that cannot be divided, or
    whose states are too large.
    """
    why = why_not_divided(_mixer(config, 2))
    if why is not None:
        raise UserError(f"parallel: {why}")
    forms = state_forms(whole_mixer(config), [sites.start for sites in stage_sites(config, stages)], dtype)
    for stage, form in enumerate(forms):
        sizes = {label: form.numbers(label)[0] for label in form.labels}
        size = sum(sizes.values()) / config.dim
        if size > most:
            advice = "a rule that keeps fewer sources (block_size, window) or fewer stages would send less"
            what = f"the state of {config.mixer} before stage {stage} has {size:g} activations a token, at most {most:g} travel"
            raise UserError(f"parallel: {what}; {advice}")
    return forms
