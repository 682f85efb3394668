"""Manifold-Constrained Hyper-Connections (DeepSeek 2025, arXiv 2512.24880), mHC-lite (2601.05732), and the single-pass schedule.

x [n, D] a token, n copies of e at the start. At every site, with x⃗ the n streams one after the other:

    [z_pre | z_post | z_res] = RMS(x⃗) phi_s;     H̃_* = alpha_s,* z_* + b_s,*
    H_pre = sigmoid(H̃_pre);   H_post = post_scale sigmoid(H̃_post);   H_res = sinkhorn, birkhoff or identity of H̃_res
    h_s = Σ_i H_pre[i] x_i;        x'_o = Σ_i H_res[o, i] x_i + H_post[o] y_s

single_pass: h_s uses the H_pre that site s-1 predicted, site 0 reads stream 0, finish uses the last site's.
docs/reference/rules.md has the two Sinkhorn conventions, the initialisations, and why `identity` favours one stream.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from depthmix.mixers.options import OptionError, at_least
from depthmix.mixers.registry import register
from depthmix.mixers.streams import StreamMixer, StreamsState
from depthmix.ops import sinkhorn
from depthmix.ops.matmul import matmul
from depthmix.ops.precision import compute_dtype, rms_normalize
from depthmix.ops.stream_mix.rules import DEEPSEEK_EPS, Rule, mixed_permutations, permutation_matrices

PAPER_EPS = 1e-20
INITIAL_ALPHA = 0.01
MOST_PERMUTED = 6  # streams: 720 permutations
OFF_LOGIT = -8.0  # of the residual map's entries that start near zero


@register("mhc")
class MHC(StreamMixer):
    """phi [S, nD, K], b [S, K], alpha [S, 3 or 2]; K = n + n + (n², n! or 0) in the order pre, post, res."""

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
    ) -> None:
        super().__init__(dim, n_blocks)
        if convention == "deepseek" and residual_map != "sinkhorn":
            raise OptionError(f"mhc: convention='deepseek' is one of Sinkhorn, residual_map is {residual_map!r}")
        if convention == "hunyuan" and residual_map != "identity":
            raise OptionError(
                f"mhc: convention='hunyuan' has no residual map, so residual_map must be 'identity', got {residual_map!r}"
            )
        if residual_map == "birkhoff" and n > MOST_PERMUTED:
            raise OptionError(
                f"mhc: residual_map='birkhoff' has a weight for each of n! permutations; n may be up to {MOST_PERMUTED}, got {n}"
            )
        if schedule == "single_pass" and head is not None:
            raise OptionError(
                "mhc: schedule='single_pass' reads the output with the last site's weights and takes no head"
            )
        self.n, self.residual_map, self.convention, self.iterations = n, residual_map, convention, iterations
        self.head = None if schedule == "single_pass" else head or "sum"
        self.init, self.schedule = init, schedule
        self.eps = self._usual_eps() if eps is None else eps
        self.post_scale = post_scale
        n_res = self._rule().residual_logits
        self.sizes = (n, n, n_res) if n_res else (n, n)
        self.phi = nn.Parameter(torch.empty(self.n_sites, n * dim, sum(self.sizes)))
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
        n, like = self.n, self.b.new_zeros(())
        self.alpha.fill_(INITIAL_ALPHA)
        self.phi.zero_()
        self.b.zero_()
        favoured = torch.eye(n, dtype=torch.bool, device=like.device).repeat(-(-self.n_sites // n), 1)[: self.n_sites]
        if self.init == "uniform":
            for phi in self.phi:
                nn.init.xavier_uniform_(phi)
        else:
            if self.init == "identity":  # weights 2 : 1 : … : 1 over the streams, summing to one
                pre = torch.where(favoured, like.new_tensor(math.log(2 / (n - 1))), like.new_tensor(-math.log(n)))
                # post begins at one where the scale allows it.
                post = torch.full_like(pre, -math.log(self.post_scale - 1) if self.post_scale > 1 else 0.0)
            else:
                pre = post = torch.where(favoured, like.new_tensor(1.0), like.new_tensor(-1.0))
            res = like.new_full((sum(self.sizes) - 2 * n,), OFF_LOGIT)
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
        x = self._normalized(state)
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
