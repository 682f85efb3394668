"""`plain-step`: check that the plain residual, the baseline of everything, is as fast as it can be.

It times the recipe's model as it is, with separate launches for sums and norms, with separate products for queries, keys and values,
and compiled as a whole by PyTorch, which then fuses what it likes. The variants take turns with the first, step by step, as in `step`.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

from torch import Tensor, nn

from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.step import case_of, data_of, first_step, in_turns, own_size, require_exact
from benchmarks.timing import Mark, Run
from depthmix.config import TrainConfig
from depthmix.fast import one_stream
from depthmix.models import layers

Change = Callable[[], AbstractContextManager[object]]

OURS, WHOLE = "residual", "the whole model compiled"
APART: dict[str, Change] = {
    "sums and norms apart": lambda: mock.patch.object(one_stream, "kernels_can_add", return_value=False),
    "projections apart": lambda: mock.patch.object(layers, "project", _one_by_one),
}


def plain_step(options: Options, report: Report) -> None:
    """Time ours first, then each variant against it. On a CPU, which has no kernels to fuse, nothing is compiled."""
    name, config = own_size(options)
    case, data = case_of(name, config), data_of(config, options)
    if not options.wanted(case):
        return
    require_exact(case, config, OURS, options, report)
    ours = first_step(case, config, OURS, data, options, report)
    variants: dict[str, tuple[TrainConfig, Change]] = {label: (config, change) for label, change in APART.items()}
    if config.compile != "off":
        variants[WHOLE] = dataclasses.replace(config, compile="model"), nullcontext
    for label, (variant_config, change) in variants.items():
        # A recording keeps the change.
        with change():
            variant = first_step(case, variant_config, label, data, options, report)
        in_turns(case, {OURS: ours, label: _changed(variant, change)}, options, report)
        del variant
        gc.collect()


def _one_by_one(h: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    return tuple(layer(h) for layer in layers)


def _changed(run: Run, change: Change) -> Run:
    def changed(mark: Mark) -> None:
        with change():
            run(mark)

    return changed
