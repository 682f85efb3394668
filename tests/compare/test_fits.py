"""Power laws and advantages, on curves whose laws are known."""

import math
import random

import pytest

from depthmix.compare.fits import advantage, by_size, fit, over_sizes


def curve(a, b, noise=0.0, seed=0):
    rng = random.Random(seed)
    return {str(i): (c, a * c**-b * math.exp(rng.gauss(0, noise))) for i, c in enumerate((0.01, 0.03, 0.2, 1.0, 5.6))}


def test_a_law_is_found_again():
    law = fit(list(curve(1.891, 0.057).values()))
    assert (law.a, law.b) == pytest.approx((1.891, 0.057))
    assert law.compute(law.loss(3.0)) == pytest.approx(3.0)


def test_the_papers_advantage():
    """1.891 C^-0.057 and 1.870 C^-0.058 give 1.25 at C = 5.6 (Attention Residuals, Figure 4)."""
    law, found = advantage(curve(1.891, 0.057), curve(1.870, 0.058))
    assert law.a == pytest.approx(1.870)
    assert found.factor == pytest.approx(1.25, abs=0.01)
    assert found.low == pytest.approx(found.high)  # nothing is uncertain about exact laws


def test_the_interval_holds_the_truth_and_grows_with_the_noise():
    held, widths = 0, {0.0005: 0.0, 0.004: 0.0}
    for noise in widths:
        for seed in range(40):
            first, own = curve(1.891, 0.057, noise, seed), curve(1.870, 0.058, noise, 1000 + seed)
            found = advantage(first, own)[1]
            held += found.low <= 1.254 <= found.high
            widths[noise] += math.log(found.high / found.low) / 40
    assert held / 80 > 0.8
    assert widths[0.004] > 4 * widths[0.0005]


def test_what_all_have_in_common_is_no_uncertainty():
    first = curve(1.891, 0.057, 0.01)
    own = {size: (c, loss * 0.99) for size, (c, loss) in first.items()}
    found = advantage(first, own)[1]
    assert found.high / found.low < 1.5
    assert found.factor > 1


def test_the_mean_over_sizes():
    """Of logarithms: 1/2 and 2 are 1 in the mean; t = 4.303 for three sizes."""
    mean = over_sizes([0.5, 1.0, 2.0])
    half = 4.303 * math.log(2) / math.sqrt(3)
    assert [mean.factor, mean.low, mean.high] == pytest.approx([1.0, math.exp(-half), math.exp(half)], rel=1e-3)
    assert over_sizes([1.2, 1.3]) is None


def test_size_by_size():
    first = curve(1.891, 0.057)
    own = {size: (c, 1.891 * (1.25 * c) ** -0.057) for size, (c, _) in first.items() if size != "0"}
    assert by_size(first, own) == pytest.approx(dict.fromkeys("1234", 1.25))
    bent = {size: (c, loss + 0.3 * (size == "2")) for size, (c, loss) in curve(4, 0.3).items()}  # no law fits
    halves = {size: (c, fit([bent["2"], bent["3"]]).loss(2 * c)) for size, (c, _) in bent.items() if size == "2"}
    assert by_size(bent, halves) == pytest.approx({"2": 2.0})  # between its own sizes
    beyond = {"4": (bent["4"][0], fit([bent["3"], bent["4"]]).loss(3 * bent["4"][0]))}
    assert by_size(bent, beyond) == pytest.approx({"4": 3.0})
    worse = {"3": (bent["3"][0], fit([bent["2"], bent["3"]]).loss(bent["3"][0] / 2))}
    assert by_size(bent, worse) == pytest.approx({"3": 0.5})
    slower = {size: (1.1 * needed, loss) for size, (needed, loss) in own.items()}  # as in GPU time
    assert by_size(first, slower) == pytest.approx(dict.fromkeys("1234", 1.25 / 1.1))


def test_too_little_to_say():
    few = {"a": (1.0, 2.0), "b": (2.0, 1.9)}
    assert advantage(few, few) is None
    assert by_size(few, few) == {}
    rising = {"a": (1.0, 2.0), "b": (2.0, 2.1), "c": (3.0, 2.2)}
    assert advantage(curve(1, 0.1), rising) is None
    assert advantage(rising, rising) is None
    assert by_size(rising, rising) == {}
