"""Random numbers of a training's own on a GPU, whose generator is another one."""

import threading

import pytest
import torch
from torch.nn import functional

from depthmix.mixers import register, registry
from depthmix.mixers.residual import Residual
from depthmix.train.loop import train
from train import small
from train.runs import metrics

for package in ("yaml", "tokenizers"):
    pytest.importorskip(package)


@pytest.fixture
def noisy(monkeypatch):
    """A rule of somebody's own that draws in every read while it trains."""
    monkeypatch.setattr(registry, "_MIXERS", dict(registry._MIXERS))

    class Noisy(Residual):
        def _read(self, state, site):
            return functional.dropout(super()._read(state, site), 0.1, self.training)

    register("noisy")(Noisy)
    return "noisy"


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("mixer", ["attnres", "noisy"])
def test_a_training_leaves_torchs_generators_alone(tmp_path, noisy, mixer, cuda_graph):
    changes = {"mixer": mixer, "device": "cuda", "cuda_graph": cuda_graph, "deterministic": True, "steps": 12}
    found = []
    for i in range(2):
        torch.manual_seed(i)
        torch.rand(3, device="cuda")
        before = torch.get_rng_state(), torch.cuda.get_rng_state()
        found.append(metrics(train(small.config(tmp_path / f"run-{i}", **changes))))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.equal(torch.cuda.get_rng_state(), before[1])
    assert found[0] == found[1]


def test_two_trainings_that_draw_in_their_steps(tmp_path, noisy):
    configs = [{"seed": i, "mixer": noisy, "device": "cuda", "steps": 12} for i in range(2)]
    expected = [metrics(train(small.config(tmp_path / f"alone-{i}", **c))) for i, c in enumerate(configs)]
    found = [None] * 2

    def work(i):
        found[i] = metrics(train(small.config(tmp_path / f"beside-{i}", **configs[i])))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
