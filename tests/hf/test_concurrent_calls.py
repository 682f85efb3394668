"""One retrofitted model called by several threads at once: each call has what it has alone."""

import functools
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")
from depthmix import retrofit
from depthmix.errors import UserError
from hf.test_retrofit import VOCAB, make, stir
from threads import LIMIT, at_once, meet_at

SEVERAL_WAYS = [("attnres", {"ways": 2}), ("attnres", {"ways": 3}), ("dca", {})]
KINDS = [
    ("llama", {}, "model.layers.{}.self_attn.q_proj"),
    ("gpt2", {}, "transformer.h.{}.attn.c_attn"),
    ("gpt_neox", {"use_parallel_residual": True}, "gpt_neox.layers.{}.attention.query_key_value"),
]


def prompts(number):
    return [torch.randint(1, VOCAB, (1, 5), generator=torch.Generator().manual_seed(i)) for i in range(number)]


def in_step(model, path, number):
    """Make the threads meet inside every attention, which is where inputs would be exchanged."""
    return [meet_at(model.get_submodule(path.format(layer)), number) for layer in range(3)]


@pytest.mark.parametrize(("mixer", "options"), SEVERAL_WAYS, ids=str)
@pytest.mark.parametrize(("kind", "more", "path"), KINDS, ids=["llama", "gpt2", "parallel"])
def test_concurrent_requests_get_their_own_answers(kind, more, path, mixer, options):
    model = stir(retrofit(make(kind, **more), mixer, quiet=True, **options))

    def answer(ids):
        with torch.no_grad():
            first = model(ids, use_cache=True)
            return first.logits, model(ids[:, -1:], past_key_values=first.past_key_values).logits

    calls = [functools.partial(answer, ids) for ids in prompts(3)]
    alone = [call() for call in calls]
    in_step(model, path, len(calls))
    for found, expected in zip(at_once(*calls), alone, strict=True):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("recomputed", ["nothing", "layers", "attentions"])
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
def test_concurrent_training_has_the_gradients_of_each_call_alone(recomputed, adapters):
    model = stir(retrofit(make("llama"), "attnres", quiet=True, ways=3)).train()
    if adapters:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).base_model.model
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradients(ids):
        return torch.autograd.grad(model(input_ids=ids, labels=ids).loss, parameters, allow_unused=True)

    calls = [functools.partial(gradients, ids) for ids in prompts(2)]
    alone = [call() for call in calls]
    if recomputed == "layers":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif recomputed == "attentions":  # as `depthmix train` does
        for layer in model.model.layers:
            layer.self_attn.forward = functools.partial(checkpoint, layer.self_attn.forward, use_reentrant=False)
    in_step(model, "model.layers.{}.self_attn.q_proj", len(calls))
    for found, expected in zip(at_once(*calls), alone, strict=True):
        assert any(g is not None and g.abs().max() > 0 for g in expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours is None) is (theirs is None)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")  # torch's, which sees a state
def test_a_reentrant_checkpoint_is_refused_though_a_call_without_gradients_ends_beside_it():
    model = retrofit(make("llama"), "attnres", quiet=True, block_size=2).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    ids, training, over = prompts(1)[0], threading.Event(), threading.Event()

    def wait(*_):
        if torch.is_grad_enabled():
            training.set()
            assert over.wait(LIMIT)

    model.model.layers[0].register_forward_pre_hook(wait)

    def look():
        assert training.wait(LIMIT)
        try:
            with torch.no_grad():
                model(ids)
        finally:
            over.set()

    with pytest.raises(UserError, match="reentrant gradient checkpointing would lose the gradients"):
        at_once(lambda: model(ids), look)
