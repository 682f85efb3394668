"""`plain-step`: whether the plain residual that everything is measured against is as fast as it can be.

The recipe's model three times: as it is, with sums and norms in launches of their own, and with all of it compiled by PyTorch,
which then joins what it likes. The last two take turns with the first, step by step, as in `step`.
"""

from __future__ import annotations

import dataclasses
import gc
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.step import case_of, data_of, first_step, in_turns, own_size, require_exact
from benchmarks.timing import Mark, Run
from depthmix.mixers.residual import Residual

OURS, APART, WHOLE = "residual", "sums and norms apart", "the whole model compiled"


def plain_step(options: Options, report: Report) -> None:
    """Ours first, then each of the others against it; on a CPU, which has no kernels to join, nothing is compiled."""
    name, config = own_size(options)
    case, data = case_of(name, config), data_of(config, options)
    if not options.wanted(case):
        return
    require_exact(case, config, OURS, options, report)
    ours = first_step(case, config, OURS, data, options, report)
    others = {APART: config}
    if config.compile != "off":
        others[WHOLE] = dataclasses.replace(config, compile="model")
    for label, other in others.items():
        with _apart() if label == APART else nullcontext():  # what is recorded stays so
            own = first_step(case, other, label, data, options, report)
        in_turns(case, {OURS: ours, label: _always_apart(own) if label == APART else own}, options, report)
        del own
        gc.collect()


def _apart() -> AbstractContextManager[object]:
    return mock.patch.object(Residual, "_adds_later", return_value=False)


def _always_apart(run: Run) -> Run:
    def apart(mark: Mark) -> None:
        with _apart():
            run(mark)

    return apart
