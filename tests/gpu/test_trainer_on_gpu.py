"""The trainer's step on a GPU, where the update is launched before anyone knows whether the loss is usable."""

import math

import pytest
import torch
from torch import Tensor

random_data = pytest.importorskip("benchmarks.step").random_data
loop = pytest.importorskip("depthmix.train.loop")
TrainConfig = pytest.importorskip("depthmix.config").TrainConfig


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("mixer", ["residual", "attnres"])
def test_an_unusable_step_leaves_the_weights_alone(mixer: str, cuda_graph: bool) -> None:
    sizes = {"dim": 64, "n_blocks": 2, "n_heads": 2, "seq_len": 32, "batch_size": 4}
    config = TrainConfig(
        mixer=mixer, steps=100, warmup=1, cuda_graph=cuda_graph, data="random tokens", quiet=True, **sizes
    )
    trainer = loop.Trainer(config, random_data(64, 4096), torch.device("cuda"))
    assert trainer.fused
    adamw = trainer.optimizers["adamw"]

    def numbers() -> list[Tensor]:
        state = [t for p in trainer.parameters for t in adamw.state[p].values()]
        return [t.detach().clone() for t in (*trainer.parameters, *state)]

    for step in range(2):
        assert trainer.usable(*trainer.step(step))
    weight = trainer.model.final_norm.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(math.inf)
    before = numbers()
    assert not trainer.usable(*trainer.step(2))
    assert all(map(torch.equal, numbers(), before))
    with torch.no_grad():
        weight.copy_(good)
    assert trainer.usable(*trainer.step(3))
    assert not any(map(torch.equal, numbers(), before))
