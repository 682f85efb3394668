"""A decoder divided among the ranks of a pipeline, and its training step.

    pipe = pipeline(config, build, layout, "Interleaved1F1B", microbatches=8, device=device)
    loss = pipe.step(batch)               # token ids [B, T + 1], the same on every rank; gradients are then in pipe.parameters()

`build` gives the whole decoder, as one process would build it; a rank keeps its pieces of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor

from depthmix.models.decoder import Decoder, DecoderConfig
from depthmix.ops.token_loss import token_loss
from depthmix.parallel.gradients import local, norm, scale
from depthmix.parallel.pipeline.deferred import defer
from depthmix.parallel.pipeline.hops import Cache, plan_hops
from depthmix.parallel.pipeline.piece import Piece, join_pieces, tensors_of_piece
from depthmix.parallel.pipeline.refusals import (
    MOST_ACTIVATIONS,
    ONE_STAGE,
    Stages,
    check_pipeline,
    schedule_named,
    stage_sites,
)
from depthmix.parallel.pipeline.stage import Bank, DepthStage

Loss = Callable[[Tensor, Tensor], Tensor]


def mean_token_loss(logits: Tensor, rows: Tensor) -> Tensor:
    """Compute the mean token loss, as the trainer does."""
    return token_loss(logits.flatten(0, 1), rows[:, 1:].flatten()).mean()


class Pipeline:
    """Stages of this rank, run by a schedule."""

    def __init__(self, config: DecoderConfig, stages: list[DepthStage], pieces: dict[int, Piece], schedule: str, microbatches: int, loss: Loss) -> None:  # fmt: skip
        self.config, self.stages, self.microbatches = config, stages, microbatches
        self.pieces = nn.ModuleDict({str(index): piece for index, piece in pieces.items()})
        self.group, self.device = stages[0].group, stages[0].device
        self.rank, self.ranks = stages[0].group_rank, stages[0].group_size
        self.has_first, self.has_last = stages[0].is_first, stages[-1].is_last
        self.loss = loss

        # Micro-batches have equal sizes, so the loss is the mean of their means.
        def of_step(logits: Tensor, rows: Tensor) -> Tensor:
            return self.loss(logits, rows) / microbatches

        given: Any = stages[0] if schedule in ONE_STAGE else stages
        self.schedule = get_schedule_class(schedule)(given, microbatches, loss_fn=of_step, scale_grads=False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of all stages of this rank."""
        return self.pieces.parameters()

    def step(self, batch: Tensor) -> Tensor:
        """Compute the loss of a batch [B, T + 1], the same on every rank, and add its gradients to the parameters'."""
        tied = self._tied()
        before = None if tied is None else tied.grad
        if tied is not None:
            tied.grad = None
        loss = self._run(self.schedule.step, batch)
        if tied is not None:
            self._exchange(tied)
            if before is not None and tied.grad is not None:
                tied.grad += before
        return loss

    @torch.no_grad()
    def evaluate(self, batch: Tensor) -> Tensor:
        """Compute the loss without gradients."""
        loss = self._run(self.schedule.eval, batch)
        for stage in self.stages:
            # A backward would have done this.
            stage.clear_runtime_states()
        return loss

    def _run(self, call: Callable[..., Any], batch: Tensor) -> Tensor:
        if len(batch) % self.microbatches:
            raise ValueError(f"{len(batch)} sequences cannot be divided into {self.microbatches} equal micro-batches")
        batch = batch.to(self.device)
        for stage in self.stages:
            piece: Any = self.pieces[str(stage.stage_index)]
            stage.tokens = len(batch) // self.microbatches, (batch.shape[1] - 1) // piece.parts
        losses: list[Tensor] = []
        inputs = (batch[:, :-1],) if self.has_first else ()
        call(*inputs, target=batch if self.has_last else None, losses=losses)
        # The same dtype in all processes.
        total = torch.zeros((), device=self.device)
        for loss in losses:
            total += loss.detach()
        dist.broadcast(total, group=self.group, group_src=self.ranks - 1)
        return total

    # An embedding that is the head's matrix too: the first and the last rank have it, and add up their gradients.

    def _tied(self) -> Tensor | None:
        if not self.config.tie_embeddings:
            return None
        ends: list[Any] = [self.pieces[str(stage.stage_index)] for stage in (self.stages[0], self.stages[-1])]
        first, last = ends
        weight: Tensor | None = (
            first.embedding.weight if self.has_first else last.head.weight if self.has_last else None
        )
        return weight

    def _exchange(self, weight: Tensor) -> None:
        other = self.ranks - 1 if self.has_first else 0
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        # An embedding's gradient may be divided in another way than a head's.
        if isinstance(weight, DTensor):
            weight.grad = weight.grad.redistribute(placements=weight.placements)  # type: ignore[attr-defined]
        gradient = local(weight.grad).contiguous()
        other_gradient = torch.empty_like(gradient)
        ops = [
            dist.P2POp(dist.isend, gradient, group=self.group, group_peer=other),
            dist.P2POp(dist.irecv, other_gradient, group=self.group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        local(weight.grad).copy_(gradient + other_gradient)

    def clip(self, limit: float) -> Tensor:
        """Scale the whole model's gradient so that its norm is at most the limit, and return the norm before."""
        counted_elsewhere = None if self.has_first else self._tied()
        counted = [p for p in self.parameters() if p.grad is not None and p is not counted_elsewhere]
        square = norm(counted).square() if counted else torch.zeros((), device=self.device)
        dist.all_reduce(square, group=self.group)
        scale(self.parameters(), square.sqrt(), limit)
        return square.sqrt()

    # State dicts.

    def state_dict(self) -> dict[int, dict[str, Tensor]]:
        """Return this rank's state dicts by stage, under the whole decoder's names."""
        return {int(index): piece.state_dict() for index, piece in self.pieces.items()}

    def load(self, whole: Mapping[str, Tensor]) -> None:
        """Load this rank's part of a whole decoder's state dict."""
        for piece in self.pieces.values():
            assert isinstance(piece, Piece)
            piece.load_state_dict({name: whole[name] for name in piece.state_dict()})

    def whole(self, tensors: Mapping[int, Mapping[str, Tensor]] | None = None) -> dict[str, Tensor]:
        """Return the whole decoder's state dict on the CPU of every rank. `tensors`: other tensors of this rank, by stage."""
        local_tensors = {i: self._on_cpu(i, d) for i, d in (tensors or self.state_dict()).items()}
        gathered: list[Any] = [None] * self.ranks
        dist.all_gather_object(gathered, local_tensors, group=self.group)
        by_stage = {i: d for rank in gathered for i, d in rank.items()}
        piece: Any = next(iter(self.pieces.values()))
        return join_pieces(piece.owners, [by_stage[i] for i in sorted(by_stage)])

    def _on_cpu(self, stage: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        piece: Any = self.pieces[str(stage)]
        return {name: t.detach().cpu() for name, t in tensors_of_piece(piece, tensors).items()}


def pipeline(
    config: DecoderConfig,
    build: Callable[[], Decoder],
    layout: Stages,
    schedule: str,
    microbatches: int,
    *,
    device: torch.device | str = "cpu",
    group: Any = None,
    cache: Cache = "all",
    dtype: torch.dtype = torch.float32,
    loss: Loss = mean_token_loss,
    wrap: Callable[[Piece], nn.Module] = lambda piece: piece,
    most: float = MOST_ACTIVATIONS,
) -> Pipeline:
    """Build this rank's part of a pipeline of `layout.pp` ranks with `layout.virtual` stages each.

    Args:
        config: The decoder.
        build: Builds the whole decoder, the same on every rank. One on the meta device stays there; the caller
            allocates it.
        layout: Ranks and stages.
        schedule: Name of the schedule.
        microbatches: Parts of a batch.
        device: This rank's device.
        group: The pipeline's ranks.
        cache: Tensors that a rank keeps (hops.py).
        dtype: Dtype of activations between stages; under autocast, autocast's.
        loss: Mean loss of a micro-batch, from its logits and its rows [B, T + 1].
        wrap: Wraps a piece, for example with FSDP2; may return another module around it.
        most: Largest number of activations in a state between stages.

    Raises:
        UserError: The pipeline is impossible, with the reason.
    """
    device, name = torch.device(device), schedule_named(schedule)
    forms = check_pipeline(config, layout, schedule, microbatches, None, dist.get_world_size(group), cache, most, dtype)
    n_stages, rank = layout.pp * layout.virtual, dist.get_rank(group)
    hops, sites = plan_hops(forms, layout.pp, cache), stage_sites(config, n_stages)
    whole, bank = build(), Bank()
    pieces, stages = {}, []
    for index in range(rank, n_stages, layout.pp):
        piece = Piece(whole, sites[index], forms[index], None if index + 1 == n_stages else forms[index + 1])
        if not any(p.is_meta for p in piece.parameters()):
            piece.to(device)
        deferred = defer(piece) if name == "InterleavedZeroBubble" else None
        pieces[index] = piece
        stages.append(DepthStage(wrap(piece), index, hops, bank, device, group, deferred))
    return Pipeline(config, stages, pieces, name, microbatches, loss)
