"""Costs of gated streams: a write with the norms of all streams, a read through gates, and three products with the normed streams.

In bf16 the products run on tensor cores, and their time hides behind what they move. The network's R hidden numbers are left out.
"""

from depthmix.parallel.plan.costs.base import NORM, Costs, StateSizes, Traffic, costs_for


@costs_for("gated_streams")
class GatedStreamCosts(Costs):
    """Moves per site, besides the norm that follows a read, for x̂ the normed streams and z the logits of the gates.

    forward     write: x, y in, x', x̂ out      products: x̂ in, z out; x̂ in      mean: z, x̂ in, h out
    backward    mean: z, x̂, dh in, dz, dx̂ out      products: dz in, for dW_up and the network; x̂ in and a dx̂ out, twice
                the three dx̂ added up      write: x', dx̂, dx', y in, dx, dy out

    Kept are x', x̂, z and y, and what the norm keeps.
    """

    def traffic(self) -> list[Traffic]:
        n = self.mixer.n
        # The copies of e take the place of y, and a sum of their gradients that of dy.
        first = Traffic(8 * n + 2 + NORM[0], 21 * n + 2 + NORM[1], 3 * n + 1)
        site = Traffic(8 * n + 2 + NORM[0], 20 * n + 3 + NORM[1], 3 * n + 2)
        # Nothing is written afterwards.
        last = Traffic(7 * n + 2 + NORM[0], 14 * n + 3 + NORM[1], 3 * n + 2)
        return [*[first, *[site] * (self.mixer.n_sites - 1)][: self.mixer.n_sites], last]

    def state_tensors(self) -> list[StateSizes]:
        return [{site: float(self.mixer.n)} for site in range(self.mixer.n_sites + 1)]
