"""Costs of the rules: what every site moves between memory and processor, keeps for the backward pass and passes on.

There is one file per rule or family whose costs differ from those of a plain sum. `costs_of(mixer)` finds the costs of a rule.
Rules know nothing of this folder.
"""

import importlib
import pkgutil

from depthmix.parallel.plan.costs.base import NORM, Costs, Published, Traffic, costs_for, costs_of

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["NORM", "Costs", "Published", "Traffic", "costs_for", "costs_of"]
