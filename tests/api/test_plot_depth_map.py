"""dm.plot_depth_map: what is drawn are contributions or the matrix, on the axes that were given."""

import sys

import numpy as np
import pytest
import torch

import depthmix as dm
from depthmix.errors import UserError
from depthmix.insight import depth_map

pyplot = pytest.importorskip("matplotlib.pyplot")
IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture(autouse=True)
def _closed():
    pyplot.switch_backend("agg")
    yield
    pyplot.close("all")


def decoder(mixer, **options):
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "dim": 16, "n_blocks": 2, "n_heads": 2}
    return dm.Decoder(dm.DecoderConfig(**shape, mixer=mixer, mixer_options=options))


def drawn(ax):
    return np.ma.filled(ax.images[0].get_array().astype(float), np.nan)


def test_it_draws_the_matrix_on_given_axes():
    model = decoder("attnres")
    figure, (left, right) = pyplot.subplots(1, 2)
    assert dm.plot_depth_map(model, IDS, ax=right, values="weight", colorbar=False) is right
    m = dm.depth_mixing(model, IDS)[0].numpy()
    lower = np.tril(np.ones(m.shape, bool))
    np.testing.assert_allclose(drawn(right)[lower], m[lower], rtol=1e-6)
    assert np.isnan(drawn(right)[~lower]).all()
    assert not left.images
    assert figure.axes == [left, right]
    assert [t.get_text() for t in right.get_yticklabels()] == ["attention 0", "mlp 0", "attention 1", "mlp 1", "finish"]
    assert right.get_xticklabels()[0].get_text() == "embedding"


def test_it_draws_contributions_on_one_scale_for_every_model():
    for model in (decoder("attnres"), decoder("denseformer")):
        ax = dm.plot_depth_map(model, IDS)
        m, image = drawn(ax), ax.images[0]
        expected = depth_map(model, [IDS]).contribution[0].numpy()
        lower = np.tril(np.ones(m.shape, bool))
        np.testing.assert_allclose(m[lower], expected[lower], rtol=1e-6)
        np.testing.assert_allclose(np.nansum(m, axis=1), 1)
        assert image.get_clim() == (0, 1)
        assert ax.figure.axes[1].get_ylabel() == "share of what is read"
    with pytest.raises(UserError, match="values must be 'contribution' or 'weight', got 'size'"):
        dm.plot_depth_map(model, IDS, values="size")


@pytest.mark.parametrize(
    "ids", [[1, 2, 3], np.array([1, 2, 3]), torch.tensor([[1, 2, 3]])], ids=["list", "array", "batch"]
)
def test_one_sequence_in_any_form(ids):
    model = decoder("attnres")
    ax = dm.plot_depth_map(model, ids, values="weight")
    expected = dm.depth_mixing(model, torch.tensor([[1, 2, 3]]))[0]
    assert drawn(ax)[-1] == pytest.approx(expected[-1].tolist(), rel=1e-5)
    assert len(ax.figure.axes) == 2  # with a colour bar


def test_the_ways_of_attention():
    model = decoder("attnres", ways=3)
    with torch.no_grad():
        model.mixer.query_kv.normal_()
    maps = [drawn(dm.plot_depth_map(model, IDS, way=way, values="weight")) for way in range(3)]
    m = dm.depth_mixing(model, IDS)
    for way in range(3):
        assert maps[way][2, :3] == pytest.approx(m[way, 2, :3].tolist(), rel=1e-5)
    assert dm.plot_depth_map(model, IDS, way=2).get_title() == "values"
    with pytest.raises(UserError, match="there is no way 3; this mixer has 3, counted from 0"):
        dm.plot_depth_map(model, IDS, way=3)


def test_signed_weights_have_a_scale_around_zero():
    model = decoder("denseformer")
    with torch.no_grad():
        for alpha in model.mixer.alpha.values():
            alpha.fill_(-0.5)
    image = dm.plot_depth_map(model, IDS, values="weight").images[0]
    assert image.get_clim()[0] == -image.get_clim()[1] < 0


def test_without_matplotlib_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(UserError, match="matplotlib is not installed"):
        dm.plot_depth_map(decoder("attnres"), IDS)
