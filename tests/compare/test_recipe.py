"""A study's file: what it comes to, what is wrong with it, and the studies of this repository."""

import dataclasses

import pytest
import torch

from compare import studies
from depthmix import Decoder, Vit, list_mixers
from depthmix.compare.pieces import in_order
from depthmix.compare.recipe import read_study
from depthmix.errors import USAGE, UserError
from depthmix.runs.restore import model_config, vit_config
from depthmix.train.loop import check_config
from depthmix.train.optim import match_groups
from project import ROOT
from train.refused import refused

STUDIES = sorted((ROOT / "recipes" / "studies").glob("*.yaml"))


def test_what_is_said_last_counts(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "data: data/base\nlr: 0.5\nclip: 2.0\neval_every: 7\narms: [dca]\nseeds: [9]\nbudget: time\nquiet: true\n"
    )
    arms = [{"label": "one", "mixer": "attnres:ways=2", "set": {"warmup": 1}}, "residual"]
    said = {
        "base": "base.yaml",
        "set": {"steps": 20, "clip": 3.0},
        "sizes": {"s": {"dim": 32, "warmup": 5}},
        "data": None,
    }
    study = read_study(str(studies.write(tmp_path, arms=arms, **said)))
    assert (study.seeds, study.budget, study.domains) == ([0, 1], "tokens", {"": "data/base"})
    found = study.config(study.arms[0], study.cells[0], 4)
    assert (found.lr, found.clip, found.steps, found.dim, found.warmup) == (0.5, 3.0, 20, 32, 1)
    assert (found.mixer, found.mixer_options, found.seed, found.data) == ("attnres", {"ways": 2}, 4, "data/base")
    assert found.eval_every == 20  # once, at the end
    assert not found.quiet
    assert study.config(study.arms[1], study.cells[0], 4).warmup == 5
    study = read_study(str(studies.write(tmp_path, **{**said, "set": {"steps": 20, "eval_every": 5}})), ["elsewhere"])
    found = study.config(study.arms[0], study.cells[0], 4)
    assert (found.eval_every, found.data) == (5, "elsewhere")


def test_an_arm_has_seeds_of_its_own_by_domain(tmp_path):
    own = [
        {"mixer": "dca", "seeds": {"code": [7]}},
        {"mixer": "grn", "seeds": {"code": []}},
        {"mixer": "mudd", "seeds": [3]},
    ]
    study = read_study(str(studies.write(tmp_path, data={"books": "a", "code": "b"}, arms=["residual", *own])))
    books, code = map(study.runs_at, study.cells)
    assert books == {"residual": [0, 1], "dca": [0, 1], "grn": [0, 1], "mudd": [3]}
    assert code == {"residual": [0, 1], "dca": [7], "mudd": [3]}
    planned = [(p.cell.domain, p.arm.label, p.config.seed) for p in in_order(study, "cpu", "", True, {})]
    assert planned[:3] == [("books", arm, 0) for arm in ("residual", "dca", "grn")]
    assert planned[3:5] == [("code", "residual", 0), ("books", "residual", 1)]
    assert [p for p in planned if p[2] in (3, 7)] == [("code", "dca", 7), ("books", "mudd", 3), ("code", "mudd", 3)]
    assert len(planned) == 11


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            "question: Why?\nbase: ../plain.yaml\narms: [dca]\n",
            ["base other/base.yaml is a study itself", "plain.yaml"],
        ),
        ("question: Why?\nset: {lr: 1}\n", ["is a study itself; base takes a recipe of training options"]),
        ("stepz: 3\n", ["its base other/base.yaml has an unknown option 'stepz'; did you mean 'steps'?"]),
        ("sets: {}\n", ["its base other/base.yaml has an unknown option 'sets'"]),
    ],
)
def test_a_base_that_is_no_recipe_is_one_sentence(tmp_path, lines, words):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "base.yaml").write_text(lines)
    path = studies.write(tmp_path, base="other/base.yaml")
    refused(lambda: read_study(str(path)), str(path), *words, code=USAGE)
    with pytest.raises(UserError) as caught:
        read_study(str(path))
    assert len(str(caught.value)) < 250 + len(str(path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"question": None}, ["question is needed"]),
        ({"sed": [0]}, ["unknown key 'sed'", "did you mean 'seeds'?"]),
        ({"seeds": [0, 0]}, ["seeds is a list of different whole numbers"]),
        ({"seeds": "0"}, ["seeds"]),
        ({"set": {"stepz": 3}}, ["unknown option 'stepz'", "did you mean 'steps'?"]),
        ({"set": {"steps": "many"}}, ["steps must be a whole number, got 'many'"]),
        ({"set": {"seed": 3}}, ["cannot hold seed", "seeds"]),
        ({"set": {"mixer": "dca"}}, ["cannot hold mixer", "arms"]),
        ({"set": 3}, ["set holds options"]),
        ({"sizes": {"a": {"dimm": 3}}}, ["unknown option 'dimm'", "'dim'"]),
        ({"sizes": []}, ["sizes maps names"]),
        ({"sizes": {"a": {"seeds": [0, 7]}}}, ["sizes, a: the study has no seed 7"]),
        ({"sizes": {"a": {"seeds": 0}}}, ["seeds is a list of different whole numbers"]),
        ({"budget": "tame"}, ["budget must be tokens or time", "'time'"]),
        ({"data": 3}, ["data is a folder"]),
        ({"base": "none.yaml"}, ["cannot read the recipe"]),
        ({"base": 3}, ["base is the path"]),
        ({"power": {"spred": 1}}, ["unknown key 'spred'", "'spread'"]),
        ({"power": {"spread": -1}}, ["numbers above 0"]),
        ({"notes": "one"}, ["notes is a list"]),
        ({"step_times": "yes"}, ["step_times is true or false"]),
        ({"sections": ["powerlaws"]}, ["unknown section 'powerlaws'", "did you mean 'power-laws'?"]),
        ({"sections": "depth"}, ["sections is a list"]),
        ({"arms": []}, ["at least one arm"]),
        ({"arms": ["residul"]}, ["unknown mixer 'residul'", "'residual'"]),
        ({"arms": ["attnres:wys=2"]}, ["wys", "'ways'"]),
        ({"arms": [{"mixer": "dca", "sett": {}}]}, ["arm 'dca'", "unknown key 'sett'", "'set'"]),
        ({"arms": [{"mixer": "dca", "set": {"lrr": 1}}]}, ["arm 'dca'", "unknown option 'lrr'", "'lr'"]),
        ({"arms": [{"label": "a \ud800", "mixer": "dca"}]}, ["one line"]),
        ({"data": {"a": "x", "a b": "x"}, "sizes": {"b c": {}, "c": {}}}, ["a domain and a size are called 'a b c'"]),
        ({"arms": [{"label": "x"}]}, ["an arm is a mechanism"]),
        ({"arms": [{"label": "a\nb", "mixer": "dca"}]}, ["one line"]),
        ({"arms": ["residual", {"mixer": "dca", "sizes": "54m"}]}, ["arm 'dca': sizes is a list of the study's"]),
        ({"sizes": {"54m": {}}, "arms": ["residual", {"mixer": "dca", "sizes": ["45m"]}]}, ["no size '45m'", "'54m'"]),
        (
            {"sizes": {"a": {}, "b": {}}, "arms": [{"mixer": "dca", "sizes": ["b"]}]},
            ["first arm, 'dca', is run at every"],
        ),
        ({"arms": [{"mixer": "dca", "seeds": []}]}, ["arm 'dca': seeds is a list of different whole numbers"]),
        ({"data": {"books": "x"}, "arms": [{"mixer": "dca", "seeds": {"boks": [0]}}]}, ["no domain 'boks'", "'books'"]),
        ({"data": {"books": "x"}, "arms": [{"mixer": "dca", "seeds": {"books": 0}}]}, ["arm 'dca': seeds is a list"]),
        (
            {"data": {"books": "x"}, "arms": [{"mixer": "dca", "seeds": {"books": []}}]},
            ["first arm, 'dca', has no seed"],
        ),
        ({"arms": ["dca", "dca"]}, ["two arms are called 'dca'"]),
        ({"arms": ["dca", {"label": "x", "mixer": "dca"}]}, ["is there twice"]),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path, changes, words):
    refused(lambda: read_study(str(studies.write(tmp_path, **changes))), *words, code=USAGE)


def test_unknown_studies_and_domains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(lambda: read_study("tinny"), "unknown study 'tinny'", "did you mean 'tiny'?", code=USAGE)
    refused(lambda: read_study(""), "recipes/studies", code=USAGE)
    path = str(studies.write(tmp_path, data={"books": "a", "code": "b"}))
    refused(lambda: read_study(path, ["c"]), "--data c", "books=FOLDER code=FOLDER", code=USAGE)
    refused(lambda: read_study(path, ["boks=c"]), "did you mean 'books'?", code=USAGE)
    one = str(studies.write(tmp_path, "one", data={"books": "a"}))
    assert read_study(one, ["v=512"]).domains == {"books": "v=512"}
    assert read_study(one, ["books=c"]).domains == {"books": "c"}
    assert read_study(path, ["code=c"]).domains == {"books": "a", "code": "c"}
    assert read_study(path, ["code=c"]).active == ["code"]
    assert read_study(path).active == ["books", "code"]


PICTURES = {"height": 32, "width": 32, "channels": 3, "classes": ["a", "b"]}


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.stem)
def test_every_arm_of_our_studies_can_be_built(path):
    study = read_study(str(path))
    sizes = {cell.size: cell for cell in study.cells}
    for arm in study.arms:
        for cell in sizes.values():
            config = study.config(arm, cell, 0)
            check_config(dataclasses.replace(config, out="nowhere"))
            with torch.device("meta"):
                text = not config.crop
                model = Decoder(model_config(config, 32)) if text else Vit(vit_config(config, PICTURES))
            match_groups([name for name, _ in model.named_parameters()], config.groups)
    assert study.power["spread"]
    assert study.name == "tiny" or "# On an H200" in path.read_text()  # what it will take


def test_the_code_of_studies_names_no_mechanism():
    for name in (
        "study",
        "recipe",
        "records",
        "checks",
        "pieces",
        "sheet",
        "pictures",
        "power",
        "compare_code",
        "../runs/code_checksums",
        "sections",
    ):
        text = (
            (ROOT / "depthmix" / "study" / f"{name}.py").read_text().split('"""', 2)[2]
        )  # docstrings may give examples
        assert not [m for m in list_mixers() if f'"{m}"' in text or f"'{m}'" in text], name
