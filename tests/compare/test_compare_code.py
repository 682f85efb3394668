"""A comparison refuses to put runs of different code, recipes or data into one row."""

import json

import pytest

from depthmix.errors import CHECKPOINT, UserError
from depthmix.mixers import mixer_class
from depthmix.runs import code_checksums
from depthmix.runs.code_record import CODE
from depthmix.compare.compare import compare
from compare.fake_training import configuration


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
    refused(configuration(tmp_path, **more), "(mixers/attnres.py changed), and 3 more", "--accept-code REASON")
    assert len(trainer.calls) == 3
    said = compare(configuration(tmp_path, **more, accept_code="a renamed\nvariable"))
    assert len(trainer.calls) == 6
    assert [row.seeds for row in said.rows] == [2, 2, 2]
    note = "Runs of different code are mixed (mixers/attnres.py), accepted because: a renamed variable."
    assert note in table(tmp_path)
    compare(configuration(tmp_path, seeds=[0, 1, 2]))  # the reason need not be said again
    assert table(tmp_path).count(note) == 1
    edited("models/layers.py")
    refused(configuration(tmp_path, seeds=[0, 1, 2, 3]), "(models/layers.py changed)")


def test_code_of_a_rule_that_no_arm_uses_does_not_matter(tmp_path, trainer, edited):
    compare(configuration(tmp_path))
    edited("mixers/mhc.py", "mixers/mudd.py")
    assert compare(configuration(tmp_path, seeds=[0, 1])).finished


def test_kernels_matter_where_arms_get_equal_time(tmp_path, trainer, edited):
    for budget in ("tokens", "time"):
        compare(configuration(tmp_path, out=str(tmp_path / budget), budget=budget))
    edited("ops/depth_attention/op.py")
    more = {"seeds": [0, 1]}
    assert compare(configuration(tmp_path, out=str(tmp_path / "tokens"), **more)).finished
    refused(configuration(tmp_path, out=str(tmp_path / "time"), budget="time", **more), "kernels of attnres")


def test_finished_runs_of_different_code_are_refused(tmp_path, trainer, edited):
    """A run trained by another version can be copied into the folder."""
    compare(configuration(tmp_path, seeds=[0, 1]))
    path = tmp_path / "out" / "dca" / "seed-1" / CODE
    parts = json.loads(path.read_text())
    parts[0]["files"]["mixers/dca.py"] = "of old"
    path.write_text(json.dumps(parts))
    refused(configuration(tmp_path, seeds=[0, 1]), "runs that were made by different code (mixers/dca.py changed)")


def test_both_versions_of_a_run_that_went_on_after_an_edit_count(tmp_path, trainer):
    compare(configuration(tmp_path))
    path = tmp_path / "out" / "residual" / "seed-0" / CODE
    first = json.loads(path.read_text())[0]["files"]
    path.write_text(json.dumps([{"from_step": 0, "files": {**first, "models/layers.py": "of old"}}, {"from_step": 200, "files": first}]))  # fmt: skip
    refused(configuration(tmp_path), "(models/layers.py changed)")


def test_runs_of_an_older_version_are_taken_with_a_warning(tmp_path, trainer):
    compare(configuration(tmp_path))
    for name in ("residual", "dca"):
        (tmp_path / "out" / name / "seed-0" / CODE).unlink()
    said = []
    assert compare(configuration(tmp_path, seeds=[0, 1]), say=said.append).finished
    words = "2 runs do not say which code made them, so runs of different code may be mixed here."
    assert said[0] == f"Warning: {words}"
    assert words in table(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "{}", "[1]", '[{"from_step": 0}]', '[{"from_step": 0, "files": {"a": 1}}]'])
def test_a_damaged_record_is_named(tmp_path, trainer, text):
    compare(configuration(tmp_path))
    path = tmp_path / "out" / "dca" / "seed-0" / CODE
    path.write_text(text)
    refused(configuration(tmp_path), f"{path} is damaged", "put it back from a copy, or delete it")


@pytest.mark.parametrize(
    "accepted", [None, [1], [{"reason": 1, "files": {}}], [{"reason": "why", "files": {"a": [1]}}]]
)
def test_a_damaged_acceptance_counts_as_never_given(tmp_path, trainer, edited, accepted):
    compare(configuration(tmp_path))
    edited("mixers/attnres.py")
    compare(configuration(tmp_path, seeds=[0, 1], accept_code="a name"))
    path = tmp_path / "out" / "comparison.json"
    saved = json.loads(path.read_text())
    assert saved["accepted"][0]["reason"] == "a name"
    path.write_text(json.dumps({**saved, "accepted": accepted}))
    refused(configuration(tmp_path, seeds=[0, 1]), "(mixers/attnres.py changed)")


def test_every_run_is_held_to_the_recipe_and_the_data(tmp_path, trainer):
    """A run that was trained into the folder by hand is not one of the comparison's."""
    compare(configuration(tmp_path))
    folder = tmp_path / "out" / "dca" / "seed-0"
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(recipe.replace("lr: 0.0015", "lr: 0.1"))
    refused(configuration(tmp_path), "dca/seed-0 is a run of another recipe (lr was 0.1 and is 0.0015); give")
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "data.json").write_text("{}")
    refused(configuration(tmp_path), "dca/seed-0 is a run of another recipe (its data was prepared otherwise)")


def test_a_default_that_has_changed_is_another_recipe(tmp_path, trainer, monkeypatch):
    compare(configuration(tmp_path, arms=["residual", "dca"]))
    folder = tmp_path / "out" / "dca" / "seed-0"
    recipe = (folder / "recipe.yaml").read_text()
    options = {name: option.default for name, option in mixer_class("dca").options.items()}
    name = next(iter(options))
    resolved = recipe.replace("mixer_options: {}", f"mixer_options: {json.dumps(options)}")
    (folder / "recipe.yaml").write_text(resolved)
    assert compare(configuration(tmp_path, arms=["residual", "dca"])).finished
    (folder / "recipe.yaml").write_text(
        recipe.replace("mixer_options: {}", f"mixer_options: {json.dumps({**options, name: 77})}")
    )
    refused(configuration(tmp_path, arms=["residual", "dca"]), "another recipe (mixer_options was", "77")
