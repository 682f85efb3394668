"""The rules, one file each. Importing this package registers them: every module in its folder is imported."""

import importlib
import pkgutil

from depthmix.mixers.base import Mixer
from depthmix.mixers.checks import ContractError
from depthmix.mixers.decay import param_groups
from depthmix.mixers.layout import Layout
from depthmix.mixers.options import OptionError
from depthmix.mixers.registry import create_mixer, list_mixers, mixer_class, register, rule_summary, rule_title
from depthmix.mixers.sharding import shard_mixer
from depthmix.mixers.state import State, register_state
from depthmix.ops.precision import compute_dtype

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "ContractError",
    "Layout",
    "Mixer",
    "OptionError",
    "State",
    "compute_dtype",
    "create_mixer",
    "list_mixers",
    "mixer_class",
    "param_groups",
    "register",
    "register_state",
    "rule_summary",
    "rule_title",
    "shard_mixer",
]
