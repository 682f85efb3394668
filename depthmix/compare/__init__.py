"""Comparisons of rules. The package can be called: `depthmix.compare(data, arms)` trains several models and compares them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from depthmix.api.comparison_result import ComparisonResult
    from depthmix.api.prepared_data import Folder, PreparedData
    from depthmix.train.events import StepEvent


class _CallablePackage(ModuleType):
    """Importing a submodule binds `depthmix.compare` to this package, so the package itself must be the function."""

    def __call__(
        self,
        data: PreparedData | Folder,
        arms: Sequence[str],
        *,
        seeds: int | Iterable[int] = 1,
        out: Folder | None = None,
        on_step: Callable[[StepEvent], object] | None = None,
        progress: bool = False,
        **options: Any,
    ) -> ComparisonResult:
        """Train several mixers on the same data in the same order and compare them.

        Args:
            data: What `depthmix.prepare` returns, or the folder of prepared data.
            arms: Mixers, each "NAME" or "NAME:option=value,option=value"; the first is the baseline.
            seeds: How many seeds, counted from 0, or the seeds themselves. Differences are taken seed by seed.
            out: Folder to keep. The same call with the same folder resumes, and more arms or seeds may be added. By default
                a temporary folder, which is removed with the result.
            on_step: Called with a `StepEvent` (arm, seed, step, steps, loss, val_loss) after every step of every run. An
                exception in it, KeyboardInterrupt included, saves a checkpoint and ends the comparison.
            progress: Show progress bars and print what the command line prints.
            **options: Any option of `depthmix compare`, such as steps, dim, n_blocks, lr, budget or device.

        Returns:
            The result: a table, sentences about it, and the trained models.

        Raises:
            UserError: An option, an arm, the data or the folder cannot be used, or every run diverged. Where only some
                diverged, a warning says so and the result holds the others.
            KeyboardInterrupt: A signal, such as Ctrl-C, has stopped the comparison; the step it came in is saved.

        Examples:
            >>> result = depthmix.compare(data, ["residual", "attnres:block_size=4"], seeds=3, steps=200)
            >>> result["attnres:block_size=4"].model
        """
        from depthmix.api.comparison import compare

        return compare(data, arms, seeds=seeds, out=out, on_step=on_step, progress=progress, **options)


sys.modules[__name__].__class__ = _CallablePackage
