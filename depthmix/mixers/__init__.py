"""The mechanisms, one file each. Importing this package registers them."""

from depthmix.mixers.attnres import AttnRes
from depthmix.mixers.base import ContractError, Mixer, create_mixer, list_mixers, mixer_class, register
from depthmix.mixers.dca import DCA
from depthmix.mixers.denseformer import DenseFormer
from depthmix.mixers.grn import GRN
from depthmix.mixers.highway import Highway
from depthmix.mixers.hyper import HyperConnections
from depthmix.mixers.laurel import Laurel
from depthmix.mixers.layerscale import LayerScale
from depthmix.mixers.mhc import MHC
from depthmix.mixers.mudd import Mudd
from depthmix.mixers.options import OptionError
from depthmix.mixers.residual import Residual
from depthmix.mixers.rezero import ReZero
from depthmix.mixers.state import State, register_state

__all__ = [
    "DCA",
    "GRN",
    "MHC",
    "AttnRes",
    "ContractError",
    "DenseFormer",
    "Highway",
    "HyperConnections",
    "Laurel",
    "LayerScale",
    "Mixer",
    "Mudd",
    "OptionError",
    "ReZero",
    "Residual",
    "State",
    "create_mixer",
    "list_mixers",
    "mixer_class",
    "register",
    "register_state",
]
