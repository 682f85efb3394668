"""A decoder of plain residuals that gets another rule: the same logits, the same weights, and what is new has a name."""

from dataclasses import replace
from typing import Any

import torch

from depthmix import Decoder, DecoderConfig
from small_cases import each

EXACT: list[tuple[str, dict[str, Any]]] = [
    ("attnres", {}),
    ("attnres", {"block_size": 2, "ways": 2}),
    ("attnres", {"ways": 3, "routing": "add"}),
    ("dca", {}),
    ("denseformer", {}),
    ("grn", {}),
    ("hyper", {}),
    ("laurel", {}),
    ("mhc", {}),
    ("mudd", {}),
]
SHAPE: dict[str, Any] = {"vocab_size": 13, "dim": 16, "n_blocks": 3, "n_heads": 2, "qk_norm": True}


def plain() -> Decoder:
    """With activations so small that an eps counts, and norms that are not all ones."""
    model = Decoder(DecoderConfig(**SHAPE, norm_eps=1e-4))
    with torch.no_grad():
        model.embedding.weight *= 0.1
        for p in model.norms.parameters():
            p += 0.2 * torch.randn_like(p)
    return model


@each(("name", "options"), EXACT)
def test_the_logits_stay(name: str, options: dict[str, Any]) -> None:
    model, ids = plain(), torch.randint(13, (2, 7))
    before, weights = model(ids), {n: p.detach().clone() for n, p in model.named_parameters()}
    model.change_mixer(replace(model.config, mixer=name, mixer_options=options, plain_eps=True))
    torch.testing.assert_close(model(ids), before, rtol=1e-5, atol=1e-6)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[n], p) for n, p in weights.items())
    assert set(after) - set(weights) == set(model.added_by_mixer())
    assert model.parameter_counts()["added_by_mixer"] == sum(after[n].numel() for n in model.added_by_mixer())
    again = Decoder(model.config)  # as a checkpoint's configuration builds it
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(ids), model(ids))


def test_without_the_eps_of_plain_the_logits_change() -> None:
    model, ids = plain(), torch.randint(13, (2, 7))
    before = model(ids)
    model.change_mixer(replace(model.config, mixer="attnres"))
    assert not torch.allclose(model(ids), before, rtol=1e-2, atol=1e-3)


@each("name", ["attnres", "dca", "mhc"])
def test_a_mixer_alone_has_the_gradients_it_has_with_the_rest(name: str) -> None:
    model, ids = plain(), torch.randint(13, (2, 7))
    model.change_mixer(replace(model.config, mixer=name, plain_eps=True))
    grads = []
    for alone in (False, True):
        model.zero_grad()
        for n, p in model.named_parameters():
            p.requires_grad_(not alone or n in model.added_by_mixer())
        model(ids).square().sum().backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert grads[1].keys() <= set(model.added_by_mixer())
    assert any(g.any() for g in grads[1].values())
    for n, g in grads[1].items():
        torch.testing.assert_close(g, grads[0][n])
