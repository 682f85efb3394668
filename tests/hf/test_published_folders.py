"""Mixers from folders that transformers' own save_pretrained wrote, against what the layers of the saved model read."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from depthmix import OptionError, UserError, create_mixer
from depthmix.mixers.published import published_weights, source_of
from hf.accelerated.small_models import layers_of, small_model, tokens

N_LAYERS = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return, by family, a model and its folder, in several files."""
    found = {}
    for family in ("deepseek_v4", "glm5_next"):
        model = small_model(family)
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder, max_shard_size="40KB")
        found[family] = model, folder
    return found


@torch.no_grad()
def passed(model, layers):
    """Return what the given layers receive as streams, their sublayers' outputs, and what each sublayer reads before its norm."""
    outputs, reads, streams = [], [], []
    handles = [layers_of(model)[layers[0]].attn_hc.register_forward_pre_hook(lambda m, args: streams.append(args[0]))]
    for layer in (layers_of(model)[i] for i in layers):
        for norm, sublayer in (
            (layer.input_layernorm, layer.self_attn),
            (layer.post_attention_layernorm, layer.mlp),
        ):
            handles.append(norm.register_forward_pre_hook(lambda m, args: reads.append(args[0])))
            handles.append(sublayer.register_forward_hook(lambda m, args, out: outputs.append(out)))
    base = getattr(model.model, "language_model", model.model)
    handles.append(base.norm.register_forward_pre_hook(lambda m, args: reads.append(args[0])))
    model(input_ids=tokens())
    for handle in handles:
        handle.remove()
    return streams[0], [out[0] if isinstance(out, tuple) else out for out in outputs], reads


def run(mixer, e, outputs):
    state, reads = mixer.start(e), []
    for site, y in enumerate(outputs):
        reads.append(mixer.read(state, site))
        state = mixer.write(state, site, y)
    return [*reads, mixer.finish(state)]


def from_folder(*args, **kwargs):
    from depthmix.hf import published_mixer

    return published_mixer(*args, **kwargs)


@pytest.mark.parametrize("family", ["deepseek_v4", "glm5_next"])
def test_the_mixer_of_a_folder_reads_what_the_saved_model_reads(saved, family):
    model, folder = saved[family]
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(name.endswith("layers.1.hc_ffn_base") for name in names)  # not the names in memory
    mixer = from_folder(folder)
    streams, outputs, reads = passed(model, range(N_LAYERS))
    with torch.no_grad():
        found = run(mixer, streams[:, :, 0], outputs)
    for ours, theirs in zip(found, reads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
    assert mixer.chosen["eps"] == (1e-6 if family == "deepseek_v4" else 1e-5)


def test_names_in_memory_give_the_same_weights(saved):
    for family, source in (("deepseek_v4", "deepseek-v4"), ("glm5_next", "glm-5-next")):
        model, folder = saved[family]
        mixer = from_folder(folder)
        weights = published_weights(source, model.state_dict(), config=model.config.to_dict())
        for name, value in mixer.named_parameters():
            assert torch.equal(value, weights[name]), name
        mixer.load_state_dict(weights)  # of the same options


@pytest.mark.parametrize("family", ["hy_v4", "inkling2", "qwen4_exp"])
def test_files_of_the_other_families_have_the_weights_of_their_models(family, tmp_path):
    model = small_model(family)
    model.save_pretrained(tmp_path)
    mixer = from_folder(tmp_path)
    weights = published_weights(source_of(model.config.to_dict()), model.state_dict(), config=model.config.to_dict())
    for name, value in mixer.named_parameters():
        assert torch.equal(value, weights[name]), name
    assert mixer.n_sites == 2 * N_LAYERS


def test_a_range_of_layers_needs_only_the_files_that_have_them(saved, tmp_path):
    _, folder = saved["deepseek_v4"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    needed = {file for name, file in index["weight_map"].items() if "layers.2.hc_" in name or "hc_head" in name}
    for file in ("config.json", "model.safetensors.index.json", *needed):
        shutil.copy(folder / file, tmp_path)
    whole, part = from_folder(folder), from_folder(tmp_path, layers=range(2, 3))
    assert part.n_sites == 2
    assert torch.equal(part.phi, whole.phi[4:])
    assert torch.equal(part.phi_head, whole.phi_head)
    with pytest.raises(UserError, match="is missing: download it too"):
        from_folder(tmp_path)


@pytest.fixture
def one_file(saved, tmp_path):
    """Return a function that writes DeepSeek-V4's tensors, changed, to a new folder in one file, with its publisher's names."""
    _, folder = saved["deepseek_v4"]
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    tensors = {name.removeprefix("model.").replace("hc_head.hc_", "hc_head_"): t for name, t in tensors.items()}

    def write(change=lambda tensors: tensors, **fields):
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        save_file(change(dict(tensors)), tmp_path / "model.safetensors")
        return tmp_path

    return write


def test_a_block_that_predicts_a_further_token_has_a_prefix(one_file):
    def add(tensors):
        layer = {name.removeprefix("layers.2."): t + 1 for name, t in tensors.items() if name.startswith("layers.2.hc")}
        head = {name: t + 2 for name, t in tensors.items() if name.startswith("hc_head")}
        return tensors | {f"mtp.0.{name}": t for name, t in (layer | head).items()}

    folder = one_file(add)
    whole, further = from_folder(folder), from_folder(folder, prefix="mtp.0.")
    assert (whole.n_sites, further.n_sites) == (2 * N_LAYERS, 2)
    assert torch.equal(further.phi, whole.phi[4:] + 1)
    assert torch.equal(further.b_head, whole.b_head + 2)


def test_without_a_head_finish_is_the_mean_of_the_streams(one_file):
    folder = one_file(lambda tensors: {name: t for name, t in tensors.items() if not name.startswith("hc_head")})
    with pytest.warns(UserWarning, match="no weights for the last read of layers"):
        mixer = from_folder(folder)
    state = mixer.start(torch.randn(2, 32))
    for site in range(mixer.n_sites):
        state = mixer.write(state, site, torch.randn(2, 32))
    torch.testing.assert_close(mixer.finish(state), state.x.mean(-2))


def without(end):
    return lambda tensors: {name: t for name, t in tensors.items() if not name.endswith(end)}


@pytest.mark.parametrize(
    ("change", "fields", "asked", "message"),
    [
        (without("layers.1.hc_ffn_base"), {}, {}, r"layer 1 has layers\.1\.hc\S+ and no ffn_hc\.base or hc_ffn_base"),
        (without("hc_head_base"), {}, {}, "the head has hc_head_fn and no hc_head.hc_base or hc_head_base"),
        (dict, {"num_hidden_layers": 5}, {}, "has 5 layers, and these tensors are of layers 0 to 2; choose some with"),
        (dict, {}, {"layers": range(2, 4)}, "layer 3 is not among these tensors, which are of layers 0 to 2"),
        (dict, {}, {"layers": [0, 2]}, r"numbers that follow one another, got \[0, 2\]"),
        (dict, {}, {"prefix": "mtp.0"}, "no tensor of its mixing is among these names below 'mtp.0.': none ends in attn_hc.fn"),
        (dict, {"hc_mult": 2}, {}, r"shape \[6, 128, 24\] of phi, and its configuration makes that \[6, 64, 8\]"),
        (dict, {"hc_eps": 1e-3}, {}, "its hc_eps is 0.001, and the rule mhc has 1e-06 there"),
        (dict, {"model_type": "llama"}, {}, "a model of type 'llama' has no mixing over depth that is known"),
        (lambda t: {n: v.to(torch.float8_e4m3fn) if n.endswith("hc_attn_fn") else v for n, v in t.items()}, {}, {},
         "layers.0.hc_attn_fn is stored as float8_e4m3fn: dequantise it first"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(one_file, change, fields, asked, message):
    with pytest.raises(UserError, match=message):
        from_folder(one_file(change, **fields), **asked)


def test_a_folder_without_tensors_and_a_damaged_index_are_said(one_file, tmp_path):
    folder = one_file()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(UserError, match="weight_map does not name files beside it"):
        from_folder(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        from_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model.safetensors.index.json nor files of safetensors"):
        from_folder(folder)
    with pytest.raises(UserError, match="no such file"):
        from_folder(tmp_path / "nowhere")


def kimi(n_layers, dim=8, prefix="language_model.model."):
    places = [f"layers.{i}.{end}" for i in range(n_layers) for end in ("self_attention_res", "mlp_res")]
    names = [f"{prefix}{place}_{kind}.weight" for place in [*places, "output_attn_res"] for kind in ("proj", "norm")]
    return {name: torch.full((1, dim) if "proj" in name else (dim,), float(i)) for i, name in enumerate(names)}


KIMI = {"attn_res_block_size": 12, "rms_norm_eps": 1e-5, "hidden_size": 8, "num_hidden_layers": 26}


def test_a_block_of_kimi_has_twelve_layers_and_ours_twelve_sites(tmp_path):
    save_file(kimi(26), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "text_config": KIMI}))
    mixer = from_folder(tmp_path)
    assert (mixer.block_size, mixer.eps, mixer.n_sites) == (24, 1e-5, 52)
    assert mixer.query[:, 0].tolist() == [2.0 * site for site in range(53)]
    part = from_folder(tmp_path, layers=range(12, 26))
    assert torch.equal(part.key_gain, mixer.key_gain[24:])
    with pytest.raises(UserError, match="layer 20 is inside a block of 12 layers; begin with layer 12"):
        from_folder(tmp_path, layers=range(20, 26))
    weights = published_weights("kimi-k3", kimi(26), config=KIMI)
    # The files of some models have a further layer, which predicts the token after the next.
    assert published_weights("kimi-k3", kimi(27), config=KIMI)["query"].shape == (53, 8)
    twelve_sites = create_mixer("attnres", dim=8, n_blocks=26, block_size=12, eps=1e-5)
    counts = r"block_size=24, and this mixer has block_size=12 \(attn_res_block_size of its configuration counts layers"
    with pytest.raises(OptionError, match=counts):
        twelve_sites.load_state_dict(weights)
    with pytest.raises(
        OptionError, match=r"do not say how many layers a block has; pass the content of its config.json"
    ):
        published_weights("kimi-k3", kimi(26))


def test_two_stacks_are_told_apart_by_their_prefix():
    tensors = kimi(1, prefix="a.") | kimi(1, prefix="b.")
    config = KIMI | {"num_hidden_layers": 1}
    with pytest.raises(OptionError, match=r"there are layers in a.layers and in b.layers; say which with prefix="):
        published_weights("kimi-k3", tensors, config=config)
    assert published_weights("kimi-k3", tensors, config=config, prefix="b.")["query"].shape == (3, 8)
