"""DDP and FSDP2 over NCCL: the trainer's own losses, kernels included, in a world of one process and, where NCCL allows it, of two on one GPU."""

import socket
import time
from pathlib import Path

import pytest
import torch
from torch import multiprocessing

from gpu.small_training import losses, take_part, training

pytest.importorskip("benchmarks.step")
loop = pytest.importorskip("depthmix.train.loop")
DEVICE = "cuda"
LIMIT = 180  # seconds until two processes are taken to hang
REFUSED = "Duplicate GPU detected"  # what NCCL says of two ranks on one device


@pytest.mark.parametrize("layout", [{"dp": 1}, {"shard": 1}], ids=str)
@pytest.mark.parametrize("mixer", ["residual", "attnres", "dca", "mhc"])
def test_a_world_of_one_trains_as_without(tmp_path: Path, mixer: str, layout: dict[str, int]) -> None:
    from depthmix.parallel.layout import Layout
    from depthmix.parallel.world import join
    from depthmix.runs.checkpoint import latest_checkpoint
    from depthmix.runs.saver import open_saver

    config, data = training(mixer, layout)
    with join(Layout.of(layout), DEVICE, given=True) as world:
        expected = losses(loop.Trainer(config, data, world.device), range(4))
        trainer = loop.Trainer(config, data, world.device, world)
        found = losses(trainer, range(2))
        saver = open_saver(world, tmp_path / "checkpoints", 1, lambda path: None, trainer.parameter_names)
        saver.save(2, *trainer.checkpoint_tensors(), {"seconds": 0.0, "skipped": 0, "val_loss": None})
        found += losses(trainer, range(2, 4))  # while it is written
        saver.wait()
        assert found == pytest.approx(expected, rel=1e-2)
        saved = latest_checkpoint(tmp_path / "checkpoints", warn=pytest.fail, tensors=False)
        assert saved is not None
        again = loop.Trainer(config, data, world.device, world)
        again.restore(saved)
        assert losses(again, range(2, 4)) == pytest.approx(found[2:], rel=1e-3)


@pytest.mark.parametrize("layout", [{"dp": 1}, {"shard": 1}], ids=str)
def test_launching_a_step_waits_for_nothing(layout: dict[str, int]) -> None:
    """A host that waits in the middle of a step leaves the GPU idle while it launches the rest."""
    from depthmix.parallel.layout import Layout
    from depthmix.parallel.world import join

    config, data = training("attnres", layout)
    with join(Layout.of(layout), DEVICE, given=True) as world:
        trainer = loop.Trainer(config, data, world.device, world)
        losses(trainer, range(12))  # DDP takes the times of its first ten passes
        torch.cuda.set_sync_debug_mode("error")
        try:
            numbers = trainer.launch(12)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert numbers.isfinite().all()


@pytest.mark.parametrize("layout", [{"dp": 2}, {"shard": 2}], ids=str)
def test_two_processes_share_a_gpu_where_nccl_allows_it(tmp_path: Path, layout: dict[str, int]) -> None:
    """NCCL may refuse a second rank on a device: then its own words are the reason to skip. Anything else is a failure."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    device = "cuda:0" if DEVICE == "cuda" else DEVICE
    started = multiprocessing.spawn(
        take_part, (port, str(tmp_path), "attnres", layout, device), nprocs=2, join=False, daemon=True
    )
    begun = time.monotonic()
    try:
        while not started.join(timeout=5):
            assert time.monotonic() - begun < LIMIT, "two processes on one GPU neither train nor fail"
    except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
        refused = next((line.strip() for line in str(error).splitlines() if REFUSED in line), None)
        if refused is None:
            raise
        pytest.skip(f"NCCL: {refused}")
    finally:
        for process in started.processes:
            process.kill()
    config, data = training("attnres", {})
    expected = losses(loop.Trainer(config, data, torch.device(device)), range(3))
    assert torch.load(tmp_path / "losses.pt") == pytest.approx(expected, rel=1e-2)
