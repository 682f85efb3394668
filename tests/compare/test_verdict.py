"""The verdict: how often it is wrong when there is nothing to find, and what it says."""

import random
import re
from dataclasses import replace

import pytest

from depthmix.compare.interval import half_width, student_probability, student_t
from depthmix.compare.rows import Run, make_rows
from depthmix.compare.verdict import footnotes, headline, verdict
from project import ROOT


def rows_of(plain, arm):
    """Rows of two arms whose final losses, seed by seed, are given."""
    common = {"path": "", "steps": 1, "tokens": 1, "bits_per_byte": None, "parameters": 1, "added_by_mixer": 0}
    common |= {"step_seconds": 1.0, "seconds": 1.0, "peak_memory": None}
    runs = [
        Run(arm=name, seed=seed, val_loss=loss, curve=[(1, 1, loss)], **common)
        for name, losses in (("residual", plain), ("arm", arm))
        for seed, loss in enumerate(losses)
    ]
    return make_rows(runs, ["residual", "arm"])


def sentence(*differences):
    (text,) = verdict(rows_of([4.0] * len(differences), [4.0 + d for d in differences]))
    return text.removeprefix("arm: ")


@pytest.mark.parametrize(
    ("df", "confidence", "t"),
    [
        (1, 0.95, 12.7062),
        (2, 0.95, 4.3027),
        (3, 0.95, 3.1824),
        (4, 0.95, 2.7764),
        (5, 0.95, 2.5706),
        (6, 0.95, 2.4469),
        (9, 0.95, 2.2622),
        (10, 0.95, 2.2281),
        (30, 0.95, 2.0423),
        (1, 0.99, 63.6567),
        (4, 0.99, 4.6041),
        (7, 0.90, 1.8946),
    ],
)
def test_quantiles_are_those_of_the_printed_tables(df, confidence, t):
    assert student_t(df, confidence) == pytest.approx(t, abs=5e-5)
    assert student_probability(student_t(df, confidence), df) == pytest.approx(confidence, abs=1e-12)


def test_the_interval_of_a_mean():
    assert half_width([0.1]) is None
    assert half_width([1.0, 3.0]) == pytest.approx(12.7062, abs=1e-4)  # half the range is the standard error
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.3027 / 3**0.5, abs=1e-4)
    assert half_width([0.2, 0.2, 0.2]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("seeds", [2, 3, 4])
def test_where_there_is_no_difference_one_is_called_in_one_case_of_twenty(seeds):
    chance, cases = random.Random(seeds), 2000
    called = 0
    for _ in range(cases):
        shared = [chance.gauss(4, 0.1) for _ in range(seeds)]
        rows = rows_of(*([s + chance.gauss(0, 0.02) for s in shared] for _ in range(2)))
        called += "no difference" not in verdict(rows)[0]
    assert 0.035 < called / cases < 0.065


def test_a_clear_difference_is_called_with_how_sure_that_is():
    assert sentence(-0.22, -0.23, -0.21) == "0.220 nats below residual (95% interval 0.195 to 0.245 over 3 seeds)."
    assert sentence(0.05, 0.0505) == "0.0503 nats above residual (95% interval 0.0471 to 0.0534 over 2 seeds, wide since t = 12.7 for two)."  # fmt: skip


def test_what_chance_may_explain_is_not_called():
    assert sentence(-0.045, -0.059) == "0.052 nats below residual, but the 95% interval over 2 seeds, wide since t = 12.7 for two, reaches from 0.141 below to 0.037 above: no difference shown."  # fmt: skip
    assert sentence(-0.1, 0.05, 0.02).endswith("over 3 seeds reaches from 0.21 below to 0.19 above: no difference shown.")  # fmt: skip
    assert sentence(-0.0595) == "0.059 nats below residual with one seed, which says nothing about chance; run three or more."  # fmt: skip


@pytest.mark.parametrize(
    "differences", [(0.0, 0.0), (1e-5, 1e-5), (0.0,), (-3e-5, 3e-5, 0), (1e-4, 1e-4), (2e-4,), (1e-4, -2e-4), (9e-4,)]
)
def test_no_number_reads_as_nothing(differences):
    text = sentence(*differences)
    assert not re.search(r"\b0\.0+\b nats", text)
    assert ("the same loss as residual to 4 decimals" in text) == (max(map(abs, differences)) < 5e-5)


def test_without_pairs_there_is_no_verdict():
    assert verdict(rows_of([], [4.0])) == []


def test_the_table_and_the_page_say_what_plus_minus_is():
    assert sum("half the 95% interval" in note for note in footnotes(rows_of([4.0, 4.1], [3.9, 4.0]))) == 1
    assert not any("±" in note for note in footnotes(rows_of([4.0], [3.9])))
    page = (ROOT / "docs" / "guides" / "comparing.md").read_text()
    assert page.count("half the 95% interval") >= 1


def test_with_the_spread_of_all_arms():
    """Two seeds are not wide for their own t, and one seed has an interval, which is said to be the others'."""
    two = replace(rows_of([4.0, 4.0], [3.9, 3.92])[1], difference_interval=0.05)
    assert verdict([two], pooled=True) == ["arm: 0.090 nats below residual (95% interval 0.040 to 0.140 over 2 seeds)."]
    assert "wide since t = 12.7" in verdict([two])[0]
    one = replace(rows_of([4.0], [3.9])[1], difference_interval=0.05)
    assert verdict([one], pooled=True) == [
        "arm: 0.100 nats below residual (95% interval 0.050 to 0.150 with one seed, by the spread of the others)."
    ]
    unsure = replace(one, difference_interval=0.2)
    assert (
        "the 95% interval with one seed, by the spread of the others, reaches from" in verdict([unsure], pooled=True)[0]
    )


def test_the_headline_says_no_more_than_is_shown():
    def rows(*differences, half=0.02, tokens=0.9, accuracy=None):
        (base, other) = rows_of([4.0, 4.0], [3.9, 3.92])
        changed = {"difference_interval": half, "tokens_to_reach": tokens, "accuracy": accuracy}
        arms = [replace(other, arm=f"arm{i}", difference=d, **changed) for i, d in enumerate(differences)]
        return [replace(base, accuracy=accuracy), *arms]

    assert headline(rows(-0.1)) == "arm0 reaches residual's loss with 10% fewer tokens"
    assert (
        headline(rows(-0.1), titles={"arm0": "Some Rule"}) == "Some Rule reaches residual's loss with 10% fewer tokens"
    )
    assert headline(rows(-0.1, -0.2)) == "All 2 rules reach residual's loss with 10% fewer tokens"
    assert headline(rows(-0.1), equal_time=True) == "arm0 predicts text better than residual"
    assert headline(rows(-0.1, tokens=None)) == "arm0 predicts text better than residual"
    assert headline(rows(-0.1, -0.01, 0.1)) == "Of 3 rules, arm0 predicts text better than residual"
    assert headline(rows(-0.1, -0.2, 0.1)) == "Of 3 rules, 2 predict text better than residual"
    assert headline(rows(-0.1, -0.2, 0.1, accuracy=0.5)) == "Of 3 rules, 2 classify images better than residual"
    assert headline(rows(0.1)) == "arm0 predicts text worse than residual"
    assert headline(rows(0.1, 0.2)) == "No rule is shown to beat residual"
    assert headline(rows(0.01, -0.01)) == "No difference is shown between any of 2 rules and residual"
    assert headline(rows(-0.1, half=0.0)).startswith("arm0 reaches")
    assert headline(rows(-0.1, half=None)) == "arm0 ended 0.100 nats below residual, in one run"
    assert headline(rows()) == "residual: validation loss 4.0000 nats"
