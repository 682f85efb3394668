"""Looking inside: what layers read from each other, magnitudes over depth, and which connections matter."""

from __future__ import annotations

import importlib
from typing import Any

from depthmix.insight.contributions import Contributions, Shares, contributions, shares_by_token
from depthmix.insight.dynamics import gradient_norms, magnitudes
from depthmix.insight.edges import EdgeEffects, edge_effects, losses_without
from depthmix.insight.intercept import record_sources
from depthmix.insight.lens import LogitLens, logit_lens
from depthmix.insight.maps import DepthMap, depth_map
from depthmix.insight.mixing import depth_mixing, sources_of
from depthmix.insight.ranks import Structure, structure
from depthmix.insight.skips import SkipEffects, skip_effects
from depthmix.insight.streams import Streams, register_streams, stream_map, stream_report, streams_of

__all__ = [
    "Contributions",
    "DepthMap",
    "EdgeEffects",
    "LogitLens",
    "Shares",
    "SkipEffects",
    "Streams",
    "Structure",
    "contributions",
    "depth_map",
    "depth_mixing",
    "edge_effects",
    "explore",
    "gradient_norms",
    "logit_lens",
    "losses_without",
    "magnitudes",
    "record_sources",
    "register_streams",
    "shares_by_token",
    "skip_effects",
    "sources_of",
    "stream_map",
    "stream_report",
    "streams_of",
    "structure",
]


def __getattr__(name: str) -> Any:
    # It makes a page, and pages are made of what this package measures. So it is imported on first use only.
    if name == "explore":
        return importlib.import_module("depthmix.api.token_explorer").explore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
