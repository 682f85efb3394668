"""A comparison refuses to put runs of different code, recipes or data into one row."""

import json

import pytest

from compare.fake_training import configuration
from depthmix.compare.engine import compare
from depthmix.errors import CHECKPOINT, UserError
from depthmix.runs import code_checksums
from depthmix.runs.code_record import CODE


@pytest.fixture
def edited(monkeypatch):
    """As if files had other lines from now on."""

    def edit(*names, checksum="edited"):
        before = code_checksums.checksum
        changed = lambda path: checksum if code_checksums._name(path) in names else before(path)  # noqa: E731
        monkeypatch.setattr(code_checksums, "checksum", changed)

    return edit


def refused(config, *words):
    with pytest.raises(UserError) as caught:
        compare(config)
    assert caught.value.exit_code == CHECKPOINT
    for word in words:
        assert word in str(caught.value)


def table(tmp_path):
    return (tmp_path / "out" / "table.md").read_text()


def test_a_seed_of_other_code_is_refused_until_somebody_says_why_not(tmp_path, trainer, edited):
    compare(configuration(tmp_path))
    edited("mixers/attnres.py")
    compare(configuration(tmp_path))  # nothing is missing, so nothing would be mixed
    more = {"seeds": [0, 1]}
    refused(configuration(tmp_path, **more), "(mixers/attnres.py changed), and 3 more runs", "--accept-code REASON")
    assert len(trainer.calls) == 3
    said = compare(configuration(tmp_path, **more, accept_code="a renamed\nvariable"))
    assert len(trainer.calls) == 6
    assert [row.seeds for row in said.rows] == [2, 2, 2]
    note = "Results of different code are mixed (mixers/attnres.py), accepted because: a renamed variable."
    assert note in table(tmp_path)
    compare(configuration(tmp_path, seeds=[0, 1, 2]))  # the reason need not be said again
    assert table(tmp_path).count(note) == 1
    edited("models/layers.py")
    refused(configuration(tmp_path, seeds=[0, 1, 2, 3]), "(models/layers.py changed)")


def test_code_of_a_rule_that_no_arm_uses_does_not_matter(tmp_path, trainer, edited):
    compare(configuration(tmp_path))
    edited("mixers/mhc.py", "mixers/mudd.py")
    assert compare(configuration(tmp_path, seeds=[0, 1])).unfinished is False


def test_kernels_matter_where_arms_get_equal_time(tmp_path, trainer, edited):
    for budget in ("tokens", "time"):
        compare(configuration(tmp_path, out=str(tmp_path / budget), budget=budget))
    edited("ops/depth_attention/op.py")
    more = {"seeds": [0, 1]}
    assert compare(configuration(tmp_path, out=str(tmp_path / "tokens"), **more)).unfinished is False
    refused(configuration(tmp_path, out=str(tmp_path / "time"), budget="time", **more), "kernels of attnres")


def recorded_again(tmp_path, run):
    """Take the record of a run out of the results: it is made again from its folder."""
    file = tmp_path / "out" / "runs.jsonl"
    lines = [line for line in file.read_text().splitlines() if json.loads(line).get("path") != run]
    file.write_text("".join(f"{line}\n" for line in lines))


def test_finished_runs_of_different_code_are_refused(tmp_path, trainer):
    """A run trained by another version can be copied into the folder."""
    compare(configuration(tmp_path, seeds=[0, 1]))
    path = tmp_path / "out" / "dca" / "seed-1" / CODE
    parts = json.loads(path.read_text())
    parts[0]["files"]["mixers/dca.py"] = "of old"
    path.write_text(json.dumps(parts))
    recorded_again(tmp_path, "dca/seed-1")
    compare(configuration(tmp_path, seeds=[0, 1]))
    refused(configuration(tmp_path, seeds=[0, 1]), "the results are of different code (mixers/dca.py changed)")


def test_both_versions_of_a_run_that_went_on_after_an_edit_count(tmp_path, trainer):
    compare(configuration(tmp_path))
    path = tmp_path / "out" / "residual" / "seed-0" / CODE
    first = json.loads(path.read_text())[0]["files"]
    path.write_text(json.dumps([{"from_step": 0, "files": {**first, "models/layers.py": "of old"}}, {"from_step": 200, "files": first}]))  # fmt: skip
    recorded_again(tmp_path, "residual/seed-0")
    compare(configuration(tmp_path))
    refused(configuration(tmp_path), "(models/layers.py changed)")


def test_a_run_that_does_not_say_which_code_made_it_needs_a_reason(tmp_path, trainer):
    compare(configuration(tmp_path))
    (tmp_path / "out" / "dca" / "seed-0" / CODE).unlink()
    recorded_again(tmp_path, "dca/seed-0")
    compare(configuration(tmp_path))
    more = {"seeds": [0, 1]}
    refused(configuration(tmp_path, **more), "mixers/dca.py", "--accept-code REASON")
    compare(configuration(tmp_path, **more, accept_code="it is from May"))
    assert "accepted because: it is from May." in table(tmp_path)


def test_every_run_is_held_to_the_recipe_and_the_data(tmp_path, trainer):
    """A record of another training is not one of the comparison's."""
    compare(configuration(tmp_path))
    file = tmp_path / "out" / "runs.jsonl"
    text = file.read_text()
    file.write_text(text.replace('"lr": 0.0015', '"lr": 0.1', 1))
    refused(configuration(tmp_path), "residual, seed 0 of another recipe (lr was 0.1 and is 0.0015); give")
    checksum = json.loads(text.splitlines()[-1])["data"]
    file.write_text(text.replace(f'"data": "{checksum}"', '"data": "other"'))
    refused(configuration(tmp_path), "its data was prepared otherwise")
