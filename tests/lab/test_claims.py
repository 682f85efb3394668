"""Claims of papers: what is measured, the verdicts, and the page."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from matplotlib.text import Text

from compare.recipes import a_run
from depthmix.compare.interval import student_t
from depthmix.compare.recipe import load_recipe
from depthmix.errors import CHECKPOINT, USAGE
from lab import results_page as module
from lab.claims import (
    CONFIRMED,
    CONTRADICTED,
    IN_SIGN,
    NOT_MEASURED,
    NOT_SEEN,
    UNDECIDED,
    Claim,
    Measurement,
    Results,
    elsewhere,
    judge,
    measure,
    read_results,
    verdicts,
    wilson,
)
from project import ROOT
from train.refused import refused


def results(runs, **more):
    return Results("s", "plain", runs if isinstance(runs, dict) else {"": runs}, **more)


def claim(says, measure_="contrast", what=None):
    return Claim("c", "p", says, ["s"], measure_, what)


@pytest.mark.parametrize(
    ("says", "low", "high", "verdict"),
    [
        (-0.02, -0.03, -0.01, CONFIRMED),
        (-0.02, -0.08, -0.05, CONFIRMED),  # more than the paper's
        (-0.02, -0.007, -0.001, IN_SIGN),
        (-0.02, -0.021, -0.001, CONFIRMED),  # the interval holds it
        (-0.02, -0.01, 0.01, NOT_SEEN),
        (-0.02, -0.03, 0.01, UNDECIDED),
        (-0.02, 0.001, 0.02, CONTRADICTED),
        (0.02, -0.02, -0.001, CONTRADICTED),
        (0.02, 0.015, 0.03, CONFIRMED),
        ("below", -0.02, -0.001, CONFIRMED),
        ("below", -0.02, 0.001, UNDECIDED),
        ("below", -0.001, 0.02, NOT_SEEN),  # ours is on the other side
        ("above", -0.001, 0.02, UNDECIDED),
        ("above", -0.02, -0.001, CONTRADICTED),
    ],
)
def test_verdicts(says, low, high, verdict):
    assert judge(claim(says), Measurement((low + high) / 2, low, high, 2)) == verdict


def test_what_is_open_says_how_many_seeds_would_tell():
    """By a simulation: with so many seeds the paper's effect is shown in four of five cases, with two fewer more rarely."""
    open_ = Measurement(-0.01, -0.03, 0.01, 4, freedom=20)
    words = module._to_tell(claim(-0.02), open_)
    needed = int(re.search(r"with a chance of 80% takes (\d+) paired seeds", words)[1])
    deviation = 0.02 / student_t(20) * 2
    random = np.random.default_rng(0)
    shown = {}
    for n in (needed - 2, needed):
        values = random.normal(-0.02, deviation, (20_000, n))  # so many have a spread of their own
        half = student_t(n - 1) * values.std(axis=1, ddof=1) / math.sqrt(n)
        shown[n] = float(np.mean(np.abs(values.mean(axis=1)) > half))
    assert shown[needed - 2] < 0.79 < shown[needed] < 0.9
    assert "more than 200" in module._to_tell(claim(-0.001), open_)
    assert "still open" not in words
    assert "paired seeds; so many were run, and the claim is still open" in module._to_tell(claim(-0.0299), open_)
    for said, found in (
        (-0.02, Measurement(-0.02, -0.03, -0.01, 4, freedom=20)),
        ("below", open_),
        (-0.02, replace(open_, freedom=0)),
    ):
        assert module._to_tell(claim(said), found) == ""


def test_a_ratio_of_one_is_no_effect():
    ratio = claim(1.25, "compute_advantage")
    assert judge(ratio, Measurement(1.2, 1.1, 1.3, 5)) == CONFIRMED
    assert judge(ratio, Measurement(1.08, 1.02, 1.14, 5)) == IN_SIGN
    assert judge(ratio, Measurement(0.9, 0.8, 0.95, 5)) == CONTRADICTED
    assert judge(claim(0.33, "time_to_reach"), Measurement(0.7, 0.6, 0.8, 2)) == IN_SIGN
    assert judge(claim(0.33, "time_to_reach"), Measurement(math.inf, math.inf, math.inf, 2)) == CONTRADICTED
    assert judge(ratio, None) == NOT_MEASURED


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (-0.012, -0.02, -0.0003, "-0.012 (-0.020 to -0.0003)"),
        (-0.01, -0.02, -0.00002, "-0.010 (-0.020 to -0.00002)"),
        (-0.0001, -0.2, 0.2, "+0.000 (-0.200 to +0.200)"),
    ],
)
def test_an_end_beside_zero_says_on_which_side(value, low, high, text):
    assert module._shown(Measurement(value, low, high, 3)) == text


def test_a_contrast_is_taken_seed_by_seed_with_the_spread_of_all_arms():
    runs = [a_run("plain", 0, 4.0), a_run("plain", 1, 5.0), a_run("a", 0, 3.9), a_run("a", 1, 4.92)]
    runs += [a_run("b", 0, 3.99), a_run("b", 1, 4.97), a_run("c", 7, 1.0)]
    found = measure(claim(-0.1, what={"a": 1, "plain": -1}), results(runs))
    half = student_t(2) * 0.02 / math.sqrt(2)  # seeds are 1.00, 1.02 and 0.98 apart (test_spread.py)
    assert found.value == pytest.approx(-0.09)
    assert (found.low, found.high) == pytest.approx((-0.09 - half, -0.09 + half))
    assert found.seeds == 2
    both = measure(claim(1, what={"a": 1, "b": -2, "plain": 1}), results(runs))
    assert both.high - both.value == pytest.approx(half * math.sqrt(3))  # 1 + 4 + 1 in the place of 2
    assert measure(claim(1, what={"c": 1, "plain": -1}), results(runs)) is None  # no seed in common


def test_a_contrast_of_six_seeds_has_its_own_spread():
    plain, quiet = [4.0, 5.0, 3.0, 4.5, 4.2, 4.1], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    runs = [a_run("plain", s, x) for s, x in enumerate(plain)]
    runs += [a_run("quiet", s, x - d) for s, (x, d) in enumerate(zip(plain, quiet, strict=True))]
    runs += [a_run(f"loud {k}", s, x + (-1) ** (s + k)) for k in range(2) for s, x in enumerate(plain)]
    found = measure(claim(-0.1, what={"quiet": 1, "plain": -1}), results(runs))
    half = 2.5706 * math.sqrt(0.035 / 6)  # t of 5 degrees of freedom; the variance of 0.1 to 0.6 is 0.175 / 5
    assert (found.low, found.high) == pytest.approx((-0.35 - half, -0.35 + half), abs=1e-4)
    assert (found.seeds, found.freedom) == (6, 5)
    five = measure(claim(-0.1, what={"quiet": 1, "plain": -1}), results([run for run in runs if run.seed]))
    assert five.freedom == 4 * 3  # all arms'
    moved = [replace(run, arm="plain") for run in runs[6:12]]
    cells = {"w1": runs[:6], "w2": moved}  # an arm each: nothing else is known
    alone = measure(claim(-0.1, what={"plain @ w2": 1, "plain @ w1": -1}), results(cells, assumed=9.0))
    assert (alone.low, alone.high) == pytest.approx((-0.35 - half, -0.35 + half), abs=1e-4)
    assert alone.remark == ""


def test_the_readme_gives_any_contrast(monkeypatch, capsys):
    """Values apart on code, as the page on short trainings says it of Full at 18M."""
    monkeypatch.chdir(ROOT)
    exec(re.search(r'^    python -c "(.*)"$', (ROOT / "lab" / "README.md").read_text(), re.M)[1], {})
    found = float(re.match(r"Measurement\(value=-([\d.]+)", capsys.readouterr().out)[1])
    assert f"Full {found:.3f} (two)" in (ROOT / "lab" / "short-trainings.md").read_text()


def test_domains_have_a_spread_of_their_own(tmp_path):
    said = yaml.safe_load((ROOT / "recipes" / "studies" / "tiny.yaml").read_text())
    said |= {
        "base": str(ROOT / "recipes" / "demo.yaml"),
        "domains": {"books": "b", "code": "c"},
        "sizes": {"s": {}, "m": {}},
    }
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(said))
    cells = {name: [a_run("plain", 0, 4.0), a_run("a", 0, 3.9)] for name in ("books s", "books m", "code s", "code m")}
    for cell, loss in (("books s", 3.92), ("code s", 3.5)):
        cells[cell] += [a_run("plain", 1, 4.0), a_run("a", 1, loss)]
    found = results(cells, study=load_recipe(tmp_path / "two.yaml"))

    def half(*cells):
        weights = {f"{arm} @ {cell}": w for cell in cells for arm, w in (("a", 1), ("plain", -1))}
        one = measure(claim(-0.1, what=weights), found)
        return (one.high - one.value) / math.sqrt(len(cells))

    books, code = (student_t(1) * half_range * math.sqrt(2) for half_range in (0.01, 0.2))
    assert half("books m") == pytest.approx(books)  # of the other size: it has one seed itself
    assert half("code m") == pytest.approx(code)
    assert half("books m", "code m") == pytest.approx(student_t(2) * math.sqrt(0.01**2 + 0.2**2))


def test_cells_and_one_seed():
    cells = {"w1": [a_run("plain", 0, 4.0), a_run("a", 0, 3.8)], "w2": [a_run("plain", 0, 3.0), a_run("a", 0, 2.9)]}
    shrinks = claim(0.1, what={"a @ w2": 1, "plain @ w2": -1, "a @ w1": -1, "plain @ w1": 1})
    found = measure(shrinks, results(cells, assumed=0.01))
    assert found.value == pytest.approx(0.1)
    assert found.high - found.value == pytest.approx(1.96 * 0.01 * math.sqrt(2), rel=0.01)
    assert "assumed" in found.remark
    assert judge(shrinks, measure(shrinks, results(cells))) == UNDECIDED  # nothing is known of chance


def test_accuracy_and_what_it_takes_to_a_loss():
    runs = [
        a_run(arm, s, loss, accuracy=acc) for arm, loss, acc in (("plain", 4.0, 0.7), ("a", 3.5, 0.72)) for s in (0, 1)
    ]
    assert measure(claim(0.7, "accuracy", {"a": 1, "plain": -1}), results(runs)).value == pytest.approx(2.0)
    falling = [(50, 10.0, 4.0), (100, 20.0, 3.5)]
    runs = [a_run("plain", 0, 4.0), a_run("a", 0, 3.5, curve=falling), a_run("b", 0, 4.5)]
    half = claim(0.4, "tokens_to_reach", "a")
    assert measure(half, results(runs)).value == pytest.approx(0.5)
    assert judge(half, measure(half, results(runs))) == UNDECIDED  # one seed says nothing of chance
    missed = claim(0.4, "time_to_reach", "b")
    assert math.isinf(measure(missed, results(runs)).value)
    assert judge(missed, measure(missed, results(runs))) == UNDECIDED  # nor does one that never comes there
    twice = [replace(run, seed=seed) for run in runs for seed in (0, 1)]
    assert judge(missed, measure(missed, results(twice))) == NOT_SEEN  # both of two miss it often by chance
    for seeds, verdict in ((5, NOT_SEEN), (6, CONTRADICTED)):
        often = [replace(run, seed=seed) for run in runs for seed in range(seeds)]
        assert judge(missed, measure(missed, results(often))) == verdict
    once = [*often, *(replace(run, seed=6, arm={"a": "b"}.get(run.arm, run.arm)) for run in runs if run.arm != "b")]
    by_tokens = claim(0.4, "tokens_to_reach", "b")
    assert measure(by_tokens, results(once)).low == pytest.approx(0.5)  # the one that came there
    assert judge(by_tokens, measure(by_tokens, results(once))) == NOT_SEEN
    shared = [a_run("plain", 0, 4.0, shared=True), a_run("a", 0, 3.5, shared=True)]
    ratio = claim(1.4, "step_ratio", "a")
    assert measure(ratio, results(shared)) is None
    beside = [a_run("plain", 0, 4.0), a_run("a", 0, 3.5), a_run("b", 0, 3.5, shared=True, step_quartiles=(0.9, 1.1))]
    assert measure(ratio, results(beside)).value == 1.0  # another arm's runs have no part in it
    turns = [a_run("plain", 0, 4.0), replace(a_run("a", 0, 3.5), step_seconds=1.3)]
    assert judge(ratio, measure(ratio, results(turns))) == CONFIRMED  # timed in turns: seeds have no part in it
    own = [replace(run, step_quartiles=(0.9, 1.1)) for run in turns]
    assert judge(ratio, measure(ratio, results(own))) == UNDECIDED


def test_spikes_and_growth():
    def record(arm, seed, spikes, rms, lr=0.1, loss=4.0):
        depth = {"block_rms": rms, "gradient_norm": [1.0, 2.0]}
        return {
            "arm": arm,
            "seed": seed,
            "domain": "",
            "size": f"lr {lr}",
            "config": {"lr": lr},
            "result": {"val_loss": loss, "spikes": [[1, 1.0]] * spikes, "depth": depth},
        }

    records = [
        record(*x) for x in (("plain", 0, 9, [1, 8]), ("plain", 1, 7, [1, 8]), ("a", 0, 0, [1, 2]), ("a", 1, 1, [2, 4]))
    ]
    found = results([a_run("plain", 0, 4.0)], records=records)
    pair = {"arm": "a", "against": "plain"}
    fewer = measure(claim("below", "spikes", pair), found)
    assert fewer.value == -0.5  # runs with spikes, however many of them
    assert fewer.remark == "1 of 2 runs have spikes or diverge, against 2"
    assert judge(claim("below", "spikes", pair), fewer) == UNDECIDED
    lost = {"arm": "a", "domain": "", "size": "lr 0.1", "diverged": "at step 3"}
    many = [record("plain", seed, 0, [1, 8]) for seed in range(10)]
    many += [{**lost, "seed": 0}, *(record("a", seed, 3 * (seed < 3), [1, 2]) for seed in range(1, 10))]
    spiky = measure(claim("below", "spikes", pair), results([a_run("plain", 0, 4.0)], records=many))
    # Newcombe's interval of 3 of 10 less 0 of 10: the distances of Wilson's ends, 0.1078 and 0.6032 of the one, 0.2775 of the other.
    ends = 0.3 - math.hypot(0.3 - 0.1078, 0.2775), 0.3 + math.hypot(0.6032 - 0.3, 0.0)
    assert (spiky.value, spiky.low, spiky.high) == pytest.approx((0.3, *ends), abs=1e-3)
    assert judge(claim("below", "spikes", pair), spiky) == NOT_SEEN
    assert measure(claim("below", "growth", pair), found).value == pytest.approx(0.25)
    still = results([a_run("plain", 0, 4.0)], records=[*records[:2], record("a", 0, 0, [1, 0]), records[3]])
    assert measure(claim("below", "growth", pair), still).seeds == 1  # a block that adds nothing does not count
    wild = [
        record(arm, seed, 0, [1, 9], 0.9, 4.0 + worse) for seed in (0, 1) for arm, worse in (("plain", 0.2), ("a", 0.0))
    ]
    swept = results([a_run("plain", 0, 4.0)], records=[*records, *wild], study=SimpleNamespace())
    grown = measure(claim("below", "growth", pair), swept)
    assert grown.value == pytest.approx(0.25)  # up to the rate that plain stands
    assert measure(claim("below", "rate", pair), swept).value == pytest.approx(9)
    never = results([], records=[*records, {**lost, "seed": 0, "config": {"lr": 0.01}}], study=SimpleNamespace())
    assert measure(claim("below", "growth", pair), never) is None  # an arm that is lost at its lowest rate stands none
    alone = results([a_run("plain", 0, 4.0)], records=[r for r in records if r["seed"] == 0])
    assert judge(claim("below", "growth", pair), measure(claim("below", "growth", pair), alone)) == UNDECIDED


A_COLUMN = {"title": "t", "study": ["start"], "table": "At equal tokens"}
CLAIM = {"claim": "c", "source": "p, t", "says": -1, "study": "tiny", "contrast": {"residual": 1}}


def test_a_damaged_result_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "lab" / "results" / "some" / "runs.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    (path.parent / "comparison.yaml").write_text("data: d\nout: o\narms: [residual]\n")
    refused(lambda: read_results("some"), "runs.jsonl:1 is damaged", code=CHECKPOINT)


def test_what_a_measure_is_of(tmp_path):
    bare = {k: v for k, v in CLAIM.items() if k != "contrast"}
    for wrong, words in (
        ({"growth": {"arm": "residual"}}, "growth needs {arm"),
        ({"step_ratio": 3}, "an arm, got 3"),
    ):
        (tmp_path / "claims.yaml").write_text(yaml.safe_dump({"claims": [{**bare, **wrong}]}))
        refused(
            lambda: module.write_claims(tmp_path / "claims.yaml", tmp_path / "page.md", tmp_path / "short.md"),
            words,
            code=USAGE,
        )
    (tmp_path / "claims.yaml").write_text("claims: [words]")
    refused(
        lambda: module.write_claims(tmp_path / "claims.yaml", tmp_path / "page.md", tmp_path / "short.md"),
        "list of claims",
        code=USAGE,
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sais": 1}, ["unknown key 'sais'"]),
        ({"says": None}, ["says is a number"]),
        ({"spikes": {}}, ["one of contrast"]),
        ({"contrast": {"residul": 1}}, ["tiny has no 'residul'", "did you mean 'residual'?"]),
        ({"contrast": {"residual @ code": 1}}, ["tiny has no 'code'"]),
        ({"contrast": ["residual"]}, ["contrast needs arms with weights"]),
        ({"contrast": {"residual": "much"}}, ["contrast needs arms with weights"]),
        ({"contrast": {"residual": math.nan}}, ["contrast needs arms with weights"]),
        ({"says": 0}, ["which means no effect"]),
        ({"says": math.nan}, ["which means no effect"]),
        ({"contrast": None, "step_ratio": "residual", "says": 1}, ["which means no effect"]),
        ({"study": "tinny"}, ["unknown study 'tinny'"]),
        ({"study": []}, ["study may be a list of names"]),
        ({"source": 3}, ["claim, source and study are text"]),
    ],
)
def test_what_is_wrong_with_a_claim_is_said(tmp_path, changes, words):
    path = tmp_path / "claims.yaml"
    kept = {key: value for key, value in {**CLAIM, **changes}.items() if value is not None or key == "says"}
    path.write_text(yaml.safe_dump({"claims": [kept]}))
    refused(lambda: module.write_claims(path, tmp_path / "page.md", tmp_path / "short.md"), *words, code=USAGE)


def test_the_page_is_made_of_what_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    drawn = []
    monkeypatch.setattr(module, "save_figure", lambda make, *_: drawn.append(make()))
    module.write_claims(page=tmp_path / "results.md", short=tmp_path / "short.md")
    made = (tmp_path / "results.md").read_text()
    # Else: `python -m lab.results_page`.
    assert made == (ROOT / "docs" / "results.md").read_text()
    assert (tmp_path / "short.md").read_text() == (ROOT / "lab" / "short-trainings.md").read_text()
    assert "| **confirmed** | DCA ends 0.050 nats below the plain residual" in made
    count = len(yaml.safe_load((ROOT / "lab" / "claims.yaml").read_text())["claims"])
    verdict = re.compile(r"^\| \*\*", re.MULTILINE)
    assert len(verdict.findall((tmp_path / "short.md").read_text())) == count
    claims = made.partition("## What the papers claim")[2].partition("## Reproduce")[0]
    # Each has a verdict or is open.
    assert (
        len(verdict.findall(claims)) + len(re.findall(r"^\* .*\((?:Table|Figure|section)", claims, re.MULTILINE))
        == count
    )
    words = " ".join(text.get_text() for text in drawn[0].findobj(Text))
    assert all(part in words for part in ("mudd", "Full (attnres)", "zero start", "hollow: one seed"))


def test_a_step_is_from_the_last_run_that_has_the_rule(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, rows in {"old": {"dca": 1.17, "layerscale": 1.04}, "new": {"layerscale": 1.0}}.items():
        lines = [f"54m: 12 blocks,{who},step / residual,{value}" for who, value in rows.items()]
        (tmp_path / f"{name}.csv").write_text("\n".join(["case,who,metric,value", *lines]))
    rules = [{"arm": arm} for arm in ("dca", "layerscale", "mudd")]
    said = {"rules": rules, "steps": ["old", "new"], "choices": [{"you": "a|b", "use": "`dca`", "gave": "<b>"}]}
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(said))
    module.write_claims(tmp_path / "claims.yaml", tmp_path / "page.md", tmp_path / "short.md")
    page = (tmp_path / "short.md").read_text()
    assert all(row in page for row in ("| dca | 1.17 |", "| layerscale | 1.00 |", "| mudd | – |"))
    assert "| you | use | result |\n|---|---|---|\n| a\\|b | `dca` | &lt;b&gt; |" in page


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"intro": "one sentence"}, ["intro is a list of sentences"]),
        ({"answer": [3]}, ["answer is a list of sentences"]),
        ({"choices": [{"you": "train", "use": "a"}]}, ["an entry of choices has you and use and gave"]),
        ({"columns": [{"title": "t"}]}, ["columns has title and study and table"]),
        ({"columns": [A_COLUMN, A_COLUMN]}, ["two columns are called 't'"]),
        ({"columns": [{**A_COLUMN, "panel": "p"}]}, ["panel and of a series"]),
        ({"columns": [{**A_COLUMN, "panel": 1, "series": "s"}]}, ["panel and of a series"]),
        ({"columns": [{**A_COLUMN, "study": ["tinny @ books"]}]}, ["unknown study 'tinny'"]),
        (
            {"columns": [{**A_COLUMN, "study": ["start @ 18m, output 0"]}]},
            ["start has no", "'books 18m, outputs 0'?"],
        ),
        ({"beside": [{"title": "t", "study": "tiny", "of": []}]}, ["beside has title and study and of"]),
        ({"beside": [{"title": "t", "study": ["tiny", "tiny @ code"], "of": []}]}, ["tiny has no 'code'"]),
        ({"beside": [{"title": "t", "study": ["tiny"], "of": ["tinny"]}]}, ["beside 't': no claim names 'tinny'"]),
        ({"beside": [{"title": "t", "study": ["tiny"], "of": [], "same": ["tinny"]}]}, ["no claim names 'tinny'"]),
        ({"beside": [{"title": "t", "study": ["tiny"], "of": [], "same": 3}]}, ["same is a list of studies"]),
        ({"choices": 3}, ["choices is a list"]),
        ({"rules": ["dca"]}, ["rules has arm", "'dca'"]),
        ({"steps": ["h200/stop"]}, ["benchmarks step", "'h200/stop' has no CSV file"]),
    ],
)
def test_what_is_wrong_with_the_second_table_is_said(tmp_path, monkeypatch, more, words):
    monkeypatch.chdir(ROOT)
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(more))
    refused(
        lambda: module.write_claims(tmp_path / "claims.yaml", tmp_path / "page.md", tmp_path / "short.md"),
        *words,
        code=USAGE,
    )


def test_of_several_studies_the_one_with_most_seeds_counts():
    one = [a_run("plain", 0, 4.0), a_run("a", 0, 3.0)]
    two = [
        a_run(arm, seed, loss) for seed in (0, 1) for arm, loss in (("plain", 4.0), ("a", 3.9), ("b", 3.8 + seed / 100))
    ]
    known = {"one": results(one), "two": results(two), "same": results(two), "none": None}
    for names, found in (
        (["one", "two"], "two"),
        (["none", "one"], "one"),
        (["same", "two"], "same"),
        (["none"], "none"),
    ):
        asked = Claim("c", "p", -0.1, names, "contrast", {"a": 1, "plain": -1})
        ((_, _, _, name),) = verdicts([asked], known.get)
        assert name == found


def test_a_contrast_elsewhere_is_of_one_cell_and_of_contrasts_only():
    cells = {
        "first": [a_run("plain", 0, 4.0), a_run("a", 0, 3.9)],
        "other": [a_run("plain", 0, 5.0), a_run("a", 0, 4.7)],
    }
    more = {"first": [a_run(arm, seed, loss) for arm, loss in (("plain", 4.0), ("b", 3.8)) for seed in (0, 1)]}
    known = {"s": Results("s", "plain", cells, 0.01), "u": Results("u", "plain", more, 0.01)}

    def found(measure="contrast", what={"a": 1, "plain": -1}, place="s @ other", of=("s", "t"), decided="t", same=()):  # noqa: B006
        column = {"title": "c", "study": place.split(", "), "of": of, "same": same}
        return elsewhere(Claim("c", "p", -0.1, ["s"], measure, what), decided, column, known.get)

    assert found().value == pytest.approx(-0.3)
    assert found(place="s").value == pytest.approx(-0.1)
    assert found(what={"b": 1, "plain": -1}) is None  # an arm that is not there
    assert found(what={"a @ first": 1, "plain @ first": -1}) is None  # of a cell of its own
    assert found(measure="accuracy") is None
    assert found(place="t @ other") is None
    assert found(place="s", decided="s") is None  # not once more what decides the claim
    assert found(place="u, s", decided="s") is None
    assert found(decided="t", same=["t"]) is None
    both = "v, s @ other, u"
    assert found(place=both).value == pytest.approx(-0.3)  # from the one that has the arms
    assert found(place=both, what={"b": 1, "plain": -1}).value == pytest.approx(-0.2)
    cells["other"].append(a_run("b", 0, 4.9))
    assert found(place=both, what={"b": 1, "plain": -1}).value == pytest.approx(-0.2)  # from the one with most seeds
    assert found(decided="s").value == pytest.approx(-0.3)
    assert found(of=("t",)) is None  # of a claim that other studies decide


def test_the_long_study_says_how_much_of_it_is_done(monkeypatch):
    """Runs of another study stand in for its own, which may not be there yet."""
    monkeypatch.chdir(ROOT)
    rates, runs = (module.read_results(name) for name in ("long-rates", "mechanisms-18m"))
    none = "\n".join(module._long_study({"long-rates": rates}.get))
    some = "\n".join(module._long_study({"long-rates": rates, "long": runs}.get))
    recipe = yaml.safe_load((ROOT / "recipes" / "studies" / "long.yaml").read_text())
    arms = recipe["arms"]
    planned = sum(len(arm.get("seeds", recipe["seeds"]) if isinstance(arm, dict) else recipe["seeds"]) for arm in arms)
    assert f"under way: 0 of its {planned} runs are done" in none
    assert "360M tokens of books, code and documentation, 20 per parameter" in none
    assert f"**{sum(map(len, runs.runs.values()))} of its {planned} runs are done**" in some
    assert "under way" not in some
    assert "](results/long-rates/table.md)" in some
    assert module._long_study({}.get) == []


def test_shares_have_wilsons_interval():
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)  # Newcombe 1998, and any calculator since
    assert wilson(3, 10) == pytest.approx((0.1078, 0.6032), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
