"""A training script in torchtitan's style: single-device model code, and one function that parallelizes it.

python examples/torchtitan_style.py
torchrun --standalone --nproc-per-node 4 examples/torchtitan_style.py attnres 2    # tensor parallelism over 2, FSDP2 over 2
"""

import copy
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import depthmix
from depthmix.parallel import apply, gradients, tensor, weights

VOCAB, DIM, BLOCKS, LENGTH, BATCH = 16, 32, 2, 24, 16
ON_GPU = torch.cuda.is_available()


def parallelize(model: depthmix.Decoder, mesh: DeviceMesh) -> set[str]:
    """Apply tensor parallelism, activation checkpointing, compilation and FSDP2, in torchtitan's order.

    Returns:
        The names of the parameters that tensor parallelism does not shard.
    """
    if mesh["tp"].size() > 1:
        tensor.parallelize(model, mesh["tp"])
    whole = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    for sublayer in model.sublayers:
        sublayer.forward = functools.partial(checkpoint, sublayer.forward, use_reentrant=False)
        if ON_GPU:
            sublayer.compile()
    # Applies fully_shard to each sublayer (gathered in bf16) and to the rest, and shard_mixer to the mixer (in fp32).
    apply.shard(model, mesh["dp"], torch.bfloat16 if ON_GPU else None)
    return whole


@contextmanager
def processes(tp: int) -> Iterator[tuple[DeviceMesh, torch.device]]:
    """Yield a mesh of the processes that torchrun has started, or of this process alone, and the device.

    Args:
        tp: neighbouring processes that share sublayers. The others share parameters and data.
    """
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    begins = not dist.is_initialized()
    if begins:
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if ON_GPU else "gloo", **alone)
    try:
        yield init_device_mesh(device.type, (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp")), device
    finally:
        if begins:
            dist.destroy_process_group()


def batch(step: int) -> Tensor:
    """Return sequences that repeat themselves after six tokens. They do not depend on the number of processes."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCAB, (BATCH, 6), generator=generator).repeat(1, LENGTH // 6 + 1)[:, : LENGTH + 1]


def main(mixer: str = "attnres", steps: int = 60, tp: int = 1, **options: object) -> list[float]:
    with processes(tp) as (mesh, device):
        losses = train(mixer, steps, mesh, device, options)
        if dist.get_rank() == 0:
            print(f"{mixer}, processes: {dist.get_world_size()}, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


def train(mixer: str, steps: int, mesh: DeviceMesh, device: torch.device, options: dict[str, object]) -> list[float]:
    config = depthmix.DecoderConfig(VOCAB, DIM, BLOCKS, n_heads=2, mixer=mixer, mixer_options=options)
    # On the meta device, so that no process holds the whole model.
    model = weights.build_empty(lambda: depthmix.Decoder(config), seed=0)
    rule = copy.deepcopy(model.mixer)
    whole = parallelize(model, mesh)
    weights.materialize(model, rule, device)
    not_sharded_by_tp = [p for name, p in model.named_parameters() if name in whole]
    optimizer = torch.optim.AdamW(depthmix.param_groups(model, weight_decay=0.1), lr=1e-2)
    losses = []
    for step in range(steps):
        ids = batch(step).chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].to(device)
        with loss_parallel():
            with torch.autocast(device.type, torch.bfloat16, enabled=ON_GPU):
                logits = model(ids[:, :-1]).flatten(0, 1).float()
                token_losses = functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
            loss = gradients.whole(token_losses).mean()
            loss.backward()
        if mesh["tp"].size() > 1:
            # Each process has computed the gradients of its own tokens.
            gradients.sum_over(not_sharded_by_tp, mesh["tp"])
        gradients.clip(list(model.parameters()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach().clone())
        losses.append(total.item() / dist.get_world_size())
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2], tp=int(sys.argv[2]) if len(sys.argv) > 2 else 1)
