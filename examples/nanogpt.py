"""A script in the style of nanoGPT: fused qkv projections, learned positions, LayerNorm, bytes of a text.

    python examples/nanogpt.py                 # attnres with a mixture of its own for the values (ways=2)
    python examples/nanogpt.py dca             # three mixtures, for queries, keys and values

The differences to a plain script are the mixer, a norm per mixture, three lines of `forward`, and `qkv`.
"""

import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import depthmix

n_layer, n_head, n_embd, block_size, batch_size, vocab_size = 3, 2, 32, 48, 8, 256
learning_rate, weight_decay = 3e-3, 0.1


def qkv(fused: nn.Linear, h: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compute queries, keys and values with one fused projection [3D, D], from one, two or three mixtures.

    The weight stays in one piece, so checkpoints and initialisation do not change. Each mixture uses its own rows of the weight.
    """
    if isinstance(h, Tensor):
        return fused(h).chunk(3, dim=-1)
    rows = fused.out_features // 3
    # With two mixtures, queries and keys share the first.
    sizes = {2: (2 * rows, rows), 3: (rows, rows, rows)}[len(h)]
    parts = map(functional.linear, h, fused.weight.split(sizes), fused.bias.split(sizes))
    return torch.cat(list(parts), dim=-1).chunk(3, dim=-1)


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, h: Tensor | tuple[Tensor, ...]) -> Tensor:
        q, k, v = (t.unflatten(-1, (n_head, -1)).transpose(1, 2) for t in qkv(self.c_attn, h))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, h: Tensor) -> Tensor:
        return self.c_proj(functional.gelu(self.c_fc(h)))


class GPT(nn.Module):
    def __init__(self, mixer: str, **options: object) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.mixer = depthmix.create_mixer(mixer, dim=n_embd, n_blocks=n_layer, **options)
        names = self.mixer.layout.names
        self.h = nn.ModuleList(CausalSelfAttention() if name == "attention" else MLP() for name in names)
        self.ln = nn.ModuleList(
            nn.ModuleList(nn.LayerNorm(n_embd) for _ in range(self.mixer.ways(s))) for s in range(len(names))
        )
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)
        self.apply(self._init_weights)  # it cannot touch the mixer, which contains no Linear and no Embedding
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=0.02 / math.sqrt(self.mixer.n_sites))
        self.lm_head.weight = self.wte.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        state = self.mixer.start(self.wte(idx) + self.wpe.weight[: idx.shape[1]])
        for site, (ln, sublayer) in enumerate(zip(self.ln, self.h, strict=True)):
            state = self.mixer.write(state, site, sublayer(self.mixer.read(state, site, ln)))
        logits = self.lm_head(self.ln_f(self.mixer.finish(state)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(mixer: str = "attnres", steps: int = 60, **options: object) -> list[float]:
    if not options and mixer == "attnres":
        options = {"block_size": 2, "ways": 2}
    torch.manual_seed(1337)
    text = sorted((Path(__file__).parents[1] / "corpora" / "sotu").glob("*.txt"))[0].read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = GPT(mixer, **options)
    optimizer = torch.optim.AdamW(depthmix.param_groups(model, weight_decay), lr=learning_rate, betas=(0.9, 0.95))
    losses = []
    for _ in range(steps):
        at = torch.randint(len(data) - block_size - 1, (batch_size, 1)) + torch.arange(block_size + 1)
        loss = model(data[at[:, :-1]], data[at[:, 1:]])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    print(f"{mixer} {options}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
