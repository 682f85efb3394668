"""Weights of published models in our mixers, against forwards written from those models' own equations."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix import OptionError, create_mixer
from depthmix.mixers.published import published_weights

D, LAYERS, TOKENS, EPS = 8, 3, 5, 1e-6


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(mixer: Any, x: Tensor, outputs: list[Tensor]) -> list[Tensor]:
    """What every site reads, and finish, when the sublayers return these."""
    state, seen = mixer.start(x), []
    for site, y in enumerate(outputs):
        seen.append(mixer.read(state, site))
        state = mixer.write(state, site, y)
    return [*seen, mixer.finish(state)]


E_, OUT = rand(TOKENS, D, seed=1), [rand(TOKENS, D, seed=2 + s) for s in range(2 * LAYERS)]


@pytest.mark.parametrize(
    ("source", "ends", "prefix", "fields"),
    [
        (
            "kimi-k3",
            ("self_attention_res", "mlp_res", "output_attn_res"),
            "model.",
            {"attn_res_block_size": 2, "rms_norm_eps": EPS},
        ),
        (
            "flash-linear-attention",
            ("attn_res", "mlp_res", "res"),
            "model.",
            {"attnres_block_size": 4, "norm_eps": EPS},
        ),
    ],
)
def test_attention_residuals(source: str, ends: tuple[str, str, str], prefix: str, fields: dict[str, Any]) -> None:
    """Blocks of two layers: sources are the embedding, the finished blocks' sums and the running one."""
    places = [f"{prefix}layers.{i}.{end}" for i in range(LAYERS) for end in ends[:2]] + [prefix + ends[2]]
    state = {f"{p}_proj.weight": rand(1, D, seed=20 + i) for i, p in enumerate(places)}
    state |= {f"{p}_norm.weight": rand(D, seed=40 + i) for i, p in enumerate(places)}
    mixer = create_mixer("attnres", dim=D, n_blocks=LAYERS, block_size=4, eps=EPS)
    config = {"hidden_size": D, "num_hidden_layers": LAYERS, **fields}
    found = mixer.load_state_dict(
        published_weights(source, state | {"model.norm.weight": rand(D, seed=3)}, config=config)
    )
    assert not found.missing_keys
    finished, running, expected = [E_], None, []
    for s, place in enumerate(places):
        sources = torch.stack(finished if running is None else [*finished, running])
        keys = sources / (sources.square().mean(-1, keepdim=True) + EPS).sqrt() * state[f"{place}_norm.weight"]
        p = torch.softmax((keys * state[f"{place}_proj.weight"]).sum(-1), 0)
        expected.append((p.unsqueeze(-1) * sources).sum(0))
        if s < len(OUT):
            running = OUT[s] if running is None else running + OUT[s]
            if (s + 1) % 4 == 0:
                finished, running = [*finished, running], None
    for got, wanted in zip(run(mixer, E_, OUT), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_deepseek_v4() -> None:
    """Against transformers' own modules."""
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = modeling.DeepseekV4Config(hidden_size=D, hc_mult=4, hc_sinkhorn_iters=5, hc_eps=1e-6, rms_norm_eps=1e-6)
    sites = [modeling.DeepseekV4HyperConnection(config) for _ in range(2 * LAYERS)]
    head = modeling.DeepseekV4HyperHead(config)
    with torch.no_grad():
        for i, p in enumerate(p for m in [*sites, head] for p in m.parameters()):
            p.copy_(rand(*p.shape, seed=100 + i))
    state = {
        f"model.layers.{s // 2}.{('attn_hc', 'ffn_hc')[s % 2]}.{k}": v
        for s, m in enumerate(sites)
        for k, v in m.state_dict().items()
    }
    state |= {f"model.hc_head.{k}": v for k, v in head.state_dict().items()}
    mixer = create_mixer("mhc", dim=D, n_blocks=LAYERS, n=4, convention="deepseek", head="learned", iterations=5)
    assert not mixer.load_state_dict(published_weights("deepseek-v4", state)).missing_keys
    streams, expected = E_.view(1, TOKENS, 1, D).expand(-1, -1, 4, -1).contiguous(), []
    for site, y in zip(sites, OUT, strict=True):
        post, comb, read = site(streams)
        expected.append(read[0])
        streams = torch.matmul(comb.transpose(-1, -2), streams) + post.unsqueeze(-1) * y.view(1, TOKENS, 1, D)
    expected.append(head(streams)[0])
    for got, wanted in zip(run(mixer, E_, OUT), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


def test_mhc_lite() -> None:
    """Softmax over permutation matrices in the order of itertools, stream i sent to perm[i]; the streams' norm has a gain of 1 + gamma."""
    n, width = 3, 6
    shapes = {
        "norm.gamma": (n * D,),
        "static_alpha": (n + width,),
        "dynamic_alpha_fn": (n * D, n + width),
        "pre_branch_scale": (1,),
        "residual_scale": (1,),
        "static_beta": (n,),
        "dynamic_beta_fn": (n * D, n),
        "h_post_scale": (),
    }
    sites = [
        {k: rand(*s, seed=10 * i + j) / (3 if len(s) == 2 else 1) for j, (k, s) in enumerate(shapes.items())}
        for i in range(2 * LAYERS)
    ]
    state = {
        f"transformer.h.{s // 2}.{('hc_attn', 'hc_mlp')[s % 2]}.{k}": v
        for s, site in enumerate(sites)
        for k, v in site.items()
    }
    mixer = create_mixer("mhc", dim=D, n_blocks=LAYERS, n=n, residual_map="birkhoff")
    found = mixer.load_state_dict(published_weights("mhc-lite", state), strict=False)
    assert found.missing_keys == ["permutations"]
    matrices = torch.stack([torch.eye(n)[list(order)] for order in itertools.permutations(range(n))])
    streams, expected = E_.unsqueeze(1).expand(-1, n, -1), []
    for w, y in zip(sites, OUT, strict=True):
        flat = streams.reshape(TOKENS, -1)
        normed = torch.nn.functional.normalize(flat, dim=-1) * (n * D) ** 0.5 * (w["norm.gamma"] + 1)
        alpha, beta = normed @ w["dynamic_alpha_fn"], normed @ w["dynamic_beta_fn"]
        pre = torch.sigmoid(w["pre_branch_scale"] * alpha[:, :n] + w["static_alpha"][:n])
        share = torch.softmax(w["residual_scale"] * alpha[:, n:] + w["static_alpha"][n:], -1)
        post = 2 * torch.sigmoid(w["h_post_scale"] * beta + w["static_beta"])
        expected.append((pre.unsqueeze(-1) * streams).sum(1))
        mixed = torch.einsum("tr,rij,tid->tjd", share, matrices, streams)
        streams = mixed + post.unsqueeze(-1) * y.unsqueeze(1)
    expected.append(streams.sum(1))
    for got, wanted in zip(run(mixer, E_, OUT), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(OptionError, match="unknown source 'nobody'; there are kimi-k3"):
        published_weights("nobody", {})
    with pytest.raises(OptionError, match=r"no tensor of its mixing is among these names: none ends in attn_hc.fn"):
        published_weights("deepseek-v4", {"a": torch.zeros(1)})
    state = {"layers.0.attn_res_proj.weight": torch.zeros(1, D)}
    with pytest.raises(OptionError, match=r"layer 0 has layers\.0\.attn_res_proj\.weight and no attn_res_norm\.weight"):
        published_weights("flash-linear-attention", state, config={})
