"""Macs: MPS has no fp64, so none is made of anything that may be on a model's device."""

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from depthmix import Decoder, DecoderConfig, list_mixers
from depthmix.train.evaluate import evaluate, token_losses
from depthmix.train.generate import generate_tokens
from depthmix.train.optim import Muon

CPU = torch.device("cpu")


class LikeMps(TorchFunctionMode):
    """Every tensor counts as on the model's device until `.cpu()` was called on what it comes from."""

    def __init__(self):
        self.on_cpu = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = [a for a in args if isinstance(a, Tensor)]
        moved = function is Tensor.cpu or (given and all(any(a is t for t in self.on_cpu) for a in given))
        for t in out if isinstance(out, tuple) else (out,):
            if isinstance(t, Tensor) and moved:
                self.on_cpu.append(t)
            elif isinstance(t, Tensor) and t.dtype == torch.float64:
                raise TypeError(f"{function.__name__}: MPS has no float64")
        return out


def test_the_stand_in_for_a_mac_has_no_float64_either():
    with LikeMps():
        assert torch.ones(2).cpu().double().sum() == 2
        for make in (lambda: torch.ones(2).double(), lambda: torch.ones(2, dtype=torch.float64)):
            with pytest.raises(TypeError, match="MPS has no float64"):
                make()


@pytest.mark.parametrize("mixer", list_mixers())
def test_training_evaluation_and_generation_need_no_float64(mixer):
    config = DecoderConfig(vocab_size=7, dim=8, n_blocks=1, n_heads=2, mlp_dim=8, mixer=mixer)
    batch = torch.arange(8).reshape(2, 4) % 7
    with LikeMps():
        model = Decoder(config)
        token_losses(model, batch).mean().backward()
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
        Muon([p for p in model.sublayers.parameters() if p.ndim == 2], lr=0.1).step()
        evaluation = evaluate(model, {"": [batch]}, CPU, "auto", 1.0)
        list(generate_tokens(model, [1, 2], 2, 0.8, 0.9, 0, None))
    assert evaluation.tokens == 6
