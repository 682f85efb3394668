"""What a study's table says besides: power laws, stability, depth; and a study of images."""

import importlib
import json
import shutil

import yaml

from depthmix.runs import code_checksums
from depthmix.compare import study as module
from compare import studies
from train import pictures, small


def table(tmp_path, **said):
    path = studies.write(tmp_path, **said)
    module.study(studies.config(path, tmp_path / "out" if path.stem == "small" else tmp_path / path.stem))
    return (tmp_path / ("out" if path.stem == "small" else path.stem) / "table.md").read_text()


def results(training, monkeypatch, change):
    """What a training finds, with a change by its configuration."""

    def train(config, data, **more):
        return change(config, training(config, data, **more))

    monkeypatch.setattr("depthmix.train.brief.train_briefly", train)


def law(training, monkeypatch):
    """Losses and step times of a power law; attnres' loss is plain's at twice the compute, dca's at half of it."""

    def change(config, result):
        compute = 6 * (result["parameters"]["total"] * config.dim) * result["tokens"] / (1e15 * 86400)
        result["parameters"] = {"total": 1000 * config.dim + 7, "embedding": 7}
        factor = {"residual": 1.0, "attnres": 2.0, "dca": 0.5}[config.mixer]
        return result | {"val_loss": 2.0 * (factor * compute) ** -0.05, "step_seconds": 0.1 * config.dim}

    results(training, monkeypatch, change)


def laws(text):
    """{arm: its line} of that section."""
    return {line.split(" | ")[0].strip("| "): line for line in text.partition("## Power laws")[2].splitlines()}


SIZES = {f"d{dim}": {"dim": dim} for dim in (16, 32, 64)}


def test_power_laws_over_sizes(training, tmp_path, monkeypatch):
    law(training, monkeypatch)
    rows = laws(table(tmp_path, sizes=SIZES, sections=["power-laws"], seeds=[0]))
    assert "2.000 C^-0.0500" in rows["residual"]
    # of compute and of time, which is in proportion, by the laws and in the mean over sizes
    assert rows["attnres:block_size=2"].count("2.00 (2.00 to 2.00)") == 4
    assert "| 0.000 | 2.00" in rows["attnres:block_size=2"]  # nothing is missed
    assert rows["slow"].count("0.50 (0.50 to 0.50)") == 4
    assert rows["slow"].endswith("| d16 0.50, d32 0.50, d64 0.50; mean 0.50 (0.50 to 0.50) |")
    text = table(
        tmp_path, name="two", sizes={"d16": {"dim": 16}, "d32": {"dim": 32}}, sections=["power-laws"], seeds=[0]
    )
    assert "| residual | 2 | – | – | – | – |" in text


def test_power_laws_in_time_are_of_arms_that_were_timed(training, tmp_path, monkeypatch):
    law(training, monkeypatch)
    monkeypatch.setattr(
        "depthmix.train.step_times.measure_step_times",
        lambda configs, **_: [0.2 * c.dim * (1 if c.mixer == "residual" else 2) for c in configs],
    )
    path = studies.write(tmp_path, sizes=SIZES, sections=["power-laws"], seeds=[0], step_times=True)
    module.study(studies.config(path, tmp_path / "out", arms=["residual", "attnres:block_size=2"]))
    said = yaml.safe_load(path.read_text())
    for step_times in (False, True):  # the third arm is trained, and not timed
        path.write_text(yaml.safe_dump(said | {"step_times": step_times}, sort_keys=False))
        module.study(studies.config(path, tmp_path / "out", report=step_times))
    rows = laws((tmp_path / "out" / "table.md").read_text())
    assert "| 2.00 (2.00 to 2.00) | 1.00 (1.00 to 1.00) |" in rows["attnres:block_size=2"]  # twice the time a step
    assert "| 0.50 (0.50 to 0.50) | – |" in rows["slow"]


def test_power_laws_pair_seeds(training, tmp_path, monkeypatch):
    """Seeds far apart do not move an arm against the first, also where it has fewer."""
    law(training, monkeypatch)
    train = importlib.import_module("depthmix.train.brief").train_briefly

    def apart(config, data, **more):
        result = train(config, data, **more)
        return result | {"val_loss": result["val_loss"] * (1 + 0.1 * config.seed)}

    monkeypatch.setattr("depthmix.train.brief.train_briefly", apart)
    arms = ["residual", {"mixer": "attnres:block_size=2", "seeds": [0]}, {"mixer": "dca", "seeds": [1]}]
    rows = laws(table(tmp_path, sizes=SIZES, sections=["power-laws"], seeds=[0, 1], arms=arms))
    assert "2.100 C^-0.0500" in rows["residual"]
    # 2 f^-0.05 less 2 of plain's 2.1, and 1.1 times that: by the law (1 + that / 2.1)^-20
    for arm, difference in (("attnres:block_size=2", 2 * 2**-0.05 - 2), ("dca", 2.2 * 0.5**-0.05 - 2.2)):
        factor = (1 + difference / 2.1) ** -20
        assert f"| {factor:.2f} ({factor:.2f} to {factor:.2f}) |" in rows[arm]


def test_sizes_of_one_compute_have_no_law(training, tmp_path):
    rates = {f"lr {lr}": {"lr": lr} for lr in (0.1, 0.2, 0.3)}
    text = table(tmp_path, sizes=rates, sections=["power-laws"], seeds=[0])
    assert "| slow | 3 | 3.950 C^+0.0000 | 0.000 | 0.000 | – | – | – | – |" in text


def test_stability_over_learning_rates(training, tmp_path, monkeypatch):
    def change(config, result):
        spikes = [[3, 1.0]] * (2 if config.mixer == "residual" and config.lr > 0.01 else 0)
        return result | {
            "spikes": spikes,
            "val_loss": (2.9 if config.mixer == "dca" else 3.0) + (config.lr > 0.05) * 0.2,
        }

    results(training, monkeypatch, change)
    training.fail["residual", 1] = studies.diverged()  # at every rate
    training.fail["attnres", 9] = studies.diverged()
    rates = {f"lr {lr}": {"lr": lr} for lr in (0.001, 0.02, 0.1)}
    text = table(tmp_path, sizes=rates, sections=["stability"], seeds=[0, 1])
    lines = text.partition("## Stability")[2]
    assert "| arm, words | lr 0.001 | lr 0.02 | lr 0.1 | each at its best | stable up to |" in lines
    assert "| residual | 3.0000 (0; 1 diverged) | 3.0000 (2; 1 diverged) | 3.2000 (2; 1 diverged) | – | – |" in lines
    assert "| slow | 2.9000 (0) | 2.9000 (0) | 3.1000 (0) | -0.1000 | 0.02 |" in lines


def test_domains_have_stable_rates_of_their_own(training, tmp_path, monkeypatch):
    results(training, monkeypatch, lambda c, r: r | {"val_loss": 3.0 + (c.lr > 0.01) * c.data.endswith("more") * 0.2})
    said = {"data": {"words": str(small.data()), "more": str(tmp_path / "more")}, "sections": ["stability"]}
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
    kept = {**studies.SIZES, "dynamics_every": 3}
    assert "| slow | 4.00 | 4.50 | 0 of 3 | 2 |" in table(tmp_path, sections=["depth"], set=kept)
    data = {"words": str(small.data()), "others": str(small.other_data())}
    text = table(tmp_path, name="both", data=data, sizes={"s": {}, "m": {"seeds": [1]}}, sections=["depth"], set=kept)
    for place, seeds in (("words, s", 2), ("words, m", 1), ("others, s", 2), ("others, m", 1)):
        assert f"| slow, {place} | 4.00 | 4.50 | 0 of 3 | {seeds} |" in text


def test_sublayers_that_no_longer_learn(training, tmp_path, monkeypatch):
    def still(config, result):
        norms = [0.0, 0.0, 9.0] if config.seed else [1e-9, 2e-3, 1.0]
        return result | {"depth": {"block_rms": [0.0, 3.0, 8.0], "gradient_norm": norms}}

    results(training, monkeypatch, still)
    text = table(tmp_path, sections=["depth"], set={**studies.SIZES, "dynamics_every": 3})
    assert "| slow | – | over 1,000 | 1.5 of 3 | 2 |" in text  # one of the first seed's, two of the second's


def test_a_study_of_images(tmp_path, monkeypatch):
    monkeypatch.setattr("depthmix.compare.sheet.draw_study", lambda *_: ([], []))
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
    said = {"set": sizes, "data": {"stripes": str(pictures.stripes())}, "seeds": [0]}
    text = table(tmp_path, arms=["residual", "dca"], **said)
    assert "nats per image" in text
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
    module.study(
        studies.config(tmp_path / "small.yaml", tmp_path / "out")
    )  # nothing is left to do, and nothing is refused
