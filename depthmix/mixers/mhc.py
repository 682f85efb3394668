"""Manifold-Constrained Hyper-Connections (DeepSeek 2025, arXiv 2512.24880), mHC-lite (2601.05732), and the single-pass schedule.

x [n, D] a token, n copies of e at the start. At every site, with x⃗ the n streams one after the other:

    [z_pre | z_post | z_res] = RMS(x⃗) phi_s;     H̃_* = alpha_s,* z_* + b_s,*
    H_pre = sigmoid(H̃_pre);   H_post = post_scale sigmoid(H̃_post);   H_res = sinkhorn, birkhoff or identity of H̃_res
    h_s = Σ_i H_pre[i] x_i;        x'_o = Σ_i H_res[o, i] x_i + H_post[o] y_s

single_pass: h_s uses the H_pre that site s-1 predicted, site 0 reads stream 0, finish uses the last site's.
With fractions=m (fractions.py) x⃗ is the stream [D] itself, x [m, D/m], and a fraction of a read has weights of its own:

    H_pre = sigmoid(H̃_pre) [m, m];   h_s[j] = Σ_i H_pre[j, i] x_i;        x'_o = Σ_i H_res[o, i] x_i + H_post[o] y_s[o];    h_S = x

docs/reference/rules.md has the two Sinkhorn conventions, the initialisations, and why `identity` favours one stream.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from depthmix.mixers.fractions import FractionMixer
from depthmix.mixers.options import OptionError, at_least
from depthmix.mixers.registry import register
from depthmix.mixers.streams import StreamsState
from depthmix.ops import sinkhorn
from depthmix.ops.matmul import matmul
from depthmix.ops.precision import compute_dtype, rms_normalize
from depthmix.ops.stream_mix.rules import DEEPSEEK_EPS, Rule, mixed_permutations, permutation_matrices

PAPER_EPS = 1e-20
INITIAL_ALPHA = 0.01
MOST_PERMUTED = 6  # streams: 720 permutations
OFF_LOGIT = -8.0  # of the residual map's entries that start near zero
FRACTION_LOGIT = 8.0  # a fraction starts with a share of sigmoid(8) of itself, in its read and in the residual map


@register("mhc")
class MHC(FractionMixer):
    """phi [S, nD, K], b [S, K], alpha [S, 3 or 2]; K = n + n + (n², n! or 0) in the order pre, post, res.

    With fractions n = m, phi [S, D, K], and pre has m² columns, row-major (the fraction of the read first).
    """

    decayed = frozenset({"phi", "phi_head"})
    permutations: Tensor  # [n!, n²], of the birkhoff map

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        *,
        n: Annotated[int, at_least(2)] = 4,
        residual_map: Literal["sinkhorn", "birkhoff", "identity"] = "sinkhorn",
        convention: Literal["paper", "deepseek", "hunyuan"] = "paper",
        iterations: Annotated[int, at_least(1)] = 20,
        head: Literal["sum", "mean", "learned"] | None = None,
        init: Literal["identity", "uniform", "symmetry"] = "identity",
        schedule: Literal["standard", "single_pass"] = "standard",
        eps: Annotated[float | None, at_least(0)] = None,
        post_scale: Annotated[float, at_least(0)] = 2.0,
        fractions: Annotated[int | None, at_least(2)] = None,
    ) -> None:
        super().__init__(dim, n_blocks, n=n, fractions=fractions)
        if fractions is not None:
            fixed = {"head": (head, None), "init": (init, "identity"), "schedule": (schedule, "standard")}
            for option, (value, only) in fixed.items():
                if value != only:
                    raise OptionError(f"mhc: with fractions {option} must be {only!r}, got {value!r}")
        if convention == "deepseek" and residual_map != "sinkhorn":
            raise OptionError(f"mhc: convention='deepseek' is one of Sinkhorn, residual_map is {residual_map!r}")
        if convention == "hunyuan" and residual_map != "identity":
            raise OptionError(
                f"mhc: convention='hunyuan' has no residual map, so residual_map must be 'identity', got {residual_map!r}"
            )
        if residual_map == "birkhoff" and self.n > MOST_PERMUTED:
            mixed = "n" if fractions is None else "fractions"
            raise OptionError(
                f"mhc: residual_map='birkhoff' has a weight for each of n! permutations; {mixed} may be up to {MOST_PERMUTED}, got {self.n}"
            )
        if schedule == "single_pass" and head is not None:
            raise OptionError(
                "mhc: schedule='single_pass' reads the output with the last site's weights and takes no head"
            )
        self.residual_map, self.convention, self.iterations = residual_map, convention, iterations
        self.head = None if schedule == "single_pass" or fractions is not None else head or "sum"
        self.init, self.schedule = init, schedule
        self.eps = self._usual_eps() if eps is None else eps
        self.post_scale = post_scale
        n, n_res = self.n, self._rule().residual_logits
        n_pre, width = (n, n * dim) if fractions is None else (n * n, dim)
        self.sizes = (n_pre, n, n_res) if n_res else (n_pre, n)
        self.phi = nn.Parameter(torch.empty(self.n_sites, width, sum(self.sizes)))
        self.b = nn.Parameter(torch.empty(self.n_sites, sum(self.sizes)))
        self.alpha = nn.Parameter(torch.empty(self.n_sites, len(self.sizes)))
        if residual_map == "birkhoff":
            # A constant, and saved all the same: a model built on the meta device has nothing else to take it from.
            self.register_buffer("permutations", torch.empty(n_res, n * n))
        if self.head == "learned":
            self.phi_head = nn.Parameter(torch.empty(n * dim, n))
            self.b_head = nn.Parameter(torch.empty(n))
            self.alpha_head = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        n = self.n
        self.alpha.fill_(INITIAL_ALPHA)
        self.phi.zero_()
        self.b.zero_()
        if self.init == "uniform":
            for phi in self.phi:
                nn.init.xavier_uniform_(phi)
        else:
            pre, post, off = self._initial_logits()
            res = post.new_full((sum(self.sizes[2:]),), off)
            if self.residual_map == "sinkhorn":
                res[:: n + 1] = 0.0
            elif self.residual_map == "birkhoff":
                res[0] = 0.0
            self.b.copy_(torch.cat([pre, post, res.expand(self.n_sites, -1)], dim=-1))
        if self.residual_map == "birkhoff":
            self.permutations.copy_(permutation_matrices(n))
        if self.head == "learned":
            self.phi_head.zero_()
            self.b_head.fill_(-math.log(n - 1))
            self.alpha_head.fill_(INITIAL_ALPHA)

    def _initial_logits(self) -> tuple[Tensor, Tensor, float]:
        """Return the logits of H_pre and H_post [S, ...] at step 0, and that of the residual map away from the identity."""
        n, like = self.n, self.b.new_zeros(())
        favoured = torch.eye(n, dtype=torch.bool, device=like.device).repeat(-(-self.n_sites // n), 1)[: self.n_sites]
        if self.init == "symmetry":
            pre = torch.where(favoured, like.new_tensor(1.0), like.new_tensor(-1.0))
            return pre, pre, OFF_LOGIT
        # post begins at one where the scale allows it.
        post = like.new_full(favoured.shape, -math.log(self.post_scale - 1) if self.post_scale > 1 else 0.0)
        if self.fractions is None:  # weights 2 : 1 : … : 1 over the streams, summing to one
            pre = torch.where(favoured, like.new_tensor(math.log(2 / (n - 1))), like.new_tensor(-math.log(n)))
            return pre, post, OFF_LOGIT
        own = torch.eye(n, dtype=like.dtype, device=like.device).flatten()
        pre = (FRACTION_LOGIT * (2 * own - 1)).expand(self.n_sites, -1)
        # The other fractions, or the other permutations, share sigmoid(-FRACTION_LOGIT).
        others = (math.factorial(n) if self.residual_map == "birkhoff" else n) - 1
        return pre, post, -FRACTION_LOGIT - math.log(others)

    def weight_options(self) -> dict[str, Any]:
        options = {name: value for name, value in super().weight_options().items() if name != "init"}
        return options | {"head": self.head, "eps": None if self.eps == self._usual_eps() else self.eps}

    def _usual_eps(self) -> float:
        return PAPER_EPS if self.convention == "paper" else DEEPSEEK_EPS

    def _first_read(self, x: Tensor) -> Tensor | None:
        if self.schedule == "standard":
            return None
        first = (torch.arange(self.n, device=x.device) == 0).to(compute_dtype(x))
        return first.expand(*x.shape[:-1], self.n)

    def _normalized(self, state: StreamsState) -> Tensor:
        return rms_normalize(state.observe(state.x).flatten(-2), self.eps)  # [..., nD]

    def _coefficients(self, state: StreamsState, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return H_pre and H_post [..., n] and H_res [..., n, n] (output stream first; None for the identity)."""
        return self._weights(self._normalized(state), parameters)

    def _fraction_weights(self, x: Tensor, site: int) -> tuple[Tensor, Tensor | None, Tensor]:
        pre, post, res = self._weights(rms_normalize(x, self.eps), self._parameters_of(site))
        read = pre.unflatten(-1, (self.n, self.n)).transpose(-1, -2)
        return read, None if res is None else res.transpose(-1, -2), post

    def _weights(self, x: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return H_pre, H_post and H_res for the normed x⃗."""
        phi, b, alpha = (p.to(x.dtype) for p in parameters)
        z, b = matmul(x, phi).split(self.sizes, dim=-1), b.split(self.sizes, dim=-1)
        pre, post, *res = (alpha[i] * z[i] + b[i] for i in range(len(self.sizes)))
        rule = self._rule()
        h_pre, h_post = torch.sigmoid(pre) + rule.pre_eps, rule.post_scale * torch.sigmoid(post) + rule.post_eps
        return h_pre, h_post, self._residual_map(res[0]) if res else None

    def _residual_map(self, logits: Tensor) -> Tensor:
        if self.residual_map == "birkhoff":
            return mixed_permutations(logits, self.permutations)
        m = sinkhorn(logits.unflatten(-1, (self.n, self.n)), self.iterations, self.convention)
        return m.transpose(-1, -2) if self.convention == "deepseek" else m

    def _rule(self) -> Rule:
        return Rule(
            self.n,
            joint=True,
            eps=self.eps,
            residual_map=self.residual_map,
            convention="deepseek" if self.convention == "deepseek" else "paper",
            iterations=self.iterations,
            pre_eps=0.0 if self.convention == "paper" else DEEPSEEK_EPS,
            post_scale=self.post_scale,
            post_eps=DEEPSEEK_EPS if self.convention == "hunyuan" else 0.0,
        )

    def _for_all_sites(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.phi, self.b, self.alpha

    def _last_read(self, state: StreamsState) -> Tensor | None:
        if state.pre is not None:
            return state.pre
        if self.head == "learned":
            return None
        ones = super()._last_read(state)
        assert ones is not None
        return ones / self.n if self.head == "mean" else ones

    def _head(self, state: StreamsState) -> Tensor:
        x = self._normalized(state)
        z = self.alpha_head.to(x.dtype) * matmul(x, self.phi_head.to(x.dtype)) + self.b_head.to(x.dtype)
        return torch.sigmoid(z) + DEEPSEEK_EPS
