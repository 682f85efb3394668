"""Reference implementations written from docs/mechanisms.md and the papers alone; they share no code with depthmix."""

from . import attnres, dca, denseformer, grn, highway, hyper, laurel, layerscale, mhc, mudd, residual, rezero
from .defaults import DEFAULTS
from .shapes import initial, random_parameters, shapes
from .trace import Trace

ORACLES = {
    "residual": residual.run,
    "rezero": rezero.run,
    "layerscale": layerscale.run,
    "highway": highway.run,
    "denseformer": denseformer.run,
    "hyper": hyper.run,
    "mhc": mhc.run,
    "grn": grn.run,
    "dca": dca.run,
    "attnres": attnres.run,
    "laurel": laurel.run,
    "mudd": mudd.run,
}

__all__ = ["DEFAULTS", "ORACLES", "Trace", "initial", "random_parameters", "shapes"]
