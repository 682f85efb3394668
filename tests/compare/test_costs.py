"""Costs on a busy machine: noticed, said, and taken from arms timed in turns where that is cheap."""

import json

import pytest

from compare.fake_training import SECONDS, configuration
from depthmix.compare.engine import compare
from depthmix.compare.rows import read_run

BUSY = "A busy machine"


def busy(mixer, **seconds):
    """Results of seeds 0 and 1 in which a step took that long."""
    return {(mixer, i): {"step_seconds": s} for i, s in enumerate(seconds.values())}


@pytest.mark.parametrize("budget", ["tokens", "time"])
@pytest.mark.parametrize(
    ("results", "words"),
    [
        (busy("residual", first=0.2, second=0.66), "residual took 200 to 660 ms per step, depending on the seed"),
        ({("dca", 1): {"core_wait": 0.34}}, "dca waited for a core 34% of the time it wanted one"),
        ({("dca", 0): {"step_quartiles": [0.45, 0.6]}}, "dca took 450 to 600 ms in the middle half of its steps with seed 0"),
    ],
)  # fmt: skip
def test_a_busy_machine_is_said_under_the_table_at_every_budget(tmp_path, trainer, capsys, budget, results, words):
    trainer.results = results
    compare(configuration(tmp_path, seeds=[0, 1], budget=budget)).show()
    for text in (
        (tmp_path / "out" / "table.md").read_text(),
        (tmp_path / "out" / "report.html").read_text(),
        capsys.readouterr().out,
    ):
        assert text.count(BUSY) == 1
        assert words in text
        assert ("losses are not those of equal time" in text) == (budget == "time")


def test_a_quiet_machine_says_nothing_and_costs_no_time(tmp_path, trainer):
    quiet = {"step_quartiles": [0.19, 0.21], "core_wait": 0.02}
    trainer.results = {("residual", 0): quiet, ("residual", 1): quiet | {"step_seconds": 0.21}}
    comparison = compare(configuration(tmp_path, seeds=[0, 1]))
    assert BUSY not in (tmp_path / "out" / "table.md").read_text()
    assert trainer.measured == []
    assert comparison.rows[0].step_ms == pytest.approx(205)


def test_costs_come_from_arms_timed_in_turns_when_the_runs_were_disturbed(tmp_path, trainer):
    trainer.results = busy("residual", first=1.0, second=3.3)
    config = configuration(tmp_path, seeds=[0, 1])
    comparison = compare(config)
    assert trainer.measured == [["residual", "attnres", "dca"]]
    assert [row.step_ratio for row in comparison.rows] == pytest.approx([1.0, 1.5, 2.5])
    assert [row.step_ms for row in comparison.rows] == pytest.approx([1000 * SECONDS[a] for a in ("residual", "attnres", "dca")])  # fmt: skip
    assert comparison.rows[1].time_to_reach == pytest.approx(1.5 * comparison.rows[1].tokens_to_reach)
    assert "are from timing the arms in turns" in (tmp_path / "out" / "table.md").read_text()
    assert compare(config).rows == comparison.rows
    assert len(trainer.measured) == 1  # saved, not measured again
    # The runs' own times stay on record.
    runs = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert {r["result"]["step_seconds"] for r in runs if r.get("arm") == "residual" and "result" in r} == {1.0, 3.3}


@pytest.mark.parametrize("values", [{"compile": "sublayers"}, {"cuda_graph": True}, {"steps": 50, "warmup": 5}])
def test_where_turns_are_not_cheap_the_table_only_warns(tmp_path, trainer, values):
    trainer.results = busy("residual", first=0.2, second=0.66)
    comparison = compare(configuration(tmp_path, seeds=[0, 1], **values))
    assert trainer.measured == []
    assert comparison.rows[1].step_ratio == pytest.approx(0.3 / 0.43)
    assert "nor are “step”, “ratio”" in (tmp_path / "out" / "table.md").read_text()


def test_a_run_without_these_numbers_is_of_an_older_version(tmp_path, trainer):
    compare(configuration(tmp_path))
    run = read_run(tmp_path / "out" / "dca" / "seed-0", "dca")
    assert (run.step_quartiles, run.core_wait) == (None, None)
