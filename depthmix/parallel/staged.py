"""Engine of a model in pipeline stages, each with tensor parallelism and FSDP2 as in apply.py.

A process holds pieces of the model, one for each of its stages. What a schedule computes, and what goes from stage to stage, is in
pipeline/; what pieces' parameters are called, and how they are saved and loaded, in pieces.py.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from depthmix.parallel import tensor
from depthmix.parallel.alone import Loss
from depthmix.parallel.apply import data_mesh, shard
from depthmix.parallel.gradients import sum_over, whole
from depthmix.parallel.pieces import Pieces
from depthmix.parallel.pipeline import pipeline
from depthmix.parallel.pipeline.piece import MIXER, Piece
from depthmix.parallel.weights import build_empty, draw, fill
from depthmix.parallel.world import PIPELINE, TENSOR, World

# A schedule that fails, as when another process dies, would print all of itself before the reason is said.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


class Staged(Pieces):
    """A decoder in pipeline stages, with one pipeline for each part of a batch."""

    def __init__(
        self,
        world: World,
        build: Callable[[], Any],
        seed: int,
        narrow: torch.dtype | None = None,
        wrap: Callable[[Any], None] = lambda piece: None,
        weights: nn.Module | None = None,
        microbatches: int = 1,
    ) -> None:
        """Build and divide the model, as Parallel does. `narrow` is autocast's dtype; `microbatches` divide a
        pipeline's rows.
        """
        assert world.mesh is not None
        self.mesh, layout = world.mesh, world.layout
        model = build_empty(build, seed)
        self.blueprint = copy.deepcopy(model)
        # Names that tensor parallelism has divided, by the sites of a piece.
        divided: dict[range, set[str]] = {}

        def divide(piece: Piece) -> Piece:
            if layout.tp > 1:
                tensor.parallelize(piece, self.mesh[TENSOR])
            divided[piece.sites] = {name for name, p in piece.named_parameters() if isinstance(p, DTensor)}
            wrap(piece)
            if narrow is not None:
                piece.forward = _under(world.device, narrow, piece.forward)  # type: ignore[method-assign]
            if layout.sharded:
                shard(piece, data_mesh(world), narrow)
            return piece

        self.pipe = pipeline(
            model.config,
            lambda: model,
            layout,
            layout.order,
            microbatches,
            device=world.device,
            group=self.mesh[PIPELINE].get_group(),
            dtype=narrow or model.embedding.weight.dtype,
            wrap=divide,
        )
        self.model = self.pipe.pieces
        self.pieces = dict(self.pipe.pieces.items())
        self._materialize(model, weights, world.device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        # Of these each tensor-parallel process has found the gradient of its own tokens, or heads, alone.
        self.everywhere = [
            p
            for piece in self.pieces.values()
            for name, p in piece.named_parameters()
            if layout.tp > 1 and name not in divided[piece.sites]
        ]
        # Parameters of the mixer that have gradients only in other pieces.
        self.unread: list[Tensor] | None = None

    # Weights.

    def _materialize(self, model: Any, weights: nn.Module | None, device: torch.device) -> None:
        for piece in self.pieces.values():
            piece.to_empty(device=device)
        if weights is not None:
            state = {**dict(weights.named_buffers()), **weights.state_dict()}
            for piece in self.pieces.values():
                self._fill(piece, state)
            return
        if model.config.tie_embeddings and (self.pipe.has_first or self.pipe.has_last):
            ends: list[Any] = list(self.pieces.values())
            tied = ends[0].embedding.weight if self.pipe.has_first else ends[-1].head.weight
            # The matrix of this process gets the numbers of both.
            model.embedding.weight = model.head.weight = tied

        def take(mixer: nn.Module) -> None:
            drawn = {**dict(mixer.named_parameters()), **dict(mixer.named_buffers())}
            for piece in self.pieces.values():
                self._fill(piece.mixer, drawn)

        draw(model, self.blueprint.mixer, take)

    @staticmethod
    def _fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        for name, place in (*module.named_parameters(), *module.named_buffers()):
            fill(place, tensors[name].detach())

    # Steps.

    def part(self, last: bool = True) -> AbstractContextManager[Any]:
        return loss_parallel() if self.mesh[TENSOR].size() > 1 else nullcontext()

    def backward(self, loss: Loss, batch: Tensor, micro: int) -> Tensor:
        """Compute the mean loss of a batch, the same in the whole pipeline. The schedule runs micro-batches of `micro`
        rows.
        """
        self.pipe.loss = lambda logits, rows: loss(rows, lambda _: logits)
        with self.part():
            total = self.pipe.step(batch)
        self._complete()
        return total

    def _complete(self) -> None:
        """Set missing gradients of a mixer's parameters to zero where another piece has one, as in the undivided model."""
        if self.unread is None:
            named = self.model.named_parameters()
            mixed = {n: p for n, p in named if p.requires_grad and self.title(n).startswith(MIXER)}
            has: list[Any] = [None] * self.pipe.ranks
            with_gradients = {self.title(n) for n, p in mixed.items() if p.grad is not None}
            dist.all_gather_object(has, with_gradients, group=self.pipe.group)
            anywhere = set[str]().union(*has)
            self.unread = [p for n, p in mixed.items() if p.grad is None and self.title(n) in anywhere]
        for p in self.unread:
            if p.grad is None:
                p.grad = torch.zeros_like(p)

    def probe(self, loss: Loss, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of a batch and the norm of its gradient, which is not kept. Every micro-batch is this batch."""
        batch_loss = self.backward(loss, batch.repeat(self.pipe.microbatches, 1), len(batch))
        norm = self.clip(math.inf)
        self.model.zero_grad(set_to_none=True)
        return batch_loss, norm

    def sums(self, of: Callable[[Any, Tensor], Iterable[float]], dealt: Iterable[tuple[Tensor, bool]]) -> list[float]:
        """Add up numbers over batches, at the end of the pipeline; empty in other processes."""
        n, rows = self.pipe.microbatches, list[list[float]]()
        together: list[tuple[Tensor, bool]] = []
        for batch, counts in dealt:
            together.append((batch, counts))
            if len(together) == n:
                rows += self._sums(of, together)
                together = []
        if together:
            rows += self._sums(of, together + [(together[0][0], False)] * (n - len(together)))
        self.rest()
        return [math.fsum(column) for column in zip(*rows, strict=True)]

    def _sums(
        self, of: Callable[[Any, Tensor], Iterable[float]], batches: list[tuple[Tensor, bool]]
    ) -> list[list[float]]:
        """Compute the numbers of one schedule's micro-batches. All have one size: smaller batches are padded with rows
        that do not count.
        """
        size, numbers = max(len(batch) for batch, _ in batches), list[list[float]]()
        # The last stage sees batches in this order.
        rows = iter([len(batch) if counts else 0 for batch, counts in batches])

        def look(logits: Tensor, batch: Tensor) -> Tensor:
            if n := next(rows):
                numbers.append(list(of(lambda _: logits[:n], batch[:n])))
            return torch.zeros((), device=self.pipe.device)

        self.pipe.loss = look
        with self.part():
            self.pipe.evaluate(torch.cat([torch.cat([b, b[:1].expand(size - len(b), -1)]) for b, _ in batches]))
        return numbers

    def whole(self, losses: Tensor) -> Tensor:
        return whole(losses)

    def clip(self, limit: float) -> Tensor:
        """Scale the whole model's gradient so that its norm is at most the limit, and return the norm before."""
        if self.everywhere:
            sum_over(self.everywhere, self.mesh[TENSOR])
        return self.pipe.clip(limit)

    def rest(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _under(device: torch.device, narrow: torch.dtype, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward in autocast. A schedule's backward passes, which run in between, stay outside."""

    @functools.wraps(call)
    def inside(*args: Any) -> Any:
        with torch.autocast(device.type, narrow):
            return call(*args)

    return inside
