"""Comparing mechanisms: several arms and seeds on the same data, one table, two figures, one report."""

from depthmix.study.compare import Comparison, compare

__all__ = ["Comparison", "compare"]
