"""A stage under torch's pipeline schedules that keeps what it has received.

Torch's PipelineStage sends all outputs of a stage to the next and returns a gradient for each: a tensor that two virtual stages of
a rank use would travel twice, and one that skips stages it refuses. Its schedules, though, only ask a stage for lists of messages
and to compute a micro-batch. Those are what this subclass overrides; orders, waiting, DDP and FSDP2 around a backward stay torch's.

The stages of a rank share a `Bank`: per micro-batch, by label, tensors and what is known of their gradients. A stage takes the
tensors of its state from there as new leaves of autograd; the gradients of its leaves are added up there. The stage that a tensor
came with sends its gradient back, once: the later stages of the rank have then had their backward, since a backward goes from the
last stage to the first. The stage that made a tensor begins its backward with what is there of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from depthmix.parallel.pipeline.deferred import Deferred
from depthmix.parallel.pipeline.hops import Hop


class Bank:
    """Tensors of depth states on a rank, and their gradients, by micro-batch and label."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int], Tensor] = {}

    def add(self, micro: int, label: int, gradient: Tensor) -> None:
        key = micro, label
        self.gradients[key] = self.gradients[key] + gradient if key in self.gradients else gradient

    def take(self, micro: int, label: int) -> Tensor | None:
        return self.gradients.pop((micro, label), None)

    def clear(self) -> None:
        self.values.clear()
        self.gradients.clear()


class DepthStage(PipelineStage):
    """A pipeline stage. `hops` lead into it and, unless it is the last, into the next."""

    def __init__(
        self,
        piece: torch.nn.Module,
        index: int,
        hops: Sequence[Hop],
        bank: Bank,
        device: torch.device,
        group: Any = None,
        deferred: Deferred | None = None,
    ) -> None:
        """Set up stage `index`. `hops`: of all stages; `deferred`: collects postponed weight gradients, for zero-bubble
        schedules.
        """
        super().__init__(piece, index, len(hops), device, group=group)
        self.bank, self.deferred = bank, deferred
        self.hop = hops[index]
        self.next = None if index + 1 == len(hops) else hops[index + 1]
        # [B, T] of a micro-batch; set before a step.
        self.tokens: tuple[int, ...] = ()
        # Bytes sent since the caller last set these to 0.
        self.sent_forward = self.sent_backward = 0
        self._arriving: dict[int, dict[int, Tensor]] = {}
        self._returning: dict[int, dict[int, Tensor]] = {}
        self._products: dict[int, list[Callable[[], None]]] = {}

    # What schedules prepare: nothing, since the states' forms are known.

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        self.chunks = num_microbatches
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())
        self.act_send_info = {}

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        pass

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self.bank.clear()
        for kept in (self._arriving, self._returning, self._products):
            kept.clear()

    # Messages.

    def _op(self, call: Any, tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(call, tensor, group=self.group, group_peer=self.stage_index_to_group_rank[stage])

    def _memory(self, hop: Hop) -> dict[int, Tensor]:
        return {label: hop.form.empty(label, self.tokens, self.device) for label in hop.carries}

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        arriving = self._arriving[fwd_chunk_id] = self._memory(self.hop)
        return [self._op(dist.irecv, t, self.stage_index - 1) for t in arriving.values()]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.next is None:
            return []
        tensors = [self.bank.values[fwd_chunk_id, label].contiguous() for label in self.next.carries]
        self.sent_forward += sum(t.nbytes for t in tensors)
        return [self._op(dist.isend, t, self.stage_index + 1) for t in tensors]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.next is None:
            return []
        returning = self._returning[bwd_chunk_id] = self._memory(self.next)
        return [self._op(dist.irecv, t, self.stage_index + 1) for t in returning.values()]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_first:
            return []
        tensors = []
        for label in self.hop.carries:
            gradient = self.bank.take(bwd_chunk_id, label)
            # No stage read this tensor.
            if gradient is None:
                gradient = self.hop.form.empty(label, self.tokens, self.device).zero_()
            tensors.append(gradient.contiguous())
        self.sent_backward += sum(t.nbytes for t in tensors)
        return [self._op(dist.isend, t, self.stage_index - 1) for t in tensors]

    # Computing.

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *options: Any, **more: Any) -> Any:
        micro, values = fwd_chunk_id, self.bank.values
        leaves: dict[int, Tensor] = {}
        if not self.is_first:
            values.update({(micro, label): t for label, t in self._arriving.pop(micro).items()})
            for label in dict.fromkeys(self.hop.form.labels):
                leaf = values[micro, label].detach()
                leaves[label] = leaf.requires_grad_(self.has_backward)
            args = tuple(leaves[label] for label in self.hop.form.labels)
        out = self.forward_maybe_with_nosync(*args)
        made: dict[int, Tensor] = {}
        if self.next is None:
            # Schedules concatenate outputs. Logits would take much memory.
            self.output_chunks.append(torch.zeros(1))
        else:
            # What came through as it was is passed on as it came: by kernels it may be another tensor with the same values.
            made = {label: t for label, t in zip(self.next.form.labels, out, strict=True) if label not in leaves}
            values.update({(micro, label): t.detach() for label, t in made.items()})
        self.fwd_cache[micro] = made, leaves  # type: ignore[assignment]
        return out

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        micro, bank = bwd_chunk_id, self.bank
        cached: Any = self.fwd_cache.pop(micro)
        made, leaves = cached
        roots: Any = loss
        gradients: Any = None
        if self.next is not None:
            for label, g in self._returning.pop(micro).items():
                bank.add(micro, label, g)
            gradients_made = {label: bank.take(micro, label) for label in made}
            roots = [made[label] for label, g in gradients_made.items() if g is not None]
            gradients = [g for g in gradients_made.values() if g is not None]
        arguments = {"stage_output": roots, "output_grads": gradients, "input_values": list(leaves.values())}
        of_leaves, _ = self.backward_maybe_with_nosync("full", arguments, last_backward=last_backward)
        for label, of_leaf in zip(leaves, of_leaves, strict=True):
            if of_leaf is not None:
                bank.add(micro, label, of_leaf)
        # All stages of this rank that use these tensors are done.
        for label in (*made, *self.hop.carries):
            bank.values.pop((micro, label), None)
        if self.deferred is not None:
            self._products[micro] = self.deferred.take()
            if full_backward:
                self.backward_weight_one_chunk(micro)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        for product in self._products.pop(bwd_chunk_id, ()):
            product()
