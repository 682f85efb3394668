"""The toy training of Figure 1: the fast way through three numbers a layer is the network, and what it shows is what is said."""

import math

import pytest
import torch

from lab.theory.toy import Setting, Size, _forward, train

SMALL = Size(d=30, n_layers=4, rank=2, steps=150, batch=50)


def test_the_fast_forward_is_the_network():
    torch.manual_seed(0)
    d, n_layers, rank, n = 7, 4, 2, 3
    u, v = torch.randn(n, n_layers * rank, d).double(), torch.randn(n, d, n_layers * rank).double()
    b, x = torch.randn(n, n_layers, n_layers + 1).double(), torch.randn(5, d).double()
    got = _forward(x, u, v, b, rank)
    for i in range(n):
        entries = [x]
        for layer in range(n_layers):
            g = x if layer == 0 else sum(w * f for w, f in zip(b[i, layer - 1], entries, strict=False))
            mine = slice(layer * rank, (layer + 1) * rank)
            entries.append(g @ u[i, mine].T @ v[i][:, mine].T)
        torch.testing.assert_close(got[i], sum(w * f for w, f in zip(b[i, -1], entries, strict=True)))


@pytest.fixture(scope="module")
def curves():
    settings = [
        Setting(target, rule, init, lr)
        for target, init, lr in (
            ("identity", 0.3, 0.01),
            ("identity", "torch", 0.3),
            ("random", "torch", 0.03),
            ("random", "torch", 3.0),
        )
        for rule in ("residual", "grn-v1")
    ]
    return train(settings, SMALL, every=50)


def test_both_rules_start_as_one_network(curves):
    for first, second in ((0, 1), (2, 3), (4, 5)):
        torch.testing.assert_close(curves.losses[first, 0], curves.losses[second, 0])


def test_the_identity_goes_to_either_rule_by_start_and_rate(curves):
    large = [curves.final(Setting("identity", rule, 0.3, 0.01)) for rule in ("residual", "grn-v1")]
    default = [curves.final(Setting("identity", rule, "torch", 0.3)) for rule in ("residual", "grn-v1")]
    assert large[1] < large[0] / 2  # as in the paper
    assert default[0] < default[1] / 2  # the other way round


def test_a_random_map_goes_to_the_grn(curves):
    residual, grn = (curves.final(Setting("random", rule, "torch", 0.03)) for rule in ("residual", "grn-v1"))
    assert grn < residual


def test_a_run_that_diverges_does_not_touch_the_others(curves):
    assert curves.final(Setting("random", "residual", "torch", 3.0)) == math.inf
    alone = train([Setting("identity", "grn-v1", 0.3, 0.01)], SMALL, every=50)
    torch.testing.assert_close(alone.losses[0], curves.losses[1])
