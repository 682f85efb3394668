"""A vision transformer (Dosovitskiy et al. 2021, arXiv 2010.11929) with a choice of rules for mixing over depth.

Patches become tokens, with positions added and an optional class token in front. The blocks are the decoder's, with attention in all
directions. After the final norm, the head reads the class token or the mean over patches (Beyer et al. 2022, arXiv 2205.01580).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from depthmix.models.blocks import Blocks, as_autocast, complete_sizes
from depthmix.models.layers import Context, MlpKind, in_all_directions
from depthmix.names import DEFAULT_MIXER

HEAD_STD = 0.02
# A size that `complete_sizes` fills in.
LEFT_OUT: Any = None


@dataclass
class VitConfig:
    """Size and shape of a vision transformer."""

    image_size: tuple[int, int]  # height and width; one number for both
    patch_size: int
    n_classes: int
    dim: int
    n_blocks: int
    n_heads: int
    channels: int = 3
    pool: Literal["token", "mean"] = "mean"  # what the head reads
    positions: Literal["learned", "sincos"] = "learned"
    n_kv_heads: int = LEFT_OUT  # as many as heads
    head_dim: int = LEFT_OUT  # dim / n_heads
    mlp: MlpKind = "swiglu"
    mlp_dim: int = LEFT_OUT  # 4 dim for relu2; 8/3 dim, rounded up to a multiple of 64, for swiglu
    qk_norm: bool = False  # RMSNorm on the queries and keys of every head
    qk_gain: bool = True  # with learned gains
    norm_eps: float = 1e-6
    output_scale: float = 1.0  # factor on the initial output projections
    mixer: str = DEFAULT_MIXER
    mixer_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = (self.image_size,) * 2 if isinstance(self.image_size, int) else tuple(self.image_size)
        if len(size) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in size):
            raise ValueError(f"image_size must be height and width, or one number for both, got {self.image_size!r}")
        self.image_size = size
        complete_sizes(self, "patch_size", "n_classes", "channels")
        if any(n % self.patch_size for n in size):
            raise ValueError(f"patch_size must divide images of {size[0]} x {size[1]}, got {self.patch_size}")
        if self.pool not in ("token", "mean"):
            raise ValueError(f"pool must be 'token' or 'mean', got {self.pool!r}")
        if self.positions not in ("learned", "sincos"):
            raise ValueError(f"positions must be 'learned' or 'sincos', got {self.positions!r}")
        if self.positions == "sincos" and self.dim % 4:
            raise ValueError(f"dim must be a multiple of 4 for sincos positions, got {self.dim}")

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches vertically and horizontally."""
        return self.image_size[0] // self.patch_size, self.image_size[1] // self.patch_size


def sincos_positions(grid: tuple[int, int], dim: int, device: torch.device) -> Tensor:
    """Compute fixed positions [patches, dim] in fp32. Sines and cosines of the row and of the column get a quarter of
    the channels each.
    """
    frequency = 10000.0 ** -(torch.arange(dim // 4, device=device, dtype=torch.float32) / (dim // 4))
    rows, columns = (torch.arange(n, device=device, dtype=torch.float32).unsqueeze(-1) * frequency for n in grid)
    rows, columns = rows.repeat_interleave(grid[1], 0), columns.repeat(grid[0], 1)  # [patches, dim / 4]
    return torch.cat([rows.sin(), rows.cos(), columns.sin(), columns.cos()], dim=-1)


class PatchEmbedding(nn.Module):
    """Images [B, C, H, W] to tokens [B, T, D]: patches plus positions, after a class token if there is one."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Conv2d(config.channels, config.dim, config.patch_size, stride=config.patch_size)
        n_patches = config.grid[0] * config.grid[1]
        learned = config.positions == "learned"
        self.positions = nn.Parameter(torch.empty(n_patches, config.dim)) if learned else None
        self.token = nn.Parameter(torch.empty(config.dim)) if config.pool == "token" else None

    def reset_parameters(self) -> None:
        """Draw patches from N(0, 1/fan_in) and positions from N(0, 1/dim), as in the code of Beyer et al., and set the
        class token to zero.
        """
        nn.init.normal_(self.patches.weight, std=1 / math.sqrt(self.patches.weight[0].numel()))
        if self.patches.bias is not None:
            nn.init.zeros_(self.patches.bias)
        if self.positions is not None:
            nn.init.normal_(self.positions, std=1 / math.sqrt(self.config.dim))
        if self.token is not None:
            nn.init.zeros_(self.token)

    def forward(self, images: Tensor) -> Tensor:
        c = self.config
        if images.ndim != 4 or tuple(images.shape[1:]) != (c.channels, *c.image_size):
            expected = f"[B, {c.channels}, {c.image_size[0]}, {c.image_size[1]}]"
            raise ValueError(f"forward: expected images of shape {expected}, got {list(images.shape)}")
        x = self.patches(images).flatten(2).transpose(1, 2)  # [B, patches, D]
        positions = sincos_positions(c.grid, c.dim, x.device) if self.positions is None else self.positions
        x = x + positions.to(x.dtype)
        if self.token is not None:
            x = torch.cat([self.token.to(x.dtype).expand(len(x), 1, -1), x], dim=1)
        return x


class Vit(Blocks):
    """An image classifier: images [B, C, H, W] in, logits [B, classes] out.

    Examples:
        >>> model = Vit(VitConfig(image_size=32, patch_size=4, n_classes=10, dim=64, n_blocks=6, n_heads=4))
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.config = config
        self._build_mixer(config)
        self.embedding = PatchEmbedding(config)
        self._build_blocks(config)
        self.head = nn.Linear(config.dim, config.n_classes, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw matrices from N(0, 1/fan_in), output projections times output_scale / sqrt(sites), and the head from
        N(0, 0.02²). The mixer resets itself.
        """
        self._reset_blocks()
        self.embedding.reset_parameters()
        nn.init.normal_(self.head.weight, std=HEAD_STD)
        self.mixer.reset_parameters()

    def forward(self, images: Tensor) -> Tensor:
        x = as_autocast(self.embedding(images))  # [B, T, D]
        x = self.through_blocks(x, Context(None, None, None, None, in_all_directions))
        return self.head(x[:, 0] if self.config.pool == "token" else x.mean(1))
