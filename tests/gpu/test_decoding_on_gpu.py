"""Decoding on a GPU: steps as CUDA graphs, kernels in bf16, prompts in chunks; against the whole forward in fp64."""

import copy
from typing import Any

import pytest
import torch

from depthmix import Decoder, DecoderConfig
from depthmix.models.decoding import Decoding
from depthmix.ops import use_backend

DEVICE = torch.device("cuda")
RULES: list[tuple[str, dict[str, Any]]] = [
    ("residual", {}),
    ("attnres", {}),
    ("attnres", {"block_size": 4}),
    ("attnres", {"block_size": 4, "ways": 2}),
    ("attnres", {"block_size": "all", "ways": 2, "output_gain": 0.5}),
    ("attnres", {"ways": 3}),
    ("dca", {}),
    ("grn", {}),
    ("denseformer", {}),
    ("mhc", {}),
]
VOCAB, NEW = 97, 4


def decoder(mixer: str, options: dict[str, Any], dim: int = 128, n_blocks: int = 10, **shape: Any) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=VOCAB, dim=dim, n_blocks=n_blocks, n_heads=4, mixer=mixer, mixer_options=options, **shape
    )
    with DEVICE:
        model = Decoder(config).requires_grad_(False)
    for p in model.mixer.parameters():
        p += 0.3 * torch.randn_like(p) / dim**0.5
    return model


def error(model: Decoder, dtype: torch.dtype, batch: int, prompt: int, chunk: int) -> float:
    """Of the logits after a prompt and after each of some tokens, in the 2-norm."""
    ids = torch.randint(VOCAB, (batch, prompt + NEW), device=DEVICE)
    with use_backend("reference"), torch.no_grad():
        expected = copy.deepcopy(model).double()(ids)[:, prompt - 1 :]
    decoding = Decoding(copy.deepcopy(model).to(dtype), batch, prompt + NEW, chunk=chunk)
    found = [decoding.prefill(ids[:, :prompt])]
    found += [decoding.step(ids[:, prompt + i]).clone() for i in range(NEW)]
    return float((torch.stack(found, 1).double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("mixer", "options"), RULES, ids=str)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-4), (torch.bfloat16, 5e-2)], ids=str)
def test_steps_in_a_cuda_graph(mixer: str, options: dict[str, Any], dtype: torch.dtype, allowed: float) -> None:
    assert error(decoder(mixer, options, qk_norm=True), dtype, 3, 20, 8) < allowed


@pytest.mark.parametrize(("mixer", "options"), [RULES[1], RULES[2], RULES[3], RULES[5]], ids=str)
@pytest.mark.parametrize("dim", [96, 1000, 2048])
def test_widths(mixer: str, options: dict[str, Any], dim: int) -> None:
    """Also those that are no power of two, and where a Full stack's sources do not fit in one launch."""
    assert error(decoder(mixer, options, dim), torch.float32, 1, 6, 6) < 2e-4


@pytest.mark.parametrize(("mixer", "options"), [("attnres", {"block_size": 2}), ("attnres", {}), ("dca", {})], ids=str)
def test_a_prompt_of_many_tokens(mixer: str, options: dict[str, Any]) -> None:
    """Chunks that are read in two phases."""
    model = decoder(mixer, options)
    assert error(model, torch.float32, 2, 1500, 700) < 2e-4
    assert error(model, torch.bfloat16, 2, 1500, 700) < 5e-2
