"""m fractions of the width instead of n streams (Frac-Connections, Zhu et al. 2025, arXiv 2503.14125).

H [m, D/m] per token is the stream itself: row j has channels j D/m to (j+1) D/m. At every site, with y_s cut in the same way,

    h_s = Yᵀ H;      H ← Aᵀ H + B ∘ y_s;      h_S = H
"""

from torch import Tensor

from depthmix.mixers.options import OptionError
from depthmix.mixers.state import StreamState
from depthmix.mixers.streams import StreamMixer
from depthmix.ops.precision import compute_dtype, widen


class FractionMixer(StreamMixer):
    """A rule over n streams that can also work on m fractions of one. self.n is the number of either."""

    def __init__(self, dim: int, n_blocks: int, *, n: int, fractions: int | None) -> None:
        if fractions is not None:
            self.fast_paths = ()  # type: ignore[misc]  # they know streams
        super().__init__(dim, n_blocks)
        if fractions is not None:
            if dim % fractions:
                raise OptionError(f"{self.name}: fractions must divide dim={dim}, got {fractions}")
            if n != self.options["n"].default:
                raise OptionError(f"{self.name}: with fractions there are no streams, so n may not be given, got {n}")
        self.n, self.fractions = fractions or n, fractions

    def _fraction_weights(self, x: Tensor, site: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return Y and A [..., m, m] and B [..., m] of a site for the stream x [..., D]; A is None for the identity."""
        raise NotImplementedError

    def _start(self, x: Tensor) -> StreamState:  # type: ignore[override]
        return super()._start(x) if self.fractions is None else StreamState(x=x)  # type: ignore[return-value]

    def _read(self, state: StreamState, site: int) -> Tensor:  # type: ignore[override]
        if self.fractions is None:
            return super()._read(state, site)  # type: ignore[arg-type]
        weights = self._fraction_weights(state.observe(state.x), site)
        state.leave_note(weights)
        return mix_fractions(weights[0], cut(state.x, self.fractions)).flatten(-2)

    def _write(self, state: StreamState, site: int, y: Tensor) -> StreamState:  # type: ignore[override]
        if self.fractions is None:
            return super()._write(state, site, y)  # type: ignore[arg-type, return-value]
        _, a, b = state.take_note() or self._fraction_weights(state.observe(state.x), site)
        h = cut(state.x, self.fractions)
        kept = h if a is None else mix_fractions(a, h)
        after: StreamState = state.next(
            x=(kept + b.unsqueeze(-1) * cut(y, self.fractions)).flatten(-2).to(state.x.dtype)
        )
        return after

    def _finish(self, state: StreamState) -> Tensor:  # type: ignore[override]
        return super()._finish(state) if self.fractions is None else state.x  # type: ignore[arg-type]


def cut(x: Tensor, m: int) -> Tensor:
    """Return H [..., m, D/m] of x [..., D], in fp32 or wider."""
    return widen(x, compute_dtype(x)).unflatten(-1, (m, -1))


def mix_fractions(weights: Tensor, h: Tensor) -> Tensor:
    """Return weightsᵀ h for weights [..., m, m] and h [..., m, D/m]: row i of the weights is for fraction i of h."""
    # Products instead of a matmul, which would be of m x m matrices for each token.
    rows = (weights[..., i, :].unsqueeze(-1) * h[..., i, :].unsqueeze(-2) for i in range(h.shape[-2]))
    total = next(rows)
    for row in rows:
        total = total + row
    return total
