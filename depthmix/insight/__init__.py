"""Looking inside: what layers read from each other, magnitudes over depth, and which connections matter."""

from depthmix.insight.dynamics import gradient_norms, magnitudes
from depthmix.insight.edges import EdgeEffects, edge_effects
from depthmix.insight.intercept import record_sources
from depthmix.insight.maps import DepthMap, depth_map
from depthmix.insight.mixing import depth_mixing, sources_of
from depthmix.insight.ranks import Structure, structure
from depthmix.insight.skips import SkipEffects, skip_effects
from depthmix.insight.streams import Streams, stream_report

__all__ = [
    "DepthMap",
    "EdgeEffects",
    "SkipEffects",
    "Streams",
    "Structure",
    "depth_map",
    "depth_mixing",
    "edge_effects",
    "gradient_norms",
    "magnitudes",
    "record_sources",
    "skip_effects",
    "sources_of",
    "stream_report",
    "structure",
]
