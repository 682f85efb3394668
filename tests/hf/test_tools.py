"""PEFT, accelerate with FSDP2, torch.export: the model goes through each as it is."""

import copy
from contextlib import nullcontext

import pytest
import torch

from depthmix import retrofit, shard_mixer
from depthmix.hf import mixer_of
from hf.test_retrofit import make
from hf.tiny import causal_lm, tokens
from project import ROOT

TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj", "up_proj", "gate_proj"]


def adapted(mixer="attnres", trained=True):
    """A model with LoRA on its sublayers and the mixer trained along, or frozen."""
    from peft import LoraConfig, get_peft_model

    extra = ["mixer"] if trained else None
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=TARGETS, r=2, lora_alpha=4, modules_to_save=extra)
    return get_peft_model(causal_lm(mixer), config)


def train(model, steps=3):
    ids = tokens(4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("mixer", ["attnres", "dca", "mhc"])
def test_lora_on_the_sublayers_is_saved_with_the_mixer_or_without(tmp_path, mixer, trained):
    from peft import PeftModel
    from safetensors.torch import load_file

    model, ids = adapted(mixer, trained), tokens()
    start = copy.deepcopy(model)
    train(model)
    assert (model(ids).logits - start(ids).logits).abs().max() > 1e-3
    for (name, p), old in zip(model.named_parameters(), start.parameters(), strict=True):
        moved = "lora_" in name or (trained and "mixer.modules_to_save" in name)
        assert p.requires_grad == moved, name
        if not moved:
            assert torch.equal(p, old), name
    if trained:
        mixer_moved = [
            not torch.equal(p, q)
            for (n, p), q in zip(model.named_parameters(), start.parameters(), strict=True)
            if "mixer.modules_to_save" in n
        ]
        assert any(mixer_moved)
    model.save_pretrained(tmp_path)
    assert any(".mixer." in name for name in load_file(tmp_path / "adapter_model.safetensors")) is trained
    again = PeftModel.from_pretrained(causal_lm(mixer), tmp_path)
    torch.testing.assert_close(again(ids).logits, model(ids).logits)
    made = again.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, pad_token_id=0)
    assert made.shape == (2, ids.shape[1] + 3)


def test_merged_lora_is_a_plain_model_again(tmp_path):
    from depthmix.hf import DepthmixForCausalLM

    model, ids = adapted(), tokens()
    train(model)
    wanted = model(ids).logits
    merged = model.merge_and_unload()
    assert type(merged) is DepthmixForCausalLM
    merged.save_pretrained(tmp_path)
    found = DepthmixForCausalLM.from_pretrained(tmp_path)(ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_lora_with_gradient_checkpointing():
    model = adapted()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    ids = tokens()
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if p.requires_grad and "lora_B" in n)


def test_accelerate_reads_the_file_for_it():
    """`accelerate launch --config_file` with the file of docs/guides/several-gpus.md, up to where it would start processes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    path = ROOT / "examples" / "accelerate-fsdp2.yaml"
    given = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    found = _validate_launch_command(given)[0]
    assert (found.use_fsdp, found.fsdp_version, found.mixed_precision, found.num_processes) == (True, 2, "bf16", 8)
    assert found.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP"


@pytest.fixture
def accelerator(monkeypatch):
    """Makes an Accelerator of one CPU process that shards with FSDP2, which it offers for GPUs alone: told so by hand."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType
    from torch import distributed

    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else accelerate sets it for everyone after it
    AcceleratorState._reset_state(reset_partial_state=True)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)

    def make(precision):
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
        if precision != "no":
            plugin.set_mixed_precision(precision)
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
        assert accelerator.is_fsdp2
        return accelerator

    yield make
    distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("mixer", ["attnres", "dca"])
@pytest.mark.parametrize(("precision", "apart"), [("no", False), ("bf16", True)])
def test_a_step_under_fsdp2_is_the_plain_one(accelerator, mixer, precision, apart):
    from torch.distributed.fsdp import FSDPModule

    model, ids = causal_lm(mixer).train(), tokens()
    plain = copy.deepcopy(model)
    accelerator = accelerator(precision)
    if apart:  # in bf16 the mixer is a group of its own, which no policy rounds
        shard_mixer(model.model.mixer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert all(isinstance(sublayer, FSDPModule) for sublayer in model.model.sublayers)
    loss = model(ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    wanted = plain(ids, labels=ids).loss
    wanted.backward()
    reference.step()
    near = {"rtol": 1e-6, "atol": 1e-7} if precision == "no" else {"rtol": 0.02, "atol": 0.005}
    torch.testing.assert_close(loss.float(), wanted, **near)
    saved = {
        n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in accelerator.get_state_dict(model).items()
    }
    assert saved.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(saved[name].float(), value, **near, msg=name)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("kind", ["own", "retrofitted"])
def test_a_mixer_under_a_bf16_policy_computes_in_fp32_if_it_is_sharded_by_itself(accelerator, kind, apart):
    """Its parameters in memory are fp32 either way; a policy rounds what is computed with, and that is said."""
    model, ids, seen = causal_lm("mhc") if kind == "own" else make("llama"), tokens(), []
    if kind == "retrofitted":
        retrofit(model, "mhc", quiet=True)
    mixer = model.model.mixer if kind == "own" else mixer_of(model)
    start = mixer.start
    mixer.start = lambda x: (seen.extend(p.dtype for p in mixer.parameters()), start(x))[1]
    accelerator = accelerator("bf16")
    if apart:
        shard_mixer(mixer)
    model, _ = accelerator.prepare(model.train(), torch.optim.SGD(model.parameters(), lr=0.1))
    with nullcontext() if apart else pytest.warns(UserWarning, match="rounded to bfloat16: call depthmix.shard_mixer"):
        accelerator.backward(model(ids, labels=ids).loss)
    assert set(seen) == {torch.float32 if apart else torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in mixer.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("mixer", "options"), [("attnres", {}), ("mhc", {"n": 2, "iterations": 2})], ids=["one input", "several streams"]
)
def test_an_exported_forward_gives_the_same_logits_at_other_sizes(mixer, options):
    class Logits(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, input_ids):
            return self.model(input_ids, use_cache=False).logits

    model = causal_lm(mixer, {"n_blocks": 1, "mixer_options": options}).requires_grad_(False)
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=512)}
    exported = torch.export.export(Logits(model), (tokens(),), dynamic_shapes=(sizes,))
    other = tokens(3, 5)
    torch.testing.assert_close(exported.module()(other), model(other).logits, rtol=1e-5, atol=1e-6)
