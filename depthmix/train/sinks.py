"""Write metrics to TensorBoard and Weights & Biases, when asked for."""

from __future__ import annotations

import importlib
from typing import Any

from depthmix.config import TrainConfig
from depthmix.errors import UserError
from depthmix.runs.folder import RunFolder


class Sinks:
    """Zero or more further outputs of metrics."""

    def __init__(self, config: TrainConfig, folder: RunFolder, first: int) -> None:
        """Open the outputs that a configuration asks for, for a run that continues after step `first`."""
        self.board: Any = None
        self.wandb: Any = None
        if config.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError(
                    "tensorboard is not installed: pip install tensorboard, or leave --tensorboard out"
                ) from None
            self.board = SummaryWriter(str(folder.path / "tensorboard"), purge_step=first + 1)
        if config.wandb:
            try:
                wandb = importlib.import_module("wandb")
            except ImportError:
                raise UserError("wandb is not installed: pip install wandb, or leave --wandb out") from None
            name = folder.wandb_id(config.wandb)
            self.wandb = wandb.init(
                project=config.wandb, id=name, dir=str(folder.path), config=vars(config), resume="allow"
            )

    def write(self, line: dict[str, Any]) -> None:
        """Write one line of metrics, which holds its step."""
        numbers = {k: v for k, v in line.items() if k != "step" and isinstance(v, int | float)}
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, line["step"])
        if self.wandb is not None:
            self.wandb.log(numbers, step=line["step"])

    def close(self) -> None:
        """Flush and close all outputs."""
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()
