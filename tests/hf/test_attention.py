"""Attention through transformers' interface: whatever function the configuration names, with what it is passed."""

import re

import pytest
import torch
from torch.nn import functional

from depthmix.models.layers import Attention
from hf.tiny import BLOCKS, HEAD_DIM, HEADS, KV_HEADS, LENGTH, as_decoder, causal_lm, tokens


@pytest.fixture
def register():
    """Register attention functions with the masks of sdpa; they are forgotten after the test."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    names = []

    def remember(name, function):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)
        names.append(name)

    yield remember
    for name in names:
        del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]


def plain(module, q, k, v, mask, scaling=None, **kwargs):
    """Attention as a user may write it."""
    k, v = (t.repeat_interleave(module.num_key_value_groups, dim=1) for t in (k, v))
    y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
    return y.transpose(1, 2), None


def test_the_default_is_torchs_own_attention():
    assert causal_lm().config._attn_implementation == "sdpa"


@pytest.mark.parametrize("ways", [1, 2, 3])
@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention"])
def test_every_implementation_gives_the_decoders_logits_on_a_padded_batch(name, ways):
    model = causal_lm(fields={"mixer_options": {"ways": ways}, "head_dim": 16}).requires_grad_(False)
    ids, mask = tokens(3), torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, :3], mask[2, -2:] = 0, 0
    wanted = as_decoder(model)(ids, mask)[mask.bool()]
    model.set_attn_implementation(name)
    with torch.compiler.set_stance("force_eager"):  # flex attention is always compiled, which on some CPUs it cannot be
        found = model(ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_registered_function_is_called_once_a_block_with_what_the_caller_passed(register):
    calls = []

    def noted(module, q, k, v, mask, **kwargs):
        calls.append((module.layer_idx, q.shape, k.shape, v.shape, kwargs))
        return plain(module, q, k, v, mask, **kwargs)

    register("noted", noted)
    model, ids = causal_lm(), tokens()
    wanted = model(ids).logits
    model.set_attn_implementation("noted")
    torch.testing.assert_close(model(ids, tables="of a server").logits, wanted, rtol=1e-5, atol=1e-6)
    assert [call[0] for call in calls] == list(range(BLOCKS))
    q, k, v, kwargs = calls[0][1:]
    assert q == (2, HEADS, LENGTH, HEAD_DIM)
    assert k == v == (2, KV_HEADS, LENGTH, HEAD_DIM)
    assert kwargs["tables"] == "of a server"
    assert kwargs["scaling"] == pytest.approx(HEAD_DIM**-0.5)
    assert kwargs["position_ids"].tolist() == [list(range(LENGTH))]


def test_what_a_registered_function_returns_is_what_the_model_uses(register):
    register("nothing", lambda module, q, k, v, mask, **kwargs: (torch.zeros_like(q.transpose(1, 2)), None))
    model, ids = causal_lm("residual"), tokens()
    model.set_attn_implementation("nothing")
    for sublayer in model.model.sublayers:
        if isinstance(sublayer, Attention):
            sublayer.register_forward_hook(lambda module, args, y: pytest.fail("not zero") if y.any() else None)
    changed = model(ids).logits
    model.set_attn_implementation("sdpa")
    for sublayer in model.model.sublayers:
        sublayer._forward_hooks.clear()
    assert (changed - model(ids).logits).abs().max() > 1e-4


def test_a_server_that_keeps_keys_and_values_itself_runs_the_model(register):
    """As vLLM's Transformers backend does: one attention object a layer by `layer_idx`, tokens of one row, masks of its own."""

    class Layer:
        def __init__(self):
            self.k, self.v = None, None

        def __call__(self, q, k, v, scaling):
            self.k = k if self.k is None else torch.cat([self.k, k], dim=2)
            self.v = v if self.v is None else torch.cat([self.v, v], dim=2)
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (self.k, self.v))
            seen = torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2]).bool()
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling).transpose(1, 2)

    def serve(module, q, k, v, mask, scaling=None, attention_instances=None, **kwargs):
        assert mask is None
        return attention_instances[module.layer_idx](q, k, v, scaling), None

    register("server", serve)
    model, ids = causal_lm("dca"), tokens(1)
    wanted = model(ids).logits
    model.set_attn_implementation("server")
    layers, parts, done = [Layer() for _ in range(BLOCKS)], [], 0
    for chunk in ids.split([5, 1, 2], dim=1):
        positions = torch.arange(done, done + chunk.shape[1])[None]
        out = model.model(
            chunk,
            attention_mask={"full_attention": None},
            position_ids=positions,
            use_cache=False,
            attention_instances=layers,
        )
        parts.append(model.lm_head(out.last_hidden_state))
        done += chunk.shape[1]
    torch.testing.assert_close(torch.cat(parts, dim=1), wanted, rtol=1e-5, atol=1e-6)
    assert model._supports_attention_backend


def test_attention_weights_of_the_eager_function():
    model, ids = causal_lm(attn_implementation="eager"), tokens()
    out = model(ids, output_attentions=True)
    assert len(out.attentions) == BLOCKS
    for weights in out.attentions:
        assert weights.shape == (2, HEADS, LENGTH, LENGTH)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, HEADS, LENGTH))
        assert not weights.triu(1).any()
    assert model(ids).attentions is None


@pytest.mark.parametrize("additive", [False, True])
def test_a_four_dimensional_mask_is_taken_as_it_is(additive):
    model, ids = causal_lm(), tokens()
    mask = torch.ones(LENGTH, LENGTH).tril().bool()[None, None]
    mask[..., 4:, 0] = False  # later tokens do not see the first
    given = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if additive else mask
    found = model(ids, attention_mask=given).logits
    torch.testing.assert_close(found, as_decoder(model)(ids, mask), rtol=1e-5, atol=1e-6)
    assert (found - model(ids).logits).abs().max() > 1e-4


def test_the_tensor_parallel_plan_covers_every_matrix_and_names_styles_that_exist():
    from torch import nn
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    model = causal_lm(fields={"qk_norm": True})
    plan = model.config.base_model_tp_plan
    named = dict(model.model.named_modules())
    for pattern in plan:
        assert any(re.fullmatch(pattern.replace(".", r"\.").replace("*", r"\d+"), name) for name in named), pattern
    for name, module in named.items():
        if name.startswith("sublayers.") and isinstance(module, nn.Linear):
            wanted = "rowwise" if name.endswith("out_proj") else "colwise"
            assert plan[re.sub(r"\d+", "*", name)] == wanted
    assert {*plan.values(), *model._tp_plan.values()} <= set(ALL_PARALLEL_STYLES.keys())


def test_a_decoding_step_with_a_static_cache_is_one_graph():
    from transformers import StaticCache

    model, ids = causal_lm(fields={"n_blocks": 1}).requires_grad_(False), tokens()
    whole = model(ids).logits
    torch.compiler.reset()
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 2)
    parts, graphs = [model(ids[:, :4], past_key_values=cache).logits], []
    for t in range(4, LENGTH):
        parts.append(step(ids[:, t : t + 1], past_key_values=cache, position_ids=torch.full((2, 1), t)).logits)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-6)
    assert graphs[-1] == graphs[0]
