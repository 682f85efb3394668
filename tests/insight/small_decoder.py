"""A decoder of a few blocks whose mixer is moved off its initial values, and tokens for it."""

import torch

from depthmix import Decoder, DecoderConfig

B, T, DIM, VOCAB = 2, 4, 16, 13


def decoder(mixer, options=None, n_blocks=2, dtype=torch.float64, random=True):
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "dim": DIM, "n_blocks": n_blocks, "n_heads": 2, "mlp_dim": 24}
    model = Decoder(DecoderConfig(**shape, mixer=mixer, mixer_options=options or {})).to(dtype)
    if random:
        with torch.no_grad():
            for p in model.mixer.parameters():
                p += 0.3 * torch.randn_like(p)
    return model


def tokens(rows=B, length=T, seed=1):
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
