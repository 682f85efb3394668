"""Images on a GPU: a recorded step is the step, in bf16, with kernels."""

import pytest
import torch

np = pytest.importorskip("numpy")
config = pytest.importorskip("depthmix.config")
loop = pytest.importorskip("depthmix.train.loop")
prepare_images = pytest.importorskip("depthmix.data.prepare_images").prepare_images


@pytest.mark.parametrize(
    ("mixer", "options"), [("residual", {}), ("attnres", {"block_size": 2, "ways": 2}), ("dca", {})]
)
def test_a_recorded_step_of_images_is_the_step(tmp_path, mixer, options):
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "in.npz", images=rng.integers(0, 256, (64, 16, 16, 3), dtype=np.uint8), labels=np.arange(64) % 4
    )
    given = config.DataConfig(images=str(tmp_path / "in.npz"), out=str(tmp_path / "data"))
    data = loop.open_data(prepare_images(given))
    losses = []
    for recorded in (False, True):
        run = config.TrainConfig(
            data=str(tmp_path / "data"),
            mixer=mixer,
            mixer_options=options,
            dim=64,
            n_blocks=2,
            n_heads=2,
            batch_size=16,
            crop=2,
            flip=True,
            cuda_graph=recorded,
        )
        trainer = loop.Trainer(run, data, torch.device("cuda"))
        losses.append([trainer.step(step)[0] for step in range(4)])
        assert 0 <= trainer.evaluate().accuracy <= 1
    assert losses[1] == pytest.approx(losses[0], abs=0.02)
