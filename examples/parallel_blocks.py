"""Parallel blocks, as in GPT-J and GPT-NeoX: attention and MLP side by side, y = attention(norm(h)) + mlp(norm(h)).

    python examples/parallel_blocks.py               # denseformer
    python examples/parallel_blocks.py dca           # three mixtures for attention; the MLP takes that of the queries

A block is one site, so the number of blocks may also be odd: sites=("attention",).
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

import depthmix

VOCAB, DIM, HEADS, LENGTH = 16, 32, 2, 24
BLOCKS = 5


class ParallelBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, h: Tensor | tuple[Tensor, ...]) -> Tensor:
        ways = h if isinstance(h, tuple) else (h,)
        h_q, h_k, h_v = ways[0], ways[1] if len(ways) == 3 else ways[0], ways[-1]
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(h_q), self.k(h_k), self.v(h_v)))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(attended) + self.down(functional.gelu(self.up(h_q)))


class Model(nn.Module):
    def __init__(self, mixer: str, **options: object) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCAB, DIM), nn.Parameter(0.1 * torch.randn(LENGTH, DIM))
        self.mixer = depthmix.create_mixer(mixer, dim=DIM, n_blocks=BLOCKS, sites=("attention",), **options)
        self.blocks = nn.ModuleList(ParallelBlock() for _ in range(BLOCKS))
        self.norms = nn.ModuleList(
            nn.ModuleList(nn.RMSNorm(DIM) for _ in range(self.mixer.ways(site))) for site in range(BLOCKS)
        )
        self.final_norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        state = self.mixer.start(self.embedding(ids) + self.position[: ids.shape[1]])
        for site, (norm, block) in enumerate(zip(self.norms, self.blocks, strict=True)):
            state = self.mixer.write(state, site, block(self.mixer.read(state, site, norm)))
        return self.head(self.final_norm(self.mixer.finish(state)))


def main(mixer: str = "denseformer", steps: int = 60, **options: object) -> list[float]:
    torch.manual_seed(0)
    model = Model(mixer, **options)
    optimizer = torch.optim.AdamW(depthmix.param_groups(model, weight_decay=0.1), lr=3e-3)
    losses = []
    for _ in range(steps):
        # Sequences that repeat themselves after six tokens.
        ids = torch.randint(VOCAB, (16, 6)).repeat(1, LENGTH // 6)
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{mixer}, {model.mixer.n_sites} sites in {BLOCKS} blocks: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
