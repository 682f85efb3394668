"""Every mixer against an implementation written from the papers alone: output, reads, every gradient, M, shapes, initial values."""

import pytest
import torch

from depthmix.mixers import mixer_class
from harness import (
    CASES,
    DIM,
    LAYOUTS,
    MIXERS,
    PAIRWISE,
    Sublayers,
    build,
    complete,
    embedding,
    label,
    run_stack,
)
from oracles import DEFAULTS, ORACLES
from oracles.cases import OPTIONS, pairwise
from oracles.shapes import initial, shapes

pytestmark = pytest.mark.uncovered  # the battery runs the same lines


def assert_agree(got, expected, what=""):
    """To 1e-9 of the largest entry: gradients reach 1e3 in some cases."""
    atol = 1e-9 * max(1.0, float(expected.detach().abs().max()))
    # Only what differs goes to assert_close, which takes ten times as long.
    if (got.shape, got.dtype) != (expected.shape, expected.dtype) or not float(
        (got - expected).detach().abs().max()
    ) <= atol:
        torch.testing.assert_close(got, expected, rtol=0, atol=atol, msg=lambda m: f"{what}: {m}")


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


SHORT = 2
DEEP = 5  # blocks of the usual two sites: enough for every window and every block size to matter


def matters(meeting):
    """Ask for every three options somewhere, every two of them in DEEP blocks and every one in uneven blocks."""
    options = [option for option, _ in meeting if option != "blocks"]
    return len(options) <= {None: 3, SHORT: 0, DEEP: 2, "uneven": 1}[dict(meeting).get("blocks")]


DEPTHS = [
    ({k: v for k, v in choice.items() if k != "blocks"}, choice["blocks"], name)
    for name in MIXERS
    for choice in pairwise(
        name, [c | {"blocks": b} for b in (SHORT, DEEP, "uneven") for c in OPTIONS.get(name, [{}])], 3, matters
    )
]
DEPTHS += [({}, layout, name) for layout in ("parallel", "cross") for name in MIXERS]
DEPTH_IDS = [f"{label(name, choice)}-{depth}" for choice, depth, name in DEPTHS]


@pytest.mark.parametrize(("choice", "depth", "name"), DEPTHS, ids=DEPTH_IDS)
def test_output_reads_mixing_and_every_gradient_agree_in_fp64(name, choice, depth):
    blocks = LAYOUTS.get(depth, depth)
    mixer = build(name, blocks, choice, random=True)
    sublayers, e = Sublayers(blocks), embedding().requires_grad_()
    direction = torch.randn_like(e)
    out, reads, sources = run_stack(mixer, sublayers, e)
    (out * direction).sum().backward()

    again, e2 = Sublayers(blocks), e.detach().clone().requires_grad_()
    again.load_state_dict(sublayers.state_dict())
    parameters, trace = reference(mixer, name, choice, again, e2)
    (trace.out * direction).sum().backward()

    assert_agree(out, trace.out, "output")
    for s, (ours, theirs) in enumerate(zip(reads, trace.reads[:-1], strict=True)):
        assert len(ours) == len(theirs) == mixer.ways(s)
        for h, expected in zip(ours, theirs, strict=True):
            assert_agree(h, expected, f"what site {s} reads")
    assert_agree(e.grad, e2.grad, "gradient of the embedding")
    assert_agree(sublayers.weight.grad, again.weight.grad, "gradients of the sublayers")
    for k, p in mixer.named_parameters():
        expected = parameters[k].grad
        got = torch.zeros_like(p) if p.grad is None else p.grad
        assert_agree(got, torch.zeros_like(p) if expected is None else expected, k)
    if depth not in (SHORT, DEEP):  # the mixing matrix takes longer than all the rest together
        sources = [source.detach() for source in sources]
        expected = trace.M.mean(-1).permute(3, 4, 0, 1, 2)  # [B, T, W, S+1, S+1]
        per_token = mixer.mixing(sources, per_token=True)
        assert_agree(per_token, expected, "mixing matrix")
        if not choice:
            assert_agree(mixer.mixing(sources), expected.mean((0, 1)), "mixing matrix over all tokens")


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
