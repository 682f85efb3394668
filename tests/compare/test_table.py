"""The table against run folders whose curves are known."""

import csv
import dataclasses
import io
import json
import math
import sys
from dataclasses import asdict, replace

import pytest

from compare.run_folders import write_run
from depthmix.compare.arms import slug
from depthmix.compare.columns import plus_minus, print_table, to_text
from depthmix.compare.recipe import check_recipe
from depthmix.compare.records import Records
from depthmix.compare.results import Results
from depthmix.compare.rows import Row, make_rows, reach, read_run, result_of_folder
from depthmix.compare.table import to_csv, to_markdown
from depthmix.compare.verdict import summary, verdict
from depthmix.config import CompareConfig
from depthmix.errors import CHECKPOINT, DIVERGED, UserError
from depthmix.runs.folder import RunFolder

PLAIN = [6.0, 5.0, 4.5, 4.0]


def rows_of(tmp_path, *arms):
    """Rows of (label, {seed: losses}, options)."""
    runs = []
    for label, seeds, options in arms:
        for seed, losses in seeds.items():
            path = write_run(tmp_path / label.replace("/", "_") / f"seed-{seed}", losses, seed=seed, **options)
            runs.append(read_run(path, label))
    return make_rows(runs, [label for label, *_ in arms])


def test_fractions_interpolate_between_evaluations(tmp_path):
    # 4.0 lies a quarter of the way from 4.1 (step 200) to 3.7 (step 300): step 225 of 400, at twice the step time.
    plain, arm = rows_of(tmp_path, ("plain", {0: PLAIN}, {}), ("arm", {0: [5, 4.1, 3.7, 3.6]}, {"step_seconds": 1.0}))
    assert (plain.tokens_to_reach, plain.time_to_reach) == (1.0, 1.0)
    assert arm.tokens_to_reach == pytest.approx(0.5625, abs=1e-9)
    assert arm.time_to_reach == pytest.approx(1.125, abs=1e-9)
    assert (arm.reached, arm.paired, arm.step_ratio) == (1, 1, 2.0)
    assert arm.difference == pytest.approx(-0.4)
    assert arm.difference_spread is None
    assert plain.val_loss_spread is None
    assert plain.difference is None


def test_fractions_use_the_last_partial_interval_and_an_arms_own_steps(tmp_path):
    # 300 steps with evaluations at 120, 240, 300: 4.0 is halfway between 4.2 (240) and 3.8 (300).
    options = {"eval_every": 120, "steps": 300, "step_seconds": 2 / 3}
    _, arm = rows_of(tmp_path, ("plain", {0: PLAIN}, {}), ("arm", {0: [5.0, 4.2, 3.8]}, options))
    assert arm.tokens_to_reach == pytest.approx(270 / 400, abs=1e-9)
    assert arm.time_to_reach == pytest.approx(270 * (2 / 3) / 200, abs=1e-9)


def test_reach():
    curve = [(10, 1.0, 5.0), (20, 2.0, 4.0), (30, 3.0, 4.5), (40, 4.0, 3.0)]
    assert reach(curve, 4.0) == (20, 2.0)  # exactly at an evaluation, and the first time counts
    assert reach(curve, 4.25) == (17.5, 1.75)
    assert reach(curve, 5.5) == (10, 1.0)  # nothing is known before the first evaluation
    assert reach(curve, 2.9) is None
    assert reach([], 1.0) is None


def test_not_reached(tmp_path):
    rows = rows_of(tmp_path, ("plain", {0: PLAIN, 1: PLAIN}, {}), ("arm", {0: [7, 6, 5, 4.1], 1: [7, 6, 5, 4.2]}, {}))
    assert (rows[1].tokens_to_reach, rows[1].time_to_reach, rows[1].reached) == (None, None, 0)
    assert "not reached" in to_text(rows)
    some = rows_of(tmp_path, ("plain", {0: PLAIN, 1: PLAIN}, {}), ("arm", {0: [7, 6, 5, 4.1], 1: [7, 6, 5, 3.9]}, {}))
    assert some[1].tokens_to_reach is None  # no mean over the seeds that happened to reach it
    assert "1 of 2 seeds" in to_text(some)


def test_seeds_are_paired_and_the_spread_is_half_the_range(tmp_path):
    plain = {0: [5, 4.0], 1: [5, 4.4], 2: [5, 4.1]}
    arm = {0: [5, 3.9], 1: [5, 4.2], 2: [5, 4.1]}
    first, row = rows_of(tmp_path, ("plain", plain, {"peak_memory": 2**30}), ("arm", arm, {"peak_memory": 2**31}))
    assert first.val_loss == pytest.approx(12.5 / 3)
    assert first.val_loss_spread == pytest.approx(0.2)
    assert row.difference == pytest.approx(-0.1)  # -0.1, -0.2, 0.0
    assert row.difference_spread == pytest.approx(0.1)
    assert row.perplexity == pytest.approx(math.exp(12.2 / 3))
    assert row.bits_per_byte == pytest.approx(12.2 / 6)
    # Seed by seed against that seed's plain run: 1 - 0.1/1.1 * 0.5, 1 - 0.2/0.8 * 0.5, and just there.
    expected = [(1 + 1.0 / 1.1) / 2, (1 + 0.6 / 0.8) / 2, 1.0]
    assert row.tokens_to_reach == pytest.approx(sum(expected) / 3)
    assert (row.seeds, row.peak_memory) == (3, 2**31)


@pytest.mark.parametrize(
    ("value", "around", "text"),
    [
        (-0.1234, 0.0123, "-0.1234 ± 0.0123"),
        (-0.00012, 0.00003, "-0.00012 ± 0.00003"),
        (-1.79e-05, 4.11e-06, "-0.000018 ± 0.000004"),
        (-0.1, 1e-8, "-0.1000 ± <0.0001"),
        (-0.1, 4.4e-16, "-0.1000 ± 0.0000"),  # what is left of 4.0 - 3.9 and 4.01 - 3.91
        (-0.00001, 0.0, "+0.0000 ± 0.0000"),
        (-0.00001, None, "+0.0000"),
        (0.0, 0.00005, "+0.0000 ± 0.0001"),
        (None, 0.1, "–"),
    ],
)
def test_a_spread_that_is_there_never_reads_as_nothing(value, around, text):
    assert plus_minus(value, around) == text


def test_accuracies_are_in_percent(tmp_path):
    (row,) = rows_of(tmp_path, ("plain", {0: [5, 4.0]}, {}))
    assert "98.52%" in to_text([dataclasses.replace(row, accuracy=0.98515)])


def test_seeds_only_one_arm_has_do_not_enter_the_difference(tmp_path):
    _, row = rows_of(tmp_path, ("plain", {0: [4.0], 1: [5.0]}, {}), ("arm", {1: [4.5], 2: [1.0]}, {}))
    assert row.difference == pytest.approx(-0.5)
    assert (row.seeds, row.paired) == (2, 1)


def test_without_the_first_arm_there_is_nothing_to_compare_with(tmp_path):
    run = read_run(write_run(tmp_path / "arm", PLAIN), "arm")
    (row,) = make_rows([run], ["plain", "arm"])
    assert (row.baseline, row.difference, row.step_ratio, row.tokens_to_reach) == ("plain", None, None, None)
    assert to_text([row])
    assert verdict([row]) == []


@pytest.mark.parametrize(
    ("file", "text", "words", "code"),
    [
        ("result.json", None, "no result.json", CHECKPOINT),
        ("result.json", "{", "is damaged", CHECKPOINT),
        ("result.json", "[]", "is damaged", CHECKPOINT),
        ("result.json", "{}", "not the result", CHECKPOINT),
        ("result.json", {"val_loss": math.nan}, "is nan", DIVERGED),
        ("result.json", {"val_loss": math.inf}, "is inf", DIVERGED),
        ("result.json", {"val_loss": None}, "is nan", DIVERGED),
        ("result.json", {"step_quartiles": [0.5]}, "not the result", CHECKPOINT),
        ("result.json", {"core_wait": "much"}, "not the result", CHECKPOINT),
        ("result.json", {"parameters": 3}, "not the result", CHECKPOINT),
        ("result.json", {"step_seconds": -1.0}, "not the result", CHECKPOINT),
        ("result.json", {"step_seconds": None}, "not the result", CHECKPOINT),
        ("result.json", {"seconds": None}, "not the result", CHECKPOINT),
        ("metrics.jsonl", None, "no metrics.jsonl", CHECKPOINT),
        ("metrics.jsonl", '{"val_loss": 1.0}\n', "is damaged", CHECKPOINT),
        ("metrics.jsonl", "[1]\n", "is damaged", CHECKPOINT),
        ("metrics.jsonl", b"\xff\xfe\n", "is damaged", CHECKPOINT),
    ],
)
def test_a_run_that_cannot_be_used_is_named(tmp_path, file, text, words, code):
    path = write_run(tmp_path / "some-run", PLAIN)
    if text is None:
        (path / file).unlink()
    elif isinstance(text, dict):
        result = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps(result | text))
    else:
        (path / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=words) as caught:
        read_run(path, "arm")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == code


def test_an_evaluation_that_is_not_a_number_is_left_out_of_the_curve(tmp_path):
    run = read_run(write_run(tmp_path / "run", [5.0, math.nan, 4.0]), "arm")
    assert [point[2] for point in run.curve] == [5.0, 4.0]


@pytest.fixture
def rows(tmp_path):
    return rows_of(
        tmp_path,
        ("residual", {0: PLAIN, 1: [6, 5, 4.6, 4.1]}, {"parameters": {"total": 54_525_952, "added_by_mixer": 0}}),
        ("attnres:block_size=4,ways=3", {0: [5, 4.1, 3.7, 3.6], 1: [5, 4.2, 3.9, 3.8]}, {"peak_memory": 3 * 2**29}),
        ("dca", {0: [7, 6, 5, 4.5], 1: [7, 6, 5, 4.4]}, {"bits_per_byte": None}),
    )


def results_of(tmp_path, *arms, **options):
    """Results of (label, {seed: losses}) with one run per seed, and no code to speak of."""
    config = CompareConfig(
        out=str(tmp_path / "out"),
        data="data",
        arms=[{"label": label, "mixer": "dca", "set": {"lr": 0.001 * (i + 1)}} for i, (label, _) in enumerate(arms)],
        seeds=list(arms[0][1]),
        **options,
    )
    lines = [{"kind": "code", "id": "c", "files": {}}]
    for label, seeds in arms:
        for seed, losses in seeds.items():
            _, result = result_of_folder(
                RunFolder(write_run(tmp_path / slug(label) / f"seed-{seed}", losses, seed=seed))
            )
            lines.append(
                {
                    "kind": "run",
                    "arm": label,
                    "domain": "",
                    "size": "",
                    "seed": seed,
                    "config": {},
                    "data": "",
                    "code": "c",
                    "environment": {"device_name": "a CPU", "torch": "2"},
                    "result": result,
                }
            )
    return Results(check_recipe(config), Records(lines))


def test_csv_has_every_number_of_the_rows(tmp_path):
    results = results_of(tmp_path, ("plain", {0: PLAIN}), ("other", {0: [7, 6, 5, 4.5]}))
    lines = list(csv.DictReader(io.StringIO(to_csv(results))))
    assert [line["arm"] for line in lines] == ["plain", "other"]
    for line, row in zip(lines, results.rows[""], strict=True):
        for name, value in asdict(row).items():
            assert line[name] == (
                "not reached" if name.endswith("to_reach") and value is None else "" if value is None else str(value)
            ), name
    assert lines[1]["tokens_to_reach"] == "not reached"


def test_json_round_trip(rows):
    again = json.loads(json.dumps([asdict(row) for row in rows], allow_nan=False))
    assert [Row(**row) for row in again] == rows


def test_markdown_has_one_line_per_arm_and_text_stays_text(tmp_path):
    results = results_of(
        tmp_path,
        ("residual", {0: PLAIN, 1: PLAIN}),
        ("<script>|", {0: [5, 4.1, 3.7, 3.6], 1: [5, 4.1, 3.7, 3.7]}),
        notes=["a | note <b>"],
    )
    text = to_markdown(results)
    assert text == to_markdown(results)
    assert "<script>" not in text
    assert "&lt;script&gt;\\|" in text
    assert "a \\| note &lt;b&gt;" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == "| arm | val. loss | against residual | seeds |"
    assert lines[2] == "| residual | 4.0000 | – | 2 |"
    assert lines[3].startswith("| &lt;script&gt;\\| | 3.6500 | -0.3500 ± 0.6353 | 2 |")  # 12.7062 * 0.05
    assert "| residual | 54.60 | 2.0000 | 1.00 | 1.00 |" in text


def test_one_sentence_sums_a_comparison_up(tmp_path):
    def rows(*losses):
        arms = [
            ("residual", {seed: [5.0, own[0]] for seed, own in enumerate(losses)}),
            ("dca", {seed: [5.0, own[1]] for seed, own in enumerate(losses)}),
        ]
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return results_of(folder, *arms).rows[""]

    # Differences -0.05 and -0.03: mean -0.04, sd 0.01414, t = 12.706, half the interval 0.127.
    assert summary(rows((4.0, 3.95), (4.1, 4.07))) == (
        "No difference is shown between dca and residual. After 200 steps, dca ended 0.04 nats lower, "
        "but the 95% interval reaches from 0.17 lower to 0.09 higher, at 1.00 times the time per step."
    )
    clear = rows((4.0, 3.952), (4.1, 4.05))
    assert summary(clear, titles={"dca": "DeepCrossAttention"}) == (
        "With dca (DeepCrossAttention) the model predicts unseen text better than with residual. After 200 steps, "
        "its loss is 0.049 nats lower (95% interval 0.036 to 0.062; lower is better), at 1.00 times the time per step."
    )
    assert summary(clear, timed=False).endswith("lower is better).")
    worse = [replace(row, accuracy=0.5) for row in rows((3.952, 4.0), (4.05, 4.1))]
    assert "With dca the model classifies unseen images worse than with residual" in summary(worse)
    assert "its loss is 0.049 nats higher (95% interval 0.036 to 0.062; lower is better)" in summary(worse)
    assert "one seed says nothing about chance" in summary(rows((4.0, 3.95)))
    assert summary(rows((4.0, 3.95))[:1]) == "After 200 steps, residual ended with a validation loss of 4.0000 nats."
    assert summary(rows((4.0, 3.95)), "books", equal_time=True).startswith(
        "On books, after the same training time, dca ended"
    )
    assert "times the time per step" not in summary(clear, equal_time=True)


@pytest.mark.parametrize("width", [60, 80, 120, None])
def test_text_fits_the_width(rows, width):
    text = to_text(rows, width)
    assert all(len(line) <= (width or 1000) for line in text.splitlines())
    assert text.count("dca") == text.count("arm ")
    for word in ("4.0500", "54.5M", "not reached", "1.50", "seeds"):
        assert word in text


@pytest.mark.parametrize("rich", [True, False])
def test_the_table_prints_with_and_without_rich(rows, rich, monkeypatch, capsys):
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    print_table(rows)
    assert capsys.readouterr().out.strip() == to_text(rows, 120).strip()
