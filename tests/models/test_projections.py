"""Layers that read one input: the same as one by one, whatever has been done to them."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from depthmix import Decoder, DecoderConfig
from depthmix.models.projections import joined

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
    found = joined(h, *own)
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
    assert all(map(torch.equal, joined(h, *own), expected))
    assert made == list(SIZES)


def test_without_gradients_weights_are_not_joined(monkeypatch):
    made = products(monkeypatch)
    with torch.no_grad():
        joined(torch.randn(1, 7), *layers(torch.float32))
    assert made == list(SIZES)


def test_a_hook_on_the_gradient_sees_it():
    own, seen = layers(), []
    own[2].register_full_backward_hook(lambda m, grad_in, grad_out: seen.append(grad_out[0]))
    sum(y.sum() for y in joined(torch.randn(4, 7, dtype=torch.float64, requires_grad=True), *own)).backward()
    assert [g.shape for g in seen] == [(4, SIZES[2])]


def test_attention_and_mlp_join_their_own_and_not_where_their_class_was_changed(monkeypatch):
    model = Decoder(DecoderConfig(vocab_size=16, dim=8, n_blocks=1, n_heads=2, mlp="swiglu", mlp_dim=12))
    made, ids = products(monkeypatch), torch.zeros(1, 3, dtype=torch.int64)
    model(ids)
    assert made == [24, 8, 24, 8, 16]  # queries, keys, values; what they become; gate and up; down; the head
    made.clear()
    for sublayer in model.sublayers:  # as FSDP2 does it
        sublayer.__class__ = type(f"FSDP{type(sublayer).__name__}", (type(sublayer),), {})
    model(ids)
    assert made == [8, 8, 8, 8, 12, 12, 8, 16]
