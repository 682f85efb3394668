"""What sources add to a read, and the streams of rules that keep several: for every mixer, whatever its rule."""

import pytest
import torch

from depthmix import ContractError
from depthmix.insight import contributions, stream_map, streams_of
from depthmix.insight.contributions import shares_by_token
from depthmix.mixers.mixing import mixing_of_token
from harness import DIM, LAYOUTS, MIXERS, B, Sublayers, T, build, complete, embedding, run_stack
from oracles import ORACLES


def check_parts(mixer, sublayers):
    """The parts of every read add up to it; their weights are the read's row of M."""
    with torch.no_grad():
        out, reads, sources = run_stack(mixer, sublayers, embedding())
    m = mixer.mixing(sources, per_token=True)
    for reader, ways in enumerate([*reads, (out,)]):
        found = contributions(mixer, sources[: reader + 1])
        assert len(found) == len(ways)
        for way, (h, (parts, weights)) in enumerate(zip(ways, found, strict=True)):
            assert parts.shape == (reader + 1, B, T, DIM)
            assert not parts.requires_grad
            torch.testing.assert_close(parts.sum(0), h, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(weights.movedim(0, -1), m[..., way, reader, : reader + 1], rtol=1e-9, atol=1e-9)


OTHERS = [
    ("hyper", {"fractions": 3}),
    ("mhc", {"fractions": 3}),
    ("attnres", {"block_size": 2, "ways": 3}),
    ("attnres", {"ways": 2, "query": "input", "window": 1}),
    ("attnres", {"heads": 2, "weights": "sigmoid", "routing": "add"}),
    ("highway", {"gate": "scalar"}),
    ("laurel", {"variant": "pa"}),
    ("dca", {"window": 1, "relu_on": "sum"}),
    ("mhc", {"head": "learned", "convention": "deepseek", "iterations": 3}),
    ("mhc", {"schedule": "single_pass", "residual_map": "birkhoff", "n": 2}),
]


@pytest.mark.parametrize(("name", "choice"), OTHERS, ids=str)
def test_the_parts_of_a_read_add_up_to_it(name, choice):
    check_parts(build(name, 2, choice, random=True), Sublayers(2))


@pytest.mark.parametrize("name", MIXERS)
def test_the_parts_of_a_read_of_other_sites_add_up_to_it(name):
    blocks = LAYOUTS["uneven"]
    check_parts(build(name, blocks, random=True), Sublayers(blocks))


def test_a_part_is_what_is_missing_without_its_source_where_weights_are_fixed():
    mixer, sources = build("denseformer", 2, random=True), [embedding() for _ in range(5)]
    ((parts, _),) = contributions(mixer, sources)
    for i in range(5):
        others = [torch.zeros_like(s) if j == i else s for j, s in enumerate(sources)]
        ((without, _),) = contributions(mixer, others)
        torch.testing.assert_close(parts.sum(0) - without.sum(0), parts[i])


@pytest.mark.parametrize("n", [0, 6])
def test_contributions_are_of_one_source_up_to_all(n):
    with pytest.raises(ContractError, match=f"contributions: expected 1 to 5 sources, .* got {n}"):
        contributions(build("residual", 2), [embedding()] * n)


# Shares of contributions.


def shares_of(parts):
    """Shares of sizes and projections by definition, of parts [W, reader, source, B, T, D]: [B, T, W, reader, source]."""
    sizes = parts.square().sum(-1).sqrt()
    whole = parts.sum(2, keepdim=True)
    along = (parts * whole).sum(-1) / (whole * whole).sum(-1)
    return [x.permute(3, 4, 0, 1, 2) for x in (sizes / sizes.sum(2, keepdim=True), along)]


def check_shares(mixer, sources, parts):
    found = shares_by_token(mixer, sources)
    assert not any(x.requires_grad for x in found)
    torch.testing.assert_close(found.weights, mixer.mixing(sources, per_token=True))
    for x, expected in zip(found[1:], shares_of(parts), strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(x.sum(-1), torch.ones_like(x[..., 0]))
        assert x.triu(1).count_nonzero() == 0


@pytest.mark.parametrize("name", [name for name in MIXERS if name not in ("delta", "laurel")])
def test_shares_are_those_of_the_oracles_matrices_times_the_sources(name):
    blocks = LAYOUTS["uneven"]
    mixer, sublayers, e = build(name, blocks, random=True), Sublayers(blocks), embedding()
    with torch.no_grad():
        parameters = {key: value.detach() for key, value in mixer.named_parameters()}
        m = ORACLES[name](parameters, complete(name, {}), mixer.layout.blocks, e, sublayers).M
        _, _, sources = run_stack(mixer, sublayers, e)
    check_shares(mixer, sources, m * torch.stack(sources))


@pytest.mark.parametrize(
    ("name", "choice"),
    [("laurel", {}), ("laurel", {"variant": "pa"}), ("hyper", {"fractions": 3, "static": True})],
    ids=str,
)
def test_shares_of_rules_that_mix_channels_are_those_of_sources_sent_one_by_one(name, choice):
    """Their weights depend on no input, so a read is the sum of what it would be of each source alone."""
    mixer, sources = build(name, 2, choice, random=True), [10.0**-i * embedding() for i in range(5)]
    parts = []
    with torch.no_grad():
        for i in range(5):
            alone = [s if j == i else torch.zeros_like(s) for j, s in enumerate(sources)]
            state, reads = mixer.start(alone[0]), []
            for site, y in enumerate(alone[1:]):
                reads.append(mixer.read(state, site))
                state = mixer.write(state, site, y)
            parts.append(torch.stack([*reads, mixer.finish(state)]))
    check_shares(mixer, sources, torch.stack(parts, dim=1).unsqueeze(0))


@pytest.mark.parametrize(("name", "choice"), [("delta", {}), ("hyper", {"fractions": 2})], ids=str)
def test_shares_where_each_token_has_matrices_are_those_of_its_matrices(name, choice):
    mixer, sources = build(name, 2, choice, random=True), [embedding()[:1, :1] for _ in range(5)]
    m = mixing_of_token(mixer, [s.flatten() for s in sources])  # [D, D, W, S+1, S+1]
    parts = torch.einsum("dcwrs,sc->wrsd", m, torch.stack(sources).flatten(1))
    check_shares(mixer, sources, parts[:, :, :, None, None])


def test_a_reader_of_nothing_has_no_shares():
    mixer = build("rezero", 1)
    found = shares_by_token(mixer, [torch.zeros(T, DIM)] * 3)
    assert found.contribution.count_nonzero() == found.projection.count_nonzero() == 0
    cancelling = [s * torch.ones(T, DIM) for s in (1.0, -1.0, 0.0)]
    found = shares_by_token(build("residual", 1), cancelling)
    torch.testing.assert_close(found.contribution[:, 0, 2], torch.tensor([0.5, 0.5, 0.0]).expand(T, 3))
    assert found.projection[:, 0, 1:].count_nonzero() == 0


def test_shares_need_every_source():
    with pytest.raises(ContractError, match=r"shares_by_token: expected 5 sources, .* got 4"):
        shares_by_token(build("residual", 2), [embedding()] * 4)


# Streams.

STREAMS = [
    ("hyper", {"n": 3}),
    ("hyper", {"n": 2, "static": True}),
    ("mhc", {"n": 2}),
    ("mhc", {"n": 3, "residual_map": "identity"}),
    ("mhc", {"n": 2, "residual_map": "birkhoff"}),
    ("mhc", {"n": 2, "schedule": "single_pass"}),
]


@pytest.mark.parametrize("name", MIXERS)
def test_streams_and_their_maps_come_together_or_not_at_all(name):
    mixer = build(name, 1)
    state = mixer.start(embedding())
    streams, by = streams_of(mixer, state), stream_map(mixer, state)
    assert (streams is None) == (by is None)
    if streams is not None:
        n = streams.shape[-2]
        assert n > 1
        assert streams.shape == (B, T, n, DIM)
        assert by.shape == (B, T, n, n)


@pytest.mark.parametrize(("name", "choice"), STREAMS, ids=str)
def test_a_write_of_nothing_mixes_the_streams_by_the_map(name, choice):
    """x' = H_res x + H_post y; the streams begin as copies of the embedding."""
    mixer, e = build(name, 2, choice, random=True), embedding()
    state = mixer.start(e)
    assert all(torch.equal(x, e) for x in streams_of(mixer, state).unbind(-2))
    for site in range(4):
        streams, by = streams_of(mixer, state), stream_map(mixer, state)
        after = streams_of(mixer, mixer.write(state, site, torch.zeros_like(e)))
        torch.testing.assert_close(after, by @ streams)
        state = mixer.write(state, site, embedding())
