"""Layers that read one input: the same as one by one, whatever has been done to them."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from depthmix import Decoder, DecoderConfig
from depthmix.compare.arms import parse_arm
from depthmix.models.projections import project

SIZES = (5, 3, 2)


def layers(dtype=torch.float64):
    torch.manual_seed(0)
    return [nn.Linear(7, n, bias=False, dtype=dtype) for n in SIZES]


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)  # which leaves fp64 as it is


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
    with autocast():
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
    "another forward": lambda own: setattr(own[1], "forward", lambda x: functional.linear(x, own[1].weight) + 1),
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
    with autocast():
        assert all(map(torch.equal, project(h, *own), expected))
    assert made == list(SIZES)


def test_hooks_of_all_modules_see_every_layer():
    own, seen = layers(), []
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, y: seen.append(module))
    try:
        with autocast():
            project(torch.randn(4, 7, dtype=torch.float64), *own)
    finally:
        hook.remove()
    assert seen == own


def test_no_copy_is_made_that_would_not_be_made_anyway(monkeypatch):
    made, h = products(monkeypatch), torch.randn(1, 7)
    with torch.no_grad(), autocast():
        project(h, *layers(torch.float32))
    project(h, *layers(torch.float32))
    assert made == [*SIZES, *SIZES]


def test_a_hook_on_the_gradient_sees_it():
    own, seen = layers(), []
    own[2].register_full_backward_hook(lambda m, grad_in, grad_out: seen.append(grad_out[0]))
    with autocast():
        found = project(torch.randn(4, 7, dtype=torch.float64, requires_grad=True), *own)
    sum(y.sum() for y in found).backward()
    assert [g.shape for g in seen] == [(4, SIZES[2])]


@pytest.mark.parametrize("mixer", ["residual", "attnres:ways=2"])
def test_a_model_trained_under_autocast_joins_what_reads_one_input(mixer, monkeypatch):
    arm = parse_arm(mixer)
    choice = {"mixer": arm.name, "mixer_options": arm.options}
    model = Decoder(DecoderConfig(vocab_size=16, dim=8, n_blocks=1, n_heads=2, mlp="swiglu", mlp_dim=12, **choice))
    ids = torch.zeros(1, 3, dtype=torch.int64)
    with autocast():
        with torch.no_grad():
            apart = model(ids)
        made = products(monkeypatch)
        torch.testing.assert_close(model(ids), apart, rtol=2e-2, atol=2e-2)
    together = [16, 8] if arm.options else [24]
    assert made == [*together, 8, 24, 8, 16]  # queries, keys, values; what they become; gate and up; down; the head
