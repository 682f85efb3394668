"""Shard a mixer with FSDP2 as a group of its own, in fp32 whatever dtype the rest of the model is gathered in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from depthmix.mixers.base import Mixer
from depthmix.mixers.checks import ContractError
from depthmix.ops.torch_internals import inside_sharded_model

CONTRACT = ("start", "read", "write", "finish", "output_gains")


def shard_mixer(mixer: Mixer, **options: Any) -> Mixer:
    """Shard a mixer's parameters with FSDP2. Call it before `fully_shard` on the model around the mixer.

    FSDP2 gathers parameters around `forward`, which a mixer does not have. Here the first call of the contract gathers them. They stay
    until the model's backward ends, and their gradients are reduced once for all sites. States pass unchanged, and no policy rounds
    the parameters.

    Args:
        mixer: the mixer.
        options: of `fully_shard`, such as the mesh.

    Returns:
        The same mixer.

    Raises:
        ContractError: in a later call, if it records gradients and the model around the mixer is not sharded.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # slow to import

    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    fully_shard(mixer, reshard_after_forward=False, mp_policy=policy, **options)
    sharded, modules = cast(FSDPModule, mixer), list(mixer.modules())

    def parameters() -> Iterator[torch.Tensor]:
        # Asked at every site, where `mixer.parameters()` would take longer than a kernel.
        return (p for module in modules for p in module._parameters.values() if p is not None)

    def gathered(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def gather_and_call(*args: Any, **kwargs: Any) -> Any:
            if (
                torch.is_grad_enabled()
                and not inside_sharded_model(mixer)
                and any(p.requires_grad for p in parameters())
            ):
                where = "the mixer is sharded and the model around it is not, so nothing would reduce its gradients"
                raise ContractError(f"{call.__name__}: {where}; call fully_shard on the model, and run it as a whole")
            if any(hasattr(p, "to_local") for p in parameters()):  # or an earlier call of this pass has gathered them
                sharded.unshard()
            return call(*args, **kwargs)

        return gather_and_call

    def gathered_finish(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = finish(*args, **kwargs)
        if out.requires_grad:
            out.register_hook(lambda _: sharded.unshard())  # the backward of another pass may have been first
        elif not torch.is_grad_enabled():
            sharded.reshard()
        return out

    for name in CONTRACT:
        setattr(mixer, name, gathered(getattr(mixer, name)))
    finish = mixer.finish
    mixer.finish = functools.wraps(finish)(gathered_finish)  # type: ignore[method-assign]
    return mixer
