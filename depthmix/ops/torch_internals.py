"""All uses of PyTorch names that are private and have no public replacement, in one file so that one test notices a change.

tests/ops/test_torch_internals.py uses each name for its purpose.
"""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "UncompiledMode",
    "autograd_is_compiled",
    "backward_pass",
    "calls_only_its_forward",
    "constant_for_compiler",
    "current_stream_handle",
    "dispatcher_is_idle",
    "inside_sharded_model",
    "node_will_run",
    "pytree",
    "saving_is_hooked",
    "transformed",
    "when_pass_ends",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def backward_pass() -> int:
    """Return the id of the backward pass that runs in this thread, or -1 outside of one."""
    return torch._C._current_graph_task_id()


def node_will_run(node: Any) -> bool:
    """Return whether the current backward pass will execute a node. Valid inside a backward only."""
    return torch._C._will_engine_execute_node(node)


def autograd_is_compiled() -> bool:
    """Return whether compiled autograd replays the backward pass instead of PyTorch's engine."""
    compiler = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiler is not None and compiler.in_compiled_autograd_region


def when_pass_ends(call: Callable[[], None]) -> None:
    """Call a function when the current backward pass is over."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def saving_is_hooked() -> bool:
    """Return whether saved tensors are packed and unpacked by hooks, as activation checkpointing does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def constant_for_compiler(function: Function) -> Function:
    """Do what torch.compiler.assume_constant_result does, without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class UncompiledMode(TorchDispatchMode):
    """Base of dispatch modes that never run inside a compiled function.

    PyTorch wraps other modes for the compiler, and imports all of it at their first operator. That takes two seconds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# The compiler guards on both by itself.
@constant_for_compiler
def transformed() -> bool:
    """Return whether tensors may belong to torch.func (grad, vmap, jvp, ...) or carry forward-mode derivatives."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def dispatcher_is_idle() -> bool:
    """Return whether an operator on plain tensors would go straight to its implementation.

    Autograd, torch.func, dispatch modes (fake tensors, selective checkpointing, profilers of operators), tracing and compilation
    all want to see it on its way.
    """
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()
    )


def current_stream_handle(device: torch.device) -> int:
    """Return the handle of the current thread's stream of a device, 0 on a CPU. Making a stream object takes ten times as long."""
    if device.index is None and device.type == "cpu":
        return 0
    handle: int = torch._C._cuda_getCurrentRawStream(
        torch.cuda.current_device() if device.index is None else device.index
    )
    return handle


_MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
# PEFT, quantisation and profilers replace these on the module.
_IN_PLACE_OF_FORWARD = ("forward", "_call_impl")


def calls_only_its_forward(module: nn.Module) -> bool:
    """Return whether calling the module runs its class's forward and nothing else: no hooks, module or global, and no replaced forward."""
    # Asked several times per layer when a model decodes: no generators, and no attributes of modules.
    own, everywhere = module.__dict__, vars(torch.nn.modules.module)
    return not (
        any(map(own.get, _MODULE_HOOKS))
        or any(map(everywhere.get, _GLOBAL_HOOKS))
        or any(map(own.__contains__, _IN_PLACE_OF_FORWARD))
    )


def inside_sharded_model(module: Any) -> bool:
    """Return whether an FSDP2-sharded module is part of a larger sharded module whose forward has begun."""
    return module._get_fsdp_state()._is_root is False
