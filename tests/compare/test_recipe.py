"""Recipes of comparisons: what they come to, what is wrong with them, and those of this repository."""

import dataclasses

import pytest
import torch

from compare import recipes
from depthmix import Decoder, Vit, list_mixers
from depthmix.compare.plan import plan_runs
from depthmix.compare.recipe import load_recipe
from depthmix.compare.table import spreads_assumed
from depthmix.errors import USAGE, UserError
from depthmix.parallel.weights import NotDrawing
from depthmix.runs.restore import model_config, vit_config
from depthmix.train.loop import check_config
from depthmix.train.optim import match_groups
from project import ROOT
from train.refused import refused

RECIPES = sorted((ROOT / "recipes" / "studies").glob("*.yaml"))


def test_what_is_said_last_counts(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "data: data/base\nlr: 0.5\nclip: 2.0\neval_every: 7\nout: base\narms: [dca]\nseeds: [9]\nbudget: time\n"
    )
    arms = [{"label": "one", "mixer": "attnres:ways=2", "set": {"warmup": 1}}, "residual"]
    own = dict.fromkeys(recipes.SIZES) | {"eval_every": None, "domains": None}
    said = {**own, "base": "base.yaml", "steps": 20, "clip": 3.0, "sizes": {"s": {"dim": 32, "warmup": 5}}}
    recipe = recipes.read(recipes.write(tmp_path, arms=arms, **said))
    assert (recipe.config.seeds, recipe.config.budget, recipe.domains) == ([0, 1], "tokens", {"": "data/base"})
    assert recipe.config.out == str(tmp_path / "out")
    found = recipe.train_config(recipe.arms[0], recipe.cells[0], 4)
    assert (found.lr, found.clip, found.steps, found.dim, found.warmup, found.eval_every) == (0.5, 3.0, 20, 32, 1, 7)
    assert (found.mixer, found.mixer_options, found.seed, found.data) == ("attnres", {"ways": 2}, 4, "data/base")
    assert recipe.train_config(recipe.arms[1], recipe.cells[0], 4).warmup == 5
    path = recipes.write(tmp_path, arms=arms, **{**said, "eval_every": 0})
    found = (recipe := recipes.read(path, data="elsewhere")).train_config(recipe.arms[0], recipe.cells[0], 4)
    assert (found.eval_every, found.data) == (20, "elsewhere")


def test_an_arm_has_seeds_of_its_own_by_domain(tmp_path):
    own = [
        {"mixer": "dca", "seeds": {"code": [7]}},
        {"mixer": "grn", "seeds": {"code": []}},
        {"mixer": "mudd", "seeds": [3]},
    ]
    recipe = recipes.read(recipes.write(tmp_path, domains={"books": "a", "code": "b"}, arms=["residual", *own]))
    books, code = map(recipe.seeds_at, recipe.cells)
    assert books == {"residual": [0, 1], "dca": [0, 1], "grn": [0, 1], "mudd": [3]}
    assert code == {"residual": [0, 1], "dca": [7], "mudd": [3]}
    planned = [(r.cell.domain, r.arm.label, r.config.seed) for r in plan_runs(recipe, {})]
    assert planned[:3] == [("books", arm, 0) for arm in ("residual", "dca", "grn")]
    assert planned[3:5] == [("code", "residual", 0), ("books", "residual", 1)]
    assert [p for p in planned if p[2] in (3, 7)] == [("code", "dca", 7), ("books", "mudd", 3), ("code", "mudd", 3)]
    assert len(planned) == 11


def test_every_run_has_a_folder_of_its_own(tmp_path):
    arms = ["residual", {"label": "a/b", "mixer": "dca"}, {"label": "a_b", "mixer": "grn"}]
    sizes = {"s": {}, "m, wide": {"dim": 32}}
    recipe = recipes.read(recipes.write(tmp_path, domains={"books": "a", "code": "b"}, sizes=sizes, arms=arms))
    folders = [run.config.out for run in plan_runs(recipe, {})]
    assert len(set(folders)) == len(folders) == 24
    assert folders[0] == str(tmp_path / "out" / "books" / "s" / "residual" / "seed-0")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("stepz: 3\n", ["the base", "has an unknown option 'stepz'; did you mean 'steps'?"]),
        ("sets: {}\n", ["has an unknown option 'sets'"]),
        ("base: ../small.yaml\n", ["is its own base"]),
        ("base: none.yaml\n", ["cannot read the recipe"]),
    ],
)
def test_a_base_that_is_no_recipe_is_one_sentence(tmp_path, lines, words):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "base.yaml").write_text(lines)
    path = recipes.write(tmp_path, base="other/base.yaml")
    refused(lambda: recipes.read(path), *words, code=USAGE)
    with pytest.raises(UserError) as caught:
        recipes.read(path)
    assert len(str(caught.value)) < 250 + 2 * len(str(path))


def test_a_base_has_a_base(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "first.yaml").write_text("lr: 0.5\nclip: 2.0\n")
    (tmp_path / "sub" / "second.yaml").write_text("base: ../first.yaml\nclip: 3.0\n")
    config = recipes.read(recipes.write(tmp_path, base="sub/second.yaml")).config
    assert (config.lr, config.clip) == (0.5, 3.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sed": [0]}, ["unknown option 'sed'", "did you mean 'seed'?"]),
        ({"seeds": [0, 0]}, ["every seed counts once, got [0, 0]"]),
        ({"seeds": "0"}, ["seeds"]),
        ({"set": {"steps": 3}}, ["unknown option 'set'"]),
        ({"seed": 3}, ["not from --seed"]),
        ({"mixer": "dca"}, ["not from --mixer"]),
        ({"sizes": {"a": {"dimm": 3}}}, ["unknown option 'dimm'", "'dim'"]),
        ({"sizes": {"a": {"steps": "many"}}}, ["steps must be a whole number, got 'many'"]),
        ({"sizes": {"a": {"seed": 3}}}, ["cannot hold seed", "seeds"]),
        ({"sizes": {"a": 3}}, ["must hold options"]),
        ({"sizes": {"a": {"seeds": [0, 7]}}}, ["sizes, a: the comparison has no seed 7"]),
        ({"sizes": {"a": {"seeds": 0}}}, ["seeds must be a list of at least one integer"]),
        ({"budget": "tame"}, ["budget must be tokens or time", "'time'"]),
        ({"domains": 3}, ["domains must be"]),
        ({"domains": {"a": 3}}, ["domains maps names to folders"]),
        ({"domains": None}, ["data is needed"]),
        ({"base": "none.yaml"}, ["cannot read the recipe"]),
        ({"base": 3}, ["must be the path of a recipe"]),
        ({"power": {"spred": 1}}, ["unknown key 'spred'", "'spread'"]),
        ({"power": {"spread": -1}}, ["numbers above 0"]),
        ({"notes": "one"}, ["notes must be a list"]),
        ({"step_times": "yes"}, ["step_times must be true or false"]),
        ({"sections": ["stabilty"]}, ["stability or depth", "did you mean 'stability'?"]),
        ({"sections": "depth"}, ["sections must be a list"]),
        ({"arms": []}, ["at least one rule"]),
        ({"arms": ["residul"]}, ["unknown mixer 'residul'", "'residual'"]),
        ({"arms": ["attnres:wys=2"]}, ["wys", "'ways'"]),
        ({"arms": [{"mixer": "dca", "sett": {}}]}, ["arm 'dca'", "unknown key 'sett'", "'set'"]),
        ({"arms": [{"mixer": "dca", "set": {"lrr": 1}}]}, ["arm 'dca'", "unknown option 'lrr'", "'lr'"]),
        ({"arms": [{"mixer": "dca", "set": 3}]}, ["arm 'dca': set must hold options"]),
        ({"arms": [{"label": "a \ud800", "mixer": "dca"}]}, ["one line"]),
        (
            {"domains": {"a": "x", "a b": "x"}, "sizes": {"b c": {}, "c": {}}},
            ["a domain and a size are called 'a b c'"],
        ),
        ({"arms": [{"label": "x"}]}, ["an arm is a rule"]),
        ({"arms": [{"label": "a\nb", "mixer": "dca"}]}, ["one line"]),
        ({"arms": ["residual", {"mixer": "dca", "sizes": "54m"}]}, ["arm 'dca': sizes must be a list"]),
        ({"sizes": {"54m": {}}, "arms": ["residual", {"mixer": "dca", "sizes": ["45m"]}]}, ["no size '45m'", "'54m'"]),
        (
            {"sizes": {"a": {}, "b": {}}, "arms": [{"mixer": "dca", "sizes": ["b"]}]},
            ["'dca', must be run at every size"],
        ),
        ({"arms": [{"mixer": "dca", "seeds": []}]}, ["arm 'dca': seeds must be a list"]),
        (
            {"domains": {"books": "x"}, "arms": [{"mixer": "dca", "seeds": {"boks": [0]}}]},
            ["no domain 'boks'", "'books'"],
        ),
        (
            {"domains": {"books": "x"}, "arms": [{"mixer": "dca", "seeds": {"books": 0}}]},
            ["arm 'dca': seeds must be a list"],
        ),
        (
            {"domains": {"books": "x"}, "arms": [{"mixer": "dca", "seeds": {"books": []}}]},
            ["'dca', needs a seed on books"],
        ),
        ({"arms": ["dca", "dca"]}, ["are the same"]),
        ({"arms": ["dca", {"label": "dca", "mixer": "grn"}]}, ["two arms are called 'dca'"]),
        ({"arms": ["dca", {"label": "x", "mixer": "dca"}]}, ["is there twice"]),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(tmp_path, changes, words):
    refused(lambda: recipes.read(recipes.write(tmp_path, **changes)), *words, code=USAGE)


PICTURES = {"height": 32, "width": 32, "channels": 3, "classes": ["a", "b"]}


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_arm_of_our_recipes_can_be_built(path):
    recipe, names = load_recipe(path), {}  # of a model's parameters, by its configuration
    sizes = {cell.size: cell for cell in recipe.cells}
    for arm in recipe.arms:
        for cell in sizes.values():
            config = recipe.train_config(arm, cell, 0)
            check_config(dataclasses.replace(config, out="nowhere"))
            of_model = vit_config(config, PICTURES) if config.crop else model_config(config, 32)
            if repr(of_model) not in names:
                with torch.device("meta"), NotDrawing():
                    model = Vit(of_model) if config.crop else Decoder(of_model)
                names[repr(of_model)] = [name for name, _ in model.named_parameters()]
            match_groups(names[repr(of_model)], config.groups)
    assert spreads_assumed(recipe)
    assert recipe.config.out == f"docs/results/{path.stem}"
    assert path.stem == "tiny" or "# On an H200" in path.read_text()  # what it will take


def test_the_engine_names_no_rule():
    """Docstrings may give examples."""
    for path in (ROOT / "depthmix" / "compare").glob("[!_]*.py"):
        text = path.read_text().split('"""', 2)[2]
        assert not [m for m in list_mixers() if f'"{m}"' in text or f"'{m}'" in text], path.name
