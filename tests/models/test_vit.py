"""The vision transformer: against a plain one written here, and what must hold whatever the mixer."""

import inspect
import re

import pytest
import torch
from torch.nn import functional

import depthmix
from depthmix import Vit, VitConfig, list_mixers
from depthmix.models import blocks, vit
from small_cases import each

SMALL = {"image_size": (8, 12), "patch_size": 4, "n_classes": 5, "dim": 16, "n_blocks": 2, "n_heads": 2, "mlp_dim": 24}


def small(mixer="residual", options=None, **changes):
    torch.manual_seed(0)
    return Vit(VitConfig(**SMALL | {"mixer": mixer, "mixer_options": options or {}} | changes)).double()


def images(batch=3):
    return torch.randn(batch, 3, 8, 12, generator=torch.Generator().manual_seed(1)).double()


# A plain vision transformer, sharing nothing with the library but the names of its weights.


def rms(x, gain, eps=1e-6):
    return gain * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def position(row, column, dim):
    frequencies = [10000 ** -(i / (dim // 4)) for i in range(dim // 4)]
    angles = torch.tensor([[row * f for f in frequencies], [column * f for f in frequencies]])
    return torch.cat([angles[0].sin(), angles[0].cos(), angles[1].sin(), angles[1].cos()])


def plain(model, x):
    p, c = dict(model.named_parameters()), model.config
    tokens = []
    for row in range(2):
        for column in range(3):
            patch = x[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            token = patch.flatten(1) @ p["embedding.patches.weight"].flatten(1).T + p["embedding.patches.bias"]
            learned = c.positions == "learned"
            tokens.append(
                token + (p["embedding.positions"][3 * row + column] if learned else position(row, column, 16))
            )
    if c.pool == "token":
        tokens.insert(0, p["embedding.token"].expand(len(x), -1))
    h = torch.stack(tokens, 1)
    for block in range(2):
        a = rms(h, p[f"norms.{2 * block}.0.weight"])
        q, k, v = (a @ p[f"sublayers.{2 * block}.{w}_proj.weight"].T for w in "qkv")
        heads = []
        for i in (slice(0, 8), slice(8, 16)):
            weights = (q[..., i] @ k[..., i].mT / 8**0.5).softmax(-1)
            heads.append(weights @ v[..., i])
        h = h + torch.cat(heads, -1) @ p[f"sublayers.{2 * block}.out_proj.weight"].T
        m, name = rms(h, p[f"norms.{2 * block + 1}.0.weight"]), f"sublayers.{2 * block + 1}"
        gate = functional.silu(m @ p[f"{name}.gate_proj.weight"].T)
        h = h + (gate * (m @ p[f"{name}.up_proj.weight"].T)) @ p[f"{name}.out_proj.weight"].T
    h = rms(h, p["final_norm.weight"])
    return (h[:, 0] if c.pool == "token" else h.mean(1)) @ p["head.weight"].T


@each("pool", ["token", "mean"])
@each("positions", ["learned", "sincos"])
def test_with_plain_residuals_it_is_a_plain_vision_transformer(pool, positions):
    model = small(pool=pool, positions=positions)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or "bias" in name or "token" in name:
                p += 0.3 * torch.randn_like(p)
    torch.testing.assert_close(model(images()), plain(model, images()), rtol=1e-6, atol=1e-7)


@each("mixer", list_mixers())
def test_every_mixer_trains_all_of_it(mixer):
    model = small(mixer, pool="token")
    with torch.no_grad():  # off the start, where some gradients are zero
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    model(images()).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
    assert model.embedding.patches.weight.grad.abs().sum() > 0
    assert depthmix.depth_mixing(model, images()).shape[-1] == 5


@each(("mixer", "options", "ways"), [("dca", {}, 3), ("attnres", {"ways": 2}, 2)])
def test_several_ways_have_norms_of_their_own(mixer, options, ways):
    model = small(mixer, options)
    assert [len(norms) for norms in model.norms] == [ways, 1, ways, 1]
    before = model(images())
    with torch.no_grad():
        model.norms[0][-1].weight.mul_(0)  # the values of the first block
    assert not torch.allclose(model(images()), before)


def test_every_patch_sees_every_other_one():
    model, x = small(), images(1).requires_grad_()
    for column in (0, 2):
        h = model.through_blocks(model.embedding(x), vit.Context(None, None, None, None, vit.in_all_directions))
        (gradient,) = torch.autograd.grad(h[0, column].sum(), x)
        patches = gradient.unfold(2, 4, 4).unfold(3, 4, 4).abs().sum(dim=(0, 1, 4, 5))
        assert (patches > 0).all()


def test_no_mechanism_is_named():
    for module in (vit, blocks):
        words = set(re.findall(r"\w+", inspect.getsource(module).lower()))
        assert not words & (set(list_mixers()) - {"residual"})


def test_one_seed_gives_the_same_weights_whatever_the_mixer():
    one, other = (dict(small(m).named_parameters()) for m in ("residual", "attnres"))
    for name, p in one.items():
        assert torch.equal(p, other[name]), name


def test_parameter_counts_add_up():
    counts = small("dca", pool="token").parameter_counts()
    total = sum(p.numel() for p in small("dca", pool="token").parameters())
    assert counts["total"] == total == sum(n for k, n in counts.items() if k not in ("total", "added_by_mixer"))
    assert counts["embedding"] == 3 * 16 * 16 + 16 + 6 * 16 + 16
    assert counts["added_by_mixer"] == counts["mixer"] + 2 * 2 * 16


def test_the_state_follows_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        logits = small("attnres").float()(images().float())
    assert logits.dtype == torch.bfloat16


def test_one_number_is_height_and_width():
    assert VitConfig(**SMALL | {"image_size": 8}).image_size == (8, 8)


@each(
    ("changes", "words"),
    [
        ({"patch_size": 3}, "patch_size must divide images of 8 x 12, got 3"),
        ({"image_size": (8,)}, "image_size must be height and width"),
        ({"image_size": 0}, "image_size must be height and width"),
        ({"n_classes": 0}, "n_classes must be an integer of at least 1, got 0"),
        ({"pool": "max"}, "pool must be 'token' or 'mean', got 'max'"),
        ({"positions": "rotary"}, "positions must be 'learned' or 'sincos', got 'rotary'"),
        ({"positions": "sincos", "dim": 6}, "dim must be a multiple of 4"),
        ({"n_heads": 3}, "n_heads must divide dim=16"),
        ({"mixer": "atnres"}, "attnres"),
        ({"mixer_options": {"ways": 2}}, "ways"),
    ],
)
def test_what_is_no_vision_transformer_is_refused(changes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        VitConfig(**SMALL | changes)


def test_images_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=re.escape("expected images of shape [B, 3, 8, 12], got [2, 3, 8, 8]")):
        small()(torch.zeros(2, 3, 8, 8).double())
