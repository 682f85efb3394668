"""Rules in fp64 with one method per step, written from their papers, and the mistakes that implementations make.

A mistake is a class that overrides one step. `depthmix.check_rule` compares an implementation with the rule, and if they differ
with the rule and each mistake. Nothing here is imported from the rest of the package.
"""

from depthmix.testing.oracles.attnres import AttnRes
from depthmix.testing.oracles.base import Mistake, Oracle
from depthmix.testing.oracles.dca import Dca
from depthmix.testing.oracles.denseformer import DenseFormer
from depthmix.testing.oracles.hyper import Hyper
from depthmix.testing.oracles.mhc import Mhc

ORACLES: dict[str, type[Oracle]] = {
    "attnres": AttnRes,
    "dca": Dca,
    "denseformer": DenseFormer,
    "hyper": Hyper,
    "mhc": Mhc,
}

__all__ = ["ORACLES", "Mistake", "Oracle"]
