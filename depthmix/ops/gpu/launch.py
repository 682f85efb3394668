"""Launch kernels on the device of their tensors. Triton itself uses the current device, whichever that is."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix.ops.torch_internals import current_stream_handle

# A device and the handle of one of its streams, 0 on a CPU.
Place = tuple[torch.device, int]


_NO_GUARD: AbstractContextManager[Any] = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which `device` is the current one."""
    # Without an index it is the CPU, or the current GPU.
    if device.index is None or device.index == torch.cuda.current_device():
        return _NO_GUARD
    return torch.cuda.device(device)


def current_place(device: torch.device) -> Place:
    """Return the device and the stream on which the current thread launches kernels for its tensors."""
    return device, current_stream_handle(device)


def count_cores(like: Tensor, on_cpu: int) -> int:
    """Return the streaming multiprocessors of a tensor's GPU; `on_cpu` in the interpreter, so that tests have several programs."""
    return torch.cuda.get_device_properties(like.device).multi_processor_count if like.is_cuda else on_cpu


def repeat_last(tensors: Sequence[Tensor], count: int) -> tuple[Tensor, ...]:
    """Pad tensors to `count` kernel arguments by repeating the last one."""
    return (*tensors, *(tensors[-1],) * (count - len(tensors)))


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *arguments: Any, **options: Any) -> None:
    """Call kernel[grid](*arguments, **options) on the device of `like` and the current stream of that device."""
    device = like.device
    with on_device(device):
        if not like.is_cuda:
            start(kernel, grid, arguments, options)
        elif not launch_again(kernel, grid, device, arguments, options):
            remember(kernel, start(kernel, grid, arguments, options), device, arguments, options)


def start(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Launch a kernel by Triton's own call, and return what it compiled."""
    try:
        return kernel[grid](*arguments, **options)
    except TypeError:
        # Triton publishes a compiled kernel before it is loaded. While another thread loads it, a launch is refused,
        # because the kernel's function is still None (triton-lang/triton, pull request 11518).
        load(kernel, grid, *arguments, **options)
        # Any other TypeError is raised again here.
        return kernel[grid](*arguments, **options)


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
    settings: Any  # Triton's, with the hooks that want to see launches


# Kernels that have been launched, by what Triton compiles a variant for.
_compiled: dict[tuple[Any, ...], Compiled] = {}


def launch_again(
    kernel: Any, grid: tuple[int, ...], device: torch.device, arguments: tuple[Any, ...], options: dict[str, Any]
) -> bool:
    """Launch a kernel that was launched before with arguments of the same kinds, and return whether it was.

    Triton's own call binds arguments, looks for the variant and asks its hooks, which takes longer than a small kernel runs.
    Its launcher takes an address instead of a tensor, and then does not ask the driver where the tensor lies.
    """
    key, given = variant(kernel, device, arguments, options)
    compiled = _compiled.get(key) if key is not None else None
    if compiled is None or is_watched(kernel, compiled.settings):
        return False
    run, function, metadata, constants, _ = compiled
    x, y, z = (*grid, 1, 1)[:3]
    run(x, y, z, current_stream_handle(device), function, metadata, None, None, None, *given, *constants)
    return True


def remember(
    kernel: Any, compiled: Any, device: torch.device, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Keep the kernel of a launch for `launch_again`.

    Only if all arguments of the call vary and all that follow are constants: those are part of the key, with their values.
    """
    from triton import knobs

    key, _ = variant(kernel, device, arguments, options)
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
    _compiled[key] = Compiled(compiled.run, compiled.function, compiled.packed_metadata, constants, knobs.runtime)


def compiled_kernel(
    kernel: Any, device: torch.device, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Compiled | None:
    """Return what `remember` keeps for such a launch, or None.

    A caller that launches the same variants over and over need not ask for each of them by its key.
    """
    key, _ = variant(kernel, device, arguments, options)
    return _compiled.get(key) if key is not None else None


def variant(
    kernel: Any, device: torch.device, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...] | None, list[int | float]]:
    """Return a key that is at least as fine as Triton's: launches with one key run the same machine code.

    Also return the arguments as numbers, addresses for tensors. The key is None for arguments of other kinds than tensors on a GPU,
    integers and floats: then the numbers are of no use.
    """
    key = [kernel.fn, device.index, *options, *options.values()]
    numbers: list[int | float] = []
    before = None
    for argument, unspecialized in zip(arguments, _unspecialized(kernel), strict=False):
        kind = type(argument)
        if kind is not int and argument is before:
            # A tensor that stands in several places.
            key.append("same")
            numbers.append(numbers[-1])
        elif kind is int:
            # Triton compiles the number 1 in, uses that a number is a multiple of 16, and passes few bytes where they are enough.
            if unspecialized:
                key.append(int)
            else:
                key += argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
            numbers.append(argument)
        elif kind is float:
            key.append(float)
            numbers.append(argument)
        elif isinstance(argument, Tensor) and argument.is_cuda:
            address = argument.data_ptr()
            key.append(argument.dtype)
            key.append(address % 16 == 0)
            numbers.append(address)
        else:
            return None, numbers
        before = argument
    return tuple(key), numbers


# By the function of a kernel. A kernel itself hashes its source code, under a lock.
_unspecialized_parameters: dict[Any, list[bool]] = {}


def _unspecialized(kernel: Any) -> list[bool]:
    """Return for each parameter of a kernel whether one variant serves all its integers."""
    found = _unspecialized_parameters.get(kernel.fn)
    if found is None:
        found = [bool(p.annotation_type) and p.do_not_specialize for p in kernel.params]
        _unspecialized_parameters[kernel.fn] = found
    return found


def is_watched(kernel: Any, settings: Any) -> bool:
    """Return whether a profiler or a debugger wants to see Triton's launches. settings: Triton's, `knobs.runtime`."""
    return bool(kernel.pre_run_hooks) or _is_set(settings.launch_enter_hook) or _is_set(settings.launch_exit_hook)


def _is_set(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))
