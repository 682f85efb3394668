"""The Hugging Face models: the decoder's own logits, weights that come back from a folder, and every output asked for."""

import json
import re
import warnings

import pytest
import torch
from torch.nn import functional

from depthmix import create_mixer, depth_mixing, list_mixers
from hf.tiny import BLOCKS, LENGTH, SITES, VOCAB, as_decoder, causal_lm, hf_config, tokens
from project import ROOT


def mixer_dtypes(model):
    return {p.dtype for p in model.model.mixer.parameters()}


def other_dtypes(model):
    own = {id(p) for p in model.model.mixer.parameters()}
    return {p.dtype for p in model.parameters() if id(p) not in own}


@pytest.mark.parametrize("mixer", list_mixers())
def test_logits_are_the_decoders(mixer):
    model = causal_lm(mixer, {"qk_norm": True})
    torch.testing.assert_close(model(tokens()).logits, as_decoder(model)(tokens()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("mixer", "tied"), [*((mixer, False) for mixer in list_mixers()), ("attnres", True)])
def test_a_saved_model_comes_back_through_the_auto_classes(tmp_path, mixer, tied):
    from safetensors.torch import load_file
    from transformers import AutoModel, AutoModelForCausalLM

    from depthmix.hf import DepthmixForCausalLM, DepthmixModel

    model = causal_lm(mixer, {"tie_embeddings": tied})
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied
    loaded, problems = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is DepthmixForCausalLM
    assert not problems["missing_keys"]
    assert not problems["unexpected_keys"]
    assert (loaded.lm_head.weight is loaded.model.embedding.weight) is tied
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is DepthmixModel
    assert torch.equal(base(tokens()).last_hidden_state, model.model(tokens()).last_hidden_state)


def test_a_model_can_be_built_on_the_meta_device():
    from depthmix.hf import DepthmixForCausalLM

    for mixer in list_mixers():
        with torch.device("meta"):
            model = DepthmixForCausalLM(hf_config(mixer))
        assert all(t.is_meta for t in model.state_dict().values()), mixer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixer_parameters_stay_fp32_when_the_rest_is_not(tmp_path, dtype):
    from depthmix.hf import DepthmixForCausalLM

    model = causal_lm("mhc")
    model.save_pretrained(tmp_path)
    before = [p.clone() for p in model.model.mixer.parameters()]
    for low in (DepthmixForCausalLM.from_pretrained(tmp_path, dtype=dtype), model.to(dtype)):
        assert mixer_dtypes(low) == {torch.float32}
        assert other_dtypes(low) == {dtype}
        for p, value in zip(low.model.mixer.parameters(), before, strict=True):
            assert torch.equal(p, value)
        assert low(tokens()).logits.dtype == dtype
        assert low(tokens()).logits.isfinite().all()


@pytest.mark.parametrize("mixer", list_mixers())
def test_a_new_model_starts_as_the_mechanism_does(mixer):
    from depthmix.hf import DepthmixForCausalLM

    model = DepthmixForCausalLM(hf_config(mixer))
    first, second = (create_mixer(mixer, dim=16, n_blocks=BLOCKS).state_dict() for _ in range(2))
    found = model.model.mixer.state_dict()
    assert found.keys() == first.keys() - {"_extra_state"}  # config.json says what that says
    for name, value in found.items():
        if torch.equal(first[name], second[name]):  # not drawn
            assert torch.equal(value, first[name]), name
        else:
            assert 0.3 < value.std() / first[name].std() < 3, name


def test_matrices_start_as_the_decoders_do():
    from depthmix.hf import DepthmixForCausalLM

    model = DepthmixForCausalLM(
        hf_config(
            fields={
                "dim": 128,
                "mlp_dim": 256,
                "head_dim": 32,
                "vocab_size": 200,
                "embedding_std": 0.5,
                "output_scale": 3.0,
            }
        )
    )
    wanted = {"q_proj": 128**-0.5, "out_proj": 3 * (128 * SITES) ** -0.5}  # of attention, where both have 128 inputs
    for name, std in wanted.items():
        assert getattr(model.model.sublayers[2], name).weight.std().item() == pytest.approx(std, rel=0.05)
    assert model.model.sublayers[3].out_proj.weight.std().item() == pytest.approx(3 * (256 * SITES) ** -0.5, rel=0.05)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.model.embedding.weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert all((n.weight == 1).all() for site in model.model.norms for n in site)


@pytest.mark.parametrize(
    "mixer", ["attnres", "dca", "hyper"]
)  # a tensor for all sites; one a site; written without torch.nn.init
def test_weights_that_a_folder_lacks_start_fresh_and_the_others_are_loaded(tmp_path, mixer):
    from safetensors.torch import load_file, save_file

    from depthmix.hf import DepthmixForCausalLM

    model = causal_lm(mixer)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lacking = sorted(n for n in weights if ".mixer." in n)[0]
    del weights[lacking]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = DepthmixForCausalLM.from_pretrained(tmp_path).state_dict()
    start = create_mixer(mixer, dim=16, n_blocks=BLOCKS).state_dict()[lacking.removeprefix("model.mixer.")]
    assert torch.equal(loaded.pop(lacking), start)
    assert all(torch.equal(loaded[n], model.state_dict()[n]) for n in loaded)


def test_the_loss_is_the_mean_over_the_next_tokens_that_count():
    model, ids = causal_lm(), tokens()
    labels = ids.clone()
    labels[0, :3] = -100
    logits = as_decoder(model)(ids)[:, :-1].reshape(-1, VOCAB)
    each = functional.cross_entropy(logits, labels[:, 1:].reshape(-1), ignore_index=-100, reduction="none")
    counted = int((labels[:, 1:] != -100).sum())
    torch.testing.assert_close(model(ids, labels=labels).loss, each.sum() / counted)
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=40).loss, each.sum() / 40)


def test_logits_of_the_last_tokens_or_of_some():
    model, ids = causal_lm(), tokens()
    whole = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, whole[:, -3:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([1, 5])).logits, whole[:, [1, 5]])


def test_outputs_as_a_tuple():
    model, ids = causal_lm(), tokens()
    loss, logits = model(ids, labels=ids, use_cache=False, return_dict=False)
    assert loss.ndim == 0
    assert logits.shape == (2, LENGTH, VOCAB)
    assert isinstance(model.model(ids, return_dict=False), tuple)


def test_embeddings_in_place_of_ids():
    model, ids = causal_lm(), tokens()
    embeds = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, model(ids).logits)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model(ids, inputs_embeds=embeds)


def test_hidden_states_of_the_plain_residual_are_the_usual_ones():
    model, ids = causal_lm("residual"), tokens()
    outs = []
    for sublayer in model.model.sublayers:
        sublayer.register_forward_hook(lambda module, args, y: outs.append(y))
    hidden = model(ids, output_hidden_states=True).hidden_states
    stream = model.get_input_embeddings()(ids)
    for block in range(BLOCKS):
        torch.testing.assert_close(hidden[block], stream)
        stream = stream + outs[2 * block] + outs[2 * block + 1]
    torch.testing.assert_close(hidden[BLOCKS], model.model.final_norm(stream))
    assert len(hidden) == BLOCKS + 1


@pytest.mark.parametrize("options", [{}, {"ways": 3}, {"block_size": 2}], ids=str)
def test_hidden_states_are_the_sources_weighted_by_the_depth_weights(options):
    model, ids = causal_lm("attnres", {"mixer_options": options}), tokens()
    sources = [model.get_input_embeddings()(ids)]
    for sublayer in model.model.sublayers:
        sublayer.register_forward_hook(lambda module, args, y: sources.append(y))
    out = model(ids, output_hidden_states=True, output_depth_weights=True)
    for block in range(BLOCKS):
        rows = out.depth_weights[:, :, 0, 2 * block]  # [B, T, sources]
        mixture = torch.einsum("bts,sbtd->btd", rows, torch.stack(sources))
        torch.testing.assert_close(out.hidden_states[block], mixture, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mixer", list_mixers())
def test_depth_weights_are_those_of_the_decoder(mixer):
    model, ids = causal_lm(mixer), tokens()
    with torch.no_grad():  # as depth_mixing: with gradients sums are added up in another order
        found = model(ids, output_depth_weights=True).depth_weights
    torch.testing.assert_close(found, depth_mixing(as_decoder(model), ids, per_token=True), rtol=1e-5, atol=1e-6)
    assert found.shape[:2] == ids.shape
    assert found.shape[-2:] == (SITES + 1, SITES + 1)
    assert not found.requires_grad
    assert model(ids).depth_weights is None


def test_depth_weights_of_a_decoding_step_and_through_the_configuration():
    model, ids = causal_lm(), tokens()
    whole = model(ids, output_depth_weights=True).depth_weights
    seen = model(ids[:, :-1]).past_key_values
    step = model(ids[:, -1:], past_key_values=seen, output_depth_weights=True).depth_weights
    torch.testing.assert_close(step, whole[:, -1:], rtol=1e-5, atol=1e-6)
    model.config.output_depth_weights = True
    assert torch.equal(model(ids).depth_weights, whole)
    assert model(ids, output_depth_weights=False).depth_weights is None


def test_nothing_but_this_package_imports_transformers():
    """So that commands read a saved folder, and training writes one, without it."""
    places = [
        p
        for p in (ROOT / "depthmix").rglob("*.py")
        if re.search(r"^\s*(from|import) transformers", p.read_text(), re.M)
    ]
    package, foreign = ROOT / "depthmix", {"runs/foreign.py", "train/accelerate.py"}  # about other people's models
    outside = {p.relative_to(package).as_posix() for p in places if not p.is_relative_to(package / "hf")}
    assert outside == foreign
    others = [p for p in package.rglob("*.py") if not p.is_relative_to(package / "hf")]
    users = {
        p.relative_to(ROOT / "depthmix").as_posix()
        for p in others
        if re.search(r"^(from|import) depthmix\.hf|^\s+from depthmix\.hf", p.read_text(), re.M)
    }
    assert users == foreign | {"__init__.py"}  # inside functions


def test_a_folder_names_the_architecture(tmp_path):
    causal_lm().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["DepthmixForCausalLM"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_larger_vocabulary_keeps_the_old_logits_and_can_be_saved(tmp_path, tied):
    from transformers import AutoModelForCausalLM

    model, ids = causal_lm(fields={"tie_embeddings": tied}), tokens()
    before = model(ids).logits
    model.resize_token_embeddings(VOCAB + 4)
    torch.testing.assert_close(model(ids).logits[..., :VOCAB], before)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.decoder_config().vocab_size == VOCAB + 4
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded(ids, labels=ids).loss.isfinite()


@pytest.mark.parametrize("token", [VOCAB, -1])
def test_a_token_beyond_the_vocabulary_is_named(token):
    ids = tokens()
    ids[1, 2] = token
    with pytest.raises(IndexError, match=f"token id {token} is not in the vocabulary of {VOCAB} entries"):
        causal_lm()(ids)


def test_a_state_dict_needs_not_say_what_the_configuration_says():
    """Trainer loads one when it goes on; weights that do say their options are checked all the same."""
    from depthmix.hf import DepthmixForCausalLM

    model = DepthmixForCausalLM(hf_config("attnres", {"mixer_options": {"block_size": 2}}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.load_state_dict(model.state_dict())
    other = create_mixer("attnres", dim=16, n_blocks=BLOCKS, block_size=4)
    with pytest.raises(ValueError, match="the weights were made with block_size=4, and this mixer has block_size=2"):
        model.model.mixer.load_state_dict(other.state_dict())
