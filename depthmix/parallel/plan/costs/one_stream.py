"""Costs of the rules with one running stream."""

from depthmix.parallel.plan.costs.base import NORM, Costs, Published, StateSizes, Traffic, costs_for, one_stream_state


@costs_for("AddedStream")
class AddedStreamCosts(Costs):
    """A stream to which outputs are added, each in the kernel of the next norm."""

    def traffic(self) -> list[Traffic]:
        # The gradient of the embedding joins that of the stream.
        first = Traffic(NORM[0], NORM[1] + 3, 1)
        # Forward: x and y in, their sum and its norm out. Backward: the sum and both gradients in, one gradient for x and y out.
        site = Traffic(4, 4, 1)
        return [first, *[site] * (self.mixer.n_sites - 1), Traffic(3 + NORM[0], NORM[1], 1)]

    def state_tensors(self) -> list[StateSizes]:
        return one_stream_state(self.mixer)


@costs_for("residual")
class ResidualCosts(AddedStreamCosts):
    def published(self) -> Published:
        # Read the stream and the output, write the stream.
        return Published(2, 1)


class JoinedStreamCosts(Costs):
    """A stream that outputs join by operators of PyTorch."""

    def join(self) -> Traffic:
        """Count what one output takes to join the stream, without the norm and the stream itself."""
        raise NotImplementedError

    def traffic(self) -> list[Traffic]:
        forward, backward, kept, flops = self.join()
        site = Traffic(forward + NORM[0], backward + NORM[1], kept + 1, flops)
        return [site] * self.mixer.n_sites + [Traffic(*NORM, 1)]

    def state_tensors(self) -> list[StateSizes]:
        return one_stream_state(self.mixer)
