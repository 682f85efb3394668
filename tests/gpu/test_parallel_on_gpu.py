"""DDP and FSDP2 over NCCL in a world of one process: the trainer's own losses, kernels included, and its checkpoint comes back."""

from pathlib import Path

import pytest

random_data = pytest.importorskip("benchmarks.step").random_data
loop = pytest.importorskip("depthmix.train.loop")
TrainConfig = pytest.importorskip("depthmix.config").TrainConfig
DEVICE = "cuda"


def losses(trainer: loop.Trainer, steps: range) -> list[float]:
    return [trainer.step(step)[0] for step in steps]


@pytest.mark.parametrize("layout", [{"dp": 1}, {"shard": 1}], ids=str)
@pytest.mark.parametrize("mixer", ["residual", "attnres", "dca", "mhc"])
def test_a_world_of_one_trains_as_without(tmp_path: Path, mixer: str, layout: dict[str, int]) -> None:
    from depthmix.parallel.layout import Layout
    from depthmix.parallel.world import join
    from depthmix.runs.checkpoint import latest_checkpoint
    from depthmix.runs.saver import open_saver

    sizes = {"dim": 64, "n_blocks": 2, "n_heads": 2, "seq_len": 32, "batch_size": 4}
    config = TrainConfig(mixer=mixer, steps=100, warmup=1, data="random tokens", quiet=True, parallel=layout, **sizes)
    data = random_data(64, 4096)
    with join(Layout.of(layout), DEVICE, given=True) as world:
        expected = losses(loop.Trainer(config, data, world.device), range(4))
        trainer = loop.Trainer(config, data, world.device, world)
        found = losses(trainer, range(2))
        saver = open_saver(world, tmp_path / "checkpoints", 1, lambda path: None)
        saver.save(2, *trainer.tensors(), {"seconds": 0.0, "skipped": 0, "val_loss": None})
        found += losses(trainer, range(2, 4))  # while it is written
        saver.wait()
        assert found == pytest.approx(expected, rel=1e-2)
        saved = latest_checkpoint(tmp_path / "checkpoints", tensors=False)
        assert saved is not None
        again = loop.Trainer(config, data, world.device, world)
        again.restore(saved)
        assert losses(again, range(2, 4)) == pytest.approx(found[2:], rel=1e-3)
