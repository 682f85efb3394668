"""Looking inside on a GPU: by kernels and in bf16 the same numbers, and within the time that is promised."""

import time
from typing import Any

import pytest
import torch

from depthmix import Decoder, DecoderConfig
from depthmix.insight import edge_effects, magnitudes, skip_effects
from depthmix.insight.edges import Cutting

random_data = pytest.importorskip("benchmarks.step").random_data
loop = pytest.importorskip("depthmix.train.loop")
TrainConfig = pytest.importorskip("depthmix.config").TrainConfig

SMALL = {"vocab_size": 64, "dim": 64, "n_blocks": 3, "n_heads": 2}
RECIPE = {"dim": 512, "n_blocks": 12, "n_heads": 8, "seq_len": 512, "batch_size": 64}  # gutenberg-54m
MIXERS = [
    ("residual", {}),
    ("attnres", {}),
    ("attnres", {"block_size": 4, "ways": 3}),
    ("dca", {"window": 1}),
    ("denseformer", {}),
    ("mudd", {}),
    ("hyper", {}),
    ("hyper", {"static": True}),
    ("mhc", {}),
    ("laurel", {}),
]
every_mixer = pytest.mark.parametrize(("mixer", "options"), MIXERS, ids=str)


def decoder(mixer: str, options: dict[str, object], **shape: int) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**{**SMALL, **shape}, mixer=mixer, mixer_options=options))
    with torch.no_grad():
        for p in model.mixer.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


@every_mixer
@torch.no_grad()
def test_with_nothing_cut_logits_are_the_models(mixer: str, options: dict[str, object]) -> None:
    """In bf16 no further away than bf16 itself is from fp32."""
    model = decoder(mixer, options).cuda()
    ids = torch.randint(64, (2, 33)).cuda()
    exact, bound = model(ids), 1e-4
    for low in (False, True):
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            expected = model(ids).float()
            bound = 2 * float((expected - exact).abs().max()) if low else bound
            for reader in (0, 3, model.mixer.n_sites):
                with Cutting(model.mixer, reader).applied([None] * 3):
                    found = model(ids).float()
                torch.testing.assert_close(found, expected.repeat(3, 1, 1), rtol=0, atol=bound)


@every_mixer
def test_the_gpu_measures_what_the_cpu_does(mixer: str, options: dict[str, object]) -> None:
    model, batch = decoder(mixer, options), torch.randint(64, (2, 33))
    results = []
    for device in ("cpu", "cuda"):
        model, batch = model.to(device), batch.to(device)
        rms = magnitudes(model, batch[:, :-1])
        edges, skips = edge_effects(model, [batch]), skip_effects(model, [batch])
        flat = [v for ways in rms["input_rms"] for v in ways] + rms["output_rms"] + rms["share"]
        results.append((torch.tensor(flat), torch.cat([c.flatten() for c in edges.change]), skips.change))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-3)  # matrix products may be in TF32


@pytest.mark.parametrize(("mixer", "options"), [("attnres", {"block_size": 4, "ways": 3}), ("mhc", {})], ids=str)
def test_all_edges_of_twelve_blocks_take_less_than_two_minutes(mixer: str, options: dict[str, object]) -> None:
    model = decoder(mixer, options, vocab_size=16384, dim=512, n_blocks=12, n_heads=8).cuda()
    batches = [torch.randint(16384, (8, 513)).cuda() for _ in range(2)]
    with torch.autocast("cuda", torch.bfloat16):
        edge_effects(model, [batches[0][:1, :65]])  # kernels are compiled
        begun = time.perf_counter()
        found = edge_effects(model, batches)
        seconds = time.perf_counter() - begun
    n = sum(c.numel() for c in found.change)
    print(f"\n{mixer} {options}: {n} edges over {found.tokens} tokens in {seconds:.1f} s")
    assert seconds < 120


def watched(trainer: Any, config: Any, name: str) -> tuple[float, float]:
    """Seconds of a step, and what looking at one costs."""
    for step in range(3):
        trainer.magnitudes(step)
        trainer.step(step)
    taken = []
    for step in range(3, 13):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        trainer.magnitudes(step)
        taken.append(time.perf_counter() - begun)
        trainer.step(step)
    begun = time.perf_counter()
    for step in range(13, 33):
        trainer.step(step)
    torch.cuda.synchronize()
    a_step, looking = (time.perf_counter() - begun) / 20, sorted(taken)[len(taken) // 2]
    config.dynamics_every = 1
    begun = time.perf_counter()
    for step in range(33, 43):
        trainer.step(step)
    torch.cuda.synchronize()
    norms = (time.perf_counter() - begun) / 10 - a_step
    print(f"\n{name}: a step {1e3 * a_step:.1f} ms, magnitudes {1e3 * looking:.1f}, norms {1e3 * norms:.1f}")
    return a_step, looking + norms


@pytest.mark.parametrize(
    ("mixer", "options"),
    [("residual", {}), ("attnres", {"block_size": 4}), ("dca", {}), ("mhc", {})],
    ids=str,
)
def test_dynamics_every_hundredth_step_take_at_most_two_percent(mixer: str, options: dict[str, object]) -> None:
    """Of the fastest steps there are, recorded ones."""
    config = TrainConfig(
        mixer=mixer, mixer_options=options, steps=1000, warmup=1, cuda_graph=True, data="random", quiet=True, **RECIPE
    )
    trainer = loop.Trainer(config, random_data(16384, 2**20), torch.device("cuda"))
    a_step, looking = watched(trainer, config, f"{mixer} {options}")
    assert looking < 0.02 * 100 * a_step


def test_under_fsdp2_too() -> None:
    from depthmix.parallel.layout import Layout
    from depthmix.parallel.world import join

    layout = {"shard": 1}
    config = TrainConfig(
        mixer="attnres", mixer_options={"block_size": 4}, steps=1000, warmup=1, data="random", quiet=True, parallel=layout, **RECIPE
    )  # fmt: skip
    with join(Layout.of(layout), "cuda", given=True) as world:
        trainer = loop.Trainer(config, random_data(16384, 2**20), world.device, world)
        a_step, looking = watched(trainer, config, "attnres under FSDP2")
    assert looking < 0.02 * 100 * a_step


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_watching_changes_no_step(cuda_graph: bool) -> None:
    sizes = {"dim": 64, "n_blocks": 2, "n_heads": 2, "seq_len": 32, "batch_size": 4}
    losses = []
    for every in (None, 2):
        config = TrainConfig(
            mixer="attnres", steps=6, warmup=1, cuda_graph=cuda_graph, data="random", dynamics_every=every, **sizes
        )
        trainer = loop.Trainer(config, random_data(64, 4096), torch.device("cuda"))
        losses.append([])
        for step in range(6):
            if trainer.records_dynamics(step):
                trainer.magnitudes(step)
            losses[-1].append(trainer.step(step)[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert trainer.gradients is not None
    assert bool((trainer.gradients > 0).all())
