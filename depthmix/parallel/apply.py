"""Divide a model among processes, from outside: tensor or context parallelism, then DDP or FSDP2.

The order is torchtitan's: divide matrices, then wrap sublayers for checkpointing and compilation, then shard or replicate.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from depthmix.mixers.sharding import shard_mixer
from depthmix.parallel import context, tensor
from depthmix.parallel.alone import Alone, Loss
from depthmix.parallel.gradients import clip, sum_over, whole
from depthmix.parallel.weights import build_empty, materialize, take_over
from depthmix.parallel.world import REPLICATE, SHARD, TENSOR, World

# Two messages for a scalar, the norm, are no reason to warn in every process; nor is a view that nobody writes into.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")


class Parallel(Alone):
    """A divided model, with the interface that a trainer uses. Parameter names are those of the undivided model."""

    def __init__(
        self,
        world: World,
        build: Callable[[], Any],
        seed: int,
        narrow: torch.dtype | None = None,
        wrap: Callable[[Any], None] = lambda model: None,
        weights: nn.Module | None = None,
    ) -> None:
        """Build the model and divide it.

        Args:
            world: The processes.
            build: Builds the model.
            seed: Seed of the random weights.
            narrow: The dtype that sharded matrices are gathered in; None: their own.
            wrap: Wraps the sublayers.
            weights: An undivided model whose weights to start with, instead of random ones.
        """
        assert world.mesh is not None
        self.world, self.mesh, layout = world, world.mesh, world.layout
        self.model = build_empty(build, seed)
        # Without memory: names and shapes of the undivided model.
        self.blueprint = copy.deepcopy(self.model)
        if layout.tp > 1:
            tensor.parallelize(self.model, self.mesh[TENSOR])
        if layout.cp > 1:
            context.parallelize(self.model, world.context)
        divided = {name for name, p in self.model.named_parameters() if isinstance(p, DTensor)}
        wrap(self.model)
        if layout.sharded:
            shard(self.model, data_mesh(world), narrow)
        if weights is None:
            materialize(self.model, self.blueprint.mixer, world.device)
        else:
            take_over(self.model, weights, world.device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        # Of these each tensor-parallel process has found the gradient of its own tokens, or heads, alone.
        named = self.model.named_parameters()
        self.everywhere = [p for name, p in named if layout.tp > 1 and name not in divided]
        self.replicated: DistributedDataParallel | None = None
        if not layout.sharded and layout.tp == 1:
            # Gradients stay in the buckets that they are summed in, where the optimizer finds them.
            self.replicated = DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    def __call__(self, *args: Any) -> Tensor:
        training = self.replicated is not None and torch.is_grad_enabled()
        return self.replicated(*args) if training and self.replicated is not None else self.model(*args)

    @contextmanager
    def part(self, last: bool = True) -> Iterator[None]:
        """Enter the context of a partial batch's loss and backward pass. Gradients are sent with the last one."""
        self.world.moved()
        with ExitStack() as stack:
            if self.world.layout.tp > 1:
                stack.enter_context(loss_parallel())
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(last)
            elif self.replicated is not None and not last:
                stack.enter_context(self.replicated.no_sync())
            yield

    def whole(self, losses: Tensor) -> Tensor:
        """Return token losses as a plain tensor."""
        return whole(losses)

    def clip(self, limit: float) -> Tensor:
        """Scale the gradients so that their global norm is at most the limit, and return the norm before."""
        if self.everywhere:
            sum_over(self.everywhere, self.mesh[TENSOR])
        return clip(self.parameters, limit)

    def order_sums(self, loss: Loss, batch: Tensor, micro: int) -> None:
        # DDP fills its buckets in the order of the parameters for the first backward, and in the order of that backward's
        # gradients for all later ones. With three processes or more, a sum depends on where in its bucket a gradient stands.
        if self.replicated is not None:
            drawn = torch.get_rng_state()
            self.backward(loss, batch, micro)
            self.model.zero_grad(set_to_none=True)
            torch.set_rng_state(drawn)

    def probe(self, loss: Loss, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the loss of a batch and the norm of its gradient, which is not kept."""
        batch_loss = self.backward(loss, batch, len(batch))
        norm = self.clip(math.inf)
        self.model.zero_grad(set_to_none=True)
        return batch_loss, norm

    def rest(self) -> None:
        """Reshard parameters that FSDP2 leaves gathered after a pass without a backward."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def data_mesh(world: World) -> Any:
    """Return the mesh of the processes that parameters are sharded among and replicated on."""
    assert world.mesh is not None
    return world.mesh[REPLICATE, SHARD] if world.layout.dp > 1 else world.mesh[SHARD]


def shard(model: Any, mesh: Any, narrow: torch.dtype | None) -> None:
    """Apply FSDP2: one group for each sublayer, one for the mixer, which stays fp32, and one for the rest.

    Matrices are gathered in the narrow dtype, and their gradients summed in fp32. Norms and the embedding, which a model under
    autocast computes with in fp32 as well, are gathered as they are. Where all shards are here, what a forward has cast is kept for
    the backward, as autocast keeps it. A piece of a model may lack one end of it, or both.

    Alone, a process sends nothing: no message is shorter for a narrow dtype, and none overlaps with another group's work. All but the
    mixer is one group then, which autocast finds as it finds it in a plain model, and hooks run once a step.
    """
    again = mesh.size(mesh.ndim - 1) > 1
    wide = None if narrow is None else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=wide, cast_forward_inputs=False)
    plain = MixedPrecisionPolicy(cast_forward_inputs=False)
    if mesh.size() > 1:
        for sublayer in model.repeated_parts()[0]:
            fully_shard(sublayer, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
        ends = {name: rule for name, rule in (("head", policy), ("embedding", plain)) if hasattr(model, name)}
        if len(ends) < 2 or not getattr(model.config, "tie_embeddings", False):
            for name, rule in ends.items():
                fully_shard(getattr(model, name), mesh=mesh, mp_policy=rule, reshard_after_forward=again)
    shard_mixer(model.mixer, mesh=mesh)
    fully_shard(model, mesh=mesh, mp_policy=plain)
