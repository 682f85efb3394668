"""`deterministic: true` on a GPU: two runs of one seed give the same losses, bit for bit, and what that costs."""

import time

import pytest
import torch

from depthmix import Decoder, DecoderConfig

random_data = pytest.importorskip("benchmarks.step").random_data
loop = pytest.importorskip("depthmix.train.loop")
TrainConfig = pytest.importorskip("depthmix.config").TrainConfig
deterministic = pytest.importorskip("depthmix.train.deterministic").deterministic
token_losses = pytest.importorskip("depthmix.train.evaluate").token_losses
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


EVERY = [
    *ARMS,
    ("attnres", {}),
    ("attnres", {"block_size": 4, "ways": 3}),
    ("dca", {"window": 4}),
    ("grn", {"version": 3}),
]


@pytest.mark.parametrize("dim", [512, 1024, 2048])
@pytest.mark.parametrize(("mixer", "options"), EVERY, ids=str)
def test_a_pass_repeated_is_the_same(mixer: str, options: dict, dim: int) -> None:
    """At the size of a real step, with parameters away from where they begin: a kernel that races with itself shows here."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        shape = {"vocab_size": 512, "dim": dim, "n_blocks": 6, "n_heads": 4}
        model = Decoder(DecoderConfig(**shape, mixer=mixer, mixer_options=options))
    with torch.no_grad():
        for p in model.mixer.parameters():
            p += 0.05 * torch.randn_like(p)
    batch = torch.randint(512, (32768 // 512, 513), device="cuda")
    expected: list[torch.Tensor] = []
    with deterministic(True):
        for turn in range(5):
            elsewhere = torch.empty(1 + turn << 22, device="cuda")  # other addresses for what comes
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = token_losses(model, batch).mean()
            loss.backward()
            found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            expected = expected or found
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            del elsewhere


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "dim", "rows", "n"), [(32768, 512, 37, 1), (8192, 512, 25, 4), (9000, 1024, 70, 2), (4100, 2048, 12, 1)]
)
def test_logits_lose_nothing(tokens: int, dim: int, rows: int, n: int, kind: torch.dtype) -> None:
    """fp32 queries times half-precision sources are exact to fp32's rounding: a product that reads what is being overwritten is not."""
    tiling = pytest.importorskip("depthmix.ops.depth_attention.kernels.tiling")
    sources = [torch.randn(tokens, dim, device="cuda").to(kind) for _ in range(n)]
    u = 0.1 * torch.randn(rows, dim, device="cuda")
    found = tiling.scores(tiling.SplitRows.of(u, kind), sources, 1e-6)
    wide = torch.stack(sources).double()
    expected = torch.einsum("rd,ntd->rnt", u.double(), wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-4)


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
