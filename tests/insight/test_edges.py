"""Cut edges and skipped sublayers, for every mixer: nothing cut changes nothing, and a cut is what its definition says."""

import math

import pytest
import torch
from torch.nn import functional

from depthmix import list_mixers
from depthmix.insight.edges import Cutting, edge_effects, losses_without
from depthmix.insight.losses import next_token_loss
from depthmix.insight.skips import skip_effects
from insight.small_decoder import VOCAB, B, T, decoder, tokens

BATCH = tokens(B, T + 1)
every_mixer = pytest.mark.parametrize("mixer", list_mixers())


@every_mixer
def test_with_nothing_cut_logits_are_the_models_whatever_reader_is_taken_apart(mixer):
    """To fp32 rounding, in as many copies as were asked for."""
    model = decoder(mixer, dtype=torch.float32)
    with torch.no_grad():
        expected = model(BATCH)
        for reader in range(model.mixer.n_sites + 1):
            with Cutting(model.mixer, reader).applied([None, None]):
                found = model(BATCH)
            torch.testing.assert_close(found, expected.repeat(2, 1, 1), rtol=2e-5, atol=2e-5)
    assert not {"start", "read", "write", "finish"} & set(vars(model.mixer))


def by_definition(model, reader, cut_ways, source):
    """The losses with one edge cut: every read is a row of M, of a pass that has come that far, times the sources."""
    mixer, ids = model.mixer, BATCH[:, :-1]
    x = model.embed(ids, None)
    context, sources = model._context(x, None, None, None), [x]

    def reads(site, ways):
        padded = [*sources, *[torch.zeros_like(x)] * (mixer.n_sites + 1 - len(sources))]
        m = mixer.mixing(padded, per_token=True)[..., site, : len(sources)]  # [B, T, W, k]
        for way in cut_ways if site == reader else ():
            rest = m[..., way, :].clone()
            rest[..., source] = 0
            rest *= m[..., way, :].abs().sum(-1, keepdim=True) / rest.abs().sum(-1, keepdim=True).clamp(min=1e-30)
            m[..., way, :] = rest
        return [torch.einsum("btk,kbtd->btd", m[..., w, :], torch.stack(sources)) for w in range(ways)]

    for site, (norms, sublayer) in enumerate(zip(model.norms, model.sublayers, strict=True)):
        h = tuple(norm(r) for norm, r in zip(norms, reads(site, mixer.ways(site)), strict=True))
        sources.append(sublayer(h if len(h) > 1 else h[0], context))
    logits = model.head(model.final_norm(reads(mixer.n_sites, 1)[0]))
    return functional.cross_entropy(logits.transpose(1, 2), BATCH[:, 1:], reduction="none")


@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        ("residual", {}),
        ("attnres", {"block_size": 2, "ways": 3}),
        ("attnres", {"window": 1, "query": "input"}),
        ("hyper", {"n": 2}),
        ("mudd", {}),
    ],
    ids=str,
)
@torch.no_grad()
def test_a_cut_is_what_its_definition_says(mixer, options):
    model = decoder(mixer, options)
    found = edge_effects(model, [BATCH])
    assert found.loss == pytest.approx(next_token_loss(model, BATCH).item(), abs=1e-9)
    for reader, source in ((0, 0), (1, 0), (2, 1), (3, 3), (4, 2)):
        ways = found.change[reader].shape[0]
        assert found.change[reader].shape == (model.mixer.ways(reader) if reader < 4 else 1, reader + 1)
        cut = by_definition(model, reader, [ways - 1], source).mean().item()
        assert found.change[reader][-1, source].item() == pytest.approx(cut - found.loss, abs=1e-9)
        by_token = losses_without(model, BATCH, reader, [None, (None, source)])
        assert by_token[0].mean().item() == pytest.approx(found.loss)
        torch.testing.assert_close(by_token[1], by_definition(model, reader, range(ways), source))


def test_edges_without_weight_are_of_no_use():
    """ReZero at step 0: outputs have weight 0, so nothing counts but what finish reads of the embedding."""
    model = decoder("rezero", random=False)
    found = edge_effects(model, [BATCH])
    assert found.change[-1][0, 0].item() == pytest.approx(math.log(VOCAB) - found.loss, abs=1e-9)
    assert max(row.abs().max() for row in (*found.change[:-1], found.change[-1][:, 1:])) < 1e-9


def test_however_many_copies_fit_at_once_and_however_tokens_are_batched_the_result_is_the_same():
    model, batch = decoder("dca"), tokens(3, T + 1)
    expected = edge_effects(model, [batch])
    assert expected.tokens == 3 * T
    for batches, at_once in (([batch], 1), ([batch], 5 * T * 3), ([batch[:2], batch[2:]], 100)):
        found = edge_effects(model, batches, at_once=at_once)
        assert found.loss == pytest.approx(expected.loss)
        for a, b in zip(found.change, expected.change, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_a_sites_only_edge_leaves_it_with_nothing_which_is_as_good_as_skipping_it():
    """Its norm of zero is zero, and so is its output, having no biases."""
    model = decoder("residual")
    edge, skip = edge_effects(model, [BATCH]).change[0][0, 0], skip_effects(model, [BATCH]).change[0]
    assert edge == pytest.approx(skip)
    assert abs(edge) > 1e-6


@every_mixer
def test_skipping_is_an_output_of_zero(mixer):
    model = decoder(mixer)
    found = skip_effects(model, [BATCH])
    assert found.tokens == B * T
    with torch.no_grad():
        assert found.loss == pytest.approx(next_token_loss(model, BATCH).item())
        for site in (0, 3):
            handle = model.sublayers[site].register_forward_hook(lambda module, args, out: torch.zeros_like(out))
            loss = next_token_loss(model, BATCH).item()
            handle.remove()
            assert found.change[site].item() == pytest.approx(loss - found.loss, abs=1e-9)


@pytest.mark.parametrize("measure", [edge_effects, skip_effects])
def test_no_tokens_are_refused(measure):
    with pytest.raises(ValueError, match="there are no tokens"):
        measure(decoder("residual"), [])
