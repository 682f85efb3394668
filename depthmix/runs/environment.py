"""Record the environment a run began in: versions, machine, device, commit."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def environment(device: str) -> dict[str, Any]:
    """Describe versions, machine, device, commit and command of a run that begins now."""
    import numpy
    import torch

    import depthmix
    from depthmix.device import choose_device, device_name

    chosen = choose_device(device)
    return {
        "depthmix": depthmix.__version__,
        "git_commit": _own_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "device": str(chosen),
        "device_name": device_name(chosen),
        "cpu_count": os.cpu_count(),
        "command": sys.argv,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


@functools.cache
def _own_commit() -> str | None:
    """Return depthmix's commit. Asked once per process, because imported code does not change afterwards."""
    import depthmix

    return _git_commit(Path(depthmix.__file__))


def _git_commit(source: Path) -> str | None:
    """Return the commit of the source, with -dirty after changes; None unless git tracks it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source.parent), *arguments]
        quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        return subprocess.run(command, env=quiet, capture_output=True, timeout=10, check=True, text=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", source.name)
        return git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty") or None
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
