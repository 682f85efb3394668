"""Further sections of a table, stability and depth; and a comparison of images."""

import json
import shutil

from compare import recipes
from depthmix.compare.engine import compare
from depthmix.runs import code_checksums
from train import pictures, small


def table(tmp_path, **said):
    path = recipes.write(tmp_path, **said)
    compare(recipes.config(path, tmp_path / "out" if path.stem == "small" else tmp_path / path.stem))
    return (tmp_path / ("out" if path.stem == "small" else path.stem) / "table.md").read_text()


def results(training, monkeypatch, change):
    """Return what a training measures, changed by its configuration."""

    def train(config, data, **more):
        return change(config, training(config, data, **more))

    monkeypatch.setattr("depthmix.train.brief.train_briefly", train)


def test_stability_over_learning_rates(training, tmp_path, monkeypatch):
    def change(config, result):
        spikes = [[3, 1.0]] * (2 if config.mixer == "residual" and config.lr > 0.01 else 0)
        return result | {
            "spikes": spikes,
            "val_loss": (2.9 if config.mixer == "dca" else 3.0) + (config.lr > 0.05) * 0.2,
        }

    results(training, monkeypatch, change)
    training.fail["residual", 1] = recipes.diverged()  # at every rate
    training.fail["attnres", 9] = recipes.diverged()
    rates = {f"lr {lr}": {"lr": lr} for lr in (0.001, 0.02, 0.1)}
    text = table(tmp_path, sizes=rates, sections=["stability"], seeds=[0, 1])
    lines = text.partition("## Stability")[2]
    assert "| arm, words | lr 0.001 | lr 0.02 | lr 0.1 | each at its best | stable up to |" in lines
    assert "| residual | 3.0000 (0; 1 diverged) | 3.0000 (2; 1 diverged) | 3.2000 (2; 1 diverged) | – | – |" in lines
    assert "| slow | 2.9000 (0) | 2.9000 (0) | 3.1000 (0) | -0.1000 | 0.02 |" in lines


def test_domains_have_stable_rates_of_their_own(training, tmp_path, monkeypatch):
    results(training, monkeypatch, lambda c, r: r | {"val_loss": 3.0 + (c.lr > 0.01) * c.data.endswith("more") * 0.2})
    said = {"domains": {"words": str(small.data()), "more": str(tmp_path / "more")}, "sections": ["stability"]}
    shutil.copytree(small.data(), tmp_path / "more")
    text = table(tmp_path, sizes={f"lr {lr}": {"lr": lr} for lr in (0.001, 0.02)}, seeds=[0], **said)
    first, second = text.partition("## Stability")[2].split("| arm, more |")
    assert "| arm, words |" in first
    assert "| slow | 3.0000 (0) | 3.0000 (0) | +0.0000 | 0.02 |" in first
    assert "| slow | 3.0000 (0) | 3.2000 (0) | +0.0000 | 0.001 |" in second


def test_depth(training, tmp_path, monkeypatch):
    results(
        training,
        monkeypatch,
        lambda c, r: r | {"depth": {"block_rms": [2.0, 3.0, 8.0], "gradient_norm": [1.0, 2.0, 9.0]}},
    )
    assert "| slow | 4.00 | 4.50 | 0 of 3 | 2 |" in table(tmp_path, sections=["depth"], dynamics_every=3)
    data = {"words": str(small.data()), "others": str(small.other_data())}
    text = table(
        tmp_path, name="both", domains=data, sizes={"s": {}, "m": {"seeds": [1]}}, sections=["depth"], dynamics_every=3
    )
    for place, seeds in (("words, s", 2), ("words, m", 1), ("others, s", 2), ("others, m", 1)):
        assert f"| slow, {place} | 4.00 | 4.50 | 0 of 3 | {seeds} |" in text


def test_sublayers_that_no_longer_learn(training, tmp_path, monkeypatch):
    def still(config, result):
        norms = [0.0, 0.0, 9.0] if config.seed else [1e-9, 2e-3, 1.0]
        return result | {"depth": {"block_rms": [0.0, 3.0, 8.0], "gradient_norm": norms}}

    results(training, monkeypatch, still)
    text = table(tmp_path, sections=["depth"], dynamics_every=3)
    assert "| slow | – | over 1,000 | 1.5 of 3 | 2 |" in text  # one of the first seed's, two of the second's


def test_a_comparison_of_images(light, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {
        "dim": 16,
        "n_blocks": 1,
        "n_heads": 2,
        "batch_size": 16,
        "steps": 6,
        "warmup": 2,
        "patch_size": 4,
        "crop": 1,
    }
    sizes = {**dict.fromkeys(["seq_len", "eval_tokens"]), **sizes}  # of text
    said = {**sizes, "domains": {"stripes": str(pictures.stripes())}, "seeds": [0]}
    text = table(tmp_path, arms=["residual", "dca"], **said)
    assert "per image on the validation split" in text
    assert "| arm | accuracy | parameters |" in text
    run = next(
        r for r in map(json.loads, (tmp_path / "out" / "runs.jsonl").read_text().splitlines()) if r["kind"] == "run"
    )
    assert run["result"]["images"] == 6 * 16
    assert 0 <= run["result"]["accuracy"] <= 1
    text_code, own = code_checksums.code_of("dca"), code_checksums.code_of("dca", images=True)
    assert {"models/vit.py", "data/images.py"} <= own.keys() - text_code.keys()
    assert "models/decoder.py" in text_code.keys() - own.keys()
    assert own["train/task.py"] != text_code["train/task.py"]
    compare(recipes.config(tmp_path / "small.yaml", tmp_path / "out"))  # nothing is left to do, and nothing is refused
