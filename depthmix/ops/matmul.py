"""Matrix products in full fp32, whatever precision the process allows.

`torch.set_float32_matmul_precision("high")` is for a model's large products; mixing arithmetic is lowered neither to TF32 nor to
bf16. Where the setting is in force, the operator `depthmix::ieee_matmul` replaces @. It sets IEEE precision around its own
product, forward and backward.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.registration import library, register
from depthmix.ops.torch_internals import constant_for_compiler, transformed

# The setting belongs to the process, and backward passes run in other threads.
_lock = threading.RLock()


def _settings(device_type: str) -> Any:
    return {"cuda": torch.backends.cuda.matmul, "cpu": getattr(torch.backends.mkldnn, "matmul", None)}.get(device_type)


# The compiler guards on the setting by itself.
@constant_for_compiler
def lowered(device_type: str) -> bool:
    """Return whether products of fp32 matrices may use fewer bits on a device."""
    settings = _settings(device_type)
    precision = "none" if settings is None else settings.fp32_precision
    if precision == "ieee":
        # Another thread's `_ieee` may have set it for one product: wait for that product.
        with _lock:
            precision = settings.fp32_precision
    return precision not in ("ieee", "none")


@contextmanager
def _ieee(device_type: str) -> Iterator[None]:
    """Set IEEE precision for products of fp32 matrices inside the context."""
    settings = _settings(device_type)
    with _lock:
        before = settings.fp32_precision
        settings.fp32_precision = "ieee"
        try:
            yield
        finally:
            # Otherwise the user has chosen another precision meanwhile, which stays.
            if settings.fp32_precision == "ieee":
                settings.fp32_precision = before


def _ieee_matmul(a: Tensor, b: Tensor) -> Tensor:
    with _ieee(a.device.type):
        return a @ b


register("ieee_matmul(Tensor a, Tensor b) -> Tensor", _ieee_matmul, lambda a, b: a @ b)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    da = torch.ops.depthmix.ieee_matmul(g, b.t()) if ctx.needs_input_grad[0] else None
    db = torch.ops.depthmix.ieee_matmul(a.flatten(0, -2).t(), g.flatten(0, -2)) if ctx.needs_input_grad[1] else None
    return da, db


torch.library.register_autograd("depthmix::ieee_matmul", _backward, setup_context=_setup, lib=library)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply bf16 matrices a [N, K] and b [K, M] with an fp32 result, which only CUDA's product returns directly."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else matmul(a.float(), b.float())


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [..., K] by b [K, M] in the precision of their dtype.

    Under torch.func, which does not know the operator, this is plain @.
    """
    if a.dtype != torch.float32 or not lowered(a.device.type) or transformed():
        return a @ b
    return torch.ops.depthmix.ieee_matmul(a, b)
