"""Loss spikes: what is one, and what is not."""

import math
import random

from depthmix.train.spikes import WINDOW, find_spikes


def losses(n=400, noise=0.03):
    rng = random.Random(0)
    return [3 + 6 * math.exp(-step / 60) + rng.gauss(0, noise) for step in range(n)]


def test_a_falling_noisy_curve_has_none():
    assert find_spikes(losses()) == []
    assert find_spikes(losses(noise=0.3)) == []  # small batches


def test_a_spike_is_one_however_long_and_is_at_its_highest_step():
    curve = losses()
    for step, above in ((200, 1.0), (201, 2.0), (202, 0.8), (300, 0.9)):
        curve[step] += above
    found = find_spikes(curve)
    assert [step for step, _ in found] == [201, 300]
    assert 1.8 < found[0][1] < 2.2


def test_small_leaps_and_the_first_steps_do_not_count():
    curve = losses(noise=0.001)
    curve[250] += 0.09
    curve[WINDOW - 1] += 5
    assert find_spikes(curve) == []
    assert find_spikes([1.0, 2.0]) == []


def test_a_loss_that_is_no_number_is_a_spike():
    curve = losses()
    curve[120] = math.nan
    assert [step for step, _ in find_spikes(curve)] == [120]
