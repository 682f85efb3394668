"""A mixer in stages is the whole: outputs, gradients and parameters, with and without kernels; what cannot be divided is refused."""

import copy
import itertools

import pytest
import torch
from torch import nn

from depthmix import DecoderConfig, create_mixer
from depthmix.errors import UserError
from depthmix.mixers import registry
from depthmix.mixers.one_stream import OneStream
from depthmix.ops import use_backend
from depthmix.parallel.packing import pack_state, state_forms, unpack_state
from depthmix.parallel.pipeline import check_pipeline
from depthmix.parallel.plan.layout import Layout
from depthmix.parallel.row_owners import (
    OwnersError,
    freeze_foreign,
    join_rows,
    row_owners,
    rows_of_sites,
    select_rows,
    why_not_divided,
)
from harness import LAYOUTS, MIXERS, OPTIONS, Sublayers, as_tuple, build
from oracles.cases import pairwise
from small_cases import each

SITES = [("attention", "mlp")] * 3
CASES = [(name, SITES, choice, (2, 3)) for name in MIXERS for choice in pairwise(name, OPTIONS[name], 1)]
CASES += [
    ("grn", [("attention", "mlp")] * 5, {"window": 1, "w_per_entry": True}, (2, 4, 6, 8)),
    ("attnres", LAYOUTS["uneven"], {"ways": 2, "block_size": 2}, (1, 3, 6)),
    ("mudd", LAYOUTS["uneven"], {}, (1, 3, 6)),
]


def through(mixer, sublayers, state, sites):
    for site in sites:
        state = mixer.write(state, site, sublayers(site, as_tuple(mixer.read(state, site))))
    return state


def stages_of(whole, owners, ranges):
    """A copy of the mixer for each stage, whose rows for other sites have fallen behind."""
    stages = []
    for sites in ranges:
        stage = copy.deepcopy(whole)
        freeze_foreign(stage, owners, sites)
        named = {n: p.detach() for n, p in stage.named_parameters()}
        kept = {n: t.clone() for n, t in select_rows(owners, named, sites).items()}
        for t in named.values():
            t.add_(1.0)
        for n, t in select_rows(owners, named, sites).items():
            t.copy_(kept[n])
        stages.append(stage)
    return stages


def passes(whole, sublayers, e, cuts):
    """The pass of a mixer in stages: (what finish returns, [(stage, its sites)], hops), gradients left where they belong."""
    ranges = list(itertools.pairwise([0, *cuts, whole.n_sites]))
    of_stages = [range(a, b + (b == whole.n_sites)) for a, b in ranges]
    stages = stages_of(whole, row_owners(whole), of_stages)
    forms = state_forms(whole, cuts, e.dtype)
    state, hops = stages[0].start(e), []
    for stage, (a, b), form in zip(stages, ranges, [*forms, None], strict=True):
        state = through(stage, sublayers, state, range(a, b))
        if form is not None:
            sent = dict(zip(form.labels, pack_state(stage, state), strict=True))
            arrived = {label: t.detach().requires_grad_() for label, t in sent.items()}
            hops.append((sent, arrived))
            state = unpack_state(form, [arrived[label] for label in form.labels])
    return stages[-1].finish(state), list(zip(stages, of_stages, strict=True)), hops


def backward(out, g, hops):
    """Hop by hop; what a stage passes on as it came has no gradient of the stage's own."""
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
    found, stages, hops = passes(whole, sublayers, e, cuts)
    backward(found, g, hops)
    owners, own = row_owners(whole), []
    for stage, sites in stages:
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in stage.named_parameters()}
        own.append({n: t.clone() for n, t in select_rows(owners, grads, sites).items()})
        for t in select_rows(owners, grads, sites).values():
            t.zero_()
        assert not any(t.any() for t in grads.values())  # rows for other sites
    joined = join_rows(owners, own)
    assert joined.keys() == named.keys()
    gradients = [e.grad, sublayers.weight.grad, *(joined[name] for name in named)]
    for f, x, what in zip([found, *gradients], [out, *expected], ["out", "e", "sublayers", *named], strict=True):
        relative = 1e-10 if dtype == torch.float64 else 1e-5
        allowed = relative * max(float(x.detach().abs().max()) if x.numel() else 0, 1e-3)
        torch.testing.assert_close(f, x, rtol=relative, atol=allowed, msg=lambda m, what=what: f"{what}: {m}")
    values = join_rows(owners, [select_rows(owners, stage.state_dict(), sites) for stage, sites in stages])
    assert values.keys() == whole.state_dict().keys()
    assert all(torch.equal(values[name], t) for name, t in whole.state_dict().items())


@each(("name", "blocks", "choice", "cuts"), CASES)
def test_stages_are_the_whole(name, blocks, choice, cuts):
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
def test_stages_by_kernels(name, n_blocks, choice, cuts):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    blocks = [("attention", "mlp")] * n_blocks
    whole = build(name, blocks, choice, random=True, dim=16, dtype=torch.float32)
    with use_backend("triton"):
        same(whole, blocks, cuts, torch.float32, 16)


@pytest.fixture
def registered():
    """A place for rules of a test."""
    before = dict(registry._MIXERS)
    yield registry.register
    registry._MIXERS.clear()
    registry._MIXERS.update(before)


class Scaled(OneStream):
    def __init__(self, dim: int, n_blocks: int) -> None:
        super().__init__(dim, n_blocks)
        self.scale = nn.Parameter(torch.empty(self.n_sites))
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.scale.copy_(torch.arange(1.0, self.n_sites + 1))

    def _join(self, state, site, y):
        return state.x + self.scale[site] * y


def test_a_new_rule_with_a_row_per_site_is_divided_as_it_is(registered):
    registered("scaled")(Scaled)
    same(create_mixer("scaled", dim=8, n_blocks=3), SITES, (2, 3), torch.float32, 8)


@each("n_blocks", [1, 2, 4])
def test_owners_follow_from_shapes(n_blocks):
    """Whatever sizes are equal by chance: with four blocks a row per stream is not a row per block."""
    s = 2 * n_blocks
    attnres = row_owners(create_mixer("attnres", dim=4, n_blocks=n_blocks, ways=2))
    assert (list(attnres["query"]), list(attnres["query_v"])) == ([*range(s + 1)], [*range(0, s, 2)])
    mhc = row_owners(create_mixer("mhc", dim=2, n_blocks=n_blocks, n=4, head="learned"))
    assert list(mhc["phi"]) == [*range(s)]
    assert [mhc[name] for name in ("phi_head", "b_head", "alpha_head")] == [s] * 3
    assert row_owners(create_mixer("mudd", dim=4, n_blocks=n_blocks))[f"b.{n_blocks}"] == s


def test_rows_of_sites():
    assert rows_of_sites([0, 2, 4], range(2, 5)) == slice(1, 3)
    assert rows_of_sites(4, range(2, 5)) == slice(None)
    assert rows_of_sites([0, 2], range(3, 5)) is rows_of_sites(2, range(3, 5)) is None
    with pytest.raises(OwnersError, match=r"the rows for sites 1 to 2 are not neighbours: \[0, 2\]"):
        rows_of_sites([1, 5, 2], range(1, 3))


def test_what_cannot_be_divided_is_refused_with_the_reason(registered):
    @registered("shared")
    class Shared(Scaled):
        def __init__(self, dim: int, n_blocks: int) -> None:
            super().__init__(dim, n_blocks)
            self.gain = nn.Parameter(torch.ones(dim))

        def _join(self, state, site, y):
            return super()._join(state, site, self.gain * y)

    @registered("summed")
    class Summed(Scaled):
        def _join(self, state, site, y):
            return state.x + self.scale.sum() * y

    @registered("uneven")
    class Uneven(OneStream):
        def __init__(self, dim: int, n_blocks: int) -> None:
            super().__init__(dim, n_blocks)
            self.scale = nn.Parameter(torch.ones(3 * n_blocks))

    refused = "cannot be divided into stages: one would need the rows that another trains of"
    assert why_not_divided(create_mixer("shared", dim=4, n_blocks=2)) == f"shared {refused} gain"  # as many as sites
    assert why_not_divided(create_mixer("summed", dim=8, n_blocks=2)) == f"summed {refused} scale"
    said = r"uneven cannot be divided into stages: scale has shape \[6\], and in a model of twice as many blocks \[12\]"
    with pytest.raises(OwnersError, match=said):
        row_owners(create_mixer("uneven", dim=8, n_blocks=2))
    config = DecoderConfig(vocab_size=5, dim=16, n_blocks=8, n_heads=2, mixer="shared")
    with pytest.raises(UserError, match="parallel: shared cannot be divided into stages"):
        check_pipeline(config, Layout(pp=2), "GPipe", 4)
