"""`plain-step`: whether the plain residual that everything is measured against is as fast as it can be.

The recipe's model as it is, with sums and norms in launches of their own, with a product for each of queries, keys and values, and
with all of it compiled by PyTorch, which then joins what it likes. The others take turns with the first, step by step, as in `step`.
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
    """Ours first, then each of the others against it; on a CPU, which has no kernels to join, nothing is compiled."""
    name, config = own_size(options)
    case, data = case_of(name, config), data_of(config, options)
    if not options.wanted(case):
        return
    require_exact(case, config, OURS, options, report)
    ours = first_step(case, config, OURS, data, options, report)
    others: dict[str, tuple[TrainConfig, Change]] = {label: (config, change) for label, change in APART.items()}
    if config.compile != "off":
        others[WHOLE] = dataclasses.replace(config, compile="model"), nullcontext
    for label, (other, change) in others.items():
        with change():  # what is recorded stays so
            own = first_step(case, other, label, data, options, report)
        in_turns(case, {OURS: ours, label: _changed(own, change)}, options, report)
        del own
        gc.collect()


def _one_by_one(h: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    return tuple(layer(h) for layer in layers)


def _changed(run: Run, change: Change) -> Run:
    def changed(mark: Mark) -> None:
        with change():
            run(mark)

    return changed
