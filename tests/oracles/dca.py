"""dca: three GRN-v3 a block on the same stack, one at the end:

h_{2i} = (g^q, g^k, g^v);   h_{2i+1} = y_{2i} + g^q;   f_{i+1} = y_{2i} + y_{2i+1};   h_S = g_N.      (see grn.py)
"""

from .grn import run_ways
from .trace import Trace


def run(p, options, n_blocks, e, sublayer) -> Trace:
    return run_ways(p, options, n_blocks, e, sublayer, ways=3)
