"""A small stack of sublayers to put mixers into, and the cases the battery runs over."""

import torch
from torch import Tensor, nn

from depthmix import create_mixer, list_mixers
from oracles import DEFAULTS
from oracles.blocks import Blocks
from oracles.cases import OPTIONS, pairwise

B, T, DIM = 2, 5, 24  # odd on purpose


# Blocks as `sites` of create_mixer has them, beside the usual two sites: what models of one's own look like.
LAYOUTS = {
    "parallel": [("attention",)] * 3,
    "cross": [("attention", "cross_attention", "mlp")] * 2,
    "uneven": [("attention", "mlp"), ("mlp",), ("attention", "cross_attention", "mlp"), ("attention",)],
}


class Sublayers(nn.Module):
    """Smooth stand-ins for attention, which mixes tokens causally and reads q, k and v, and for the MLP."""

    def __init__(self, blocks, dim: int = DIM, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.names = [name for block in Blocks(blocks).names for name in block]
        self.weight = nn.Parameter(torch.randn(len(self.names), 3, dim, dim, dtype=dtype) / dim**0.5)

    def forward(self, site: int, reads: tuple[Tensor, ...]) -> Tensor:
        w = self.weight[site]
        if self.names[site] == "mlp":
            return torch.tanh(reads[0] @ w[0]) @ w[1]
        q, k, v = {1: reads * 3, 2: (reads[0], *reads), 3: reads}[len(reads)]
        seen = torch.tanh(k @ w[1])
        past = seen.cumsum(-2) / torch.arange(1, seen.shape[-2] + 1, dtype=seen.dtype).unsqueeze(-1)
        return torch.tanh(q @ w[0]) * past + v @ w[2]


def as_tuple(h) -> tuple[Tensor, ...]:
    return h if isinstance(h, tuple) else (h,)


def run_stack(mixer, sublayers, e, around=lambda f, *args: f(*args)):
    """One pass: (out, reads, sources). around(f, *args) calls a sublayer, e.g. under activation checkpointing."""
    state, reads, sources = mixer.start(e), [], [e]
    for site in range(mixer.n_sites):
        reads.append(as_tuple(mixer.read(state, site)))
        y = around(sublayers, site, reads[-1])
        state = mixer.write(state, site, y)
        sources.append(y)
    return mixer.finish(state), reads, sources


def build(name, blocks, choice=None, random=False, dim=DIM, dtype=torch.float64):
    """A mixer for blocks, or for a number of the usual ones; with random=True every parameter is moved away from its initial value by noise."""
    size = {"n_blocks": blocks} if isinstance(blocks, int) else {"sites": blocks}
    mixer = create_mixer(name, dim=dim, **size, **(choice or {})).to(dtype)
    if random:
        with torch.no_grad():
            for p in mixer.parameters():
                p += 0.3 * torch.randn_like(p)
    return mixer


def embedding(dtype=torch.float64, dim=DIM):
    return torch.randn(B, T, dim, dtype=dtype)


def label(name, choice):
    return "-".join([name, *(f"{k}={v}" for k, v in choice.items())])


# Every registered mixer is here: one without option cases of its own runs with its defaults.
MIXERS = list_mixers()
CASES = [(name, choice) for name in MIXERS for choice in OPTIONS.get(name, [{}])]
CASE_IDS = [label(*case) for case in CASES]
PAIRWISE = [(name, choice) for name in MIXERS for choice in pairwise(name, OPTIONS.get(name, [{}]))]
EVERY_VALUE = [(name, choice) for name in MIXERS for choice in pairwise(name, OPTIONS.get(name, [{}]), 1)]
PAIRWISE_IDS = [label(*case) for case in PAIRWISE]


def complete(name, choice):
    """All options of a case, as an oracle wants them."""
    return DEFAULTS[name] | choice
