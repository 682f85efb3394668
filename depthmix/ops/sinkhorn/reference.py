"""Sinkhorn normalisation of a positive n x n matrix in plain PyTorch: the specification, in two conventions.

paper (mHC, Eq. 9):       M = exp(logits);  `iterations` times: divide columns by their sums, then rows by theirs. Row sums are exact.
deepseek (their code):    M = softmax over each row + eps;  divide columns by (sums + eps);
                          `iterations` - 1 times: divide rows, then columns, by (sums + eps). Column sums are exact up to eps.

The two differ by transposition and half an iteration: the paper's matrix is M[out, in], DeepSeek's is comb[in, out].
The paper's form runs on logarithms, where subtracting a log-sum-exp is the division by a sum and nothing can overflow.
"""

import torch
from torch import Tensor

from depthmix.ops.precision import compute_dtype

DEEPSEEK_EPS = 1e-6
# The axis that a sum runs over: a row's sum runs over its columns, and vice versa.
ROWS, COLUMNS = -1, -2


def sinkhorn_reference(logits: Tensor, iterations: int, convention: str) -> Tensor:
    """Compute Sinkhorn in plain PyTorch: [..., n, n] -> [..., n, n], in the layout of the logits."""
    logits = logits.to(compute_dtype(logits))
    if convention == "paper":
        for _ in range(iterations):
            logits = logits - torch.logsumexp(logits, COLUMNS, keepdim=True)
            logits = logits - torch.logsumexp(logits, ROWS, keepdim=True)
        return logits.exp()
    m = torch.softmax(logits, ROWS) + DEEPSEEK_EPS
    m = m / (m.sum(COLUMNS, keepdim=True) + DEEPSEEK_EPS)
    for _ in range(iterations - 1):
        m = m / (m.sum(ROWS, keepdim=True) + DEEPSEEK_EPS)
        m = m / (m.sum(COLUMNS, keepdim=True) + DEEPSEEK_EPS)
    return m
