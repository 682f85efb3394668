"""A state dict says which rule and options its weights are for, and weights of another variant are refused."""

import copy
import warnings

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from depthmix import Decoder, DecoderConfig, create_mixer
from depthmix.mixers import OptionError
from harness import DIM, MIXERS, PAIRWISE, Sublayers, build, embedding, run_stack

every_mixer = pytest.mark.parametrize("name", MIXERS)

OTHERS = [
    ("attnres", {"block_size": 4}, {"block_size": 2}, "block_size=4.*block_size=2"),
    ("attnres", {}, {"window": 2}, "window=None.*window=2"),
    ("attnres", {}, {"weights": "sigmoid"}, "weights='softmax'.*weights='sigmoid'"),
    ("hyper", {"tanh": True}, {"tanh": False}, "tanh=True.*tanh=False"),
    ("mhc", {"iterations": 5}, {"iterations": 20}, "iterations=5.*iterations=20"),
    ("grn", {"relu_on": "sum"}, {}, "relu_on='sum'.*relu_on='dynamic'"),
    ("denseformer", {"period": 1}, {"period": 2}, "period=1.*period=2"),
    ("laurel", {"variant": "lr", "rank": 2}, {"variant": "lr", "rank": 3}, "rank=2.*rank=3"),
]
SAME = [
    ("attnres", {}, {"block_size": 1}),
    ("attnres", {"block_size": "all"}, {"block_size": 6}),
    ("attnres", {}, {"window": 6}),
    ("attnres", {}, {"query_init": 0.5}),
    ("attnres", {"output_gain": 1}, {"output_gain": 0.1}),
    ("grn", {}, {"window": 3}),
    ("mhc", {}, {"head": "sum", "init": "symmetry"}),
    ("highway", {"bias": -1.0}, {"bias": -2}),
    ("layerscale", {"init": 0.1}, {"init": 1.0}),
    ("laurel", {"variant": "pa"}, {"variant": "pa", "rank": 16}),
]


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.parametrize(("name", "theirs", "ours", "said"), OTHERS)
def test_weights_of_another_variant_are_refused_before_any_is_copied(name, theirs, ours, said):
    weights, mixer = build(name, 3, theirs, random=True).state_dict(), build(name, 3, ours)
    before = copy.deepcopy(mixer.state_dict())
    for how in ({}, {"strict": False}, {"assign": True}):
        with pytest.raises(OptionError, match=f"{name}: the weights were made with {said}"):
            mixer.load_state_dict(weights, **how)
    for key, value in mixer.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize(("name", "theirs", "ours"), SAME)
def test_options_that_do_not_change_what_weights_mean_do_not_matter(name, theirs, ours):
    """The same reads to the last bit."""
    one, other = build(name, 3, theirs, random=True), build(name, 3, ours)
    other.load_state_dict(one.state_dict())
    sublayers, e = Sublayers(3), embedding()
    with torch.no_grad():
        assert torch.equal(run_stack(one, sublayers, e)[0], run_stack(other, sublayers, e)[0])


@every_mixer
def test_another_rule_is_refused(name):
    other = "residual" if name != "residual" else "rezero"
    with pytest.raises(OptionError, match=f"the weights are those of mixer '{other}', and this one is '{name}'"):
        create_mixer(name, dim=DIM, n_blocks=2).load_state_dict(
            create_mixer(other, dim=DIM, n_blocks=2).state_dict(), strict=False
        )


@every_mixer
def test_variants_that_load_each_others_weights_read_the_same(name):
    """Of all that the tests try of a rule."""
    sublayers, e = Sublayers(3), embedding()
    cases = [choice for other, choice in PAIRWISE if other == name]
    mixers = [build(name, 3, choice, random=True) for choice in cases]
    for a, one in zip(cases, mixers, strict=True):
        for b, two in zip(cases, mixers, strict=True):
            if one is two or one.weight_options() != two.weight_options():
                continue
            twin = build(name, 3, b)
            twin.load_state_dict(one.state_dict())
            with torch.no_grad():
                assert torch.equal(run_stack(one, sublayers, e)[0], run_stack(twin, sublayers, e)[0]), (a, b)


@every_mixer
def test_old_weights_load_with_one_warning(name):
    mixer = build(name, 2, random=True)
    weights = mixer.state_dict()
    del weights["_extra_state"]
    fresh = build(name, 2)
    if not weights:
        fresh.load_state_dict(weights)
        return
    with pytest.warns(UserWarning, match="do not say with which options they were made; they are taken for") as found:
        assert not fresh.load_state_dict(weights).missing_keys
    assert len(found) == 1
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for key, value in weights.items():
            assert torch.equal(fresh.state_dict()[key], value)


@every_mixer
def test_what_saves_and_loads_keeps_the_entry(name, tmp_path):
    """safetensors, torch.save, copies, rounding, an average over checkpoints, and calls with other weights."""
    mixer = build(name, 2, random=True)
    weights = mixer.state_dict()
    safetensors.torch.save_file(weights, tmp_path / "w.safetensors")
    torch.save(weights, tmp_path / "w.pt")
    average = {k: torch.lerp(v.float() * 0.3, v.float() * 1.7, 0.5) for k, v in weights.items()}
    for found in (
        safetensors.torch.load_file(tmp_path / "w.safetensors"),
        torch.load(tmp_path / "w.pt", weights_only=True),
        copy.deepcopy(mixer).state_dict(),
        {k: v.bfloat16() for k, v in weights.items()},
        average,
    ):
        assert not build(name, 2).load_state_dict(found).missing_keys
    with torch.device("meta"):
        empty = create_mixer(name, dim=DIM, n_blocks=2)
    empty.load_state_dict(weights, assign=True)
    assert torch.equal(empty.state_dict()["_extra_state"], weights["_extra_state"])
    e = embedding()
    called = torch.func.functional_call(Called(mixer), {f"mixer.{k}": v for k, v in weights.items()}, (e,))
    assert torch.equal(called, Called(mixer)(e))
    assert "_extra_state" not in dict(mixer.named_buffers())


class Called(nn.Module):
    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, e):
        state = self.mixer.start(e)
        for site in range(self.mixer.n_sites):
            self.mixer.read(state, site)
            state = self.mixer.write(state, site, e)
        return self.mixer.finish(state)


def decoder(**options):
    shape = {"vocab_size": 16, "dim": 8, "n_blocks": 2, "n_heads": 2}
    return Decoder(DecoderConfig(**shape, mixer="attnres", mixer_options=options))


def test_a_model_refuses_weights_of_another_variant():
    weights, other = decoder(block_size=2).state_dict(), decoder(block_size=4)
    for load in (
        lambda: other.load_state_dict(weights),
        lambda: set_model_state_dict(other, weights),
        lambda: set_model_state_dict(other, weights, options=StateDictOptions(full_state_dict=True)),
    ):
        with pytest.raises(
            OptionError, match="the weights were made with block_size=2, and this mixer has block_size=4"
        ):
            load()
    twin = decoder(block_size=2)
    set_model_state_dict(twin, get_model_state_dict(decoder(block_size=2)))


def test_a_damaged_entry_is_said():
    mixer = build("attnres", 1)
    for entry in (torch.zeros(3), torch.full((4,), float("nan")), "text"):
        with pytest.raises(OptionError, match=r"attnres: the entry _extra_state.* is damaged"):
            mixer.load_state_dict(mixer.state_dict() | {"_extra_state": entry})


def test_a_distributed_checkpoint_keeps_the_entry(tmp_path):
    """Loading fills tensors of the same shape, which entries of other options have too."""
    decoder_, other = decoder(block_size=2), decoder(block_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a process that is alone
        dcp.save(get_model_state_dict(decoder_), checkpoint_id=tmp_path / "saved")
        for model in (decoder(block_size=2), other):
            state = get_model_state_dict(model)
            dcp.load(state, checkpoint_id=tmp_path / "saved")
            if model is other:
                with pytest.raises(OptionError, match="block_size=2, and this mixer has block_size=4"):
                    set_model_state_dict(model, state)
            else:
                set_model_state_dict(model, state)
                assert torch.equal(model.mixer.query, decoder_.mixer.query)
