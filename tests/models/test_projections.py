"""Layers that read one input: the same as one by one, whatever has been done to them."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from depthmix.models.projections import project

SIZES = (5, 3, 2)


def layers(dtype=torch.float64):
    torch.manual_seed(0)
    return [nn.Linear(7, n, bias=False, dtype=dtype) for n in SIZES]


def products(monkeypatch):
    """The output sizes of the products that are made."""
    made, linear = [], functional.linear

    def counted(x, weight, bias=None):
        made.append(len(weight))
        return linear(x, weight, bias)

    monkeypatch.setattr(functional, "linear", counted)
    return made


def test_results_and_every_gradient_are_those_of_the_layers_one_by_one(monkeypatch):
    own, h = layers(), torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    expected = [layer(h) for layer in own]
    made = products(monkeypatch)
    found = project(h, *own)
    assert made == [sum(SIZES)]
    wanted, given = [h, *(layer.weight for layer in own)], [torch.randn_like(y) for y in expected]
    for y, other in zip(found, expected, strict=True):
        torch.testing.assert_close(y, other)
    for g, other in zip(
        torch.autograd.grad(found, wanted, given), torch.autograd.grad(expected, wanted, given), strict=True
    ):
        torch.testing.assert_close(g, other)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Wrapped(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def wrapped(own):
    own[1].__class__ = Wrapped


CHANGES = {
    "a hook": lambda own: own[1].register_forward_hook(lambda m, args, y: y + 1),
    "a hook before": lambda own: own[1].register_forward_pre_hook(lambda m, args: (args[0] + 1,)),
    "another weight": lambda own: parametrize.register_parametrization(own[1], "weight", Doubled()),
    "another class": wrapped,
    "a bias": lambda own: own.__setitem__(1, nn.Linear(7, SIZES[1], dtype=torch.float64)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_layer_that_was_changed_is_asked(change, monkeypatch):
    own, h = layers(), torch.randn(4, 7, dtype=torch.float64)
    before = [layer(h) for layer in own]
    change(own)
    expected = [layer(h) for layer in own]
    assert not torch.allclose(expected[1], before[1])
    made = products(monkeypatch)
    assert all(map(torch.equal, project(h, *own), expected))
    assert made == list(SIZES)


def test_without_gradients_weights_are_not_joined(monkeypatch):
    made = products(monkeypatch)
    with torch.no_grad():
        project(torch.randn(1, 7), *layers(torch.float32))
    assert made == list(SIZES)


def test_a_hook_on_the_gradient_sees_it():
    own, seen = layers(), []
    own[2].register_full_backward_hook(lambda m, grad_in, grad_out: seen.append(grad_out[0]))
    sum(y.sum() for y in project(torch.randn(4, 7, dtype=torch.float64, requires_grad=True), *own)).backward()
    assert [g.shape for g in seen] == [(4, SIZES[2])]
