"""Costs of the experiments, whose own files do not mention them. Import this file before calling `costs_of`."""

from depthmix.parallel.plan.costs import NORM, Costs, Traffic, costs_for, costs_of
from depthmix.parallel.plan.costs.attnres import AttnResCosts
from depthmix.parallel.plan.costs.block_stack import DeltaStackCosts


@costs_for("attnres_on_streams")
class AttnResOnStreamsCosts(Costs):
    def traffic(self) -> list[Traffic]:
        below, above = (costs_of(rule).traffic() for rule in (self.mixer.below, self.mixer.above))
        pairs = zip(below, above, strict=True)
        by_site = [Traffic(a.forward + b.forward + 3, a.backward + b.backward, a.kept + b.kept) for a, b in pairs]
        return [*by_site[:-1], below[-1]]


@costs_for("embedding_again")
class EmbeddingAgainCosts(Costs):
    def traffic(self) -> list[Traffic]:
        """Count x + y, then x and e in and a sum for each way out, each with a norm.

        Backward, both gradients are written and added to those that are there.
        """
        mixer, by_site = self.mixer, []
        for site in range(mixer.n_sites + 1):
            w, ends = mixer.ways(site) if site < mixer.n_sites else 1, site == mixer.n_sites
            sums = mixer.into == "reads" or (mixer.layout.begins[site] and not ends)
            forward, backward = (2 + w, w + 1 + 2 + 6) if sums else (0, 3)
            by_site.append(Traffic(3 * (not ends) + forward + NORM[0] * w, backward + NORM[1] * w, 1 + w))
        return by_site


@costs_for("low_rank_query")
class LowRankQueryCosts(AttnResCosts):
    def traffic(self) -> list[Traffic]:
        return [Traffic(t.forward + 3, t.backward + 6, t.kept) for t in super().traffic()]


@costs_for("softmax_dca")
class SoftmaxDCACosts(DeltaStackCosts):
    def traffic(self) -> list[Traffic]:
        begins = self.mixer.layout.begins  # finish does, too
        by_site = zip(super().traffic(), begins, strict=True)
        return [Traffic(t.forward + entry, t.backward + 3 * entry, t.kept) for t, entry in by_site]
