"""Costs of LAuReL."""

from depthmix.parallel.plan.costs.base import StateSizes, Traffic, costs_for
from depthmix.parallel.plan.costs.one_stream import JoinedStreamCosts


@costs_for("laurel")
class LaurelCosts(JoinedStreamCosts):
    def join(self) -> Traffic:
        # The low-rank sums that variant="pa" carries on are left out.
        return Traffic(23, 36, 4) if self.mixer.variant == "rw" else Traffic(25, 26, 2)

    def state_tensors(self) -> list[StateSizes]:
        if self.mixer.variant != "pa":
            return super().state_tensors()
        # The stream and all that it was before earlier sites.
        return [dict.fromkeys(range(site + 1), 1.0) for site in range(self.mixer.n_sites + 1)]
