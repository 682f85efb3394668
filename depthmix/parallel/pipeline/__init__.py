"""Pipeline parallelism on torch.distributed.pipelining: stages pass on the depth state and keep what they have
received.
"""

from depthmix.parallel.pipeline.pipeline import Pipeline, pipeline
from depthmix.parallel.pipeline.refusals import SCHEDULES, check_pipeline

__all__ = ["SCHEDULES", "Pipeline", "check_pipeline", "pipeline"]
