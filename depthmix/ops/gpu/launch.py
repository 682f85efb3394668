"""Launch kernels on the device of their tensors. Triton itself uses the current device, whichever that is."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

# A device and the handle of one of its streams, 0 on a CPU.
Place = tuple[torch.device, int]


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which `device` is the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def current_place(device: torch.device) -> Place:
    """Return the device and the stream on which the current thread launches kernels for its tensors."""
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def count_cores(like: Tensor, on_cpu: int) -> int:
    """Return the streaming multiprocessors of a tensor's GPU; `on_cpu` in the interpreter, so that tests have several programs."""
    return torch.cuda.get_device_properties(like.device).multi_processor_count if like.is_cuda else on_cpu


def repeat_last(tensors: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
    """Pad tensors to `count` kernel arguments by repeating the last one."""
    return (*tensors, *(tensors[-1],) * (count - len(tensors)))


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *arguments: Any, **options: Any) -> None:
    """Call kernel[grid](*arguments, **options) on the device of `like` and the current stream of that device."""
    with on_device(like.device):
        if like.is_cuda and launch_again(kernel, grid, like.device, arguments, options):
            return
        try:
            compiled = kernel[grid](*arguments, **options)
        except TypeError:
            # Triton publishes a compiled kernel before it is loaded. While another thread loads it, a launch is refused,
            # because the kernel's function is still None (triton-lang/triton, pull request 11518).
            load(kernel, grid, *arguments, **options)
            # Any other TypeError is raised again here.
            compiled = kernel[grid](*arguments, **options)
        if like.is_cuda:
            remember(kernel, compiled, like.device, arguments, options)


def load(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Compile the variant of a kernel for these arguments, and wait until it is on the GPU. Do nothing in the interpreter."""
    import triton

    if isinstance(kernel, triton.JITFunction):
        # Indexing with a grid loads the compiled kernel onto the GPU.
        kernel.warmup(*arguments, grid=grid, **options)[grid]


class Compiled(NamedTuple):
    """A kernel that is on a GPU, and what its launcher takes besides the arguments of a call."""

    run: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[Any, ...]  # the arguments that follow those of a call


# Kernels that have been launched, by what Triton compiles a variant for.
_compiled: dict[tuple[Any, ...], Compiled] = {}


def launch_again(
    kernel: Any, grid: tuple[int, ...], device: torch.device, arguments: tuple[Any, ...], options: dict[str, Any]
) -> bool:
    """Launch a kernel that was launched before with arguments of the same kinds, and return whether it was.

    Triton's own call binds arguments, looks for the variant and asks its hooks, which takes longer than a small kernel runs.
    """
    key = variant(kernel, device, arguments, options)
    compiled = _compiled.get(key) if key is not None else None
    if compiled is None or is_watched(kernel):
        return False
    run, function, metadata, constants = compiled
    x, y, z = (*grid, 1, 1)[:3]
    stream = current_place(device)[1]
    run(x, y, z, stream, function, metadata, None, None, None, *arguments, *constants)
    return True


def remember(
    kernel: Any, compiled: Any, device: torch.device, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Keep the kernel of a launch for `launch_again`.

    Only if all arguments of the call vary and all that follow are constants: those are part of the key, with their values.
    """
    key = variant(kernel, device, arguments, options)
    given, rest = kernel.params[: len(arguments)], kernel.params[len(arguments) :]
    constant = [p.name in options for p in rest if p.is_constexpr]
    if (
        key is None
        or compiled is None
        or len(constant) < len(rest)
        or not all(constant)
        or any(p.is_constexpr for p in given)
    ):
        return
    constants = tuple(options[p.name] for p in rest)
    _compiled[key] = Compiled(compiled.run, compiled.function, compiled.packed_metadata, constants)


def variant(
    kernel: Any, device: torch.device, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Return a key that is at least as fine as Triton's: launches with one key run the same machine code.

    None stands for arguments of other kinds than tensors, integers and floats.
    """
    key = [kernel, device.index, *options.items()]
    for argument in arguments:
        if isinstance(argument, Tensor):
            key.append(argument.dtype)
            key.append(argument.data_ptr() % 16 == 0)
        elif type(argument) is int:
            # Triton compiles the number 1 in, uses that a number is a multiple of 16, and passes few bytes where they are enough.
            key.append(argument == 1)
            key.append(argument % 16 == 0)
            key.append(-(2**31) <= argument < 2**31)
        elif type(argument) is not float:
            return None
    return tuple(key)


def is_watched(kernel: Any) -> bool:
    """Return whether a profiler or a debugger wants to see Triton's launches."""
    from triton import knobs

    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return bool(kernel.pre_run_hooks) or any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
