"""The trainer's step on a GPU, where the update is launched before anyone knows whether the loss is usable."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

np = pytest.importorskip("numpy")
dataset = pytest.importorskip("depthmix.train.dataset")
loop = pytest.importorskip("depthmix.train.loop")
TrainConfig = pytest.importorskip("depthmix.train.config").TrainConfig

VOCAB = 64


def random_tokens() -> object:
    ids = np.random.default_rng(0).integers(0, VOCAB, 4096)
    splits = {name: dataset.Split(name, 4096, 4096, 1, [ids]) for name in ("train", "val")}
    return dataset.TokenData(Path("random"), {"vocab_size": VOCAB, "tokenizer": "none"}, splits)


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("mixer", ["residual", "attnres"])
def test_an_unusable_step_leaves_the_weights_alone(mixer: str, cuda_graph: bool) -> None:
    sizes = {"dim": 64, "n_blocks": 2, "n_heads": 2, "seq_len": 32, "batch_size": 4}
    config = TrainConfig(
        mixer=mixer, steps=100, warmup=1, cuda_graph=cuda_graph, data="random tokens", quiet=True, **sizes
    )
    trainer = loop.Trainer(config, random_tokens(), torch.device("cuda"))
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
