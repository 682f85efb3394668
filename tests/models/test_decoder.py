"""The decoder: against a plain Transformer written here, at step 0, and what must hold whatever the mixer."""

import ast
import functools
import inspect
import itertools
import re
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

import depthmix.models.decoder as decoder_module
from depthmix import Decoder, DecoderConfig, create_mixer, list_mixers
from depthmix.mixers import mixer_class
from oracles.cases import pairwise
from small_cases import each

SMALL = {"vocab_size": 13, "dim": 16, "n_blocks": 3, "n_heads": 4, "n_kv_heads": 2, "mlp_dim": 24}
SEVERAL_WAYS = [(name, {}) for name in list_mixers() if create_mixer(name, dim=4, n_blocks=1).ways(0) > 1]
SEVERAL_WAYS += [("attnres", {"ways": ways}) for ways in (2, 3)]
SEEN_BY = {2: ("qk", "v"), 3: ("q", "k", "v")}  # by ways: the projections that see each


def small(mixer="residual", options=None, seed=0, random=False, dtype=torch.float64, **changes):
    """A decoder of a few thousand parameters; random=True moves the mixer and all gains off their initial values."""
    torch.manual_seed(seed)
    model = Decoder(DecoderConfig(**SMALL | {"mixer": mixer, "mixer_options": options or {}} | changes)).to(dtype)
    if random:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.startswith("mixer") or "norm" in name:
                    p += 0.3 * torch.randn_like(p)
    return model


def tokens(batch=2, length=6):
    return torch.randint(SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


def assert_relative(actual, expected, tolerance):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


# A plain pre-norm Transformer, sharing nothing with the library but the names of its weights.


def rms(x, gain, eps):
    return gain * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def turn(x, theta):
    """Rotary positions as a complex product, for x [B, T, heads, d]; the decoder takes its angles, cos and sin in fp32."""
    half = x.shape[-1] // 2
    frequency = theta ** -(torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[1], dtype=torch.float32)[:, None, None] * frequency
    z = torch.complex(x[..., :half], x[..., half:]) * torch.complex(angle.cos().double(), angle.sin().double())
    return torch.cat([z.real, z.imag], dim=-1)


def plain_attention(h, p, c):
    q, k, v = ((h @ p[f"{w}_proj.weight"].T).reshape(*h.shape[:2], -1, c.head_dim) for w in "qkv")
    if c.qk_norm:
        q, k = rms(q, p["q_norm.weight"], c.norm_eps), rms(k, p["k_norm.weight"], c.norm_eps)
    q, k = turn(q, c.rope_theta), turn(k, c.rope_theta)
    outs = []
    for head in range(c.n_heads):
        shared = head // (c.n_heads // c.n_kv_heads)
        scores = q[:, :, head] @ k[:, :, shared].transpose(1, 2) / c.head_dim**0.5
        future = torch.ones(h.shape[1], h.shape[1]).triu(1).bool()
        outs.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, :, shared])
    return torch.cat(outs, dim=-1) @ p["out_proj.weight"].T


def plain_mlp(h, p, c):
    up = h @ p["up_proj.weight"].T
    if c.mlp == "swiglu":
        gate = h @ p["gate_proj.weight"].T
        return (gate * gate.sigmoid() * up) @ p["out_proj.weight"].T
    return up.clamp(min=0).pow(2) @ p["out_proj.weight"].T


def plain_transformer(p, c, ids):
    x = p["embedding.weight"][ids]
    for site in range(2 * c.n_blocks):
        prefix = f"sublayers.{site}."
        own = {name.removeprefix(prefix): w for name, w in p.items() if name.startswith(prefix)}
        x = x + (plain_mlp if site % 2 else plain_attention)(rms(x, p[f"norms.{site}.0.weight"], c.norm_eps), own, c)
    head = p["embedding.weight"] if c.tie_embeddings else p["head.weight"]
    return rms(x, p["final_norm.weight"], c.norm_eps) @ head.T


HEADS = ({}, {"n_kv_heads": 2}, {"n_kv_heads": 1}, {"n_kv_heads": 2, "head_dim": 6})
EVERY_CHOICE = [
    {"heads": heads, "tie_embeddings": tied, "qk_norm": qk_norm, "mlp": mlp}
    for heads, tied, qk_norm, mlp in itertools.product(range(4), (False, True), (False, True), ("swiglu", "relu2"))
]


@each("choice", pairwise("", EVERY_CHOICE))
def test_logits_and_every_gradient_are_those_of_a_plain_transformer(choice):
    model = small(random=True, **HEADS[choice["heads"]], **{k: v for k, v in choice.items() if k != "heads"})
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits, expected = model(tokens()), plain_transformer(weights, model.config, tokens())
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    direction = torch.randn_like(logits)
    for out in (logits, expected):
        (out * direction).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, weights[name].grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_rotary_angles_are_the_exact_ones_to_fp32():
    cos, sin = decoder_module.Rotary(8, 500.0)(torch.arange(64)[None])
    angle = torch.arange(64).double()[:, None] * 500.0 ** (-torch.arange(4).double() / 4).repeat(2)
    torch.testing.assert_close(cos[0, 0].double(), angle.cos(), rtol=0, atol=1e-5)
    torch.testing.assert_close(sin[0, 0].double(), angle.sin(), rtol=0, atol=1e-5)


def without_docstrings(tree):
    """Empty the docstrings of a module and of all that it defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0].value.value = ""
    return tree


def test_the_source_names_no_mechanism():
    classes = [mixer_class(name).__name__ for name in list_mixers()]
    # Unparsed from its tree, the source has no comments; docstrings may show a mechanism as an example.
    code = ast.unparse(without_docstrings(ast.parse(inspect.getsource(decoder_module))))
    named = re.findall(rf"\b({'|'.join(list_mixers() + classes)})\b", code, re.IGNORECASE)
    assert named == []


# Step 0.


@each("mixer", list_mixers())
def test_one_seed_gives_the_same_weights_outside_the_mixer(mixer):
    weights = dict(small(mixer).named_parameters())
    for name, p in small().named_parameters():
        assert torch.equal(weights[name], p), name


def plain(mixer, **options):
    """Cases of a mixer that is plain at step 0: every value of every option, one at a time."""
    return [(mixer, {name: value}) for name, values in options.items() for value in values]


PLAIN_AT_STEP_0 = [
    *plain("attnres", block_size=(None, 1, 2, 3, 4, 5), ways=(2, 3), query=("input",), weights=("sigmoid", "static")),
    *plain("attnres", heads=(4,), key_norm=(False,), routing=("add",)),
    *plain("dca", window=(None, 1), relu_on=("sum",), w_per_entry=(True,)),
    *plain("denseformer", dilation=(1, 2), period=(2,)),
    *plain("grn", version=(1, 2, 3), window=(1,), relu_on=("sum",), w_per_entry=(True,)),
    *plain("hyper", n=(1, 3, 4), static=(True,), tanh=(False,), norm=("rmsnorm",), fractions=(1, 2)),
    *plain("laurel", variant=("rw", "lr", "pa")),
    *plain("layerscale", init=(1.0,)),
    *plain("mhc", n=(2, 4), residual_map=("birkhoff", "identity"), head=("mean", "learned")),
    *plain("mhc", schedule=("single_pass",), convention=("deepseek",)),
    ("mudd", {}),
]


def logits_and_gradients(model):
    """The gradient of a norm that is there three times is the sum of the three."""
    logits = model(tokens())
    (
        logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=logits.dtype)
    ).sum().backward()
    gradients = defaultdict(int)
    for name, p in model.named_parameters():
        if not name.startswith("mixer"):
            gradients[re.sub(r"(norms\.\d+)\.\d", r"\1", name)] += p.grad
    return logits, gradients


@functools.cache
def plain_logits_and_gradients():
    return logits_and_gradients(small(norm_eps=1e-12))


@each(("mixer", "options"), PLAIN_AT_STEP_0)
def test_at_step_0_logits_and_gradients_are_those_of_the_plain_transformer(mixer, options):
    tolerance = 1e-4 if options.get("convention") == "deepseek" else 1e-6
    logits, gradients = logits_and_gradients(small(mixer, options, norm_eps=1e-12))
    expected, expected_gradients = plain_logits_and_gradients()
    assert_relative(logits, expected, tolerance)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert_relative(gradients[name], gradient, tolerance)


def test_rezero_starts_as_the_embedding_alone():
    model = small("rezero", norm_eps=0.0)
    root_mean_square = normalize(model.embedding(tokens()), dim=-1) * SMALL["dim"] ** 0.5
    torch.testing.assert_close(model(tokens()), root_mean_square @ model.head.weight.T, rtol=1e-9, atol=1e-9)


# Whatever the mixer.


@each(("mixer", "options"), SEVERAL_WAYS)
@each("way", range(3))
def test_each_of_several_norms_reaches_its_own_projections_and_no_other(mixer, options, way):
    model, site = small(mixer, options, random=True), 2
    ways = model.mixer.ways(site)
    assert ways == options.get("ways", 3)
    assert [len(norms) for norms in model.norms] == [ways, 1] * SMALL["n_blocks"]
    way = min(way, ways - 1)
    attention, projected = model.sublayers[site], defaultdict(list)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(attention, name).register_forward_hook(lambda m, i, out, name=name: projected[name].append(out))
    before = model(tokens())
    nn.init.zeros_(model.norms[site][way].weight)
    assert (model(tokens()) - before).abs().max() > 1e-6
    changed = [not torch.equal(*projected[name]) for name in ("q_proj", "k_proj", "v_proj")]
    assert changed == [w in SEEN_BY[ways][way] for w in "qkv"]


@each("mixer", list_mixers())
def test_counts_add_up_to_the_parameters(mixer):
    model = small(mixer)
    counts = model.parameter_counts()
    total, added = counts.pop("total"), counts.pop("added_by_mixer")
    assert total == sum(counts.values()) == sum(p.numel() for p in model.parameters())
    assert added == total - small().parameter_counts()["total"]


@each("tied", [False, True])
def test_counts_of_a_plain_model_by_hand(tied):
    counts = small(tie_embeddings=tied).parameter_counts()
    attention = 3 * (16 * 16 + 2 * 16 * 8 + 16 * 16)  # q; k and v with two of four heads; out
    parts = {"embedding": 13 * 16, "attention": attention, "mlp": 3 * 3 * 16 * 24, "norms": 7 * 16, "mixer": 0}
    parts["head"] = 0 if tied else 13 * 16
    assert counts == {**parts, "total": sum(parts.values()), "added_by_mixer": 0}


def test_added_parameters_follow_the_formulas():
    n, sites, dim = 3, 6, 16
    gains_and_scores = sum(3 * (i + 1) * dim + 3 * dim for i in range(1, n)) + (n + 1) * dim + dim
    assert small("attnres").parameter_counts()["added_by_mixer"] == 2 * (sites + 1) * dim
    assert small("dca").parameter_counts()["added_by_mixer"] == gains_and_scores + n * 2 * dim


@each("mixer", list_mixers())
def test_no_logit_depends_on_later_tokens_or_other_rows(mixer):
    model, ids = small(mixer, random=True), tokens()
    before = model(ids)
    for t in range(ids.shape[1]):
        changed = ids.clone()
        changed[1, t] = (changed[1, t] + 1) % SMALL["vocab_size"]
        after = model(changed)
        assert torch.equal(after[0], before[0])
        assert torch.equal(after[1, :t], before[1, :t])
        assert (after[1, t:] != before[1, t:]).any(-1).all()


@each("mixer", list_mixers())
def test_bfloat16_keeps_the_mixer_in_fp32_and_the_logits_close(mixer):
    model = small(mixer, random=True, dtype=torch.float32)
    expected, kept = model(tokens()), {name: p.clone() for name, p in model.mixer.named_parameters()}
    logits = model.bfloat16()(tokens())
    assert {p.dtype for name, p in model.named_parameters() if not name.startswith("mixer")} == {torch.bfloat16}
    for name, p in model.mixer.named_parameters():
        assert p.dtype == torch.float32, name
        assert torch.equal(p, kept[name]), name
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).norm() < 0.1 * expected.norm()


@each("mixer", list_mixers())
def test_autocast_runs_forward_and_backward_with_finite_gradients(mixer):
    model = small(mixer, random=True, dtype=torch.float32)
    expected = model(tokens())
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens())
    logits.float().logsumexp(-1).sum().backward()
    assert (logits.float() - expected).norm() < 0.1 * expected.norm()
    for name, p in model.named_parameters():
        assert p.grad is None or p.grad.isfinite().all(), name
        assert p.grad is not None or name.startswith("mixer"), name


@each("mixer", list_mixers())
def test_linear_wide_init_does_not_touch_mixers(mixer):
    def weird(module):
        if isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)):
            for p in module.parameters(recurse=False):
                nn.init.constant_(p, 7.0)

    model = small(mixer)
    before = {name: p.clone() for name, p in model.mixer.named_parameters()}
    model.apply(weird)
    assert all((p == 7.0).all() for name, p in model.named_parameters() if not name.startswith("mixer"))
    for name, p in model.mixer.named_parameters():
        assert torch.equal(p, before[name]), name


@each(("mixer", "tied"), [*((name, False) for name in list_mixers()), ("residual", True)])
def test_a_model_built_on_meta_initialises_like_any_other(mixer, tied):
    fields = {"dtype": torch.float32, "tie_embeddings": tied, "embedding_std": 0.5, "output_scale": 0.0}
    expected = small(mixer, **fields)
    with torch.device("meta"):
        model = small(mixer, **fields)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    for m in (model.to_empty(device="cpu"), expected):
        torch.manual_seed(0)
        m.reset_parameters()
    assert (model.head.weight is model.embedding.weight) == tied
    assert model.embedding.weight.std().item() == pytest.approx(0.5, rel=0.1)
    assert not any(sublayer.out_proj.weight.any() for sublayer in model.sublayers)
    for name, p in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), p), name
    assert torch.equal(model(tokens()), expected(tokens()))


@each("mixer", list_mixers())
def test_a_bfloat16_default_dtype_leaves_the_mixer_in_fp32_with_exact_values(mixer):
    expected = small(mixer, dtype=torch.float32).mixer
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Decoder(DecoderConfig(**SMALL, mixer=mixer))
        torch.manual_seed(0)
        model.mixer.reset_parameters()
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.embedding.weight.dtype == torch.bfloat16
    torch.manual_seed(0)
    expected.reset_parameters()
    torch.testing.assert_close(dict(model.mixer.named_parameters()), dict(expected.named_parameters()), rtol=0, atol=0)


# Errors.

COUNTS = ("vocab_size", "dim", "n_blocks", "n_heads", "n_kv_heads", "head_dim", "mlp_dim")
BAD = [({name: bad}, name, "integer of at least 1") for name in COUNTS for bad in (0, -1, True, "8", 2.0)]
BAD += [
    ({"n_kv_heads": 3}, "n_kv_heads", "divide n_heads=4"),
    ({"head_dim": 5}, "head_dim", "even"),
    ({"dim": 18}, "n_heads", "divide dim=18"),
    *(({"output_scale": bad}, "output_scale", "at least 0") for bad in (-1.0, float("inf"), "0")),
    *(({"embedding_std": bad}, "embedding_std", "positive number") for bad in (0.0, float("nan"), "1")),
    ({"mlp": "gelu"}, "mlp", "'swiglu' or 'relu2'"),
    ({"mixer": "atnres"}, "mixer", "did you mean 'attnres'"),
    ({"mixer": "hyper", "mixer_options": {"statik": True}}, "statik", "did you mean 'static'"),
    ({"mixer": "attnres", "mixer_options": {"dim": 8}}, "dim", "block_size"),
]


@each(("changes", "names", "says"), BAD)
def test_a_bad_configuration_says_what_is_valid(changes, names, says):
    with pytest.raises(ValueError, match=rf"\b{names}\b.*{says}"):
        small(**changes)


def test_forward_takes_ids_or_embeddings_but_not_both():
    model, ids = small(random=True), tokens()
    assert torch.equal(model(inputs_embeds=model.embedding(ids)), model(ids))
    for inputs in ({}, {"input_ids": ids, "inputs_embeds": model.embedding(ids)}):
        with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
            model(**inputs)
