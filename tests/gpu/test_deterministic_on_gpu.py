"""`deterministic: true` on a GPU: two runs of one seed give the same losses, bit for bit, and what that costs."""

import time

import pytest
import torch

random_data = pytest.importorskip("benchmarks.step").random_data
loop = pytest.importorskip("depthmix.train.loop")
TrainConfig = pytest.importorskip("depthmix.config").TrainConfig
deterministic = pytest.importorskip("depthmix.train.deterministic").deterministic
compiled_once = pytest.importorskip("depthmix.train.compiled").compiled_once

ARMS = [
    ("residual", {}),
    ("attnres", {"block_size": 4, "ways": 2}),
    ("dca", {}),
    ("hyper", {}),
    ("mhc", {}),
    ("mudd", {}),
]
SIZES = {"dim": 256, "n_blocks": 4, "n_heads": 4, "seq_len": 256, "batch_size": 32}


def losses(mixer: str, options: dict, on: bool, steps: int = 40, **changes: object) -> tuple[list[float], float]:
    """The loss of every step, and seconds a step."""
    config = TrainConfig(
        mixer=mixer,
        mixer_options=options,
        steps=steps,
        warmup=5,
        lr=3e-3,
        data="random tokens",
        quiet=True,
        deterministic=on,
        **{**SIZES, **changes},
    )
    with deterministic(on):
        trainer = loop.Trainer(config, random_data(4096, 1 << 20), torch.device("cuda"))
        found = [trainer.step(step)[0] for step in range(steps)]
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for step in range(20):
            trainer.step(step)
        torch.cuda.synchronize()
        return found, (time.perf_counter() - begun) / 20


@pytest.mark.parametrize("setting", [{}, {"cuda_graph": True}, {"compile": "sublayers", "cuda_graph": True}], ids=str)
@pytest.mark.parametrize(("mixer", "options"), ARMS, ids=lambda x: x if isinstance(x, str) else "")
def test_two_runs_of_one_seed_are_the_same(mixer: str, options: dict, setting: dict) -> None:
    one, two = (losses(mixer, options, True, **setting)[0] for _ in range(2))
    assert one == two
    assert len(set(one)) > 30


def test_they_are_so_after_other_models_were_compiled_too() -> None:
    """As in a study, where what was compiled is kept."""
    setting = {"compile": "sublayers", "cuda_graph": True}
    with compiled_once():
        first, *_ = (losses(m, o, True, **setting)[0] for m, o in ARMS[:3])
        losses("dca", {}, True, **setting)
        assert losses("residual", {}, True, **setting)[0] == first


def test_what_it_costs(capsys: pytest.CaptureFixture) -> None:
    """At the size of the 54M recipe; printed; a half more would be too much."""
    size = {
        "dim": 512,
        "n_blocks": 12,
        "n_heads": 8,
        "seq_len": 512,
        "batch_size": 64,
        "compile": "sublayers",
        "cuda_graph": True,
    }
    free, fixed = (losses("residual", {}, on, steps=10, **size)[1] for on in (False, True))
    with capsys.disabled():
        print(f"\n54M step: {1000 * free:.2f} ms, in a fixed order {1000 * fixed:.2f} ms ({fixed / free:.3f})")
    assert fixed < 1.5 * free
