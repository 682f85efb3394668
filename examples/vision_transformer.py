"""A vision transformer on generated images: patches, a class token, attention in all directions.

python examples/vision_transformer.py            # attnres
python examples/vision_transformer.py layerscale
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

import depthmix

SIZE, PATCH, DIM, BLOCKS, HEADS, CLASSES = 16, 4, 32, 3, 2, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, h: Tensor | tuple[Tensor, ...]) -> Tensor:
        ways = h if isinstance(h, tuple) else (h,)
        h_q, h_k, h_v = ways[0], ways[1] if len(ways) == 3 else ways[0], ways[-1]
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(h_q), self.k(h_k), self.v(h_v)))
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class VisionTransformer(nn.Module):
    def __init__(self, mixer: str, **options: object) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, DIM, PATCH, stride=PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.position = nn.Parameter(0.02 * torch.randn(1, (SIZE // PATCH) ** 2 + 1, DIM))
        self.mixer = depthmix.create_mixer(mixer, dim=DIM, n_blocks=BLOCKS, **options)
        self.sublayers, self.norms = nn.ModuleList(), nn.ModuleList()
        for site, name in enumerate(self.mixer.layout.names):
            mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
            self.sublayers.append(Attention() if name == "attention" else mlp)
            self.norms.append(nn.ModuleList(nn.LayerNorm(DIM) for _ in range(self.mixer.ways(site))))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)  # [B, patches, D]
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        state = self.mixer.start(x)
        for site, (norm, sublayer) in enumerate(zip(self.norms, self.sublayers, strict=True)):
            state = self.mixer.write(state, site, sublayer(self.mixer.read(state, site, norm)))
        return self.head(self.norm(self.mixer.finish(state))[:, 0])


def stripes(n: int = 32) -> tuple[Tensor, Tensor]:
    """Return images [n, 1, SIZE, SIZE] of stripes in one of four directions, at any phase, and the index of the direction."""
    label = torch.randint(CLASSES, (n,))
    angle, phase = label * torch.pi / CLASSES, 6.28 * torch.rand(n, 1, 1)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    wave = torch.sin(angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y + phase)
    return (wave + 0.3 * torch.randn(n, SIZE, SIZE)).unsqueeze(1), label


def main(mixer: str = "attnres", steps: int = 60, **options: object) -> list[float]:
    torch.manual_seed(0)
    model = VisionTransformer(mixer, **options)
    optimizer = torch.optim.AdamW(depthmix.param_groups(model, weight_decay=0.05), lr=2e-3)
    losses = []
    for _ in range(steps):
        images, label = stripes()
        loss = functional.cross_entropy(model(images), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    images, label = stripes(256)
    with torch.no_grad():
        accuracy = (model(images).argmax(-1) == label).float().mean()
    print(f"{mixer}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {accuracy:.0%} accuracy on new images")
    # Weights with which the head reads every sublayer's output at the class token.
    weights = depthmix.depth_mixing(model, images[:8], per_token=True)[:, 0, 0, -1].mean(0)
    print("the class token at the end:", [round(w, 2) for w in weights.tolist()])
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
