"""dca: three GRN-v3 per block on the same stack, one at the end:

h_{2i} = (g^q, g^k, g^v);   h_{2i+1} = y_{2i} + g^q;   f_{i+1} = y_{2i} + y_{2i+1};   h_S = g_N.      (see grn.py)

A block that has no attention has no keys and values: one mixture, that of q, goes through it.
"""

from .grn import run_ways, stacked
from .tables import combine
from .trace import Trace

DEFAULTS = {"window": None, "relu_on": "dynamic", "w_per_entry": False}
OPTIONS = combine(window=[None, 1, 2], relu_on=["dynamic", "sum"], w_per_entry=[False, True])
DEAD_ROWS = set()


def parameters(o, D, blocks):
    return stacked(o, D, blocks, 3)


def starts_plain(options):
    return True


def run(p, options, blocks, e, sublayer) -> Trace:
    return run_ways(p, options, blocks, e, sublayer, ways=3)
