"""What the process has imported and computed from which tests fork the runs of a comparison."""

import depthmix.compare.workers
import torch._dynamo  # noqa: F401 (by the first optimizer)
from train import small

small.prepare_to_fork("residual")
