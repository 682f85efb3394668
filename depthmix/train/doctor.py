"""`depthmix doctor`: what is installed, where it will run, and why."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

import depthmix
from depthmix.train.device import choose_device

PACKAGES = {
    "numpy": "needed",
    "safetensors": "needed, for checkpoints",
    "tokenizers": "for preparing data and generating text",
    "pyyaml": "for recipes",
    "rich": "for progress bars and tables",
    "matplotlib": "for figures",
    "pyarrow": "for parquet",
    "tensorboard": "for --tensorboard",
    "wandb": "for --wandb",
    "transformers": "for its caches",
    "triton": "for kernels, which this version does not have yet",
}


def report() -> str:
    """One page about this installation."""
    device = choose_device("auto")
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    precision = "bf16 autocast" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    lines = [
        f"depthmix {depthmix.__version__}, Python {platform.python_version()}, torch {torch.__version__}",
        f"device: {device} ({name}), {torch.get_num_threads()} CPU threads; precision with auto: {precision}",
        "operators: depth_attention, depth_sum, stream_mix and sinkhorn run on their reference implementations (plain PyTorch, fp32)",
        "packages:",
    ]
    for package, purpose in PACKAGES.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        lines.append(f"    {package:<13} {version:<14} {purpose}")
    return "\n".join(lines)
