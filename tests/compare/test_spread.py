"""What all arms together say of chance: by hand, against formulas for balanced data, and in a simulation."""

import math

import numpy as np
import pytest

from compare import recipes
from compare.recipes import a_run
from depthmix.compare.interval import OWN_SEEDS, student_t
from depthmix.compare.spread import Spread, around, pooled, spreads


def table(losses):
    """Runs of arms (rows) and seeds (columns); None where there is none."""
    return [a_run(f"arm {i}", s, x) for i, row in enumerate(losses) for s, x in enumerate(row) if x is not None]


def test_by_hand():
    """Seeds are 1.00, 1.02 and 0.98 apart: 0.01 is left twice of the second arm and twice of the third."""
    found = pooled([table([[4.0, 5.0], [3.9, 4.92], [3.99, 4.97]])])
    assert found.freedom == 2
    assert found.deviation == pytest.approx(math.sqrt(2 * 4 * 0.01**2 / 2))
    assert found.half_width(2) == pytest.approx(student_t(2) * 0.02 / math.sqrt(2))


def test_balanced_data_have_the_squares_of_the_analysis_of_variance():
    losses = np.random.default_rng(0).normal(size=(5, 3))
    rest = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
    found = pooled([table(losses)])
    assert found.freedom == 4 * 2
    assert found.deviation == pytest.approx(math.sqrt(2 * (rest**2).sum() / 8))
    moved = pooled([table(losses + np.array([0, 7, 0]) + np.arange(5)[:, None])])
    assert moved.deviation == pytest.approx(found.deviation)


def test_arms_of_different_cells_have_different_seeds():
    """A contrast that does not cancel within a cell also varies with the cell's seeds: simulated, as is one that does."""
    draws, held = np.random.default_rng(0), [0, 0]
    for _ in range(400):
        cells = [draws.normal(size=(8, 3)) + 2 * draws.normal(size=3) for _ in range(4)]
        spread = pooled(map(table, cells))
        one, other = cells[0], cells[1]
        for i, (value, weights) in enumerate(
            (
                ((one[1] - other[0]).mean(), ((1,), (-1,))),
                ((one[1] - one[0] - other[1] + other[0]).mean(), ((1, -1), (-1, 1))),
            )
        ):
            held[i] += abs(value) < spread.half_width(3, weights)
    assert 0.88 < held[0] / 400 < 0.99  # without the seeds' part it is 0.6
    assert 0.92 < held[1] / 400 < 0.98


def test_what_stands_alone_says_nothing():
    two = [[4.0, 5.0], [3.9, 4.92]]
    known = pooled([table(two)])
    one_seed, nothing_in_common = pooled([table([*two, [1.0, None]])]), pooled([[*table(two), a_run("c", 7, 1.0)]])
    assert one_seed.freedom == nothing_in_common.freedom == known.freedom == 1
    assert one_seed.deviation == pytest.approx(known.deviation)
    assert nothing_in_common.deviation == pytest.approx(known.deviation)
    assert pooled([table([[4.0, None], [None, 3.9]])]).freedom == 0
    assert pooled([]) == Spread(0.0, 0)
    assert Spread(0.0, 0).half_width(2) is None
    assert known.half_width(0) is None


def test_cells_add_up_and_have_seeds_of_their_own():
    first, second = table([[4.0, 5.0], [3.9, 4.92]]), table([[1.0, 3.0], [1.0, 3.06]])
    found = pooled([first, second])
    assert found.freedom == 2
    assert found.deviation**2 == pytest.approx(
        (0.02**2 / 2 + 0.06**2 / 2) / 2
    )  # the variance of two differences, twice


def test_intervals_hold_what_they_should():
    """Two seeds of twelve arms, plain among them: of 95% intervals of a difference to plain about as many hold the truth."""
    draws, held = np.random.default_rng(0), 0
    for _ in range(400):
        losses = draws.normal(size=(12, 2)) + draws.normal(size=2)
        half = pooled([table(losses)]).half_width(2)
        held += abs((losses[3] - losses[0]).mean()) < half
    assert 0.92 < held / 400 < 0.98


def test_arms_that_do_not_vary_alike_have_their_own_with_enough_seeds():
    """An arm that goes with plain, one that varies ten times as much, and ten others: intervals of all arms' spread fit neither."""
    draws, own, common = np.random.default_rng(1), np.zeros(2), np.zeros(2)
    for _ in range(600):
        plain = draws.normal(size=OWN_SEEDS)
        arms = [plain, *(plain + s * draws.normal(size=OWN_SEEDS) for s in (0.1, 10, *[1] * 10))]
        spread = pooled([table(arms)])
        for i in range(2):
            values = list(arms[1 + i] - plain)
            own[i] += abs(np.mean(values)) < around(values, spread)[0]
            common[i] += abs(np.mean(values)) < spread.half_width(OWN_SEEDS)
    assert own / 600 == pytest.approx([0.95, 0.95], abs=0.03)
    assert common[0] == 600
    assert common[1] < 0.7 * 600
    values = list(arms[1] - plain)
    assert around(values, spread)[1] == OWN_SEEDS - 1
    assert around(values[1:], spread) == (spread.half_width(OWN_SEEDS - 1), spread.freedom)


def test_sizes_of_a_domain_are_one_unless_they_are_rates(tmp_path):
    cells = {"s": table([[4.0, 5.0], [3.9, 4.92]]), "m": table([[4.0, 5.0], [3.9, 4.9]])}
    for sections, same in (([], True), (["stability"], False)):
        sizes = {"s": {"lr": 1e-3}, "m": {"lr": 1e-2}}
        study = recipes.read(recipes.write(tmp_path, sizes=sizes, sections=sections))
        names = [cell.name for cell in study.cells]
        found = spreads(study, dict(zip(names, cells.values(), strict=True)))
        assert (found[names[0]] == found[names[1]]) is same
