"""Tests of `accelerate` and `restore`: what stays as it was, what is refused, and that everything comes back."""

import copy
import hashlib
import io
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers.models.hy_v4")
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek

from depthmix import UserError
from depthmix.hf import accelerate, restore
from hf.accelerated.small_models import BUILD, layers_of, mixing_alone, small_model, tokens

FAMILIES = list(BUILD)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens()).logits


def checksums(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


def mixing_runs(model: Any) -> bool:
    """Tell whether transformers' own mixing runs, by calls of its modules."""
    return mixing_runs_in(layers_of(model)[0], lambda: model(input_ids=tokens()))


def mixing_runs_in(layer: Any, run: Callable[[], Any]) -> bool:
    calls = []
    # Without weights, so that no hook stands before it.
    if hasattr(layer, "attn_hc"):
        part = layer.attn_hc.input_norm
    else:
        part = layer.mlp_input.norm if hasattr(layer, "mlp_input") else layer.mlp_hyper_connection.hc_norm
    before = type(part).forward
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(type(part), "forward", lambda self, x: calls.append(self) or before(self, x))
        run()
    return part in calls


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = small_model("deepseek_v4")
    assert accelerate(model) is model
    assert capsys.readouterr().out.startswith(
        "DeepSeek-V4: 6 mHC modules and the head, in plain PyTorch (kernels run on GPUs"
    )
    assert not mixing_runs(model)
    accelerate(model)
    assert capsys.readouterr().out == "DeepSeek-V4: this model is accelerated already\n"
    accelerate(small_model("glm5_next"), check=False, quiet=True)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES)
def test_restore_brings_back_the_model(family: str) -> None:
    model = small_model(family)
    before, attributes = logits(model), {name: dict(vars(m)) for name, m in model.named_modules()}
    classes = {name: type(m) for name, m in model.named_modules()}
    accelerate(model, quiet=True)
    changed = {type(m).__name__ for name, m in model.named_modules() if type(m) is not classes[name]}
    ends = ("DecoderLayer", "HyperHead", "BlockAttentionResidual", "GatedResidual")
    assert changed == {k.__name__ for k in classes.values() if k.__name__.endswith(ends)} - {"Glm5NextTextHyperHead"}
    restore(model)
    assert {name: type(m) for name, m in model.named_modules()} == classes
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == attributes
    assert torch.equal(logits(model), before)
    with pytest.raises(UserError, match="not retrofitted"):
        restore(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_files_are_the_same(family: str, tmp_path: Path) -> None:
    model = small_model(family)
    model.save_pretrained(tmp_path / "before")
    accelerate(model, quiet=True).save_pretrained(tmp_path / "after")
    assert checksums(tmp_path / "before") == checksums(tmp_path / "after")
    loaded = type(model).from_pretrained(tmp_path / "after")
    assert mixing_runs(loaded)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_outputs(family: str) -> None:
    model = small_model(family)
    options = {"output_hidden_states": True, "output_attentions": True, "output_router_logits": True}
    before = model(input_ids=tokens(), **options)
    after = accelerate(model, quiet=True)(input_ids=tokens(), **options)
    assert len(before.hidden_states) == len(layers_of(model)) + 1
    assert before.router_logits
    for name in ("hidden_states", "attentions", "router_logits"):
        torch.testing.assert_close(after[name], before[name], rtol=1e-4, atol=1e-5)


def test_two_models_and_copies() -> None:
    """Another model of the same class is not accelerated, and a copy of an accelerated one has weights of its own."""
    plain, model = small_model("deepseek_v4"), accelerate(small_model("deepseek_v4", seed=1), quiet=True)
    assert mixing_runs(plain)
    before, twin = logits(model), copy.deepcopy(model)
    assert not mixing_runs(twin)
    with torch.no_grad():
        layers_of(model)[0].attn_hc.base.zero_()
    assert torch.equal(logits(twin), before)
    assert not torch.equal(logits(model), before)
    assert mixing_runs(restore(twin))
    assert not mixing_runs(model)


def test_pickled_as_a_whole() -> None:
    model = accelerate(small_model("hy_v4"), quiet=True)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert not mixing_runs(loaded)
    assert torch.equal(logits(loaded), logits(model))


def test_changed_weights_are_seen() -> None:
    """Also where autograd's version counter does not move, as when another process's weights arrive."""
    model, plain = accelerate(small_model("deepseek_v4"), quiet=True), small_model("deepseek_v4")
    logits(model)
    for m in (model, plain):
        for layer in layers_of(m):
            layer.attn_hc.fn.data.mul_(-1.0)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", ["adapter", "accelerate"])
def test_lora(first: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_a_proj", "q_b_proj"], init_lora_weights=False)
    results = []
    for faster in (False, True):
        model = small_model("hy_v4")
        if faster and first == "accelerate":
            accelerate(model, quiet=True)
        torch.manual_seed(3)
        model = peft.get_peft_model(model, config)
        if faster and first == "adapter":
            accelerate(model, quiet=True)
        ids = tokens()
        model(input_ids=ids, labels=ids).loss.backward()
        results.append([p.grad for p in model.parameters() if p.requires_grad])
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        merged = model.merge_and_unload()
        assert mixing_runs(merged) != faster
    assert len(results[0]) > 4
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "hooks"), [*((family, "after") for family in FAMILIES), ("hy_v4", "before"), ("inkling2", "before")]
)
def test_device_map(family: str, hooks: str) -> None:
    """Under the hooks of accelerate, which replace every module's forward; they can be removed again."""
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_submodules

    model = small_model(family)
    expected = logits(model)
    if hooks == "after":
        accelerate(model, quiet=True)
    model = dispatch_model(model, {"": "cpu"}, force_hooks=True)
    if hooks == "before":
        accelerate(model, quiet=True)
    assert "_hf_hook" in vars(layers_of(model)[0])
    assert not mixing_runs(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    remove_hook_from_submodules(model)
    assert not mixing_runs(model)
    restore(model)
    assert torch.equal(logits(model), expected)


def test_offloaded_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights that are on another device between calls stay with transformers' own forward."""
    from accelerate import cpu_offload

    model = small_model("deepseek_v4")
    expected = logits(model)
    model = accelerate(cpu_offload(model, torch.device("cpu")))
    assert "3 layers with offloaded weights stay as they are" in capsys.readouterr().out
    assert mixing_runs(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    model = cpu_offload(accelerate(small_model("deepseek_v4"), quiet=True), torch.device("cpu"))
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


def test_modules_that_change_later() -> None:
    """A hook of a norm is called, and a layer whose hyper connection became another module computes with that module."""
    model, calls = accelerate(small_model("deepseek_v4"), quiet=True), []
    expected = logits(model)
    layers_of(model)[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    assert calls

    class Zero(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            post, comb, collapsed = self.inner(x)
            return post, comb, 0.0 * collapsed

    plain = small_model("deepseek_v4")
    for m in (model, plain):
        layers_of(m)[1].ffn_hc = Zero(layers_of(m)[1].ffn_hc)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)


def refusal(model: Any, **options: Any) -> str:
    classes = [type(m) for m in model.modules()]
    with pytest.raises(UserError) as caught:
        accelerate(model, quiet=True, **options)
    assert [type(m) for m in model.modules()] == classes
    return str(caught.value)


def test_models_without_such_layers_are_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 5,
    }
    assert "no layers that mix over depth in it are known" in refusal(LlamaForCausalLM(LlamaConfig(**small)))
    with pytest.raises(UserError, match="expected a model of transformers"):
        accelerate("deepseek-ai/DeepSeek-V4-Flash")


def test_other_classes_are_refused() -> None:
    model = small_model("deepseek_v4")
    last = layers_of(model)[2]
    last.__class__ = type("Own", (deepseek.DeepseekV4DecoderLayer,), {})
    assert refusal(model).startswith("cannot accelerate model.layers.2: Own is a subclass of DeepseekV4DecoderLayer")
    last.__class__ = type("DeepseekV4DecoderLayer", (nn.Module,), {"__module__": "transformers_modules.repo.modeling"})
    assert "its class is transformers_modules.repo.modeling.DeepseekV4DecoderLayer" in refusal(model)


def test_replaced_forwards_are_refused() -> None:
    model = small_model("deepseek_v4")
    layer = layers_of(model)[1]
    layer.forward = types.MethodType(lambda self, x, **_: x, layer)
    assert refusal(model) == "cannot accelerate model.layers.1: something else has replaced its forward"


def test_other_parameters_are_refused() -> None:
    model = small_model("deepseek_v4")
    layers_of(model)[1].ffn_hc.scale = nn.Parameter(torch.ones(4))
    assert "the parameters of its ffn_hc have shapes" in refusal(model)
    model = small_model("hy_v4")
    layers_of(model)[2].input_layernorm = nn.LayerNorm(32)
    assert "its input_layernorm is a LayerNorm, not a HYV4RMSNorm" in refusal(model)
    assert "its hc_eps is 0.001" in refusal(small_model("glm5_next", hc_eps=1e-3))


def transposed(self: Any, hidden_states: torch.Tensor, input_ids: Any = None, **kwargs: Any) -> torch.Tensor:
    """The layer with its residual map transposed, a mistake that was shipped elsewhere."""
    for connection, norm, sublayer in (
        (self.attn_hc, self.input_layernorm, lambda x: self.self_attn(x, **kwargs)[0]),
        (self.ffn_hc, self.post_attention_layernorm, lambda x: self.mlp(x, input_ids=input_ids)),
    ):
        post, comb, collapsed = connection(hidden_states)
        y = sublayer(norm(collapsed))
        hidden_states = post.unsqueeze(-1) * y.unsqueeze(-2) + comb @ hidden_states
    return hidden_states


def test_the_check_finds_another_mixing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the layer as another version of transformers might; only the numerical check can notice it."""
    monkeypatch.setattr(deepseek.DeepseekV4DecoderLayer, "forward", transposed)
    assert "cannot accelerate model.layers.0: its mixing is not the one of this family" in refusal(
        small_model("deepseek_v4")
    )


def test_the_check_finds_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    original = deepseek.DeepseekV4DecoderLayer.forward

    def more(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return original(self, hidden_states, depth=self.layer_idx, **kwargs)

    monkeypatch.setattr(deepseek.DeepseekV4DecoderLayer, "forward", more)
    assert "cannot accelerate model.layers.0" in refusal(small_model("deepseek_v4"))


def test_weights_without_values() -> None:
    """A model on the meta device: the check takes numbers of its own."""
    model = accelerate(mixing_alone("hy_v4", torch.bfloat16).to("meta"), quiet=True)
    first = layers_of(model)[0]
    assert not mixing_runs_in(first, lambda: first(torch.zeros(1, 2, 4, 32, device="meta")))


def test_fully_sharded() -> None:
    """FSDP2 around an accelerated model. The other order is refused."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = small_model("deepseek_v4")
        expected = logits(model)
        accelerate(model, quiet=True)
        mesh = dist.init_device_mesh("cpu", (1,))
        for part in (*layers_of(model), model):
            fully_shard(part, mesh=mesh)
        out = model(input_ids=tokens()).logits
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        out.sum().backward()
        assert layers_of(model)[0].attn_hc.fn.grad is not None
        with pytest.raises(UserError, match="undo what made it"):
            restore(model)
        other = small_model("deepseek_v4")
        fully_shard(layers_of(other)[0], mesh=mesh)
        assert "accelerate a model before it is sharded" in refusal(other)
    finally:
        dist.destroy_process_group()
