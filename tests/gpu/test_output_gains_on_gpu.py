"""Gains of outputs in the weights of compiled sublayers, as training has them: as close to fp64 as the rule's own products."""

import copy

import pytest
import torch

from depthmix import Decoder, DecoderConfig
from depthmix.insight.intercept import intercepted

SIZES = {"vocab_size": 64, "dim": 256, "n_blocks": 2, "n_heads": 4, "mlp": "relu2"}


def gradients(model: Decoder, ids: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        out = model(ids).double()
    return [out.detach(), *torch.autograd.grad(out.square().mean(), list(model.parameters()))]


@pytest.mark.parametrize("mixer", ["layerscale", "rezero"])
def test_compiled(mixer: str) -> None:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(mixer=mixer, **SIZES)).cuda()
    with torch.no_grad():
        for p in model.mixer.parameters():
            p.normal_(std=0.5)
    ids = torch.randint(64, (8, 128), device="cuda")
    exact = gradients(copy.deepcopy(model).double(), ids, torch.float64)
    for sublayer in model.sublayers:
        sublayer.compile()
    found = gradients(model, ids, torch.bfloat16)
    with intercepted(model.mixer):
        expected = gradients(model, ids, torch.bfloat16)
    for a, b, c in zip(found, expected, exact, strict=True):
        assert (a - c).norm() <= 1.5 * (b - c).norm() + 1e-6 * c.norm()
    gamma = dict(zip((n for n, _ in model.named_parameters()), found[1:], strict=True))
    assert all(gamma[f"mixer.{name}"].abs().min() > 0 for name, _ in model.mixer.named_parameters())
