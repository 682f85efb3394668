"""Value residuals and value embeddings: against a second implementation of the whole decoder, with caches and checkpoints."""

import functools
import math

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from depthmix import Decoder, DecoderConfig
from depthmix.errors import UserError
from depthmix.models.decoding import Decoding
from depthmix.models.layers import rotate
from depthmix.models.value_mixing import ValueMixing
from depthmix.parallel.plan.model import parts_of
from small_cases import each

VOCAB, DIM, BLOCKS, HEADS, KV_HEADS, HEAD_DIM = 13, 16, 5, 4, 2, 6
BOTH = {"value_residual": "learnable", "value_embeddings": True}
CASES = [{"value_residual": "learnable"}, {"value_residual": "sparse"}, {"value_embeddings": True}, BOTH]
every_case = pytest.mark.parametrize("changes", CASES, ids=str)


def decoder(random=True, **changes):
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "dim": DIM, "n_blocks": BLOCKS, "n_heads": HEADS, "n_kv_heads": KV_HEADS}
    model = Decoder(DecoderConfig(**shape, head_dim=HEAD_DIM, mlp_dim=24, mlp="relu2", **changes)).double()
    for name, p in model.named_parameters() if random else ():
        if ".values." in name:
            torch.nn.init.normal_(p)
    return model


def tokens(length=7):
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


def normed(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def logits_by_hand(model, ids):
    """The decoder written out, with plain residuals."""
    x, first = model.embedding.weight[ids], None
    cos, sin = model.rotary(torch.arange(ids.shape[1]).unsqueeze(0))
    for block in range(BLOCKS):
        attention, mlp = model.sublayers[2 * block], model.sublayers[2 * block + 1]
        a = normed(x, model.norms[2 * block][0])
        q, k, v = (a @ p.weight.T for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        first = v if block == 0 else first
        weights = dict(attention.named_parameters())
        if "values.lambda_1" in weights:
            v = weights["values.lambda_1"] * first + weights["values.lambda_2"] * v
        if "values.table.weight" in weights:
            gate = 3 / (1 + torch.exp(-(a[..., :12] @ weights["values.gate.weight"].T)))
            embedded = weights["values.table.weight"][ids]
            v = v + gate.repeat_interleave(HEAD_DIM, dim=-1) * embedded
        q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for t in (q, k, v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        later = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        scores = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(later, -math.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + y @ attention.out_proj.weight.T
        h = normed(x, model.norms[2 * block + 1][0])
        x = x + functional.relu(h @ mlp.up_proj.weight.T).square() @ mlp.out_proj.weight.T
    return normed(x, model.final_norm) @ model.head.weight.T


def gradients(model, logits):
    grads = torch.autograd.grad((logits * torch.arange(VOCAB)).square().mean(), list(model.parameters()))
    return {name: g for (name, _), g in zip(model.named_parameters(), grads, strict=True)}


@every_case
def test_logits_and_gradients_are_those_of_the_equations(changes):
    model = decoder(**changes)
    found, expected = model(tokens()), logits_by_hand(model, tokens())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients(model, found), gradients(model, expected), rtol=1e-7, atol=1e-9)


def test_examples():
    """V_1 = (1, 2), V_2 = (3, −2); V = (0.5, 0.5), E = (0.2, −0.4) with a gate of σ(0)."""
    v_1, v_2 = (torch.tensor(v, dtype=torch.float64).view(1, 1, 1, 2) for v in ((1.0, 2.0), (3.0, -2.0)))
    for start, expected in (((0.5, 0.5), (2, 0)), ((2.0, 1.0), (5, 2)), ((5.0, 1.0), (8, 8))):
        mixing = ValueMixing(2, 1, 2, start, None).double()
        mixing.reset_parameters()
        assert mixing(v_2, v_2[0], v_1, None).flatten().tolist() == list(expected)
    mixing = ValueMixing(2, 1, 2, None, 1).double()
    torch.nn.init.zeros_(mixing.gate.weight)
    with torch.no_grad():
        mixing.table.weight.copy_(torch.tensor([[0.2, -0.4]]))
    v = torch.full((1, 1, 1, 2), 0.5, dtype=torch.float64)
    found = mixing(v, torch.ones(1, 1, 2, dtype=torch.float64), None, torch.zeros(1, 1, dtype=torch.long))
    torch.testing.assert_close(found.flatten(), torch.tensor([0.8, -0.1], dtype=torch.float64))


def test_initial_values():
    learnable, sparse = (decoder(False, value_residual=kind) for kind in ("learnable", "sparse"))
    starts = [{n: p.item() for n, p in m.named_parameters() if "values" in n} for m in (learnable, sparse)]
    name = "sublayers.{}.values.lambda_{}".format
    assert starts[0] == {name(2 * block, i): 0.5 for block in range(1, BLOCKS) for i in (1, 2)}
    # Of 5 blocks; of 8 they are 5, 6 and 7.
    assert starts[1] == {name(2 * block, i): value for block in (3, 4) for i, value in ((1, 5.0), (2, 1.0))}
    model = decoder(False, value_embeddings=True)
    assert [n for n, _ in model.named_parameters() if "table" in n] == [
        f"sublayers.{site}.values.table.weight" for site in (0, 4, 8)
    ]
    table, gate = (model.get_parameter(f"sublayers.8.values.{part}.weight") for part in ("table", "gate"))
    assert table.shape == (VOCAB, KV_HEADS * HEAD_DIM)
    assert gate.shape == (KV_HEADS, 12)
    assert table.std().item() == pytest.approx(DIM**-0.5, rel=0.1)
    assert 0 < gate.min().item() < gate.max().item() < 0.02


@each("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    """Let terms cancel, so that a rounded partial sum is off by far more than the result's own rounding."""
    torch.manual_seed(0)
    mixing = ValueMixing(DIM, KV_HEADS, HEAD_DIM, (0.5, 0.5), VOCAB).to(dtype)
    mixing.reset_parameters()
    first, v, h = torch.randn(3, 1, 500, KV_HEADS * HEAD_DIM + 4).to(dtype)
    first, v = (t[..., : KV_HEADS * HEAD_DIM].unflatten(-1, (KV_HEADS, HEAD_DIM)) for t in (first, v))
    ids = torch.randint(VOCAB, (1, 500))
    gate = mixing.gate(h[..., :12]).double()  # a product of the model, in the model's dtype
    embedded = mixing.table(ids).unflatten(-1, (KV_HEADS, HEAD_DIM)).double()
    exact = 0.5 * first.double() + 0.5 * v.double() + (3 / (1 + torch.exp(-gate))).unsqueeze(-1) * embedded
    found = mixing(v, h, first, ids)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-6)


def test_without_them_nothing_is_added():
    assert not any("values" in name for name, _ in decoder().named_parameters())


@every_case
def test_decoding_gives_the_logits_of_the_whole_text(changes):
    """Token by token and in chunks, with the cache that grows and with preallocated memory."""
    model, ids = decoder(**changes).requires_grad_(False), tokens()
    expected = model(ids)
    for chunks in ((7,), (1,) * 7, (3, 1, 3)):
        cache = model.new_cache()
        outs = [model(part, cache=cache) for part in ids.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(outs, dim=1), expected, rtol=1e-9, atol=1e-9)
    decoding = Decoding(model, batch=2, length=7, chunk=2)
    torch.testing.assert_close(decoding.prefill(ids[:, :5]), expected[:, 4], rtol=1e-9, atol=1e-9)
    for t in (5, 6):
        torch.testing.assert_close(decoding.step(ids[:, t]), expected[:, t], rtol=1e-9, atol=1e-9)


@every_case
def test_recomputed_sublayers_give_the_same_gradients(changes):
    model = decoder(**changes)
    expected = gradients(model, model(tokens()))
    for sublayer in model.sublayers:
        sublayer.forward = functools.partial(checkpoint, sublayer.forward, use_reentrant=False)
    found = gradients(model, model(tokens()))
    assert all(torch.equal(found[name], g) for name, g in expected.items())


@every_case
def test_the_planner_counts_their_parameters(changes):
    model = decoder(**changes)
    assert parts_of(model.config, model.mixer) == model.parameter_counts()


def test_embeddings_instead_of_ids_are_refused():
    model = decoder(value_embeddings=True)
    with pytest.raises(ValueError, match="value embeddings need input_ids"):
        model(inputs_embeds=torch.randn(1, 3, DIM, dtype=torch.float64))
    assert decoder(value_residual="learnable")(inputs_embeds=torch.randn(1, 3, DIM, dtype=torch.float64)).shape[1] == 3


@each(("field", "value"), [("value_residual", "all"), ("value_embeddings", "yes")])
def test_other_values_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        decoder(**{field: value})


@each("sizes", [{"tp": 2}, {"pp": 2}])
def test_layouts_that_divide_values_are_refused(sizes):
    from depthmix.config import TrainConfig
    from depthmix.parallel.layout import Layout

    model = decoder(value_residual="sparse").config
    with pytest.raises(UserError, match="value_residual and value_embeddings need every head's values"):
        Layout(**sizes).check(TrainConfig(), model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_hugging_faces_model(tmp_path, reentrant):
    """The same logits, back from a folder, and the same gradients with either kind of checkpoint."""
    from depthmix.hf import DepthmixConfig, DepthmixForCausalLM

    sizes = {"hidden_size": DIM, "num_hidden_layers": 3, "num_attention_heads": HEADS, "intermediate_size": 24}
    torch.manual_seed(0)
    model = DepthmixForCausalLM(DepthmixConfig(vocab_size=VOCAB, **sizes, **BOTH))
    gate = model.get_parameter("model.sublayers.4.values.gate.weight")
    assert 0 < gate.min().item() < gate.max().item() < 0.02
    assert model.get_parameter("model.sublayers.4.values.lambda_1").tolist() == [0.5]
    model.save_pretrained(tmp_path)
    back = DepthmixForCausalLM.from_pretrained(tmp_path)
    assert (back.config.value_residual, back.config.value_embeddings) == ("learnable", True)
    ids = tokens()
    torch.testing.assert_close(back(ids).logits, model(ids).logits, rtol=0, atol=0)
    whole = model.generate(ids[:, :2], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(
        whole, model.generate(ids[:, :2], max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False)
    )
    results = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.zero_grad()
        model.train()(ids, labels=ids).loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters() if "values" in name})
    torch.testing.assert_close(*results)
