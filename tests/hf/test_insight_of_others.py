"""Cut connections and skipped sublayers of Hugging Face models, whose outputs are not tensors."""

import pytest
import torch

import depthmix
from depthmix.insight import edge_effects, skip_effects
from hf.test_retrofit import ids, make, stir
from hf.tiny import as_decoder, causal_lm, tokens


def test_what_our_own_model_says_is_what_its_decoder_says():
    model, batch = causal_lm("attnres"), tokens()
    for measure in (edge_effects, skip_effects):
        found, expected = measure(model, [batch]), measure(as_decoder(model), [batch])
        assert found.loss == pytest.approx(expected.loss)
        for ours, other in zip(found.change, expected.change, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_skipping_a_sublayer_of_a_retrofitted_model_is_an_output_of_zero(kind):
    model = stir(depthmix.retrofit(make(kind), "attnres", quiet=True, block_size=2))
    found = skip_effects(model, [ids()])
    layer = (model.model.layers if kind == "llama" else model.transformer.h)[1]
    handle = layer.mlp.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
    with torch.no_grad():
        logits = model(ids()[:, :-1]).logits
    handle.remove()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids()[:, 1:].flatten()).item()
    assert float(found.change[3]) == pytest.approx(loss - found.loss, abs=1e-5)  # the second block's second site
    edges = edge_effects(model, [ids()])
    assert edges.loss == pytest.approx(found.loss, abs=1e-5)
    # A site that has one edge is left with nothing without it; the first site reads the embedding alone.
    assert abs(float(edges.change[0][0, 0])) > 1e-6


def test_a_model_with_masks_for_its_rows_is_cut_one_copy_after_the_other():
    """Attention in a window has a mask for as many rows as it is given, and copies would be more."""
    model = stir(depthmix.retrofit(make("mistral", sliding_window=3), "attnres", quiet=True, block_size=2))
    found, expected = edge_effects(model, [ids()]), edge_effects(model, [ids()], at_once=1)
    assert found.loss == pytest.approx(expected.loss)
    for ours, other in zip(found.change, expected.change, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-6)
    assert max(float(change.abs().max()) for change in found.change) > 1e-4


def test_what_cannot_run_in_any_way_is_still_an_error():
    model = depthmix.retrofit(make("llama"), "attnres", quiet=True)
    with pytest.raises(IndexError):
        edge_effects(model, [ids() + 1000])
