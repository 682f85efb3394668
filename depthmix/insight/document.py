"""The JSON document of all measurements, whose fields docs/guides/inspecting.md describes.

Lists over readers have one entry per site and a last one for finish. Values by way and source are [reader][way][source], where
reader s has s + 1 sources, the embedding first.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import Tensor

from depthmix.insight.contributions import Shares
from depthmix.insight.edges import EdgeEffects
from depthmix.insight.maps import MEASURES, DepthMap, by_kind
from depthmix.insight.ranks import Structure
from depthmix.insight.skips import SkipEffects
from depthmix.insight.statistics import QUANTILES
from depthmix.insight.streams import Streams
from depthmix.mixers import Mixer

SCHEMA = 2
DIGITS = 5


def describe_mixer(mixer: Mixer) -> dict[str, Any]:
    """Describe the readers and the sources of a mixer."""
    layout = mixer.layout
    readers = [{"name": n, "block": layout.block[s], "ways": mixer.ways(s)} for s, n in enumerate(layout.names)]
    sources = ["embedding", *(f"{name} {layout.block[s]}" for s, name in enumerate(layout.names))]
    return {"readers": [*readers, {"name": "finish", "block": layout.n_blocks, "ways": 1}], "sources": sources}


def of_depth_map(mixer: Mixer, measured: DepthMap) -> dict[str, Any]:
    return {
        "tokens": measured.tokens,
        "signed": measured.signed,
        "mean": by_reader(mixer, measured.mean),
        "contribution": by_reader(mixer, measured.contribution),
        "projection": by_reader(mixer, measured.projection),
        "std": by_reader(mixer, measured.std),
        "quantiles": {str(q): by_reader(mixer, m) for q, m in zip(QUANTILES, measured.quantiles, strict=True)},
        **{name: by_reader(mixer, measured.measures[name]) for name in MEASURES},
        **{f"{name}_std": by_reader(mixer, measured.measures_std[name]) for name in MEASURES},
        "by_kind": by_kind(mixer, measured.measures),
    }


def of_structure(ways: list[Structure] | None) -> list[dict[str, int]] | None:
    return None if ways is None else [dataclasses.asdict(way) for way in ways]


def of_edges(effects: EdgeEffects) -> dict[str, Any]:
    return {"tokens": effects.tokens, "loss": effects.loss, "change": [row.tolist() for row in effects.change]}


def of_skips(effects: SkipEffects) -> dict[str, Any]:
    return {"tokens": effects.tokens, "loss": effects.loss, "change": effects.change.tolist()}


def of_streams(streams: Streams | None) -> dict[str, Any] | None:
    return None if streams is None else {f.name: getattr(streams, f.name).tolist() for f in dataclasses.fields(streams)}


def of_tokens(mixer: Mixer, shares: Shares) -> dict[str, Any]:
    """Describe what every token of a text was read from, from shares [T, W, S+1, S+1]."""
    return {
        "weights": [by_reader(mixer, token) for token in shares.weights],
        "contributions": [by_reader(mixer, token) for token in shares.contribution],
    }


def by_reader(mixer: Mixer, m: Tensor) -> list[Any]:
    """Convert [W, S+1, S+1] to lists [reader][way][source], or [W, S+1] to [reader][way], leaving out ways that a
    reader lacks.
    """
    ways = [*(mixer.ways(s) for s in range(mixer.n_sites)), 1]
    by = m.transpose(0, 1).tolist()
    if m.ndim == 2:
        return [row[:w] for row, w in zip(by, ways, strict=True)]
    return [[way[: s + 1] for way in row[:w]] for s, (row, w) in enumerate(zip(by, ways, strict=True))]


def rounded(value: Any) -> Any:
    """Round every number of a document to five digits. Infinities and NaN, which JSON lacks, become null."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, Tensor):
        return rounded(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value
