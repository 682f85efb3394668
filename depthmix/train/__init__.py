"""Training. The package can be called: `depthmix.train(config)` trains a model."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from depthmix.config import TrainConfig
    from depthmix.runs.folder import RunFolder
    from depthmix.train.events import OnStep


class _CallablePackage(ModuleType):
    """A callable package. Importing a submodule binds `depthmix.train` to the package, so the package must be the function."""

    def __call__(self, config: TrainConfig, *, on_step: OnStep | None = None) -> RunFolder:
        """Train one model, or resume the run in `config.out`.

        Args:
            config: What to train. `data` and `out` name folders, as text or as anything with a path.
            on_step: Called with a `StepEvent` after every step, in the first process only. An exception in it saves a
                checkpoint and ends the training.

        Returns:
            The run folder. `depthmix.load(run)` gives its model.

        Raises:
            UserError: The configuration, the data or the folder cannot be used, or the run diverged.
            KeyboardInterrupt: A signal, such as Ctrl-C, has stopped the training. The current step is saved.

        Examples:
            >>> config = depthmix.TrainConfig(data="data/sotu", out="runs/attnres", mixer="attnres", steps=100, warmup=10)
            >>> run = depthmix.train(config)
            >>> run.read_result()["val_loss"]
            4.21
        """
        from depthmix.api.training import train

        return train(config, on_step=on_step)


sys.modules[__name__].__class__ = _CallablePackage
