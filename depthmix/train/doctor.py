"""`depthmix doctor`: report what is installed, where it will run, and why."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

import depthmix
from depthmix.device import choose_device, device_name
from depthmix.ops.backend import why_no_kernels

PACKAGES = {
    "numpy": "needed",
    "safetensors": "needed, for checkpoints",
    "tokenizers": "for preparing data and generating text",
    "pyyaml": "for recipes",
    "rich": "for progress bars and tables",
    "matplotlib": "for figures",
    "pyarrow": "for parquet",
    "pillow": "for pictures",
    "tensorboard": "for --tensorboard",
    "wandb": "for --wandb",
    "transformers": "for its caches",
    "triton": "for the kernels on NVIDIA GPUs",
}
OPERATORS = ("depth_attention", "depth_sum", "stream_mix", "sinkhorn")  # all of them have kernels


def backends(device: torch.device) -> dict[str, str]:
    """Return the backend of each operator on a device, with the reason."""
    why = why_no_kernels(device.type, device.index)
    if why is None and device.type != "cuda":  # in Triton's interpreter
        why = f"on {device.type} kernels run only in Triton's interpreter, for tests, if they are forced"
    return dict.fromkeys(OPERATORS, "triton kernels" if why is None else f"reference, because {why}")


def report() -> str:
    """Return one page of text about this installation."""
    device = choose_device("auto")
    precision = "bf16 autocast" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    lines = [
        f"depthmix {depthmix.__version__}, Python {platform.python_version()}, torch {torch.__version__}",
        f"device: {device} ({device_name(device)}), {torch.get_num_threads()} CPU threads; precision with auto: {precision}",
        "operators: kernels where they can run, the reference (plain PyTorch, at least fp32) elsewhere",
        *(f"    {op}: {backend}" for op, backend in backends(device).items()),
        "    the kernels' backward goes source by source; in a block wrapped by FSDP2 or torch.compile it goes layer by layer,",
        "    with the same gradients, but slower (docs/reference/performance.md)",
        '    to force a backend: `with depthmix.ops.use_backend("reference"):`, or "triton", around a whole pass',
        "packages:",
    ]
    for package, purpose in PACKAGES.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        lines.append(f"    {package:<13} {version:<14} {purpose}")
    return "\n".join(lines)
