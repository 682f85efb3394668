"""The experiments of examples/experiments on a GPU: precision of a pass with every gradient, and steps that are compiled and recorded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from depthmix import create_mixer
from depthmix.compare.modules import load_modules
from depthmix.mixers import registry
from depthmix.ops import use_backend
from gpu import exact
from gpu.exact import BF16, FP32, draw, error

random_data = pytest.importorskip("benchmarks.step").random_data
loop = pytest.importorskip("depthmix.train.loop")
TrainConfig = pytest.importorskip("depthmix.config").TrainConfig

RULES: dict[str, dict[str, Any]] = {
    "attention_reads": {"block_size": 8},
    "embedding_again": {},
    "gate_apart": {"block_size": 4, "values": True},
    "low_rank_query": {"block_size": 4},
    "attnres_on_streams": {"block_size": 4},
    "softmax_dca": {},
}
every_rule = pytest.mark.parametrize("name", RULES)
TOLERANCE = {
    BF16: (1e-2, 6e-2),
    FP32: (1e-5, 1e-4),
}  # of the output, of gradients through many sites, each of which rounds


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MIXERS", dict(registry._MIXERS))
    load_modules(Path(__file__).resolve().parent, ["../../examples/experiments"], "modules")


def passed(mixer: nn.Module, norms: nn.ModuleList, x: Tensor, weight: Tensor) -> list[Tensor]:
    """The output of a pass whose sublayers scale channels, and its gradients."""
    x = x.detach().requires_grad_()
    state: Any = mixer.start(x)
    for site in range(mixer.n_sites):
        h = mixer.read(state, site, norms[site])
        reads = h if isinstance(h, tuple) else (h,)
        y = sum(t * w.to(t.dtype) for t, w in zip(reads, weight[site], strict=False))
        state = mixer.write(state, site, y)
    out = mixer.finish(state)
    direction = draw(*out.shape, seed=7).to(out.dtype)
    grads = torch.autograd.grad(out, [x, *mixer.parameters()], direction, allow_unused=True)
    return [out, *(g for g in grads if g is not None)]


def check_precision(name: str, dtype: torch.dtype, tokens: int, dim: int) -> None:
    """On values that the sources' dtype holds, against the reference in fp64."""
    mixer = create_mixer(name, dim=dim, n_blocks=4, **RULES[name]).to(exact.DEVICE)
    for i, p in enumerate(mixer.parameters()):
        p.data += draw(*p.shape, seed=100 + i, scale=0.3 if dim not in p.shape else 0.3 / dim**0.5)
    norms = nn.ModuleList(nn.ModuleList(nn.RMSNorm(dim, eps=1e-5) for _ in range(mixer.ways(s))) for s in range(8))
    norms.to(exact.DEVICE)
    x, weight = draw(tokens, dim, dtype=dtype), 1 + draw(8, 3, dim, seed=5, scale=0.3).to(dtype)
    with use_backend("triton"):
        found = passed(mixer, norms, x, weight)
    with use_backend("reference"):
        expected = passed(mixer.double(), norms.double(), x.double(), weight.double())
    assert len(found) == len(expected)
    output, gradient = TOLERANCE[dtype]
    assert error(found[0], expected[0]) <= output
    for got, wanted in zip(found[1:], expected[1:], strict=True):
        assert error(got, wanted) <= gradient


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@every_rule
def test_output_and_gradients_are_those_of_the_reference(name: str, dtype: torch.dtype) -> None:
    check_precision(name, dtype, 1000, 512)  # from 512 tokens on, attnres works out logits beforehand


@pytest.mark.parametrize("compiled", ["off", "sublayers"])
@every_rule
def test_a_recorded_step_is_the_step(name: str, compiled: str) -> None:
    sizes = {"dim": 64, "n_blocks": 3, "n_heads": 2, "seq_len": 32, "batch_size": 4, "mlp": "swiglu"}
    rule = {"mixer": name, "mixer_options": RULES[name], "compile": compiled}
    losses = []
    for graph in (False, True):
        config = TrainConfig(
            steps=100, warmup=1, cuda_graph=graph, data="random tokens", quiet=True, seed=0, **rule, **sizes
        )
        trainer = loop.Trainer(config, random_data(64, 4096), torch.device("cuda"))
        losses.append([trainer.step(step)[0] for step in range(5)])
    assert losses[0] == pytest.approx(losses[1], abs=5e-3)
    assert losses[1][-1] != losses[1][0]
