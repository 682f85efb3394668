"""Pretrained Hugging Face decoders with another rule for mixing over depth: the same logits at step 0, and everything else intact."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from depthmix import create_mixer, list_mixers, restore, retrofit
from depthmix.errors import UserError
from depthmix.hf import DepthmixConfig, DepthmixForCausalLM, mixer_of, surgery
from depthmix.hf.architectures import ARCHITECTURES
from depthmix.mixers.plain import why_not_plain

VOCAB = 61
NAMES = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
}
LIKE_LLAMA = NAMES | {"num_key_value_heads": 2, "head_dim": 8}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "gpt_neox": NAMES | {"use_parallel_residual": False, "eos_token_id": 0},
    "mixtral": LIKE_LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": LIKE_LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    "qwen3_moe": LIKE_LLAMA
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2},
    "deepseek_v3": NAMES
    | {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "phi3": NAMES | {"num_key_value_heads": 2, "pad_token_id": 0},
    "smollm3": LIKE_LLAMA | {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
}
EXACT = [name for name in list_mixers() if why_not_plain(create_mixer(name, dim=8, n_blocks=2)) is None]


def make(kind: str, **more: Any) -> Any:
    """A small model with random weights, with the small embeddings that make an RMSNorm's eps count."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES.get(kind, LIKE_LLAMA) | more))
    return AutoModelForCausalLM.from_config(config).eval()


def ids(batch: int = 2, length: int = 6) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def stir(model: Any) -> Any:
    """Away from step 0."""
    with torch.no_grad():
        for i, p in enumerate(mixer_of(model).parameters()):
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    return model


def test_most_mixers_begin_as_plain_residuals() -> None:
    assert {"attnres", "dca", "denseformer", "grn", "hyper", "laurel", "mhc", "mudd", "residual"} <= set(EXACT)
    assert not {"highway", "layerscale", "rezero"} & set(EXACT)


def test_a_rule_that_changes_the_logits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule could begin as plain in the narrow copy that is measured, and as something else in the model."""
    monkeypatch.setattr(surgery, "why_not_plain", lambda mixer: None)
    model = make("llama")
    before = model(ids()).logits
    with pytest.raises(UserError, match="rezero does not begin as the plain residual in this model"):
        retrofit(model, "rezero")
    assert torch.equal(model(ids()).logits, before)
    assert type(model) is type(make("llama"))


def test_a_model_whose_logits_are_zero_can_be_retrofitted(capsys: pytest.CaptureFixture[str]) -> None:
    model = make("llama")
    torch.nn.init.zeros_(model.lm_head.weight)
    retrofit(model, "attnres")
    assert "attnres: the logits changed by 0.0e+00 of the largest" in capsys.readouterr().out


@pytest.mark.parametrize("mixer", EXACT)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_logits_do_not_change_at_step_0(kind: str, mixer: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = make(kind)
    before = model(ids()).logits
    assert retrofit(model, mixer) is model
    assert "the logits changed by" in capsys.readouterr().out
    assert ((model(ids()).logits - before).abs().max() / before.abs().max()).item() <= 1e-5
    assert not torch.allclose(stir(model)(ids()).logits, before) or mixer == "residual"
    assert torch.equal(restore(model)(ids()).logits, before)
    assert type(model).__name__ == type(make(kind)).__name__


@pytest.mark.parametrize("kind", sorted(set(ARCHITECTURES) - {"llama", "gpt2"}))
def test_every_architecture(kind: str) -> None:
    model = make(kind)
    before = model(ids()).logits
    ways = 3 if ARCHITECTURES[kind].projections else 1
    retrofit(model, "attnres", block_size=2, ways=ways, quiet=True)
    assert ((model(ids()).logits - before).abs().max() / before.abs().max()).item() <= 1e-5


@pytest.mark.parametrize("mixer", EXACT)
def test_parallel_blocks_are_one_site(mixer: str) -> None:
    """Attention and MLP of GPT-NeoX read the same and are added; with several ways the MLP reads that of the queries."""
    model = make("gpt_neox", use_parallel_residual=True)
    before = model(ids()).logits
    retrofit(model, mixer, quiet=True)
    assert mixer_of(model).n_sites == 3
    assert ((model(ids()).logits - before).abs().max() / before.abs().max()).item() <= 1e-5
    assert not torch.allclose(stir(model)(ids()).logits, before) or mixer == "residual"
    assert torch.equal(restore(model)(ids()).logits, before)


def test_parallel_blocks_saved_cached_and_with_ways_of_their_own(tmp_path: Path) -> None:
    model = make("gpt_neox", use_parallel_residual=True)
    before = model(ids()).logits
    stir(retrofit(model, "attnres", ways=3, quiet=True)).save_pretrained(tmp_path)
    assert not torch.allclose(model(ids()).logits, before, atol=1e-4)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids()).logits, model(ids()).logits)
    given: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(again.generate(ids(), use_cache=True, **given), model.generate(ids(), use_cache=False, **given))


@pytest.mark.parametrize(("kind", "more"), [("llama", {}), ("gpt2", {}), ("gpt_neox", {"use_parallel_residual": True})])
@pytest.mark.parametrize(("mixer", "options"), [("attnres", {"block_size": 2}), ("dca", {}), ("mhc", {"n": 2})])
def test_hidden_states_are_tensors(kind: str, more: dict[str, Any], mixer: str, options: dict[str, Any]) -> None:
    """At step 0 the plain model's own; later what each layer reads, the last after the final norm."""
    model = make(kind, **more)
    plain = model(ids(), output_hidden_states=True).hidden_states
    retrofit(model, mixer, quiet=True, **options)
    for found in (
        model(ids(), output_hidden_states=True).hidden_states,
        model(ids(), output_hidden_states=True, return_dict=False)[-1],
    ):
        assert len(found) == len(plain)
        for ours, theirs in zip(found, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert model(ids()).hidden_states is None
    out = stir(model)(ids(), output_hidden_states=True)
    assert not torch.allclose(out.hidden_states[-1], plain[-1], atol=1e-4)
    assert torch.equal(out.logits, model.get_output_embeddings()(out.hidden_states[-1]))
    assert all(h.shape == plain[0].shape for h in out.hidden_states)
    restore(model)
    again = model(ids(), output_hidden_states=True).hidden_states
    assert all(map(torch.equal, again, plain))


@pytest.mark.parametrize(("mixer", "options"), [("attnres", {"ways": 3}), ("dca", {}), ("hyper", {})])
def test_our_own_decoder_is_retrofitted_too(mixer: str, options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = DepthmixForCausalLM(DepthmixConfig(**sizes, rms_norm_eps=1e-4)).eval()
    before = model(ids()).logits
    retrofit(model, mixer, quiet=True, **options)
    assert mixer_of(model).name == mixer
    assert ((model(ids()).logits - before).abs().max() / before.abs().max()).item() <= 1e-5
    with pytest.raises(UserError, match="already"):
        retrofit(model, mixer)
    stir(model).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids()).logits, model(ids()).logits)
    assert torch.equal(restore(model)(ids()).logits, before)
    assert torch.equal(restore(again)(ids()).logits, before)
    scratch = DepthmixForCausalLM(DepthmixConfig(**sizes, mixer="attnres"))
    with pytest.raises(UserError, match="was trained with attnres"):
        retrofit(scratch, "dca")


def test_our_own_decoder_with_the_eps_of_plain_is_no_retrofitted_one() -> None:
    """`plain_eps` may be had from the start."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    scratch = DepthmixForCausalLM(DepthmixConfig(**sizes, mixer="attnres", plain_eps=True))
    with pytest.raises(UserError, match="was trained with attnres"):
        retrofit(scratch, "dca")
    with pytest.raises(UserError, match="not retrofitted"):
        restore(scratch)
    config = DepthmixConfig(**sizes, plain_eps=True)
    said = config.to_dict()
    plain, other = DepthmixForCausalLM(config), DepthmixForCausalLM(config)
    retrofit(plain, "dca", quiet=True)
    assert config.to_dict() == said
    assert mixer_of(retrofit(other, "attnres", quiet=True)).name == "attnres"
    assert restore(plain).config.to_dict() == said
    assert plain.model.config is plain.config


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_ways_reach_their_part_of_a_fused_projection(kind: str) -> None:
    """With one mixture for all, by three equal queries, as with three: what is different is what each projection sees."""
    one, three = (retrofit(make(kind), "attnres", ways=ways, quiet=True) for ways in (1, 3))
    with torch.no_grad():
        query = torch.randn(mixer_of(one).query.shape, generator=torch.Generator().manual_seed(0))
        mixer_of(one).query.copy_(query)
        mixer_of(three).query.copy_(query)
        mixer_of(three).query_kv.copy_(query[:-1:2].unsqueeze(1).expand(-1, 2, -1))
    torch.testing.assert_close(three(ids()).logits, one(ids()).logits)
    for row in (0, 1):  # keys, values
        changed = copy.deepcopy(three)
        with torch.no_grad():
            mixer_of(changed).query_kv[:, row] *= -3
        assert not torch.allclose(changed(ids()).logits, one(ids()).logits, atol=1e-4)


@pytest.mark.parametrize(("mixer", "options"), [("attnres", {"block_size": 2}), ("dca", {}), ("mhc", {"n": 2})])
def test_generation_with_a_cache_and_padding(mixer: str, options: dict[str, Any]) -> None:
    model = stir(retrofit(make("llama"), mixer, quiet=True, **options))
    given: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with_cache, without = (model.generate(ids(), use_cache=cache, **given) for cache in (True, False))
    assert torch.equal(with_cache, without)
    assert torch.equal(model.generate(ids(), cache_implementation="static", **given), without)
    alone = model.generate(ids()[:1, 2:], **given)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    padded = model.generate(ids().masked_fill(mask == 0, 0), attention_mask=mask, **given)
    assert torch.equal(padded[0, 6:], alone[0, 4:])


@pytest.mark.parametrize(("mixer", "options"), [("attnres", {"ways": 3}), ("hyper", {}), ("grn", {})])
def test_saved_and_loaded_as_an_ordinary_folder(mixer: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = stir(retrofit(make("qwen3"), mixer, quiet=True, **options))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert torch.equal(again.eval()(ids()).logits, model(ids()).logits)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in mixer_of(half).parameters()} == {torch.float32}
    assert half.lm_head.weight.dtype == torch.bfloat16
    assert torch.isfinite(half(ids()).logits).all()


def test_a_configuration_that_models_share_stays_as_it_is(tmp_path: Path) -> None:
    config = make("llama").config
    said = config.to_dict()
    one, other = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    assert one.config is other.config
    before = one(ids()).logits
    retrofit(other, "dca", quiet=True)
    assert one.config is config
    assert type(config) is type(make("llama").config)
    assert config.to_dict() == said
    with pytest.raises(UserError, match="this model is not retrofitted: there is nothing to undo"):
        restore(one)
    one.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is type(one)
    assert torch.equal(again(ids()).logits, before)
    saved = config.to_dict()  # which saving adds to
    retrofit(one, "attnres", quiet=True)
    assert (one.config.depthmix["mixer"], other.config.depthmix["mixer"]) == ("attnres", "dca")
    for model, expected in ((one, saved), (other, said)):
        assert restore(model).config.to_dict() == expected
        assert type(model.config) is type(config)
    assert torch.equal(one(ids()).logits, before)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_all_modules_of_a_model_share_its_configuration(kind: str) -> None:
    """So that what is switched there reaches every attention."""
    model = make(kind)
    holders = [name for name, module in model.named_modules() if getattr(module, "config", None) is model.config]
    assert len(holders) > 3
    for change in (lambda: retrofit(model, "dca", quiet=True), lambda: restore(model)):
        old = model.config
        change()
        assert model.config is not old
        assert [n for n, m in model.named_modules() if getattr(m, "config", None) is model.config] == holders
        for name in ("eager", "sdpa"):
            model.set_attn_implementation(name)
            out = model(ids(), output_attentions=name == "eager")
            assert bool(out.attentions) is (name == "eager")


def test_a_loaded_model_is_restored_to_a_plain_configuration_and_another_of_its_configuration_is_not(
    tmp_path: Path,
) -> None:
    plain = make("llama")
    plain.save_pretrained(tmp_path / "plain")
    retrofit(plain, "dca", quiet=True).save_pretrained(tmp_path / "dca")
    one = AutoModelForCausalLM.from_pretrained(tmp_path / "dca")
    other = AutoModelForCausalLM.from_config(one.config)
    restore(one)
    other(ids())
    assert other.config.depthmix == {"mixer": "dca", "options": {}}
    said, wanted = (c.to_dict() for c in (one.config, AutoConfig.from_pretrained(tmp_path / "plain")))
    for place in (said, wanted):
        place.pop("_name_or_path", None)
    assert said == wanted


def test_a_part_of_a_retrofitted_model_is_not_restored() -> None:
    model = retrofit(make("llama"), "dca", quiet=True)
    with pytest.raises(UserError, match="shares modules with a retrofitted model"):
        restore(model.model)
    with pytest.raises(UserError, match="already"):
        retrofit(model.model, "dca")
    restore(model)


def test_one_model_only() -> None:
    one, other = make("llama"), make("llama")
    retrofit(one, "denseformer", quiet=True)
    assert type(other.model.layers[0]) is not type(one.model.layers[0])
    assert torch.equal(other(ids()).logits, make("llama")(ids()).logits)
    twin = stir(copy.deepcopy(one))
    assert mixer_of(twin) is not mixer_of(one)
    assert not torch.allclose(twin(ids()).logits, one(ids()).logits)


@pytest.mark.parametrize(("mixer", "options"), [("attnres", {"block_size": 2, "ways": 2}), ("mhc", {"n": 2})])
def test_gradient_checkpointing(mixer: str, options: dict[str, Any]) -> None:
    model = stir(retrofit(make("llama"), mixer, quiet=True, **options)).train()
    grads = []
    for on in (False, True):
        if on:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(input_ids=ids(), labels=ids()).loss.backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert any("depth_mixer" in n for n in grads[0])
    for n, g in grads[0].items():
        torch.testing.assert_close(g, grads[1][n], rtol=1e-4, atol=1e-6)


REENTRANT = "reentrant gradient checkpointing would lose the gradients .*'use_reentrant': False"


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint:UserWarning")  # of a default that torch wants to be given
@pytest.mark.parametrize("how", [{"use_reentrant": True}, {}], ids=["asked-for", "torch-default"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_reentrant_checkpoints_are_refused_where_gradients_would_be_lost(kind: str, how: dict[str, Any]) -> None:
    """They see no tensors in a state: 5 of a Llama's 37 parameters had a gradient."""
    model = retrofit(make(kind), "attnres", block_size="all", ways=2, quiet=True).train()
    model.gradient_checkpointing_enable(how)
    with pytest.raises(UserError, match=REENTRANT):
        model(input_ids=ids(), labels=ids())
    with torch.no_grad():  # nobody wants any
        model(ids())
    model.eval()(ids()).logits.sum().backward()  # where Hugging Face makes no checkpoints
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    model(input_ids=ids(), labels=ids()).loss.backward()
    restore(model).gradient_checkpointing_enable({"use_reentrant": True})
    model(input_ids=ids(), labels=ids()).loss.backward()


@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")  # torch's, which sees a state
def test_a_reentrant_checkpoint_around_one_layer_is_refused_too() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    model = retrofit(make("llama"), "dca", quiet=True).train()
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1], checkpoint_impl=CheckpointImpl.REENTRANT)
    with pytest.raises(UserError, match=REENTRANT):
        model(ids())


def test_a_reentrant_checkpoint_between_compiled_parts_is_refused_too() -> None:
    """A hook may break the graph; a checkpoint that is compiled as a whole is PyTorch's own, and exact."""
    model = retrofit(make("llama", num_hidden_layers=1), "denseformer", quiet=True).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.model.layers[0].mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    with pytest.raises(UserError, match=REENTRANT):
        torch.compile(model.model, backend="eager")(input_ids=ids())


def test_a_layer_called_by_itself_without_gradients_is_no_checkpoint() -> None:
    model = retrofit(make("llama"), "dca", quiet=True).train()
    x = torch.randn(1, 4, 32)
    model(ids())
    positions = model.model.rotary_emb(x, torch.arange(4)[None])
    with torch.no_grad():
        model.model.layers[0](x, position_embeddings=positions)


def test_lora_with_the_mixer_saved_beside_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = retrofit(make("llama"), "dca", quiet=True)
    plain = copy.deepcopy(model)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["depth_mixer"])
    tuned = peft.get_peft_model(model, config)
    tuned(input_ids=ids(), labels=ids()).loss.backward()
    trained = {n for n, p in tuned.named_parameters() if p.grad is not None}
    assert any("lora" in n for n in trained)
    assert any("depth_mixer" in n for n in trained)
    assert not any("mlp" in n for n in trained)
    with torch.no_grad():
        for n, p in tuned.named_parameters():
            if n in trained:
                p += 0.05
    tuned.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path)
    torch.testing.assert_close(loaded(ids()).logits, tuned(ids()).logits)


def test_what_adapters_are_put_on_is_retrofitted_and_not_what_is_around_it() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    before = model(ids()).logits
    with pytest.raises(UserError, match=r"is wrapped in adapters: retrofit .*`model.get_base_model\(\)`"):
        retrofit(model, "dca")
    retrofit(model.get_base_model(), "dca", quiet=True)
    torch.testing.assert_close(model(ids()).logits, before, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_is_refused() -> None:
    model = make("llama")
    before = model(ids()).logits
    broken = make("llama")
    broken.lm_head.weight.data[3] = float("nan")
    for call, reason in (
        (lambda: retrofit(broken, "dca"), "the logits of this model are not numbers"),
        (lambda: retrofit(model, "attnres", block_size=0), "block_size"),
        (lambda: retrofit(model, "nothing"), "nothing"),
        (lambda: restore(model), "not retrofitted"),
        (lambda: retrofit(make("bert"), "attnres"), "bert is a post-norm model"),
        (lambda: retrofit(model, "highway"), "highway .* does not begin as the plain residual: what site 1 reads"),
        (lambda: retrofit(model, "attnres", window=1), "does not begin as the plain residual"),
        (lambda: retrofit(torch.nn.Linear(2, 2), "attnres"), "Hugging Face model"),
        (lambda: retrofit(make("cohere"), "attnres"), "not known"),
    ):
        with pytest.raises((UserError, ValueError), match=reason):
            call()
    assert torch.equal(model(ids()).logits, before)
    retrofit(model, "dca", quiet=True)
    with pytest.raises(UserError, match="already"):
        retrofit(model, "dca")


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_was_loaded_and_retrofitted_is_loaded_again(kind: str, tmp_path: Path) -> None:
    """Folders of some architectures have other names for weights than their models, which goes by the name of the class."""
    make(kind).save_pretrained(tmp_path / "plain")
    rule = "dca" if ARCHITECTURES[kind].projections else "attnres"
    model = stir(retrofit(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), rule, quiet=True))
    model.save_pretrained(tmp_path / "mixed")
    again, found = AutoModelForCausalLM.from_pretrained(tmp_path / "mixed", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert torch.equal(again(ids()).logits, model(ids()).logits)


def test_a_mixer_that_a_folder_lacks_begins_afresh(tmp_path: Path) -> None:
    model = retrofit(make("llama"), "attnres", quiet=True)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {
        name: value + 0.5 * ("key_gain" in name) for name, value in load_file(file).items() if "query" not in name
    }
    save_file(weights, file, metadata={"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    mixer = mixer_of(again)
    assert torch.equal(mixer.query, torch.zeros_like(mixer.query))
    assert torch.equal(mixer.key_gain, torch.full_like(mixer.key_gain, 1.5))


def test_a_retrofitted_model_is_in_no_folder_until_it_is_saved(tmp_path: Path) -> None:
    """Where adapters would look for what they belong to, and find the plain one. Its configuration names that one."""
    shape = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    for plain in (make("llama"), DepthmixForCausalLM(DepthmixConfig(**shape, mixer="residual"))):
        plain.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        for mixer in ("attnres", "dca"):
            retrofit(model, mixer, quiet=True)
            assert (model.name_or_path, model.config.name_or_path) == ("", str(tmp_path))
            restore(model)
            assert (model.name_or_path, model.config.name_or_path) == (str(tmp_path), str(tmp_path))


def test_preference_training_of_an_unsaved_model_finds_its_reference(tmp_path: Path) -> None:
    """As trl's DPOTrainer does, from the configuration: the plain model, whose logits are those of step 0."""
    make("llama").save_pretrained(tmp_path)
    model = retrofit(AutoModelForCausalLM.from_pretrained(tmp_path), "attnres", quiet=True)
    model_id = getattr(model.config, "_name_or_path", "")  # trl.trainer.utils.get_config_model_id
    found = AutoConfig.from_pretrained(model_id)  # create_model_from_path
    reference = getattr(transformers, found.architectures[0]).from_pretrained(model_id)
    torch.testing.assert_close(model(ids()).logits, reference(ids()).logits, rtol=1e-4, atol=1e-6)


def test_adapters_of_an_unsaved_model_name_no_folder(tmp_path: Path) -> None:
    """The plain model in the folder it came from is not what they belong to."""
    peft = pytest.importorskip("peft")
    make("llama").save_pretrained(tmp_path / "plain")
    model = retrofit(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), "attnres", quiet=True)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    tuned.save_pretrained(tmp_path / "adapters")
    assert not peft.PeftConfig.from_pretrained(tmp_path / "adapters").base_model_name_or_path


@pytest.mark.parametrize(
    ("kind", "mixer", "options"),
    [("llama", "dca", {}), ("gpt2", "attnres", {"ways": 2})],
    ids=str,
)
def test_compiled(kind: str, mixer: str, options: dict[str, Any]) -> None:
    model = stir(retrofit(make(kind, num_hidden_layers=1), mixer, quiet=True, **options))
    with torch.no_grad():
        expected = model(ids(), use_cache=False).logits
        found = torch.compile(model, backend="eager", fullgraph=True)(ids(), use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
