"""Magnitudes over depth against what hooks see, shares of the output, gradient norms, and streams."""

import pytest
import torch
from torch import nn

from depthmix import list_mixers
from depthmix.insight.dynamics import gradient_norms, magnitudes
from depthmix.insight.mixing import sources_of
from depthmix.insight.streams import stream_report
from insight.small_decoder import decoder, tokens


def rms(x):
    return x.square().mean().sqrt().item()


def close(expected):
    return pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("mixer", list_mixers())
def test_magnitudes_are_those_that_hooks_see(mixer):
    model, inputs, outputs = decoder(mixer), [], []
    for norms, sublayer in zip(model.norms, model.sublayers, strict=True):
        inputs.append([])
        for norm in norms:
            norm.register_forward_pre_hook(lambda module, args, to=inputs[-1]: to.append(args[0]))
        sublayer.register_forward_hook(lambda module, args, out: outputs.append(out))
    inputs.append([])
    model.final_norm.register_forward_pre_hook(lambda module, args: inputs[-1].append(args[0]))
    found = magnitudes(model, tokens())
    assert found["input_rms"] == [close([rms(h) for h in ways]) for ways in inputs]
    assert found["output_rms"] == close([rms(y) for y in outputs])
    sums = [model.embedding(tokens())]
    for y in outputs:
        sums.append(sums[-1] + y)
    assert found["stream_rms"] == close([rms(x) for x in sums])
    assert found["block_rms"] == close([rms(outputs[i] + outputs[i + 1]) for i in (0, 2)])
    assert sum(found["share"]) == close(1)


def test_shares_of_a_plain_stream_are_projections_on_it():
    model = decoder("residual")
    sources = torch.stack(sources_of(model, model.mixer, tokens()))
    h = sources.sum(0)
    assert magnitudes(model, tokens())["share"] == close(
        [(y * h).sum().item() / h.square().sum().item() for y in sources]
    )


def test_a_pass_that_fails_leaves_the_mixer_as_it_was():
    model = decoder("attnres")
    with pytest.raises(IndexError):
        magnitudes(model, 100 + tokens())
    assert not {"start", "read", "write", "finish"} & set(vars(model.mixer))


def test_gradient_norms_are_those_of_each_module():
    layers = [nn.Linear(3, 2), nn.Linear(3, 2), nn.Identity()]
    layers[0](torch.ones(1, 3)).sum().backward()
    whole = torch.cat([p.grad.flatten() for p in layers[0].parameters()]).norm().item()
    assert gradient_norms(layers).tolist() == pytest.approx([whole, 0, 0])


# Streams.


def report(mixer, options):
    model = decoder(mixer, options, n_blocks=3)
    return model, stream_report(model.mixer, sources_of(model, model.mixer, tokens()))


def test_rules_without_streams_have_no_report():
    for mixer in list_mixers():
        _, found = report(mixer, {})
        assert (found is None) == (mixer not in ("gated_streams", "hyper", "mhc"))


def test_streams_begin_alike():
    _, found = report("hyper", {"n": 3})
    torch.testing.assert_close(found.similarity[0], torch.ones(3, 3))
    torch.testing.assert_close(found.similarity.diagonal(dim1=1, dim2=2), torch.ones(7, 3))
    assert (found.similarity[-1] < 0.999).any()
    assert found.rms.shape == (7, 3)


@pytest.mark.parametrize(("residual_map", "error"), [("identity", 1e-12), ("birkhoff", 1e-12), ("sinkhorn", 0.02)])
def test_doubly_stochastic_maps_have_no_error_and_a_gain_of_one_however_many_are_composed(residual_map, error):
    """Sinkhorn's are so up to its last iteration."""
    _, found = report("mhc", {"n": 3, "residual_map": residual_map})
    for errors in (found.row_error, found.column_error, found.largest_row_error, found.largest_column_error):
        assert errors.shape == (6,)
        assert errors.max() < error
    for gain in (found.gain, found.composite_gain):
        torch.testing.assert_close(gain, torch.ones(6, 2).double(), rtol=0, atol=6 * error)


def test_errors_and_gains_of_maps_that_are_known():
    """Static Hyper-Connections: H ← A_rᵀ H."""
    model, found = report("hyper", {"n": 2, "static": True})
    product = torch.eye(2).double()
    for site, a in enumerate(model.mixer.A_r.detach()):
        product = a.T @ product
        assert found.row_error[site].item() == close((a.T.sum(1) - 1).abs().mean().item())
        assert found.largest_column_error[site].item() == close((a.T.sum(0) - 1).abs().max().item())
        assert found.gain[site].tolist() == close([a.abs().sum(0).max().item(), a.abs().sum(1).max().item()])
        sums = [product.abs().sum(d).max().item() for d in (1, 0)]
        assert found.composite_gain[site].tolist() == close(sums)
