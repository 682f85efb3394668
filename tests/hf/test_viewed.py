"""Models of transformers that already mix over depth, as depth_mixing and the other measurements see them."""

import pytest
import torch

import depthmix
from depthmix.insight import depth_map, edge_effects, magnitudes, skip_effects
from hf.accelerated.small_models import layers_of, small_model, tokens


@pytest.fixture(params=["deepseek_v4", "glm5_next"], scope="module")
def model(request):
    return small_model(request.param)


def plain_and_viewed(model):
    from depthmix.hf.viewed import Viewed

    view = Viewed(model)
    with torch.no_grad():
        return model(input_ids=tokens()).logits, view(input_ids=tokens()).logits


def test_a_view_has_the_logits_of_its_model(model):
    plain, viewed = plain_and_viewed(model)
    torch.testing.assert_close(viewed, plain, rtol=1e-4, atol=1e-5)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_mixer_of_a_view_is_what_mixes(model):
    from depthmix.hf.viewed import Viewed

    view = Viewed(model)
    with torch.no_grad():
        view.mixer.b += 1.0
        changed = view(input_ids=tokens()).logits
        plain = model(input_ids=tokens()).logits
    assert (changed - plain).abs().max() > 0.1


@pytest.mark.parametrize("family", ["hy_v4", "inkling2"])
def test_other_families_have_the_same_logits_and_depth_weights_of_their_own(family):
    model = small_model(family)
    plain, viewed = plain_and_viewed(model)
    torch.testing.assert_close(viewed, plain, rtol=1e-4, atol=1e-5)
    found = depthmix.depth_mixing(model, input_ids=tokens())
    assert found.shape == (3 if family == "inkling2" else 1, 7, 7)
    assert found[0].diagonal().abs().min() > 0


def test_a_model_without_weights_is_refused():
    with pytest.raises(depthmix.UserError, match="the weights of this model's mixing are offloaded or not loaded"):
        depthmix.depth_mixing(small_model("deepseek_v4").to("meta"), input_ids=tokens())


def test_a_model_with_other_sources_is_refused():
    with pytest.raises(depthmix.UserError, match="qwen4-exp has other sources than the outputs of its sublayers"):
        depthmix.depth_mixing(small_model("qwen4_exp"), input_ids=tokens())


def test_an_accelerated_model_has_the_same_view():
    from depthmix.hf import accelerate

    plain, viewed = plain_and_viewed(accelerate(small_model("deepseek_v4"), quiet=True))
    torch.testing.assert_close(viewed, plain, rtol=1e-4, atol=1e-5)


def by_hand(model):
    """Return M [S+1, S+1] of token 4 of row 0, from the weights that the model's own modules return."""
    weights, head, n = [], [], 4
    handles = [
        module.register_forward_hook(lambda m, args, out: weights.append((args[0], out, m)))
        for layer in layers_of(model)
        for module in (layer.attn_hc, layer.ffn_hc)
    ]
    if hasattr(model.model, "hc_head"):
        handles.append(model.model.hc_head.register_forward_pre_hook(lambda m, args: head.append((args[0], m))))
    with torch.no_grad():
        model(input_ids=tokens())
    for handle in handles:
        handle.remove()
    rows, held = [], torch.zeros(n, 2 * len(layers_of(model)) + 1)  # how much of each source every stream holds
    held[:, 0] = 1.0
    for site, (streams, (post, comb, h), _) in enumerate(weights):
        # h is a sum of streams: its weights are the solution of a least squares problem.
        pre = torch.linalg.lstsq(streams[0, 4].T, h[0, 4].unsqueeze(-1)).solution[:, 0]
        if site == 0:  # all streams are equal there
            pre = torch.full((n,), float((h[0, 4] / streams[0, 4, 0])[0]) / n)
        rows.append(pre @ held)
        held = comb[0, 4].T @ held
        held[:, site + 1] += post[0, 4]
    if head:
        (streams, module) = head[0]
        out = module(streams)[0, 4]
        last = torch.linalg.lstsq(streams[0, 4].T, out.unsqueeze(-1)).solution[:, 0]
    else:
        last = torch.full((n,), 1 / n)
    return torch.stack([*rows, last @ held])


def test_depth_mixing_is_the_product_of_the_model_s_own_maps(model):
    found = depthmix.depth_mixing(model, input_ids=tokens(), per_token=True)[0, 4, 0]
    torch.testing.assert_close(found, by_hand(model), rtol=1e-3, atol=1e-3)


def test_the_other_measurements_take_such_a_model(model):
    batch = tokens()
    with torch.no_grad():
        logits = model(input_ids=batch[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()
    skips = skip_effects(model, [batch])
    assert skips.loss == pytest.approx(loss, rel=1e-4)
    handle = layers_of(model)[1].mlp.register_forward_hook(lambda module, args, out: torch.zeros_like(out))
    with torch.no_grad():
        logits = model(input_ids=batch[:, :-1]).logits
    handle.remove()
    skipped = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()
    assert float(skips.change[3]) == pytest.approx(skipped - loss, abs=1e-4)
    assert depth_map(model, [batch]).mean.shape == (1, 7, 7)
    assert len(magnitudes(model, batch)["output_rms"]) == 6


def test_connections_are_cut_in_copies_of_one_text():
    one_layer = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
    model, batch = small_model("deepseek_v4", **one_layer), tokens(batch=1, length=5)
    found, one_by_one = edge_effects(model, [batch]), edge_effects(model, [batch], at_once=1)
    for ours, other in zip(found.change, one_by_one.change, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-5)
    assert max(float(change.abs().max()) for change in found.change) > 1e-4
