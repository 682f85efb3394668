"""Hugging Face's Trainer: our loss and our step, resuming, gradient checkpointing, bf16; and which weights decay."""

import pytest
import torch
from torch.utils.data import Dataset

from depthmix import list_mixers, param_groups, retrofit
from depthmix.errors import UserError
from depthmix.mixers.decay import decays
from depthmix.train.evaluate import token_losses
from hf.test_retrofit import make
from hf.tiny import SITES, as_decoder, causal_lm, tokens

BATCH, LENGTH = 4, 12


class Texts(Dataset):
    """Rows of tokens."""

    def __init__(self, rows=8 * BATCH):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, i):
        ids = tokens(1, LENGTH, seed=i)[0]
        return {"input_ids": ids, "labels": ids}


def trainer(model, folder, optimizers=(None, None), rows=8 * BATCH, **changes):
    from transformers import Trainer, TrainingArguments

    values = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 0.05,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
        "save_strategy": "no",
    }
    return Trainer(
        model=model, args=TrainingArguments(**{**values, **changes}), train_dataset=Texts(rows), optimizers=optimizers
    )


def losses(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """(losses, weights) of four plain steps, with checkpoints at the second and the fourth, and the folder they are in."""
    folder = tmp_path_factory.mktemp("plain")
    run = trainer(causal_lm("attnres"), folder, save_strategy="steps")
    run.train()
    return losses(run), run.model.state_dict(), folder


@pytest.mark.parametrize("mixer", list_mixers())
def test_one_step_is_ours(tmp_path, mixer):
    """The same loss, and with plain gradient descent the same weights after it."""
    model = causal_lm(mixer)
    ours = as_decoder(model)
    batch = torch.stack([Texts()[i]["input_ids"] for i in range(BATCH)])
    loss = token_losses(ours, batch).mean()
    loss.backward()
    with torch.no_grad():
        for p in ours.parameters():
            p -= 0.05 * (0 if p.grad is None else p.grad)
    how = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "max_steps": 1, "rows": BATCH}
    theirs = trainer(model, tmp_path, **how)
    theirs.train()
    assert losses(theirs) == pytest.approx([loss.item()], rel=1e-5)
    for name, value in as_decoder(model).state_dict().items():
        torch.testing.assert_close(value, ours.state_dict()[name], rtol=1e-4, atol=4e-6)


def test_smoothed_labels_are_those_of_the_next_token(tmp_path):
    """Trainer shifts them for classes that it knows by name; with next to no smoothing the loss is the usual one."""
    still = {"learning_rate": 0.0, "max_steps": 1, "rows": BATCH}
    for model in (causal_lm("attnres"), retrofit(make("llama"), "attnres")):
        usual, smoothed = (trainer(model, tmp_path, label_smoothing_factor=factor, **still) for factor in (0.0, 1e-6))
        usual.train()
        smoothed.train()
        assert losses(smoothed) == pytest.approx(losses(usual), rel=1e-4)


def test_accumulated_gradients_count_every_token_once(tmp_path, plain):
    run = trainer(causal_lm("attnres"), tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    run.train()
    assert losses(run) == pytest.approx(plain[0], rel=1e-4)


def test_a_resumed_training_ends_as_one_that_was_not_interrupted(tmp_path, plain):
    wanted, weights, folder = plain
    run = trainer(causal_lm("attnres"), tmp_path)
    run.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert losses(run) == wanted
    assert all(torch.equal(value, weights[name]) for name, value in run.model.state_dict().items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing_and_computes_sublayers_twice(tmp_path, plain, reentrant):
    model, calls = causal_lm("attnres"), []
    for sublayer in model.model.sublayers:
        sublayer.register_forward_pre_hook(lambda module, args: calls.append(module))
    how = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    run = trainer(model, tmp_path, gradient_checkpointing=True, **how)
    run.train()
    assert len(calls) == 4 * SITES * 2
    assert losses(run) == pytest.approx(plain[0], rel=1e-6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain[1][name], rtol=1e-5, atol=1e-6, msg=name)


def test_reentrant_checkpoints_of_a_retrofitted_model_are_refused(tmp_path):
    how = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(UserError, match="'use_reentrant': False"):
        trainer(retrofit(make("llama"), "dca", quiet=True), tmp_path, **how).train()


@pytest.mark.parametrize("mixer", ["attnres", "dca", "mhc"])  # with one input of a sublayer, three, streams
def test_gradient_checkpointing_gives_the_same_gradients(mixer):
    ids, gradients = tokens(), []
    for checkpointed in (False, True):
        model = causal_lm(mixer).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        out = model(ids, labels=ids)
        assert (out.past_key_values is None) == checkpointed  # a recomputed sublayer would write its keys twice
        out.loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, rtol=1e-5, atol=1e-7, msg=name)


def test_bf16_autocast_stays_near_fp32_and_rounds_no_weight(tmp_path, plain):
    run = trainer(causal_lm("attnres"), tmp_path, bf16=True)
    run.train()
    assert losses(run) == pytest.approx(plain[0], rel=0.05)
    assert losses(run) != plain[0]
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


def test_a_model_in_bf16_trains_its_mixer_in_fp32(tmp_path):
    model = causal_lm("attnres").to(torch.bfloat16)
    before = [p.clone() for p in model.model.mixer.parameters()]
    trainer(model, tmp_path, max_steps=2, learning_rate=1e-4).train()
    for p, old in zip(model.model.mixer.parameters(), before, strict=True):
        assert p.dtype == torch.float32
        change = (p.detach() - old).abs()
        assert change.max() > 0
        assert change.max() < 1e-3  # less than bf16 could tell from nothing at a gain of one


def decayed(model, optimizer):
    """Names of the parameters in the groups of an optimizer that decay."""
    found = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    return {name for name, p in model.named_parameters() if id(p) in found}


def test_the_trainer_takes_the_groups_that_decay_as_the_papers_say(tmp_path):
    """Its own grouping goes by names and would decay gains and the mixer, too."""
    model = causal_lm("attnres")
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=0.01)
    run = trainer(model, tmp_path, optimizers=(optimizer, None), max_steps=1)
    run.train()
    names = decayed(model, optimizer)
    assert names
    assert not any("mixer" in name or "norm" in name for name in names)


@pytest.mark.parametrize("kind", ["own", "retrofitted", "adapted"])
def test_a_trainer_with_paper_decay_makes_the_same_groups_itself(tmp_path, kind):
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    from depthmix.hf import PaperDecay

    class MyTrainer(PaperDecay, Trainer):
        pass

    model = make("llama") if kind == "retrofitted" else causal_lm("mudd")  # whose paper decays a part of the mixer
    if kind == "retrofitted":
        retrofit(model, "mudd", quiet=True)
    if kind == "adapted":
        lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["mixer"])
        model = get_peft_model(model, lora)
    arguments = TrainingArguments(output_dir=str(tmp_path), weight_decay=0.1, use_cpu=True, report_to=[])
    names, theirs = (
        decayed(model, made(model=model, args=arguments).create_optimizer()) for made in (MyTrainer, Trainer)
    )
    applies, trained = decays(model), {name for name, p in model.named_parameters() if p.requires_grad}
    assert names == {name for name in trained if applies[name]}
    mixers = {name for name in trained if "mixer" in name}
    assert names & mixers
    assert mixers - names
    assert (theirs & mixers) - names  # what this is for
