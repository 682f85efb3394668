"""A mixer in parts is the whole: outputs, gradients and parameters, with and without kernels; what cannot be cut is refused."""

import itertools
import threading

import pytest
import torch
from torch import nn

from depthmix import DecoderConfig, create_mixer
from depthmix.errors import UserError
from depthmix.mixers import base
from depthmix.mixers.cutting import CutError, Rows, cut, cut_tensors, forms, here, join_tensors, why_not_cut
from depthmix.mixers.one_stream import OneStream
from depthmix.ops import use_backend
from depthmix.parallel.pipeline import check_pipeline
from depthmix.parallel.plan.layout import Layout
from harness import LAYOUTS, MIXERS, OPTIONS, Sublayers, as_tuple, build
from oracles.cases import pairwise

SITES = [("attention", "mlp")] * 3
CASES = [(name, SITES, choice, (2, 3)) for name in MIXERS for choice in pairwise(name, OPTIONS[name])]
CASES += [
    ("grn", [("attention", "mlp")] * 5, {"window": 1, "w_per_entry": True}, (2, 4, 6, 8)),
    ("attnres", LAYOUTS["uneven"], {"ways": 2, "block_size": 2}, (1, 3, 6)),
    ("mudd", LAYOUTS["uneven"], {}, (1, 3, 6)),
]


def through(mixer, sublayers, state, sites):
    for site in sites:
        state = mixer.write(state, site, sublayers(site, as_tuple(mixer.read(state, site))))
    return state


def passes(whole, sublayers, e, cuts):
    """The pass of a mixer, and that of its parts: (what finish returns, the parts), gradients left where they belong."""
    ends = [0, *cuts, whole.n_sites]
    ranges = list(itertools.pairwise(ends))
    parts = [cut(whole, range(a, b + (b == whole.n_sites))) for a, b in ranges]
    found = forms(whole, cuts, e.dtype)
    state, hops = parts[0].start(e), []
    for part, (a, b), form in zip(parts, ranges, [*found, None], strict=True):
        state = through(part, sublayers, state, range(a, b))
        if form is not None:
            sent = dict(zip(form.labels, part.pack(state), strict=True))
            arrived = {label: t.detach().requires_grad_() for label, t in sent.items()}
            hops.append((sent, arrived))
            state = part.unpack(form, [arrived[label] for label in form.labels])
    return parts[-1].finish(state), parts, hops


def test_a_part_in_use_is_plain_for_other_threads():
    """While one thread is in the rule's code, another one finds parameters, and calls the rule, and the first goes on."""
    part = cut(create_mixer("attnres", dim=8, n_blocks=2), range(2, 5))
    form = forms(create_mixer("attnres", dim=8, n_blocks=2), [2])[0]
    sent, seen = [torch.randn(3, 1, 8) for _ in range(3)], []

    def norm(x):
        seen.append(type(part.query))  # called by the rule's own code
        if len(seen) == 1:
            other = threading.Thread(target=lambda: seen.extend([type(part.query), part.read(state, 2)]))
            other.start()
            other.join(60)
            seen.append(type(part.query))
        return x

    state = part.unpack(form, sent)
    h = part.read(state, 2, norm)
    assert [*seen[:2], seen[3], type(part.query)] == [Rows, nn.Parameter, Rows, nn.Parameter]
    assert torch.equal(seen[2], h)


def backward(out, g, hops):
    """Hop by hop; what a part passes on as it came has no gradient of the part's own."""
    roots, grads = [out], [g]
    for i in reversed(range(len(hops) + 1)):
        torch.autograd.backward(roots, grads)
        if not i:
            return
        sent, arrived = hops[i - 1]
        earlier = hops[i - 2][1] if i > 1 else {}
        roots, grads = [], []
        for label, leaf in arrived.items():
            if leaf.grad is not None and label in earlier:
                before = earlier[label].grad
                earlier[label].grad = leaf.grad if before is None else before + leaf.grad
            elif leaf.grad is not None:
                roots.append(sent[label])
                grads.append(leaf.grad)


def same(whole, blocks, cuts, dtype, dim):
    sublayers = Sublayers(blocks, dim, dtype)
    e = torch.randn(2, 3, dim, dtype=dtype, requires_grad=True)
    out = whole.finish(through(whole, sublayers, whole.start(e), range(whole.n_sites)))
    g, named = torch.randn_like(out), dict(whole.named_parameters())
    wanted = [e, sublayers.weight, *named.values()]
    expected = torch.autograd.grad(out, wanted, g, allow_unused=True, materialize_grads=True)
    found, parts, hops = passes(whole, sublayers, e, cuts)
    backward(found, g, hops)
    of_parts = [{n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in q.named_parameters()} for q in parts]
    joined = join_tensors(whole, of_parts)
    assert joined.keys() == named.keys()
    gradients = [e.grad, sublayers.weight.grad, *(joined[name] for name in named)]
    for f, x, what in zip([found, *gradients], [out, *expected], ["out", "e", "sublayers", *named], strict=True):
        relative = 1e-10 if dtype == torch.float64 else 1e-5
        allowed = relative * max(float(x.detach().abs().max()) if x.numel() else 0, 1e-3)
        torch.testing.assert_close(f, x, rtol=relative, atol=allowed, msg=lambda m, what=what: f"{what}: {m}")
    values = join_tensors(whole, [dict(q.named_parameters()) for q in parts])
    assert all(torch.equal(values[name], p) for name, p in named.items())
    for part in parts:
        own = cut_tensors(whole, whole.state_dict(), part.held)
        assert {n: t.shape for n, t in part.state_dict().items()} == {n: t.shape for n, t in own.items()}


@pytest.mark.parametrize(("name", "blocks", "choice", "cuts"), CASES, ids=str)
def test_parts_are_the_whole(name, blocks, choice, cuts):
    torch.manual_seed(0)
    same(build(name, blocks, choice, random=True), blocks, cuts, torch.float64, 24)


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize(
    ("name", "n_blocks", "choice", "cuts"),
    [
        ("attnres", 2, {"ways": 2, "block_size": 3}, (2,)),
        ("grn", 3, {"window": 1, "w_per_entry": True}, (4,)),
        ("mhc", 1, {"n": 2, "iterations": 2, "schedule": "single_pass"}, (1,)),
    ],
    ids=str,
)
def test_parts_by_kernels(name, n_blocks, choice, cuts):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    blocks = [("attention", "mlp")] * n_blocks
    whole = build(name, blocks, choice, random=True, dim=16, dtype=torch.float32)
    with use_backend("triton"):
        same(whole, blocks, cuts, torch.float32, 16)


@pytest.fixture
def registered():
    """A place for rules of a test."""
    before = dict(base._MIXERS)
    yield base.register
    base._MIXERS.clear()
    base._MIXERS.update(before)


def test_a_new_rule_with_a_row_per_site_is_cut_as_it_is(registered):
    @registered("scaled")
    class Scaled(OneStream):
        def __init__(self, dim: int, n_blocks: int) -> None:
            super().__init__(dim, n_blocks)
            self.scale = nn.Parameter(torch.arange(1.0, self.n_sites + 1))

        def _join(self, state, site, y):
            return state.x + self.scale[site] * y

    same(create_mixer("scaled", dim=8, n_blocks=3), SITES, (2, 3), torch.float32, 8)
    whole = create_mixer("scaled", dim=8, n_blocks=3)
    part = cut(whole, range(2, 4))
    assert part.scale.tolist() == [3, 4]  # from outside a parameter like any other
    x = torch.zeros(1, 8)
    state = part.unpack(forms(whole, [3])[0], [x])
    state = part.write(state, 3, x + 1)
    assert (state.x == 4).all()
    with pytest.raises(CutError, match="has the rows 2 to 3 of scale, not 4"):
        part.write(state, 4, x)


def test_rows_are_only_taken_by_number():
    rows = Rows(torch.arange(6.0).view(3, 2), 4, "scale")
    assert rows[5, 1] == 3
    with pytest.raises(CutError, match="scale is cut by sites, so it has no sum"):
        rows.sum()
    assert here(rows).shape == (3, 2)


def test_what_cannot_be_cut_is_refused_with_the_reason(registered):
    @registered("shared")
    class Shared(OneStream):
        def __init__(self, dim: int, n_blocks: int) -> None:
            super().__init__(dim, n_blocks)
            self.scale = nn.Parameter(torch.ones(dim))

        def _join(self, state, site, y):
            return state.x + self.scale * y

    with pytest.raises(CutError, match=r"shared cannot be cut by sites: scale has the shape \[7\], not a row for"):
        cut(create_mixer("shared", dim=7, n_blocks=2), range(2))
    assert "unsupported operand" in why_not_cut(create_mixer("shared", dim=5, n_blocks=2))  # as many channels as rows
    config = DecoderConfig(vocab_size=5, dim=16, n_blocks=8, n_heads=2, mixer="shared")  # as many channels as sites
    with pytest.raises(UserError, match=r"shared cannot be cut by sites.*so it cannot be divided into stages"):
        check_pipeline(config, Layout(pp=2), "GPipe", 4)
    with pytest.raises(CutError, match="neighbouring sites from 0 to 4, got"):
        cut(create_mixer("residual", dim=5, n_blocks=2), range(3, 7))


def test_a_part_draws_nothing():
    with pytest.raises(CutError, match="draws none itself"):
        cut(create_mixer("rezero", dim=4, n_blocks=2), range(2)).reset_parameters()
