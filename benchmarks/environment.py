"""The environment that a number depends on: hardware, versions, commit. It has names only, never a path."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

import depthmix

PACKAGES = {"triton": "triton", "fla": "fla-core", "flash_attn_res": "flash-attn-res"}
COLUMNS = ("hardware", "depthmix", "commit", "torch", "cuda", *PACKAGES, "python", "date")


def environment(device: torch.device, commit: str = "") -> dict[str, str]:
    """Return a value for every column of COLUMNS."""
    on_gpu = device.type == "cuda"
    return {
        "hardware": torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})",
        "depthmix": depthmix.__version__,
        "commit": commit or git_commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        **{column: _version(package) for column, package in PACKAGES.items()},
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def git_commit() -> str:
    """Return the commit of the working tree, with a + if files differ from it, or "unknown" outside a repository."""
    root = Path(__file__).parents[1]
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def _version(package: str) -> str:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
    return f"{version} (gluon)" if package == "fla-core" and os.environ.get("FLA_GLUON", "0") != "0" else version
