"""Whether what stands in one table may be compared: the same text, the same time, pairs of seeds, rules that do not look ahead."""

import math
import os
import signal

import pytest
import torch

from compare import recipes
from compare.recipes import a_run
from depthmix.compare import modules
from depthmix.compare.engine import compare
from depthmix.compare.interval import student_t
from depthmix.compare.results import with_interval
from depthmix.compare.rows import make_rows
from depthmix.compare.spread import Spread
from depthmix.errors import CHECKPOINT, DIVERGED, INTERNAL, INTERRUPTED, USAGE
from depthmix.mixers import registry as rules
from depthmix.mixers.leaks import leak
from depthmix.runs.code_checksums import _checksum, _files, _imports, _outline, changed_since, checksum
from train import pictures, small
from train.refused import refused

RULE = """
import torch
from torch import nn

from depthmix.mixers import register
from depthmix.mixers.one_stream import OneStream


@register("{name}")
class Own(OneStream):
    "A rule of one's own."

    def __init__(self, dim, n_blocks):
        super().__init__(dim, n_blocks)
        self.a = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.zeros_(self.a)

    def _join(self, state, site, y):
        x, dim = state.x, self.dim
        return {what}
"""


def own_rule(folder, name, what):
    (folder / f"{name}.py").write_text(RULE.format(name=name, what=what))
    return f"{name}.py"


def run(path, tmp_path, **more):
    return compare(recipes.config(path, tmp_path / "out", **more))


def table(tmp_path):
    return (tmp_path / "out" / "table.md").read_text()


# Recipes.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arms": ["residual", {"mixer": "dca", "set": {"eval_tokens": 32}}]}, ["arm 'dca'", "eval_tokens", "text"]),
        (
            {"budget": "time", "arms": ["residual", {"mixer": "dca", "set": {"steps": 9}}]},
            ["steps", "baseline's time"],
        ),
        ({"sections": ["depth"]}, ["dynamics_every"]),
        (
            {
                "sections": ["stability"],
                "sizes": {"s": {"lr": 0.1}, "m": {"lr": 0.2}},
                "arms": ["residual", {"mixer": "dca", "set": {"lr": 0.3}}],
            },
            ["dca has the same rate at 's' and 'm'"],
        ),
        (
            {"sections": ["stability"], "sizes": {"s": {}, "m": {"dim": 32}}},
            ["residual has the same rate at 's' and 'm'"],
        ),
    ],
)
def test_a_recipe_that_could_not_be_compared_is_refused(tmp_path, changes, words):
    path = recipes.write(tmp_path, **{"arms": ["residual", "dca"], **changes})
    refused(lambda: recipes.read(path), *words, code=USAGE)


def test_rates_may_be_the_same_in_two_domains_and_an_arm_may_have_steps_at_equal_tokens(training, tmp_path):
    data = {"words": str(small.data()), "others": str(small.other_data())}
    rates = {"a": {"lr": 0.1}, "b": {"lr": 0.2}}
    recipes.read(recipes.write(tmp_path, domains=data, sizes=rates, sections=["stability"]))
    longer = {"label": "longer", "mixer": "dca", "set": {"steps": 9, "batch_size": 2}}
    run(recipes.write(tmp_path, arms=["residual", longer]), tmp_path)
    assert "the same steps, but for what arms set themselves: longer (steps, batch_size)." in table(tmp_path)
    run(recipes.write(tmp_path, name="plain", arms=["residual", "dca"]), tmp_path)
    assert "every arm takes the same steps." in table(tmp_path)


# Pairs.


def test_no_run_is_made_without_the_one_it_is_compared_with(training, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "depthmix.compare.engine.predict_seconds",
        lambda run, *_: 100.0 if (run.config.mixer, run.config.seed) == ("residual", 1) else 1.0,
    )
    run(recipes.write(tmp_path), tmp_path, minutes=0.5)
    assert training.made == [("residual", 0), ("attnres", 0), ("dca", 0)]


def test_without_the_first_arm_nothing_else_is_run(training, tmp_path, capsys):
    training.fail["residual", 0] = RuntimeError("no memory")
    refused(lambda: run(recipes.write(tmp_path), tmp_path, quiet=False), "residual: no memory", code=INTERNAL)
    assert "Without residual the others have nothing to be compared with." in capsys.readouterr().out
    assert not training.made


def test_where_the_first_arm_is_left_out_for_time_so_are_its_pairs(training, tmp_path, monkeypatch):
    def slow(config, *args, **kwargs):
        return None if config.mixer == "residual" else training(config, *args, **kwargs)

    monkeypatch.setattr("depthmix.train.brief.train_briefly", slow)
    run(recipes.write(tmp_path), tmp_path)
    assert not training.made


def test_an_arm_that_is_asked_for_by_itself_is_run(training, tmp_path):
    run(recipes.write(tmp_path), tmp_path, only=["slow"])
    assert training.made == [("dca", 0), ("dca", 1)]


def test_a_part_in_which_there_is_no_run_is_refused(training, tmp_path):
    data = {"books": str(small.data()), "code": str(small.data())}
    arms = ["residual", {"mixer": "dca", "seeds": {"code": []}, "sizes": ["s"]}]
    path = recipes.write(tmp_path, domains=data, arms=arms, sizes={"s": {}, "m": {}})
    refused(lambda: run(path, tmp_path, only=["dca", "m"]), "no run is of dca and m together", code=USAGE)
    refused(lambda: run(path, tmp_path, only=["dca", "code"]), "no run is of dca and code together", code=USAGE)
    assert not training.made
    run(path, tmp_path, only=["dca"])
    assert training.made == [("dca", 0), ("dca", 1)]


def test_seeds_without_a_pair_are_said(training, tmp_path):
    training.fail["residual", 1] = recipes.diverged()
    run(recipes.write(tmp_path, seeds=[0, 1, 2]), tmp_path)
    rows = [line for line in table(tmp_path).splitlines() if line.startswith("| ")]
    first, _, slow = rows[1:4]
    assert first.endswith("| – | 2 |")
    assert slow.startswith("| slow |")
    assert slow.endswith("| 3, 2 of both |")
    assert "wide since" not in table(tmp_path)  # pages have all arms' spread


def test_an_interval_is_over_the_seeds_that_both_have():
    runs = [a_run("residual", 0, 4.0), a_run("residual", 2, 4.0), *(a_run("dca", seed, 3.9) for seed in (0, 1, 2))]
    first, own = make_rows(runs, ["residual", "dca"])
    assert with_interval(own, Spread(0.02, 5)).difference_interval == pytest.approx(student_t(5) * 0.02 / math.sqrt(2))
    assert with_interval(own, Spread(0.0, 0)) == own
    assert with_interval(first, Spread(0.02, 5)) == first


def test_each_at_its_best_is_taken_seed_by_seed(training, tmp_path, monkeypatch):
    """Seed 1 is worse by a nat for all; an arm without it is no better for that."""
    losses = training.__call__

    def by_seed(config, data, **more):
        result = losses(config, data, **more)
        return {**result, "val_loss": 3.0 + config.seed - 0.1 * (config.mixer == "dca") + (config.lr > 0.1)}

    monkeypatch.setattr("depthmix.train.brief.train_briefly", by_seed)
    arms = ["residual", {"mixer": "dca", "seeds": [0]}]
    rates = {"slow": {"lr": 0.1}, "fast": {"lr": 0.2}}
    run(recipes.write(tmp_path, arms=arms, sizes=rates, sections=["stability"]), tmp_path)
    lines = table(tmp_path).partition("## Stability")[2]
    assert "| dca | 2.9000 (0) | 3.9000 (0) | -0.1000 | 0.1 |" in lines


def test_all_diverged_is_said_in_the_table_and_by_the_exit_code(training, tmp_path):
    for mixer in ("residual", "attnres", "dca"):
        for seed in (0, 1):
            training.fail[mixer, seed] = recipes.diverged()
    path = recipes.write(tmp_path, power=None)
    refused(lambda: run(path, tmp_path), "6 of 6 runs diverged", "there is nothing to compare", code=DIVERGED)
    assert "| slow | diverged | – | 0 |" in table(tmp_path)
    assert "No run has finished yet" not in table(tmp_path)
    assert "What the seeds can show" not in table(tmp_path)


def test_figures_of_another_state_are_not_shown(training, tmp_path, monkeypatch):
    monkeypatch.setattr("depthmix.compare.engine.draw_figures", lambda *_: (["differences"], []))
    run(recipes.write(tmp_path, seeds=[0]), tmp_path)
    for name in ("differences", "training", "power-laws"):
        (tmp_path / "out" / f"{name}.png").write_bytes(b"old")
    run(recipes.write(tmp_path, seeds=[0]), tmp_path)
    assert "![differences](differences.png)" in table(tmp_path)
    assert "training.png" not in table(tmp_path)
    assert "power-laws.png" not in table(tmp_path)


# Rules of one's own.


@pytest.mark.parametrize(
    ("name", "what", "said"),
    [
        ("fades", "self.a * x + y", None),
        ("looks_back", "x + y + self.a * torch.cat([0 * x[..., :1, :], x[..., :-1, :]], -2)", None),
        ("peeks", "x + y + self.a * x.roll(-1, -2)", "tokens to come"),
        ("averages", "x + y + self.a * x.mean(0, keepdim=True)", "other rows"),
        ("fails", "y + self.a @ x", None),  # a training says why
        ("roots", "x + y * (self.a - 9).sqrt().sum()", None),  # of a number below zero, which says nothing of tokens
        ("drops", "x + torch.nn.functional.dropout(y, 0.5, True)", None),  # chance is no leak
        ("far", "x + y + self.a * x.roll(-8, -2)", "tokens to come"),
        ("wide", "x + y + self.a * x.roll(-1, -2) / (dim % 32 == 0 or bad)", "tokens to come"),
    ],
)
def test_a_rule_that_looks_where_it_must_not_is_refused_before_it_runs(training, tmp_path, name, what, said):
    path = recipes.write(tmp_path, modules=[own_rule(tmp_path, name, what)], arms=["residual", name])
    recipes.read(path)
    found = leak(name, {}, 32 if name == "wide" else 16, 2)
    assert said in found if said else found is None
    if said:
        changes = {"dim": 32} if name == "wide" else {}
        path = recipes.write(tmp_path, modules=[f"{name}.py"], arms=["residual", name], **changes)
        refused(lambda: run(path, tmp_path), f"arm '{name}'", said, code=USAGE)
        assert not training.made
        if name == "peeks":
            assert leak(name, {}, 16, 2, tokens_too=False) is None  # of images there are none to come


def test_parameters_that_nobody_set_are_refused(training, tmp_path):
    """They are what memory held, which trains all the same."""
    own_rule(tmp_path, "forgets", "self.a * x + y")
    text = (tmp_path / "forgets.py").read_text()
    bare = text.replace("torch.empty(1)", "torch.empty_strided((1,), (1,))")  # which tests do not fill by themselves
    bare = bare.replace("        self.reset_parameters()\n", "")
    (tmp_path / "forgets.py").write_text(bare)
    path = recipes.write(tmp_path, modules=["forgets.py"], arms=["residual", "forgets"])
    repeatable = torch.are_deterministic_algorithms_enabled()
    refused(lambda: run(path, tmp_path), "arm 'forgets'", "its parameter a is never set", code=USAGE)
    assert not training.made
    assert torch.are_deterministic_algorithms_enabled() == repeatable


def test_in_a_picture_nothing_is_to_come(training, tmp_path):
    """Where text would be refused."""
    sizes = {"dim": 16, "n_blocks": 1, "n_heads": 2, "batch_size": 16, "steps": 6, "warmup": 2, "patch_size": 4}
    sizes = {**dict.fromkeys(["seq_len", "eval_tokens"]), **sizes}  # of text
    said = {**sizes, "domains": {"stripes": str(pictures.stripes())}, "seeds": [0]}
    arms = ["residual", "neighbours"]
    name = own_rule(tmp_path, "neighbours", "x + y + self.a * x.roll(-1, -2)")
    run(recipes.write(tmp_path, modules=[name], arms=arms, **said), tmp_path)
    assert training.made == [("residual", 0), ("neighbours", 0)]


def test_the_rules_of_the_package_are_left_to_its_tests():
    assert leak("dca", {}, 16, 2) is None


def test_a_rule_that_has_changed_since_its_runs_is_named(training, tmp_path, monkeypatch, capsys):
    path = recipes.write(tmp_path, modules=[own_rule(tmp_path, "mine", "y")], arms=["residual", "mine"])
    run(path, tmp_path, quiet=False)
    assert "mine.py has changed" not in table(tmp_path) + capsys.readouterr().out
    own_rule(tmp_path, "mine", "2 * y")
    for kept in (_checksum, _outline, _files, _imports):  # as in a new process
        kept.cache_clear()
    monkeypatch.setattr(modules, "_loaded", {})
    monkeypatch.delitem(rules._MIXERS, "mine")
    run(path, tmp_path, quiet=False)
    assert "mine.py has changed since the runs of mine were made" in capsys.readouterr().out
    assert "mine.py has changed since the runs of mine were made" in table(tmp_path)
    runs = [({"arm": "mine", "config": {"mixer": "mine"}}, {"mine.py": "then"})]
    (said,) = changed_since(runs, [])
    assert "mine.py" in said
    assert changed_since(runs, [{"files": {"mine.py": ["then", checksum(tmp_path / "mine.py")]}}]) == []
    assert changed_since([({"arm": "mine", "config": {"mixer": "mine"}}, {})], []) == []  # of no such file
    gone = [({"arm": "gone", "config": {"mixer": "gone"}}, {"gone.py": "then"})]
    assert changed_since(gone, []) == []


# What is in the way.


def test_a_folder_that_cannot_be_written_is_found_before_the_first_run(training, tmp_path):
    (tmp_path / "out").write_text("")
    refused(lambda: run(recipes.write(tmp_path), tmp_path), "is a file", code=CHECKPOINT)
    assert not training.made


@pytest.mark.parametrize("minutes", [-1, float("nan"), float("inf")])
def test_minutes_are_a_number(tmp_path, minutes):
    refused(lambda: run(recipes.write(tmp_path), tmp_path, minutes=minutes), "minutes must be", code=USAGE)


def test_a_report_of_nothing_says_where_it_looked(training, tmp_path, capsys):
    run(recipes.write(tmp_path), tmp_path, report=True, quiet=False)
    assert f"there are no results in {tmp_path / 'out'}" in capsys.readouterr().out


def test_a_signal_in_the_last_measuring_is_no_success(training, tmp_path, monkeypatch):
    def build(config):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("depthmix.train.step_times._trainer", build)
    monkeypatch.setattr("depthmix.train.step_times._step_seconds", lambda *_: 0.1)
    path = recipes.write(tmp_path, step_times=True)
    refused(lambda: run(path, tmp_path), "stopped by SIGTERM: 6 of 6 runs are done; the same command", code=INTERRUPTED)


def test_all_of_a_part_may_diverge(training, tmp_path):
    training.fail["residual", 0] = recipes.diverged()
    refused(
        lambda: run(recipes.write(tmp_path), tmp_path, only=["residual", "0"]), "1 of 6 runs diverged", code=DIVERGED
    )
    assert "1 of 6 runs are done" in table(tmp_path)
