"""A small model of every mixer as Hugging Face sees it, away from its initial values."""

import torch

from depthmix import DecoderConfig
from depthmix.models.exchange import FIELDS

VOCAB, DIM, BLOCKS, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 13, 16, 3, 4, 2, 6, 8
SITES = 2 * BLOCKS


def decoder_config(mixer="attnres", **fields):
    shape = {"vocab_size": VOCAB, "dim": DIM, "n_blocks": BLOCKS, "n_heads": HEADS, "mlp_dim": 24}
    return DecoderConfig(**{**shape, "n_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "mixer": mixer, **fields})


def hf_config(mixer="attnres", fields=None, **kwargs):
    from depthmix.hf import DepthmixConfig  # transformers takes seconds to import

    config = decoder_config(mixer, **(fields or {}))
    return DepthmixConfig(**{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()}, **kwargs)


def causal_lm(mixer="attnres", fields=None, **kwargs):
    """A causal language model in eval mode; kwargs go to its configuration."""
    from depthmix.hf import DepthmixForCausalLM

    torch.manual_seed(0)
    model = DepthmixForCausalLM(hf_config(mixer, fields, **kwargs)).eval()
    with torch.no_grad():
        for p in model.model.mixer.parameters():
            p += 0.3 * torch.randn_like(p)
    return model


def as_decoder(model):
    """The same weights in a Decoder."""
    from depthmix import Decoder

    decoder = Decoder(model.config.decoder_config()).to(model.dtype)
    names = {k.removeprefix("model.").replace("lm_head.", "head."): v for k, v in model.state_dict().items()}
    decoder.load_state_dict(names)
    return decoder.eval()


def tokens(batch=2, length=LENGTH, seed=1):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
