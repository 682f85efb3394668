"""What sources add to a read, and the streams of rules that keep several: for every mixer, whatever its rule."""

import pytest
import torch

from depthmix import ContractError
from depthmix.insight import contributions, stream_map, streams_of
from harness import DIM, LAYOUTS, MIXERS, B, Sublayers, T, build, embedding, run_stack


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
