"""The trainer's step on a GPU, where the update is launched before anyone knows whether the loss is usable."""

import math
import time

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
        assert trainer.is_usable(*trainer.step(step))
    weight = trainer.model.final_norm.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(math.inf)
    before = numbers()
    assert not trainer.is_usable(*trainer.step(2))
    assert all(map(torch.equal, numbers(), before))
    with torch.no_grad():
        weight.copy_(good)
    assert trainer.is_usable(*trainer.step(3))
    assert not any(map(torch.equal, numbers(), before))


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_step_is_launched_without_waiting_and_timed_by_the_gpu(cuda_graph: bool, monkeypatch) -> None:
    sizes = {"dim": 64, "n_blocks": 2, "n_heads": 2, "seq_len": 32, "batch_size": 4}
    config = TrainConfig(steps=100, warmup=1, cuda_graph=cuda_graph, data="random tokens", quiet=True, **sizes)
    trainer = loop.Trainer(config, random_data(64, 4096), torch.device("cuda"))
    for step in range(3):
        trainer.step(step)
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # about half a second
    begun = time.perf_counter()
    trainer.launch(3)
    launched = time.perf_counter() - begun
    torch.cuda.synchronize()
    waited = time.perf_counter() - begun
    assert launched < waited / 2
    assert trainer.clock.seconds()[-1] < waited / 2
    get = trainer.batches.get
    monkeypatch.setattr(trainer.batches, "get", lambda step: (time.sleep(0.3), get(step))[1])  # a busy host
    for step in (4, 5):
        trainer.step(step)
    assert max(trainer.clock.seconds()[-2:]) < 0.3
    assert len(trainer.clock.seconds()) == 6
