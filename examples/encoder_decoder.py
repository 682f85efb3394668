"""An encoder and a decoder with cross attention: two mixers, and three sites in every block of the decoder.

    python examples/encoder_decoder.py               # grn
    python examples/encoder_decoder.py attnres

Each stack has its own embedding, sublayers and mixer. The decoder's cross attention reads one mixture, for its queries. Its keys and
values come from the encoder's output.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

import depthmix

VOCAB, DIM, HEADS, BLOCKS, LENGTH = 12, 32, 2, 2, 8
# The token before the first.
START = VOCAB


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, h: Tensor | tuple[Tensor, ...], memory: Tensor | None = None) -> Tensor:
        ways = h if isinstance(h, tuple) else (h,)
        h_q, h_k, h_v = ways[0], ways[1] if len(ways) == 3 else ways[0], ways[-1]
        if memory is not None:
            h_k = h_v = memory
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(h_q), self.k(h_k), self.v(h_v)))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """An embedding with positions, and blocks with the given sites."""

    def __init__(self, mixer: str, sites: tuple[str, ...], causal: bool, **options: object) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCAB + 1, DIM), nn.Parameter(0.1 * torch.randn(LENGTH, DIM))
        self.mixer = depthmix.create_mixer(mixer, dim=DIM, n_blocks=BLOCKS, sites=sites, **options)
        self.sublayers, self.norms = nn.ModuleList(), nn.ModuleList()
        for site, name in enumerate(self.mixer.layout.names):
            mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
            self.sublayers.append(mlp if name == "mlp" else Attention(causal and name == "attention"))
            self.norms.append(nn.ModuleList(nn.RMSNorm(DIM) for _ in range(self.mixer.ways(site))))
        self.final_norm = nn.RMSNorm(DIM)

    def forward(self, ids: Tensor, memory: Tensor | None = None) -> Tensor:
        state = self.mixer.start(self.embedding(ids) + self.position[: ids.shape[1]])
        for site, name in enumerate(self.mixer.layout.names):
            h = self.mixer.read(state, site, self.norms[site])
            extra = (memory,) if name == "cross_attention" else ()
            state = self.mixer.write(state, site, self.sublayers[site](h, *extra))
        return self.final_norm(self.mixer.finish(state))


class EncoderDecoder(nn.Module):
    def __init__(self, mixer: str, **options: object) -> None:
        super().__init__()
        self.encoder = Stack(mixer, ("attention", "mlp"), causal=False, **options)
        self.decoder = Stack(mixer, ("attention", "cross_attention", "mlp"), causal=True, **options)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.decoder(target, self.encoder(source)))


def batch(n: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Return sequences, the decoder's inputs (their reverse, shifted by one token) and the decoder's targets."""
    source = torch.randint(VOCAB, (n, LENGTH))
    reversed_source = source.flip(1)
    return source, torch.cat([torch.full((n, 1), START), reversed_source[:, :-1]], dim=1), reversed_source


def main(mixer: str = "grn", steps: int = 60, **options: object) -> list[float]:
    torch.manual_seed(0)
    model = EncoderDecoder(mixer, **options)
    optimizer = torch.optim.AdamW(depthmix.param_groups(model, weight_decay=0.01), lr=5e-3)
    losses = []
    for _ in range(steps):
        source, target, expected = batch()
        loss = functional.cross_entropy(model(source, target).flatten(0, 1), expected.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{mixer}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    # A model with two mixers needs the name of one.
    for name in ("encoder.mixer", "decoder.mixer"):
        m = depthmix.depth_mixing(model, *batch(4)[:2], mixer=name)
        print(f"{name}, weights with which finish reads:", [round(w, 2) for w in m[0, -1].tolist()])
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
