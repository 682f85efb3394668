"""Rules that make the weights of reads and writes from the streams, in plain PyTorch: the specification of kernels/coefficients.py.

From the products z = x W and the sums of the streams, with r = 1 / RMS:

    joint (mHC):               H = scale ⊙ (r z) + base, W [n D, K];   pre = sigmoid(H_pre) + eps', post = 2 sigmoid(H_post)
                               (a rule may have another factor than 2, and an eps here too),
                               res = Sinkhorn of H_res, or Σ softmax(H_res)_k P_k over all permutations, or None (identity)
    each (Hyper-Connections):  for every stream f(r z), W [D, n + 2], f = tanh or none;   pre = s_alpha f_0 + base_pre,
                               post = s_beta f_1 + base_post,   res = (s_alpha f_2: + base_res)ᵀ

base holds the terms added to pre, post and res, one after the other. A LayerNorm is an RMSNorm of centred streams. Their products
are those of the streams with a centred W: the caller centres W.
"""

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from depthmix.ops.matmul import matmul
from depthmix.ops.sinkhorn.reference import DEEPSEEK_EPS, sinkhorn_reference


class Rule(NamedTuple):
    """Options of a rule that makes the weights of reads and writes."""

    n: int
    joint: bool  # the streams of a token together, as mHC; otherwise each for itself, as Hyper-Connections
    eps: float  # of the norm
    centred: bool = False  # a LayerNorm
    tanh: bool = False
    residual_map: str = "sinkhorn"  # of mHC: or birkhoff, or identity
    convention: str = "paper"
    iterations: int = 20
    pre_eps: float = 0.0
    post_scale: float = 2.0
    post_eps: float = 0.0

    @property
    def residual_logits(self) -> int:
        """Return the number of logits of mHC's residual map."""
        return {"sinkhorn": self.n * self.n, "birkhoff": math.factorial(self.n), "identity": 0}[self.residual_map]


def permutations(n: int) -> list[tuple[int, ...]]:
    """Return where each permutation sends each of n streams, in lexicographic order: the identity comes first."""
    return list(itertools.permutations(range(n)))


def permutation_matrices(n: int) -> Tensor:
    """Return all permutation matrices [n!, n²], row by row."""
    return torch.nn.functional.one_hot(torch.tensor(permutations(n)), n).flatten(1)


# (pre [..., n], post [..., n], res [..., n, n] with the output stream first).
Coefficients = tuple[Tensor, Tensor, Tensor | None]


def products(rule: Rule, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return z and the sums of streams x [..., n, D] in w's precision.

    The sums are Σ x² [...] if the rule is joint, otherwise Σ x and Σ x² [..., n, 2].
    """
    x = x.to(w.dtype)
    if rule.joint:
        return matmul(x.flatten(-2), w), x.square().sum((-1, -2))
    return matmul(x, w), torch.stack([x.sum(-1), x.square().sum(-1)], dim=-1)


def coefficients(rule: Rule, dim: int, z: Tensor, sums: Tensor, base: Tensor, scale: Tensor) -> Coefficients:
    """Compute pre, post and res from products and sums."""
    n = rule.n
    if rule.joint:
        z = z * torch.rsqrt(sums / (n * dim) + rule.eps).unsqueeze(-1)
        sizes = (n, n, rule.residual_logits) if rule.residual_logits else (n, n)
        parts = [a * v + b for a, v, b in zip(scale, z.split(sizes, -1), base.split(sizes), strict=True)]
        pre = torch.sigmoid(parts[0]) + rule.pre_eps
        post = rule.post_scale * torch.sigmoid(parts[1]) + rule.post_eps
        if rule.residual_map == "identity":
            return pre, post, None
        if rule.residual_map == "birkhoff":
            return pre, post, mixed_permutations(parts[2], permutation_matrices(n))
        res = sinkhorn_reference(parts[2].unflatten(-1, (n, n)), rule.iterations, rule.convention)
        return pre, post, res.transpose(-1, -2) if rule.convention == "deepseek" else res
    variance = sums[..., 1] / dim
    if rule.centred:
        variance = (variance - (sums[..., 0] / dim).square()).clamp(min=0)
    z = z * torch.rsqrt(variance + rule.eps).unsqueeze(-1)
    z = torch.tanh(z) if rule.tanh else z
    pre, post, res = base.split((n, n, n * n))
    res = scale[0] * z[..., 2:] + res.view(n, n)
    return scale[0] * z[..., 0] + pre, scale[1] * z[..., 1] + post, res.transpose(-1, -2)


def mixed_permutations(logits: Tensor, matrices: Tensor) -> Tensor:
    """Compute mHC-lite's map [..., n, n] from logits [..., n!] and all permutation matrices [n!, n²]."""
    n = math.isqrt(matrices.shape[-1])
    return matmul(torch.softmax(logits, dim=-1), matrices.to(logits)).unflatten(-1, (n, n))


def by_column(rule: Rule, w: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Arrange w, base and scale of Hyper-Connections for all sites by column of w: [S, n + 2, D], [S, n + 2, n] and [S, n + 2].

    A rule that centres has one more column, of 1/D: its products are the means.
    """
    n, columns = rule.n, w.transpose(-1, -2)
    if rule.centred:
        columns = torch.cat([columns, columns.new_full((len(w), 1, w.shape[1]), 1 / w.shape[1])], dim=1)
    pre_post, res = base[:, : 2 * n].unflatten(-1, (2, n)), base[:, 2 * n :].unflatten(-1, (n, n))
    s_alpha, s_beta = scale.unbind(-1)
    return columns, torch.cat([pre_post, res.transpose(1, 2)], 1), torch.stack([s_alpha, s_beta, *[s_alpha] * n], 1)


__all__ = [
    "DEEPSEEK_EPS",
    "Coefficients",
    "Rule",
    "by_column",
    "coefficients",
    "mixed_permutations",
    "permutation_matrices",
    "permutations",
    "products",
]
