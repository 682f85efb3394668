"""Import and compute what the runs of a comparison need, in the process from which tests fork them."""

import torch._dynamo  # noqa: F401 (the first optimizer imports it)

import depthmix.compare.workers  # noqa: F401
from train import small

small.prepare_to_fork("residual")
