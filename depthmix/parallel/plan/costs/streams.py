"""Costs of the rules with n residual streams: Hyper-Connections and mHC."""

from __future__ import annotations

from depthmix.parallel.plan.costs.base import NORM, Costs, Published, StateSizes, Traffic, costs_for, one_stream_state


@costs_for("hyper")
class StreamCosts(Costs):
    """A write, the streams' products with W, and a read per site. Streams that are all e are read as one."""

    joint = False  # weights are products of all streams together, instead of each by itself

    def is_dynamic(self) -> bool:
        """Tell whether weights depend on the token."""
        return not self.mixer.static

    def knows_next_read(self) -> bool:
        """Tell whether the weights of a read are known before its streams, so that it can be part of the write."""
        return not self.is_dynamic()

    def traffic(self) -> list[Traffic]:
        if self.mixer.fractions is not None:  # what PyTorch moves was not counted
            return super().traffic()
        n, dynamic, joint, known = self.mixer.n, self.is_dynamic(), self.joint, self.knows_next_read()

        def write(before: int) -> Traffic:
            forward = before + 1 + n + n * dynamic + (1 if known else n + 1)
            norm = 2 if known else 1 + n
            # P, written and read; dW; x', x, y, dh in and dx, dy out
            backward = norm + 2 * n * joint + n * dynamic + (n + before + 2) + (before + 1)
            return Traffic(forward, backward, n + 1)

        # of e: the copies for dW, written and read, and its two gradients added up
        first = Traffic(2 + dynamic, 8 + 2 * n * joint + (1 + 2 * n) * dynamic, 1)
        last = Traffic(2 * n + 2 + NORM[0], 2 * n + 3 + NORM[1], n + 2)
        sites = self.mixer.n_sites
        return [*[first, write(1), *[write(n)] * (sites - 2)][:sites], last]

    def state_tensors(self) -> list[StateSizes]:
        if self.mixer.fractions is not None:
            return one_stream_state(self.mixer)
        return [{site: float(self.mixer.n)} for site in range(self.mixer.n_sites + 1)]


@costs_for("mhc")
class MHCCosts(StreamCosts):
    joint = True

    def is_dynamic(self) -> bool:
        return True

    def knows_next_read(self) -> bool:
        return bool(self.mixer.schedule == "single_pass")

    def published(self) -> Published | None:
        if self.mixer.fractions is not None:
            return None
        n = self.mixer.n
        # the coefficients, their use for pre, post and res, the sum
        read, written = [n, n, 1, n, 2 * n], [0, 1, n, n, n]
        return Published(sum(read), sum(written), 2 * n * n + 4 * n)
