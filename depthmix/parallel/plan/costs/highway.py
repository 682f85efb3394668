"""Costs of Highway networks."""

from depthmix.parallel.plan.costs.base import Traffic, costs_for
from depthmix.parallel.plan.costs.one_stream import JoinedStreamCosts


@costs_for("highway")
class HighwayCosts(JoinedStreamCosts):
    def join(self) -> Traffic:
        dim = self.mixer.dim
        if self.mixer.gate == "vector":
            return Traffic(48, 90, 8, flops=2 * dim * dim)
        return Traffic(36, 78, 6, flops=2 * dim)
