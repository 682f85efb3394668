"""Comparisons with a training that is not one: budgets, resuming, and what is written."""

import json
import shutil
import sys
import time

import pytest

from depthmix.errors import CHECKPOINT, DISK, DIVERGED, INTERRUPTED, UserError
from depthmix.compare.arms import parse_arms
from depthmix.compare.compare import compare
from depthmix.compare.plan import check_config, make_plan
from depthmix.compare.table import from_csv
from compare.fake_training import SECONDS, configuration
from compare.test_table import write_run
from train import small

# Budgets.


def test_equal_tokens_is_the_same_training_for_every_arm_seed_by_seed(tmp_path):
    config = configuration(tmp_path, seeds=[3, 1])
    plan = make_plan(config, parse_arms(config.arms))
    assert [(arm.name, c.seed) for arm, c in plan] == [(m, s) for s in (3, 1) for m in ("residual", "attnres", "dca")]
    assert {(c.steps, c.warmup, c.eval_every, c.save_every) for _, c in plan} == {(400, 40, 100, 200)}
    assert plan[1][1].out == str(tmp_path / "out" / "attnres-block_size=4" / "seed-3")
    assert plan[1][1].mixer_options == {"block_size": 4}
    assert type(plan[0][1]).__name__ == "TrainConfig"


def test_equal_time_scales_steps_warmup_and_intervals(tmp_path):
    config = configuration(tmp_path)
    plan = make_plan(config, parse_arms(config.arms), [0.2, 0.3, 0.5])
    assert [(c.steps, c.warmup, c.eval_every, c.save_every) for _, c in plan] == [
        (400, 40, 100, 200),
        (266, 27, 66, 133),  # floor(400 * 2 / 3)
        (160, 16, 40, 80),
    ]


@pytest.mark.parametrize(
    ("times", "steps"),
    [([0.3, 0.1], 1200), ([0.1, 0.1], 400), ([0.1, 0.3], 133), ([1e-3, 100.0], 1), ([0.7, 0.1], 2800)],
)
def test_equal_time_arithmetic(tmp_path, times, steps):
    config = configuration(tmp_path, arms=["residual", "dca"])
    (_, first), (_, other) = make_plan(config, parse_arms(config.arms), times)
    assert first.steps == 400
    assert other.steps == steps
    assert other.steps * times[1] <= 400 * times[0] * (1 + 1e-6) or other.steps == 1
    assert 0 <= other.warmup < other.steps
    assert min(other.eval_every, other.save_every) >= 1


def test_no_warmup_stays_no_warmup(tmp_path):
    config = configuration(tmp_path, warmup=0)
    assert {c.warmup for _, c in make_plan(config, parse_arms(config.arms), [0.1, 0.2, 0.3])} == {0}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"out": ""}, "--out"),
        ({"mixer": "dca"}, "--arms"),
        ({"mixer_options": {"n": 2}}, "--arms"),
        ({"budget": "tme"}, "tokens or time"),
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
        check_config(configuration(tmp_path, **values))


# Running and resuming.


def test_a_comparison_writes_everything(tmp_path, trainer):
    comparison = compare(configuration(tmp_path, seeds=[0, 1], prompt="We <b>the people"))
    assert trainer.calls == [(m, s) for s in (0, 1) for m in ("residual", "attnres", "dca")]
    assert comparison.finished
    saved = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert saved["finished"] is True
    assert saved["recipe"]["steps"] == 400
    assert [run["path"] for run in saved["runs"]][:2] == ["residual/seed-0", "attnres-block_size=4/seed-0"]
    assert from_csv((tmp_path / "out" / "table.csv").read_text()) == comparison.rows
    row = comparison.rows[1]
    assert row.difference == pytest.approx(-0.1)
    assert row.difference_spread == pytest.approx(0, abs=1e-12)
    assert row.tokens_to_reach == pytest.approx((300 + 80) / 400)
    assert row.time_to_reach == pytest.approx((300 + 80) / 400 * 1.5)
    assert len(trainer.generated) == 3
    assert "attnres:block_size=4" in (tmp_path / "out" / "table.md").read_text()
    assert not list((tmp_path / "out").glob(".tmp*"))


def test_show_prints_the_table_the_sample_and_where_the_report_lies(tmp_path, trainer, capsys):
    compare(configuration(tmp_path, prompt="We")).show()
    text = capsys.readouterr().out
    for words in ("against residual", "0.100 nats below", "We and <script>", str(tmp_path / "out" / "report.html")):
        assert words in text


def test_finished_arms_are_not_run_again(tmp_path, trainer):
    trainer.fail[("dca", 0)] = UserError("stopped", INTERRUPTED)
    config = configuration(tmp_path, seeds=[0, 1], prompt="We")
    with pytest.raises(UserError, match="stopped"):
        compare(config)
    partial = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert partial["finished"] is False
    assert [row["arm"] for row in partial["rows"]] == ["residual", "attnres:block_size=4"]
    assert len(from_csv((tmp_path / "out" / "table.csv").read_text())) == 2
    assert "not finished" in (tmp_path / "out" / "report.html").read_text()

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
    assert comparison.step_times == [0.2, 0.3, 0.5]
    # An arm that comes later is measured with the first, and scaled to the first's saved time.
    grown = compare(configuration(tmp_path, budget="time", arms=[*config.arms, "rezero"]))
    assert trainer.measured[1:] == [["residual", "rezero"]]
    assert grown.rows[3].steps == 400


def test_step_times_that_moved_are_said(tmp_path, trainer, monkeypatch):
    monkeypatch.setitem(SECONDS, "dca", 0.25)
    out = tmp_path / "out"
    out.mkdir()
    times = {"residual": 0.2, "attnres:block_size=4": 0.3, "dca": 0.5}
    (out / "step_times.json").write_text(json.dumps(times))
    compare(configuration(tmp_path, budget="time"))
    assert trainer.measured == []
    assert "dca trained 50% shorter than residual" in (out / "table.md").read_text()


def test_a_changed_recipe_is_refused_with_the_fields_that_differ(tmp_path, trainer):
    compare(configuration(tmp_path))
    calls = len(trainer.calls)
    for values, words in (
        ({"lr": 0.1, "steps": 500}, "steps (was 400, now 500), lr (was 0.0015, now 0.1)"),
        ({"budget": "time"}, 'budget (was "tokens", now "time")'),
        ({"arms": ["attnres", "residual"]}, "arms (was"),
        ({"arms": ["residual", "attnres:block_size=2", "dca"]}, "arms (was"),
        ({"seeds": [1]}, "seeds (was [0], now [1])"),
    ):
        with pytest.raises(UserError) as caught:
            compare(configuration(tmp_path, **values))
        assert words in str(caught.value)
        assert str(tmp_path / "out") in str(caught.value)
        assert caught.value.exit_code == CHECKPOINT
    assert len(trainer.calls) == calls
    # Arms and seeds may be added, and what no number depends on may change.
    grown = compare(
        configuration(tmp_path, seeds=[0, 1], arms=["residual", "attnres:block_size=4", "dca", "rezero"], keep=5)
    )
    assert len(trainer.calls) == 8
    assert [row.seeds for row in grown.rows] == [2, 2, 2, 2]


def test_data_is_known_by_its_content(tmp_path, trainer):
    for name in ("a", "b"):
        shutil.copytree(small.data(), tmp_path / name)
    compare(configuration(tmp_path, data=str(tmp_path / "a")))
    compare(configuration(tmp_path, data=str(tmp_path / "b")))
    with open(tmp_path / "b" / "meta.json", "a") as file:
        file.write("\n")
    with pytest.raises(UserError, match="differs in data"):
        compare(configuration(tmp_path, data=str(tmp_path / "b")))
    shutil.rmtree(tmp_path / "b")
    assert compare(configuration(tmp_path, data=str(tmp_path / "b"))).finished  # nothing is left to train


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lr": 0}, "lr must be a finite number above 0"),
        ({"warmup": 400}, "warmup must be shorter"),
        ({"seeds": [0, -4]}, "seed must be at least 0, got -4"),
        ({"dim": 15}, "n_heads must divide dim=15"),
        ({"n_kv_heads": 3}, "n_kv_heads must divide"),
        ({"arms": ["residual", "attnres:heads=3"]}, "heads must divide dim=8"),
        ({"arms": ["residual", "rezero"], "output_scale": 0.0}, "sublayers would never learn"),
        ({"seq_len": 5000}, "train split has 4912 tokens"),
        ({"seq_len": 1300}, "val split has 1235 tokens"),
        ({"device": "cuda:99"}, "not available here"),
        ({"data": "nowhere"}, "There is no folder nowhere"),
        ({"data": ""}, "data is needed"),
    ],
)
@pytest.mark.parametrize("budget", ["tokens", "time"])
def test_what_no_run_could_use_is_said_before_anything_is_written(tmp_path, trainer, budget, values, words):
    with pytest.raises((UserError, ValueError), match=words):
        compare(configuration(tmp_path, budget=budget, **values))
    assert list(tmp_path.iterdir()) == []
    assert trainer.measured == []
    assert compare(configuration(tmp_path, budget=budget)).finished  # the corrected command


def test_a_comparison_with_nothing_to_lose_takes_another_recipe(tmp_path, trainer):
    config = configuration(tmp_path, budget="time")
    trainer.fail[("residual", 0)] = MemoryError()
    with pytest.raises(MemoryError):
        compare(config)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"comparison.json", "report.html", "step_times.json"}
    trainer.fail = {("dca", 0): MemoryError()}
    smaller = configuration(tmp_path, budget="time", batch_size=2)
    with pytest.raises(MemoryError):
        compare(smaller)
    assert len(trainer.measured) == 2  # the other recipe's times are not this one's
    with pytest.raises(UserError, match="batch_size"):
        compare(config)  # now there are results
    trainer.fail.clear()
    assert compare(smaller).finished
    assert len(trainer.measured) == 2


def test_step_times_never_lie_without_their_recipe(tmp_path, trainer, monkeypatch):
    def interrupted(configs):
        assert (tmp_path / "out" / "comparison.json").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("depthmix.train.step_times.measure_step_times", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compare(configuration(tmp_path, budget="time"))
    assert compare(configuration(tmp_path, budget="time")).finished


def test_figures_are_drawn_once_for_the_same_runs(tmp_path, trainer, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        sys.modules["depthmix.compare.compare"],
        "draw_figures",
        lambda runs, *_: drawn.append(len(runs)) or ["no figures"],
    )
    compare(configuration(tmp_path))
    assert drawn == [1, 2, 3]
    assert "no figures" in (tmp_path / "out" / "report.html").read_text()


def test_figures_that_take_long_are_drawn_at_the_first_run_and_at_the_end(tmp_path, trainer, monkeypatch):
    drawn = []

    def slowly(runs, *_):
        drawn.append(len(runs))
        time.sleep(0.1)
        return []

    monkeypatch.setattr(sys.modules["depthmix.compare.compare"], "draw_figures", slowly)
    compare(configuration(tmp_path))
    assert drawn == [1, 3]


def test_a_place_below_a_file(tmp_path, trainer):
    (tmp_path / "f").write_text("mine")
    with pytest.raises(UserError, match="f is a file") as caught:
        compare(configuration(tmp_path, out=str(tmp_path / "f" / "out")))
    assert caught.value.exit_code == DISK


def test_an_arm_that_diverges_does_not_stop_the_others(tmp_path, trainer):
    trainer.fail[("attnres", 0)] = UserError("the loss became nan at step 7", DIVERGED)
    with pytest.raises(UserError, match="1 of 3 runs diverged") as caught:
        compare(configuration(tmp_path))
    assert caught.value.exit_code == DIVERGED
    assert str(tmp_path / "out" / "attnres-block_size=4" / "seed-0") in str(caught.value)
    assert trainer.calls[-1] == ("dca", 0)
    assert [row.arm for row in from_csv((tmp_path / "out" / "table.csv").read_text())] == ["residual", "dca"]
    assert "the loss became nan at step 7" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda out: out.write_text(""), "is a file"),
        (lambda out: write_run(out, [4.0]), "run folder of one training"),
        (lambda out: write_run(out / "dca" / "seed-0", [4.0]), "recipe.yaml is missing"),
        (lambda out: (out.mkdir(), (out / "comparison.json").write_text("{")), "not a comparison"),
        (lambda out: (out.mkdir(), (out / "comparison.json").write_text("[]")), "not a comparison"),
        (lambda out: (out.mkdir(), (out / "comparison.json").write_text("{}")), "not a comparison"),
    ],
)
def test_a_folder_that_is_something_else_is_left_alone(tmp_path, trainer, make, words):
    make(tmp_path / "out")
    with pytest.raises(UserError, match=words) as caught:
        compare(configuration(tmp_path))
    assert str(tmp_path / "out") in str(caught.value)
    assert trainer.calls == []


def test_a_foreign_run_in_an_arms_folder_is_named(tmp_path, trainer):
    compare(configuration(tmp_path))
    path = write_run(tmp_path / "out" / "dca" / "seed-0", [4.0], steps=7)
    with pytest.raises(UserError, match="another run") as caught:
        compare(configuration(tmp_path))
    assert str(path) in str(caught.value)
