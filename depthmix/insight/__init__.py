"""Looking inside: what layers read from each other."""

from depthmix.insight.mixing import depth_mixing, record_sources

__all__ = ["depth_mixing", "record_sources"]
