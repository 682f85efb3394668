"""Every mixer against an implementation written from the papers alone: output, reads, every gradient, M, shapes, initial values."""

import pytest
import torch

from depthmix.mixers import mixer_class
from harness import (
    BY_THREES,
    CASES,
    DIM,
    LAYOUTS,
    MIXERS,
    PAIRWISE,
    PAIRWISE_IDS,
    Sublayers,
    build,
    complete,
    embedding,
    label,
    run_stack,
)
from oracles import DEFAULTS, ORACLES
from oracles.shapes import initial, shapes

pytestmark = pytest.mark.uncovered  # the battery runs the same lines


def assert_agree(got, expected, what=""):
    """To 1e-9 of the largest entry: gradients reach 1e3 in some cases."""
    scale = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9 * scale, msg=lambda m: f"{what}: {m}")


def reference(mixer, name, choice, sublayers, e):
    parameters = {k: p.detach().clone().requires_grad_() for k, p in mixer.named_parameters()}
    return parameters, ORACLES[name](parameters, complete(name, choice), mixer.layout.blocks, e, sublayers)


def test_every_mixer_has_an_oracle():
    """A new mixer needs a reference of its own in tests/oracles: nothing can be compared with itself."""
    assert set(MIXERS) == set(ORACLES)


@pytest.mark.parametrize("name", MIXERS)
def test_defaults_are_the_documented_ones(name):
    defaults = {n: o.default for n, o in mixer_class(name).options.items()}
    documented = DEFAULTS[name] | (
        {"head": None} if name == "mhc" else {}
    )  # None: sum, unless the schedule needs no head
    assert defaults == documented


# The combinations that every three values need where every window and block size matters; in four blocks of one, two and three
# sites those that every pair of values needs; and the defaults at another depth and with other sites.
DEPTHS = [(*case, 5) for case in BY_THREES]
DEPTHS += [(*case, "uneven") for case in PAIRWISE]
DEPTHS += [(name, {}, depth) for depth in (3, "parallel", "cross") for name in MIXERS]
DEPTH_IDS = [f"{label(name, choice)}-{depth}" for name, choice, depth in DEPTHS]


@pytest.mark.parametrize(("name", "choice", "depth"), DEPTHS, ids=DEPTH_IDS)
def test_output_and_every_gradient_agree_in_fp64(name, choice, depth):
    blocks = LAYOUTS.get(depth, depth)
    mixer = build(name, blocks, choice, random=True)
    sublayers, e = Sublayers(blocks), embedding().requires_grad_()
    direction = torch.randn_like(e)
    out, reads, _ = run_stack(mixer, sublayers, e)
    (out * direction).sum().backward()

    again, e2 = Sublayers(blocks), e.detach().clone().requires_grad_()
    again.load_state_dict(sublayers.state_dict())
    parameters, trace = reference(mixer, name, choice, again, e2)
    (trace.out * direction).sum().backward()

    assert_agree(out, trace.out)
    for s, (ours, theirs) in enumerate(zip(reads, trace.reads[:-1], strict=True)):
        assert len(ours) == len(theirs) == mixer.ways(s)
        for h, expected in zip(ours, theirs, strict=True):
            assert_agree(h, expected)
    assert_agree(e.grad, e2.grad)
    assert_agree(sublayers.weight.grad, again.weight.grad)
    for k, p in mixer.named_parameters():
        expected = parameters[k].grad
        got = torch.zeros_like(p) if p.grad is None else p.grad
        assert_agree(got, torch.zeros_like(p) if expected is None else expected, k)


@pytest.mark.parametrize(("name", "choice"), PAIRWISE, ids=PAIRWISE_IDS)
def test_mixing_matrix_equals_the_closed_form(name, choice):
    check_mixing(name, choice, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MIXERS)
def test_mixing_matrix_of_other_sites_equals_the_closed_form(name, layout):
    check_mixing(name, {}, LAYOUTS[layout])


def check_mixing(name, choice, blocks):
    mixer = build(name, blocks, choice, random=True)
    with torch.no_grad():
        sublayers, e = Sublayers(blocks), embedding()
        _, _, sources = run_stack(mixer, sublayers, e)
    _, trace = reference(mixer, name, choice, sublayers, e)
    expected = trace.M.mean(-1).permute(3, 4, 0, 1, 2)  # [B, T, W, S+1, S+1]
    assert_agree(mixer.mixing(sources, per_token=True), expected)
    assert_agree(mixer.mixing(sources), expected.mean((0, 1)))


@pytest.mark.parametrize("name", MIXERS)
def test_parameters_have_the_documented_names_shapes_and_initial_values(name):
    """All combinations at three blocks, and at one and with other sites those that every pair of values needs."""
    for blocks, cases in ((3, CASES), *((blocks, PAIRWISE) for blocks in (1, LAYOUTS["uneven"]))):
        for choice in (choice for other, choice in cases if other == name):
            mixer, options = build(name, blocks, choice, dtype=torch.float32), complete(name, choice)
            found = {k: tuple(p.shape) for k, p in mixer.named_parameters()}
            assert found == shapes(name, options, DIM, blocks), choice
            for k, expected in initial(name, options, DIM, blocks).items():
                value = mixer.get_parameter(k)
                assert torch.isfinite(value).all(), (choice, k)
                if expected is not None:
                    torch.testing.assert_close(value, expected.float(), msg=lambda m, c=choice, k=k: f"{c}, {k}: {m}")
