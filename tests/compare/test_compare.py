"""Comparisons with a training that is not one: budgets, resuming, and what is written."""

import csv
import shutil
import time

import pytest
import yaml

from compare.fake_training import configuration
from compare.run_folders import write_run
from depthmix.compare.engine import compare
from depthmix.compare.plan import plan_runs
from depthmix.compare.recipe import check_recipe
from depthmix.compare.records import read_records
from depthmix.errors import CHECKPOINT, DISK, DIVERGED, INTERRUPTED, UserError
from depthmix.train.events import StepEvent
from train import small

# Budgets.


def plan(config, *times):
    recipe = check_recipe(config)
    return plan_runs(recipe, {("", ""): dict(zip(recipe.labels, times, strict=True))} if times else {})


def test_equal_tokens_is_the_same_training_for_every_arm_seed_by_seed(tmp_path):
    runs = plan(configuration(tmp_path, seeds=[3, 1]))
    assert [(r.arm.arm.name, r.config.seed) for r in runs] == [
        (m, s) for s in (3, 1) for m in ("residual", "attnres", "dca")
    ]
    assert {(r.config.steps, r.config.warmup, r.config.eval_every, r.config.save_every) for r in runs} == {
        (400, 40, 100, 200)
    }
    assert runs[1].config.out == str(tmp_path / "out" / "attnres-block_size=4" / "seed-3")
    assert runs[1].config.mixer_options == {"block_size": 4}
    assert type(runs[0].config).__name__ == "TrainConfig"


def test_equal_time_scales_steps_warmup_and_intervals(tmp_path):
    runs = plan(configuration(tmp_path, budget="time"), 0.2, 0.3, 0.5)
    assert [(r.config.steps, r.config.warmup, r.config.eval_every, r.config.save_every) for r in runs] == [
        (400, 40, 100, 200),
        (266, 27, 66, 133),  # floor(400 * 2 / 3); 66.5 rounds to the even 66
        (160, 16, 40, 80),
    ]


@pytest.mark.parametrize(
    ("times", "steps"),
    [([0.3, 0.1], 1200), ([0.1, 0.1], 400), ([0.1, 0.3], 133), ([1e-3, 100.0], 1), ([0.7, 0.1], 2800)],
)
def test_equal_time_arithmetic(tmp_path, times, steps):
    first, other = (
        run.config for run in plan(configuration(tmp_path, arms=["residual", "dca"], budget="time"), *times)
    )
    assert first.steps == 400
    assert other.steps == steps
    assert other.steps * times[1] <= 400 * times[0] * (1 + 1e-6) or other.steps == 1
    assert 0 <= other.warmup < other.steps
    assert min(other.eval_every, other.save_every) >= 1


def test_no_warmup_stays_no_warmup(tmp_path):
    assert {r.config.warmup for r in plan(configuration(tmp_path, warmup=0, budget="time"), 0.1, 0.2, 0.3)} == {0}


def test_evaluation_at_the_end_only(tmp_path):
    assert {r.config.eval_every for r in plan(configuration(tmp_path, eval_every=0))} == {400}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"out": ""}, "--out"),
        ({"mixer": "dca"}, "--arms"),
        ({"mixer_options": {"n": 2}}, "--arms"),
        ({"budget": "tme"}, "tokens or time"),
        ({"eval_every": -1}, "eval_every must be at least 0"),
        ({"prompt": "We", "save_models": False}, "needs trained models"),
        ({"seeds": []}, "at least one integer"),
        ({"seeds": [0, "1"]}, "at least one integer"),
        ({"seeds": [0, 0]}, "counts once"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"sample_tokens": 0}, "sample_tokens"),
        ({"arms": ["residual", "dcaa"]}, "did you mean 'dca'"),
        ({"arms": ["residual", "attnres:heads=3"]}, "heads must divide"),
    ],
)
def test_a_wrong_configuration_is_refused_before_anything_runs(tmp_path, values, words):
    with pytest.raises(UserError, match=words):
        check_recipe(configuration(tmp_path, **values))


# Running and resuming.


def test_a_comparison_writes_everything(tmp_path, trainer):
    comparison = compare(configuration(tmp_path, seeds=[0, 1], prompt="We <b>the people"))
    out = tmp_path / "out"
    assert trainer.calls == [(m, s) for s in (0, 1) for m in ("residual", "attnres", "dca")]
    assert not comparison.unfinished
    recipe = yaml.safe_load((out / "comparison.yaml").read_text())
    assert recipe["steps"] == 400
    assert recipe["arms"] == ["residual", "attnres:block_size=4", "dca"]
    runs = read_records([out / "runs.jsonl"]).runs
    assert [run["path"] for run in runs][:2] == ["residual/seed-0", "attnres-block_size=4/seed-0"]
    assert str(tmp_path) not in (out / "runs.jsonl").read_text()
    lines = list(csv.DictReader((out / "table.csv").read_text().splitlines()))
    assert [float(line["val_loss"]) for line in lines] == [row.val_loss for row in comparison.rows]
    row = comparison.rows[1]
    assert row.difference == pytest.approx(-0.1)
    assert row.difference_spread == pytest.approx(0, abs=1e-12)
    assert row.tokens_to_reach == pytest.approx((300 + 80) / 400)
    assert row.time_to_reach == pytest.approx((300 + 80) / 400 * 1.5)
    assert len(trainer.generated) == 3
    assert "attnres:block_size=4" in (out / "table.md").read_text()
    assert not list(out.glob(".tmp*"))


def test_show_ends_with_one_sentence_and_where_the_report_is(tmp_path, trainer, capsys):
    compare(configuration(tmp_path, prompt="We")).show()
    text = capsys.readouterr().out
    for words in ("against residual", "0.100 nats below", "We and <script>"):
        assert words in text
    assert text.splitlines()[-2:] == [
        "After 400 steps, attnres:block_size=4 (Attention Residuals) ended 0.100 nats below residual (the plain residual connection); one seed says nothing about chance, so run three or more.",
        f"Report: {tmp_path / 'out' / 'report.html'}",
    ]


def test_finished_arms_are_not_run_again(tmp_path, trainer):
    trainer.fail[("dca", 0)] = UserError("stopped", INTERRUPTED)
    config = configuration(tmp_path, seeds=[0, 1], prompt="We")
    with pytest.raises(UserError, match="stopped"):
        compare(config)
    out = tmp_path / "out"
    assert [line["arm"] for line in csv.DictReader((out / "table.csv").read_text().splitlines())] == [
        "residual",
        "attnres:block_size=4",
    ]
    assert "2 of 6 runs are done" in (out / "table.md").read_text()
    assert "not finished" in (out / "report.html").read_text()

    trainer.calls.clear()
    trainer.fail.clear()
    first = compare(config)
    assert trainer.calls == [("dca", 0), ("residual", 1), ("attnres", 1), ("dca", 1)]
    assert "not finished" not in first.report.read_text()
    trainer.calls.clear()
    written = first.report.read_text()
    assert compare(config).rows == first.rows
    assert trainer.calls == []
    assert len(trainer.generated) == 3  # samples are kept too
    assert first.report.read_text() == written


def test_equal_time_measures_once_and_resumes_with_the_same_numbers(tmp_path, trainer):
    trainer.fail[("attnres", 0)] = UserError("stopped", INTERRUPTED)
    config = configuration(tmp_path, budget="time")
    with pytest.raises(UserError, match="stopped"):
        compare(config)
    trainer.fail.clear()
    comparison = compare(config)
    assert trainer.measured == [["residual", "attnres", "dca"]]
    assert [row.steps for row in comparison.rows] == [400, 266, 160]
    # An arm that comes later is measured with the baseline, and scaled to the baseline's recorded time.
    grown = compare(configuration(tmp_path, budget="time", arms=[*config.arms, "rezero"]))
    assert trainer.measured[1:] == [["residual", "rezero"]]
    assert grown.rows[3].steps == 400


def test_step_times_that_moved_are_said(tmp_path, trainer, monkeypatch):
    config = configuration(tmp_path, budget="time")
    real = trainer.measure_step_times
    monkeypatch.setattr(
        "depthmix.train.step_times.measure_step_times",
        lambda configs, **_: [t * (2 if c.mixer == "dca" else 1) for c, t in zip(configs, real(configs), strict=True)],
    )
    compare(config)
    assert "dca trained 50% shorter than residual" in (tmp_path / "out" / "table.md").read_text()


def test_a_changed_recipe_is_refused_with_the_options_that_differ(tmp_path, trainer):
    compare(configuration(tmp_path))
    calls = len(trainer.calls)
    for values, words in (
        ({"lr": 0.1, "dim": 16}, "dim was 8 and is 16, lr was 0.0015 and is 0.1"),
        ({"steps": 500}, "steps was 400 and is 500"),
    ):
        with pytest.raises(UserError) as caught:
            compare(configuration(tmp_path, **values))
        assert words in str(caught.value)
        assert caught.value.exit_code == CHECKPOINT
    assert len(trainer.calls) == calls
    # Arms and seeds may be added and removed, and what no number depends on may change.
    arms = ["residual", "attnres:block_size=4", "dca", "rezero"]
    grown = compare(configuration(tmp_path, seeds=[0, 1], arms=arms, keep=5))
    assert len(trainer.calls) == 8
    assert [row.seeds for row in grown.rows] == [2, 2, 2, 2]
    fewer = compare(configuration(tmp_path, arms=["dca", "residual"]))
    assert len(trainer.calls) == 8
    assert [row.arm for row in fewer.rows] == ["dca", "residual"]
    assert "6 runs in runs.jsonl are of arms" in (tmp_path / "out" / "table.md").read_text()


def test_data_is_known_by_its_content(tmp_path, trainer):
    for name in ("a", "b"):
        shutil.copytree(small.data(), tmp_path / name)
    compare(configuration(tmp_path, data=str(tmp_path / "a")))
    compare(configuration(tmp_path, data=str(tmp_path / "b")))
    with pytest.raises(UserError, match="its data was prepared otherwise"):
        compare(configuration(tmp_path, data=str(small.other_data())))
    shutil.rmtree(tmp_path / "b")
    assert not compare(configuration(tmp_path, data=str(tmp_path / "b"))).unfinished  # nothing is left to train


@pytest.mark.parametrize(
    ("budget", "values", "words"),
    [
        ("tokens", {"lr": 0}, "lr must be a finite number above 0"),
        ("time", {"warmup": 400}, "warmup must be shorter"),
        ("tokens", {"seeds": [0, -4]}, "seed must be at least 0, got -4"),
        ("time", {"dim": 15}, "n_heads must divide dim=15"),
        ("tokens", {"n_kv_heads": 3}, "n_kv_heads must divide"),
        ("time", {"arms": ["residual", "attnres:heads=3"]}, "heads must divide dim=8"),
        ("tokens", {"arms": ["residual", "rezero"], "output_scale": 0.0}, "sublayers would never learn"),
        ("time", {"seq_len": 5000}, "train split has 4912 tokens"),
        ("tokens", {"seq_len": 1300}, "val split has 1235 tokens"),
        ("time", {"seq_len": 1300}, "val split has 1235 tokens"),
        ("time", {"device": "cuda:99"}, "not available here"),
        ("tokens", {"data": "nowhere"}, "There is no folder nowhere"),
        ("time", {"data": ""}, "data is needed"),
    ],
)
def test_what_no_run_could_use_is_said_before_anything_is_written(tmp_path, trainer, budget, values, words):
    with pytest.raises((UserError, ValueError), match=words):
        compare(configuration(tmp_path, budget=budget, **values))
    assert list(tmp_path.iterdir()) == []
    assert trainer.measured == []
    assert not compare(configuration(tmp_path, budget=budget)).unfinished  # the corrected command


def test_a_comparison_with_nothing_to_lose_takes_another_recipe(tmp_path, trainer):
    config = configuration(tmp_path)
    trainer.fail[("residual", 0)] = MemoryError()
    with pytest.raises(MemoryError):
        compare(config)
    trainer.fail = {("dca", 0): MemoryError()}
    smaller = configuration(tmp_path, batch_size=2)
    with pytest.raises(MemoryError):
        compare(smaller)
    with pytest.raises(UserError, match="batch_size was 2 and is 4"):
        compare(config)  # now there are results
    trainer.fail.clear()
    assert not compare(smaller).unfinished


def test_runs_whose_records_are_lost_are_recorded_again(tmp_path, trainer):
    rows, calls = compare(configuration(tmp_path, seeds=[0, 1])).rows, len(trainer.calls)
    (tmp_path / "out" / "runs.jsonl").unlink()
    assert compare(configuration(tmp_path, seeds=[0, 1])).rows == rows
    assert len(trainer.calls) == calls


def test_a_run_out_of_time_is_saved(tmp_path, trainer, monkeypatch, capsys):
    """A real callback ends the run; the trainer saves it."""
    real, ended = trainer.train, []

    def train(config, *, label="", on_step=None):
        time.sleep(0.3)
        try:
            on_step(StepEvent(config.mixer, config.seed, 1, config.steps, 4.0))
        except BaseException as error:
            ended.append(type(error).__name__)
            raise
        return real(config, label=label)

    monkeypatch.setattr("depthmix.train.loop.train", train)
    compare(configuration(tmp_path, minutes=0.2 / 60, quiet=False))
    assert ended == ["OutOfTime"]
    assert "residual, seed 0 is saved and resumes later." in capsys.readouterr().out


def test_a_place_below_a_file(tmp_path, trainer):
    (tmp_path / "f").write_text("mine")
    with pytest.raises(UserError, match="f is a file") as caught:
        compare(configuration(tmp_path, out=str(tmp_path / "f" / "out")))
    assert caught.value.exit_code == DISK


def test_an_arm_that_diverges_does_not_stop_the_others(tmp_path, trainer):
    trainer.fail[("attnres", 0)] = UserError("the loss became nan at step 7", DIVERGED)
    with pytest.raises(UserError, match="1 of 3 runs diverged, all of attnres:block_size=4") as caught:
        compare(configuration(tmp_path))
    assert caught.value.exit_code == DIVERGED
    assert trainer.calls[-1] == ("dca", 0)
    lines = csv.DictReader((tmp_path / "out" / "table.csv").read_text().splitlines())
    assert [line["arm"] for line in lines] == ["residual", "dca"]
    assert "the loss became nan at step 7" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda out: out.write_text(""), "is a file"),
        (lambda out: write_run(out, [4.0]), "run folder of one training"),
        (lambda out: (out.mkdir(), (out / "runs.jsonl").write_text("{")), "is damaged"),
        (lambda out: (out.mkdir(), (out / "table.md").write_text("mine")), "not depthmix's"),
    ],
)
def test_a_folder_that_is_something_else_is_left_alone(tmp_path, trainer, make, words):
    make(tmp_path / "out")
    with pytest.raises(UserError, match=words) as caught:
        compare(configuration(tmp_path))
    assert str(tmp_path / "out") in str(caught.value)
    assert trainer.calls == []
