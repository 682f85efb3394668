"""Depth maps over many tokens: the same as over all at once, in bounded memory, and what the measures say of known matrices."""

import math

import pytest
import torch

from depthmix import depth_mixing, list_mixers
from depthmix.insight import sources_of
from depthmix.insight.contributions import shares_by_token
from depthmix.insight.maps import MEASURES, by_kind, depth_map, reading
from depthmix.insight.statistics import QUANTILES, EvenSample, Moments
from insight.small_decoder import decoder, tokens


@pytest.mark.parametrize("mixer", list_mixers())
def test_batch_after_batch_gives_what_all_tokens_give(mixer, monkeypatch):
    monkeypatch.setattr("depthmix.insight.maps.AT_ONCE", 5)
    model, batches = decoder(mixer), [tokens(2, 4, 1), tokens(1, 7, 2), tokens(3, 1, 3)]
    found = depth_map(model, batches)
    each = torch.cat([depth_mixing(model, b, per_token=True).flatten(0, 1) for b in batches])
    assert found.tokens == len(each) == 18
    assert found.signed == bool((each < 0).any())
    torch.testing.assert_close(found.mean, each.mean(0))
    torch.testing.assert_close(found.std, each.std(0, correction=0), rtol=1e-6, atol=1e-9)
    quantiles = torch.quantile(each, torch.tensor(QUANTILES).double(), dim=0)
    torch.testing.assert_close(found.quantiles.double(), quantiles, rtol=1e-5, atol=1e-6)
    shares = [shares_by_token(model.mixer, sources_of(model, model.mixer, b)) for b in batches]
    for name in ("contribution", "projection"):
        by_token = torch.cat([getattr(batch, name).flatten(0, 1) for batch in shares])
        torch.testing.assert_close(getattr(found, name), by_token.mean(0))
    for name, value in reading(each).items():
        torch.testing.assert_close(found.measures[name], value.mean(0))
        torch.testing.assert_close(found.measures_std[name], value.std(0, correction=0), rtol=1e-6, atol=1e-8)


def test_no_tokens_are_refused():
    with pytest.raises(ValueError, match="there are no tokens"):
        depth_map(decoder("residual"), [])


def test_measures_of_known_rows():
    m = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, -2.0, 0.0], [-1.0, 1.0, 1.0, 1.0]])
    found = reading(m)
    assert list(found) == list(MEASURES)
    torch.testing.assert_close(found["entropy"], torch.tensor([0.0, math.log(2), 0.0, math.log(4)]))
    torch.testing.assert_close(found["effective"], torch.tensor([1.0, 2.0, 1.0, 4.0]))
    torch.testing.assert_close(found["newest"], torch.tensor([1.0, 0.5, 1.0, 0.25]))
    torch.testing.assert_close(found["embedding"], torch.tensor([1.0, 0.5, 0.0, 0.25]))


def test_a_reader_of_nothing_has_no_entropy():
    assert all(v.isfinite().all() for v in reading(torch.zeros(2, 3, 3)).values())


def test_a_plain_stream_reads_all_alike_at_every_kind_of_site():
    model = decoder("residual", n_blocks=3)
    found = by_kind(model.mixer, depth_map(model, [tokens()]).measures)
    assert list(found) == ["attention", "mlp"]
    assert all(kind["effective_share"] == pytest.approx(1) for kind in found.values())
    assert found["mlp"]["effective"] == pytest.approx((2 + 4 + 6) / 3)
    assert found["attention"]["effective"] == pytest.approx((3 + 5) / 2)  # without site 0


def test_moments_lose_no_digits_far_from_zero():
    x, moments = 1e6 + torch.randn(3000, 2).double(), Moments()
    for part in x.split([1, 0, 999, 2000]):
        moments.add(part)
    torch.testing.assert_close(moments.mean, x.mean(0))
    torch.testing.assert_close(moments.std(), x.std(0, correction=0), rtol=1e-6, atol=0)


def test_an_even_sample_is_bounded_and_spread_over_all_tokens():
    sample, x = EvenSample(most=100), torch.arange(10_000.0).unsqueeze(-1)
    for part in x.split(37):
        sample.add(part)
        assert sum(map(len, sample.kept)) <= 100
    kept = torch.cat(sample.kept).flatten()
    assert len(kept) > 50
    assert (kept.diff() == sample.stride).all()
    assert kept[0] == 0
    assert kept[-1] >= 10_000 - sample.stride
    torch.testing.assert_close(sample.quantiles().flatten(), 10_000 * torch.tensor(QUANTILES), rtol=0, atol=200)
