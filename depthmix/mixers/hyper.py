"""Hyper-Connections (Zhu et al. 2024, arXiv 2409.19606): n residual streams, read, mixed and written with learned weights.

H [n, D] per token, n copies of e at the start. At every site

    h_s = A_mᵀ H;      H ← A_rᵀ H + Bᵀ y_sᵀ;      h_S = the sum of H's rows

static: A_m, A_r, B are parameters. Dynamic, with H̄ = norm(H) for each stream:

    B(H) = s_beta tanh(H̄ W_beta) + B;    A_m(H) = s_alpha tanh(H̄ W_m) + A_m;    A_r(H) = s_alpha tanh(H̄ W_r) + A_r

With fractions=m it is Frac-Connections (fractions.py): Y = A_m, A = A_r and B in the same form.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from depthmix.mixers.fractions import FractionMixer, cut
from depthmix.mixers.options import at_least
from depthmix.mixers.registry import register
from depthmix.mixers.streams import StreamsState
from depthmix.ops.matmul import matmul
from depthmix.ops.precision import compute_dtype, rms_normalize
from depthmix.ops.stream_mix.rules import Coefficients, Rule, coefficients, products

LAYERNORM_EPS, RMSNORM_EPS = 1e-5, 1e-6
INITIAL_SCALE = 0.01


@register("hyper")
class HyperConnections(FractionMixer):
    """A_m [S, n] one-hot at s mod n, A_r [S, n, n] identity, B [S, n] one; W_* zero, s_* 0.01: plain at step 0.

    With fractions n = m, and A_m [S, m, m] is the identity.
    """

    decayed = frozenset({"W_beta", "W_m", "W_r"})

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        *,
        n: Annotated[int, at_least(1)] = 4,
        static: bool = False,
        tanh: bool = True,
        norm: Literal["layernorm", "rmsnorm"] = "layernorm",
        fractions: Annotated[int | None, at_least(1)] = None,
    ) -> None:
        super().__init__(dim, n_blocks, n=n, fractions=fractions)
        self.static, self.tanh, self.norm = static, tanh, norm
        sites, n, width = self.n_sites, self.n, dim // (fractions or 1)
        columns = () if fractions is None else (n,)  # a fraction of a read has weights of its own
        self.A_m = nn.Parameter(torch.empty(sites, n, *columns))
        self.A_r = nn.Parameter(torch.empty(sites, n, n))
        self.B = nn.Parameter(torch.empty(sites, n))
        if not static:
            self.W_beta = nn.Parameter(torch.empty(sites, width))
            self.W_m = nn.Parameter(torch.empty(sites, width, *columns))
            self.W_r = nn.Parameter(torch.empty(sites, width, n))
            self.s_alpha = nn.Parameter(torch.empty(sites))
            self.s_beta = nn.Parameter(torch.empty(sites))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        site = torch.arange(self.n_sites)
        if self.fractions is None:
            self.A_m.zero_()[site, site % self.n] = 1.0
        else:
            self.A_m.copy_(torch.eye(self.n))
        self.A_r.copy_(torch.eye(self.n))
        self.B.fill_(1.0)
        if not self.static:
            for w in (self.W_beta, self.W_m, self.W_r):
                w.zero_()
            for s in (self.s_alpha, self.s_beta):
                s.fill_(INITIAL_SCALE)

    def _fraction_weights(self, x: Tensor, site: int) -> tuple[Tensor, Tensor, Tensor]:
        wide, n = compute_dtype(x), self.n
        y, a, b = (p[site].to(wide) for p in (self.A_m, self.A_r, self.B))
        if self.static:
            return y, a, b
        h = cut(x, n)
        if self.norm == "layernorm":
            h = functional.layer_norm(h, h.shape[-1:], eps=LAYERNORM_EPS)
        else:
            h = rms_normalize(h, RMSNORM_EPS)
        w = torch.cat([self.W_m[site], self.W_r[site], self.W_beta[site].unsqueeze(-1)], dim=-1).to(wide)
        z = matmul(h, w)  # [..., m, 2 m + 1]
        z = torch.tanh(z) if self.tanh else z
        s_alpha, s_beta = self.s_alpha[site].to(wide), self.s_beta[site].to(wide)
        return s_alpha * z[..., :n] + y, s_alpha * z[..., n : 2 * n] + a, s_beta * z[..., -1] + b

    def _coefficients(self, state: StreamsState, parameters: Sequence[Tensor]) -> Coefficients:
        """Return A_m and B [..., n] and A_rᵀ [..., n, n] (output stream first) for the H that this site reads."""
        x = state.observe(state.x)
        wide, rule = compute_dtype(x), self._rule()
        first, second, third = (p.to(wide) for p in parameters)
        if rule is None:
            return first, second, third
        return coefficients(rule, self.dim, *products(rule, x, first), second, third)

    def _rule(self) -> Rule | None:
        if self.static:
            return None
        eps = LAYERNORM_EPS if self.norm == "layernorm" else RMSNORM_EPS
        return Rule(self.n, joint=False, eps=eps, centred=self.norm == "layernorm", tanh=self.tanh)

    def _for_all_sites(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.static:
            return self.A_m, self.B, self.A_r.transpose(1, 2).contiguous()
        w = torch.cat([self.W_m.unsqueeze(-1), self.W_beta.unsqueeze(-1), self.W_r], dim=-1)
        if self.norm == "layernorm":
            w = w - w.mean(1, keepdim=True)  # [S, D, n + 2]
        base = torch.cat([self.A_m, self.B, self.A_r.flatten(1)], dim=-1)
        return w, base, torch.stack([self.s_alpha, self.s_beta], dim=-1)
