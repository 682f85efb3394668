"""Looking inside: what layers read from each other, magnitudes over depth, and which connections matter."""

from depthmix.insight.contributions import Contributions, contributions
from depthmix.insight.dynamics import gradient_norms, magnitudes
from depthmix.insight.edges import EdgeEffects, edge_effects
from depthmix.insight.intercept import record_sources
from depthmix.insight.maps import DepthMap, depth_map
from depthmix.insight.mixing import depth_mixing, sources_of
from depthmix.insight.ranks import Structure, structure
from depthmix.insight.skips import SkipEffects, skip_effects
from depthmix.insight.streams import Streams, register_streams, stream_map, stream_report, streams_of

__all__ = [
    "Contributions",
    "DepthMap",
    "EdgeEffects",
    "SkipEffects",
    "Streams",
    "Structure",
    "contributions",
    "depth_map",
    "depth_mixing",
    "edge_effects",
    "gradient_norms",
    "magnitudes",
    "record_sources",
    "register_streams",
    "skip_effects",
    "sources_of",
    "stream_map",
    "stream_report",
    "streams_of",
    "structure",
]
