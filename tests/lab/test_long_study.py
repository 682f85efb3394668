"""The long study's reading side, on made-up runs: multiples of the plain model's tokens, domains, lengths, and what is missing."""

import dataclasses
import math

import pytest

from compare.recipes import a_run
from lab import results_page
from lab.claims import Measurement, Results, read_claims
from lab.long_pictures import plot_factors, plot_lengths
from lab.long_study import domains_of, gains_by_length, of_domain, plain_gains, tokens_factor
from lab.readme_table import rows_of, table
from project import ROOT


def run(arm, seed, loss, tokens=1000, step=1.0):
    return dataclasses.replace(a_run(arm, seed, loss), tokens=tokens, step_seconds=step)


def study(runs, records=()):
    return Results("s", "residual", runs if isinstance(runs, dict) else {"": runs}, 0.01, records=list(records))


@pytest.fixture
def long():
    """Block gains 0.03 with two seeds; dca 0.1, mudd nothing, hyper 0.02 with one."""
    runs = [run("residual", seed, 2.0 + seed / 10) for seed in (0, 1)]
    for arm, gains, step in (
        ("attnres:block_size=4", (0.02, 0.04), 1.25),
        ("dca", (0.1,), 1.0),
        ("mudd", (-0.01,), 1.0),
        ("hyper", (0.02,), 2.0),
    ):
        runs += [run(arm, seed, 2.0 + seed / 10 - gain, step=step) for seed, gain in enumerate(gains)]
    return study(runs)


@pytest.fixture
def lengths():
    """The plain model gains 0.02 by 1.25 times the tokens and 0.06 by 2 times; seed 1 has no run of 2 times."""
    cells = {
        "short": [run("residual", 0, 3.0, 100), run("attnres:block_size=4", 0, 2.9, 100)],
        "1.25 times": [run("residual", 0, 1.99, 1250), run("residual", 1, 2.07, 1250)],
        "2 times": [run("residual", 0, 1.94, 2000)],
        "4 times": [],
    }
    return study(cells)


def test_the_plain_models_own_gains_are_means_over_shared_seeds(long, lengths):
    points = plain_gains(long, lengths)
    assert [x for x, _ in points] == [1.0, 1.25, 2.0]
    assert [gain for _, gain in points] == pytest.approx([0.0, (0.01 + 0.03) / 2, 0.06])
    assert plain_gains(long, None) == [(1.0, 0.0)]
    assert plain_gains(study([run("dca", 0, 2.0)]), lengths) == []


@pytest.mark.parametrize(
    ("gain", "times"),
    [
        (0.0, 1.0),
        (0.01, math.sqrt(1.25)),  # halfway in the logarithm
        (0.02, 1.25),
        (0.03, 1.25 * (2 / 1.25) ** 0.25),
        (0.06, 2.0),
        (0.07, math.inf),
        (-0.001, 0.0),
    ],
)
def test_tokens_that_a_gain_is_worth(long, lengths, gain, times):
    factor = tokens_factor(plain_gains(long, lengths), Measurement(-gain, -gain, -gain, 2))
    assert factor.value == factor.low == factor.high == pytest.approx(times)


def test_ends_of_a_factor_are_those_of_the_gain(long, lengths):
    factor = tokens_factor(plain_gains(long, lengths), Measurement(-0.02, -0.09, 0.05, 2))
    assert (factor.low, factor.high) == (0.0, math.inf)
    assert factor.show() == "1.25 (below 1.00 to above 2.00)"
    assert factor.over(1.25).show() == "1.00 (below 0.80 to above 1.60)"
    assert factor.show(interval=False) == "1.25"


def test_rows_have_factors_as_far_as_longer_runs_are_there(long, lengths):
    rows = {row.arm: row for row in rows_of(long, lengths)}
    assert rows["attnres:block_size=4"].tokens.value == pytest.approx(1.25 * (2 / 1.25) ** 0.25)
    assert rows["attnres:block_size=4"].time.value == pytest.approx(rows["attnres:block_size=4"].tokens.value / 1.25)
    assert rows["hyper"].cells(factors=True)[2:4] == ["1.25", "0.62"]
    assert rows["dca"].cells(factors=True)[2:] == ["above 2.00", "above 2.00", "1.00", "1 seed: a lead"]
    assert rows["mudd"].cells(factors=True)[2:4] == ["below 1.00", "below 1.00"]
    assert all(row.tokens is None for row in rows_of(long))


def test_gains_by_length_need_two_lengths(long, lengths):
    found = gains_by_length([lengths, None, long])
    assert list(found) == ["attnres:block_size=4"]
    assert {tokens: round(m.value, 6) for tokens, m in found["attnres:block_size=4"].items()} == {
        100: -0.1,
        1000: -0.03,
    }
    assert gains_by_length([None, long]) == {}


def test_a_domain_has_its_own_losses(long):
    records = [
        {"arm": arm, "seed": 0, "domain": "", "size": "", "result": {"domains": {"books": loss, "code": 1.0}}}
        for arm, loss in (("residual", 3.0), ("dca", 2.6))
    ]
    records += [{"arm": "mudd", "seed": 0, "domain": "", "size": "", "result": {}}]
    records += [{"arm": "hyper", "seed": 0, "domain": "", "size": "", "diverged": "at step 3"}]
    found = dataclasses.replace(long, records=records)
    assert domains_of(found) == ["books", "code"]
    assert [(r.arm, r.val_loss) for r in of_domain(found, "books").runs[""]] == [("residual", 3.0), ("dca", 2.6)]
    rows = {row.arm: row for row in rows_of(found)}
    assert rows["dca"].cells(["books", "code"])[1:4] == ["-0.100", "-0.400", "+0.000"]
    assert rows["mudd"].cells(["books"])[1:3] == ["+0.010", "–"]


def test_the_table_grows_with_the_runs(long, lengths):
    assert table(long).splitlines()[0].count("|") == 5
    wide = table(long, lengths).splitlines()
    assert wide[0].count("|") == 7
    assert all(line.count("|") == 7 for line in wide[1 : wide.index("")])
    assert any(line.startswith("* Tokens: how many times") for line in wide)


def test_figures_show_what_is_there(long, lengths):
    rows = rows_of(long, lengths)
    (axes,) = plot_factors(rows).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [row.name for row in rows]
    # Of dca and mudd no value is known, only a side of 1.
    dots = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert len(dots) == 4
    (axes,) = plot_lengths(gains_by_length([lengths, long]), {}).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0.0001M", "0.001M"]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [line.get_ydata()[0] for line in dots] == pytest.approx([-0.1, -0.03])
    assert [line.get_markerfacecolor() == line.get_color() for line in dots] == [False, True]


def test_claims_that_the_long_study_measured_have_verdicts_and_one_seed_has_none(long, monkeypatch):
    monkeypatch.chdir(ROOT)
    claims, _ = read_claims(results_page.CLAIMS)
    lines = results_page._long_claims(claims, {"long": long}.get)
    rows = [line for line in lines if line.startswith("| **")]
    assert any(
        line.startswith("| **a lead** | DCA ends 0.050 nats below") and "| -0.100 | 1 |" in line for line in rows
    )
    assert any("Block of 4 sites ends 0.020 nats below" in line and "| 2 |" in line for line in rows)
    assert f"measured {len(rows)} of {len(claims)} claims" in " ".join(lines)
    assert results_page._long_claims(claims, {}.get) == []
