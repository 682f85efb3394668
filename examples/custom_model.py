"""A user's own PyTorch model: a short language model whose connections over depth are a choice.

python examples/custom_model.py            # attnres
python examples/custom_model.py hyper      # any name of depthmix.list_mixers()
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

import depthmix

VOCAB, DIM, BLOCKS, LENGTH = 16, 32, 3, 24


class Attention(nn.Module):
    """Causal attention over what `read` returns: one mixture, two (for queries and keys, and for values) or three."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, h: Tensor | tuple[Tensor, ...]) -> Tensor:
        ways = h if isinstance(h, tuple) else (h,)
        h_q, h_k, h_v = ways[0], ways[1] if len(ways) == 3 else ways[0], ways[-1]
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(h_q), self.k(h_k), self.v(h_v)))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def mlp(dim: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


class Model(nn.Module):
    def __init__(self, mixer: str, **options: object) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCAB, DIM), nn.Parameter(0.1 * torch.randn(LENGTH, DIM))
        self.mixer = depthmix.create_mixer(mixer, dim=DIM, n_blocks=BLOCKS, **options)
        self.sublayers, self.norms = nn.ModuleList(), nn.ModuleList()
        for site, name in enumerate(self.mixer.layout.names):
            self.sublayers.append(Attention(DIM) if name == "attention" else mlp(DIM))
            # One norm per mixture.
            self.norms.append(nn.ModuleList(nn.RMSNorm(DIM) for _ in range(self.mixer.ways(site))))
        self.final_norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        state = self.mixer.start(self.embedding(ids) + self.position[: ids.shape[1]])
        for site, (norm, sublayer) in enumerate(zip(self.norms, self.sublayers, strict=True)):
            # A plain Transformer has: x = x + sublayer(norm(x))
            state = self.mixer.write(state, site, sublayer(self.mixer.read(state, site, norm)))
        return self.head(self.final_norm(self.mixer.finish(state)))


def batch(n: int = 16) -> Tensor:
    """Return sequences that repeat themselves after six tokens."""
    return torch.randint(VOCAB, (n, 6)).repeat(1, LENGTH // 6)


def main(mixer: str = "attnres", steps: int = 60, **options: object) -> list[float]:
    torch.manual_seed(0)
    model = Model(mixer, **options)
    optimizer = torch.optim.AdamW(depthmix.param_groups(model, weight_decay=0.1), lr=3e-3)
    losses = []
    for _ in range(steps):
        ids = batch()
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{mixer}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(
        "weights with which finish reads:",
        [round(w, 2) for w in depthmix.depth_mixing(model, batch(4))[0, -1].tolist()],
    )
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
