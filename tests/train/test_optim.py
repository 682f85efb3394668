"""The learning rate at exact points, which parameters decay, and optimizers that survive a trip through tensors."""

import itertools
import math

import pytest
import torch
from torch import nn

from depthmix.config import TrainConfig
from depthmix.errors import USAGE
from depthmix.mixers.decay import decays
from depthmix.models import Decoder, DecoderConfig
from depthmix.schedule import learning_rate
from depthmix.train import optim
from depthmix.train.optim import (
    Muon,
    build_optimizers,
    hidden_matrices,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)
from harness import CASES, MIXERS, build
from train.refused import refused


def model(mixer="residual", options=None, **changes):
    values = {"vocab_size": 20, "dim": 24, "n_blocks": 3, "n_heads": 2, "qk_norm": True, **changes}
    return Decoder(DecoderConfig(mixer=mixer, mixer_options=options or {}, **values))


def rates(**changes):
    config = TrainConfig(**changes)
    return [learning_rate(config, step) for step in range(config.steps)]


# Schedules.


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "rsqrt"])
def test_warm_up(schedule):
    found = rates(schedule=schedule, steps=100, warmup=10)
    assert found[:10] == [(i + 1) / 10 for i in range(10)]
    assert found[9] == 1
    assert max(found) == 1
    assert all(a >= b for a, b in itertools.pairwise(found[9:]))  # and then only down


def test_cosine():
    found = rates(schedule="cosine", steps=111, warmup=10, final_lr=0.1)
    assert found[10] == 1
    assert found[60] == pytest.approx(0.55)  # half-way between 1 and 0.1
    assert found[35] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5)))
    assert found[-1] == pytest.approx(0.1)
    assert rates(schedule="cosine", steps=50, warmup=0, final_lr=0)[-1] == 0


def test_wsd():
    found = rates(schedule="wsd", steps=100, warmup=10, final_lr=0.2, decay_fraction=0.25)
    assert found[9:75] == [1] * 66  # up to the knee
    assert found[75] == pytest.approx(1 - 0.8 / 25)
    assert found[86] == pytest.approx(1 - 0.8 * 12 / 25)
    assert found[99] == pytest.approx(0.2)
    everything = rates(schedule="wsd", steps=10, warmup=4, final_lr=0, decay_fraction=1.0)
    assert everything[3] == 1
    assert everything[4:] == pytest.approx([5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0])
    assert rates(schedule="wsd", steps=10, warmup=0, final_lr=0.5, decay_fraction=0)[-2:] == [1, 0.5]


def test_rsqrt():
    found = rates(schedule="rsqrt", steps=401, warmup=100, final_lr=0)
    assert found[399] == pytest.approx(0.5)  # four times the warm-up
    assert found[224] == pytest.approx(2 / 3)
    assert rates(schedule="rsqrt", steps=4, warmup=0) == pytest.approx([1, math.sqrt(1 / 2), math.sqrt(1 / 3), 0.5])


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "rsqrt"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (2, 1), (2, 0), (3, 2)])
def test_the_shortest_runs(schedule, steps, warmup):
    assert all(0 < r <= 1 for r in rates(schedule=schedule, steps=steps, warmup=warmup, final_lr=0.1))


def test_the_peak_is_each_groups_own():
    optimizers = build_optimizers(model(), TrainConfig(optimizer="muon", lr=0.5, muon_lr=2.0))
    for factor in (0.25, 1.0, 0.5):  # not one on top of the other
        set_learning_rate(optimizers, factor)
        assert {g["lr"] for g in optimizers["adamw"].param_groups} == {0.5 * factor}
        assert {g["lr"] for g in optimizers["muon"].param_groups} == {2.0 * factor}


# Groups.


def grouped(optimizers):
    """(optimizer, weight decay) by parameter name."""
    found = {}
    for key, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for name in group["param_names"]:
                assert name not in found, f"{name} is in two groups"
                found[name] = key, group["weight_decay"]
    return found


@pytest.mark.parametrize("name", MIXERS)
def test_groups(name):
    with torch.device("meta"):
        layouts = {tuple(dict(build(n, 2, c).named_parameters())): c for n, c in CASES if n == name}
    for options in layouts.values():  # one of the options that give the same parameters
        for optimizer in ("adamw", "muon"):
            check_groups(name, options, optimizer)


def check_groups(name, options, optimizer):
    with torch.device("meta"):
        built = model(name, options, n_blocks=2)
    found = grouped(build_optimizers(built, TrainConfig(optimizer=optimizer, weight_decay=0.3)))
    named = dict(built.named_parameters())
    assert found.keys() == named.keys()
    for path, (key, decay) in found.items():
        part, _, rest = path.partition(".")
        if part == "mixer":
            assert key == "adamw"
            assert decay == (0.3 if rest.split(".")[0] in built.mixer.decayed else 0), path
        else:
            assert decay == (0.3 if named[path].ndim == 2 else 0), path
            hidden = part == "sublayers" and named[path].ndim == 2
            assert key == ("muon" if hidden and optimizer == "muon" else "adamw"), path


def test_what_decays_in_a_mixer():
    """Every mechanism's vectors stay free, its projections decay: spelled out, not read off the code."""
    expected = {
        ("attnres", "query"): False,
        ("hyper", "W_beta"): True,
        ("hyper", "B"): False,
        ("hyper", "A_r"): False,  # a matrix in shape alone
        ("mhc", "phi"): True,
        ("mhc", "alpha"): False,
        ("highway", "W_T"): True,
        ("highway", "b_T"): False,
        ("layerscale", "gamma"): False,
        ("rezero", "alpha"): False,
        ("laurel", "A"): True,
    }
    found = {
        (name, path.removeprefix("mixer.")): on
        for name in MIXERS
        for path, on in decays(model(name)).items()
        if path.startswith("mixer.")
    }
    assert expected.items() <= found.items()


def test_tied_embeddings_come_once_and_stay_with_adamw():
    built = model(tie_embeddings=True)
    assert "head.weight" not in hidden_matrices(built)
    found = grouped(build_optimizers(built, TrainConfig(optimizer="muon")))
    assert found["embedding.weight"][0] == "adamw"
    assert "head.weight" not in found


# Muon.


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
def test_muon_on_the_cpu_is_torchs_up_to_bf16(adjust_lr_fn):
    torch.manual_seed(1)
    start = [torch.randn(12, 8), torch.randn(8, 12), torch.randn(8, 8)]
    grads = [[torch.randn_like(p) for p in start] for _ in range(3)]
    ends = []
    for kind in (Muon, torch.optim.Muon):
        params = [nn.Parameter(p.clone()) for p in start]
        named = [("a", params[0]), ("b", params[1]), ("c", params[2])]
        optimizer = kind(named, lr=0.1, weight_decay=0.2, adjust_lr_fn=adjust_lr_fn)
        for step in grads:
            for p, g in zip(params, step, strict=True):
                p.grad = g.clone()
            optimizer.step()
        ends.append(params)
        assert {k for p in params for k in optimizer.state[p]} == {"momentum_buffer"}
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)


def test_muon_leaves_closures_and_missing_gradients_alone():
    p = nn.Parameter(torch.eye(4))
    optimizer = Muon([p], lr=0.1)
    optimizer.step()
    assert torch.equal(p, torch.eye(4))

    def closure():
        loss = (p - 1).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 12
    assert not torch.equal(p, torch.eye(4))


# State.


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_round_trip(optimizer):
    config = TrainConfig(optimizer=optimizer)
    ids = torch.randint(0, 20, (2, 5))

    def take(built, optimizers, steps):
        for _ in range(steps):
            built(ids).square().mean().backward()
            for o in optimizers.values():
                o.step()
            built.zero_grad()

    one = model("mhc", tie_embeddings=True)
    first = build_optimizers(one, config)
    assert optimizer_tensors(first) == {}
    take(one, first, 3)
    tensors = {k: v.clone() for k, v in optimizer_tensors(first).items()}
    assert all(isinstance(v, torch.Tensor) for v in tensors.values())
    two = model("mhc", tie_embeddings=True)
    two.load_state_dict(one.state_dict())
    second = build_optimizers(two, config)
    load_optimizer_tensors(second, tensors)
    for name, value in optimizer_tensors(second).items():
        assert torch.equal(value, tensors[name]), name
        assert value.data_ptr() != tensors[name].data_ptr()
    take(one, first, 2)
    take(two, second, 2)
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_state_that_does_not_fit_is_refused():
    optimizers = build_optimizers(model(), TrainConfig())
    for tensors, words in (
        ({"muon/momentum_buffer/head.weight": torch.zeros(20, 24)}, "belongs to no parameter"),
        ({"adamw/exp_avg/tail.weight": torch.zeros(20, 24)}, "belongs to no parameter"),
        ({"adamw/exp_avg/head.weight": torch.zeros(24, 20)}, r"shape \[24, 20\], expected \[20, 24\]"),
        ({"adamw": torch.zeros(3)}, "not enough values"),
    ):
        with pytest.raises(ValueError, match=words):
            load_optimizer_tensors(optimizers, tensors)


# Groups of one's own.


def settings_of(optimizers):
    """{parameter: (peak learning rate, weight decay)}."""
    groups = [g for o in optimizers.values() for g in o.param_groups]
    return {n: (g["peak_lr"], g["weight_decay"]) for g in groups for n in g["param_names"]}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_groups_change_what_they_name_and_nothing_else(optimizer):
    groups = [{"match": "mixer.b.1", "lr": 0.5}, {"match": "mixer.b.*", "lr": 0.1, "weight_decay": 0.3}]
    groups.append({"match": "sublayers.0.q_proj.weight", "lr": 2})
    decoder = model("dca")
    sizes = {"optimizer": optimizer, "lr": 0.01, "muon_lr": 0.04, "weight_decay": 0.2}
    plain = settings_of(build_optimizers(decoder, TrainConfig(**sizes)))
    found = settings_of(build_optimizers(decoder, TrainConfig(groups=groups, **sizes)))
    assert set(found) == set(plain)
    changed = {n: v for n, v in found.items() if v != plain[n]}
    assert changed == {
        "mixer.b.1": (0.005, 0.0),  # the first that matches
        "mixer.b.2": (0.001, 0.3),
        "mixer.b.3": (0.001, 0.3),
        "sublayers.0.q_proj.weight": (2 * plain["sublayers.0.q_proj.weight"][0], 0.2),
    }


def test_groups_with_betas_of_their_own():
    groups = [{"match": "mixer.b.1", "beta1": 0.5}, {"match": "mixer.w.*", "beta1": 0.96, "beta2": 0.9}]
    optimizers = build_optimizers(model("dca"), TrainConfig(groups=groups, optimizer="muon", beta1=0.8, beta2=0.99))
    found = {n: g["betas"] for g in optimizers["adamw"].param_groups for n in g["param_names"]}
    own = {n: betas for n, betas in found.items() if betas != (0.8, 0.99)}
    assert own == {"mixer.b.1": (0.5, 0.99), **{f"mixer.w.{i}": (0.96, 0.9) for i in (1, 2, 3)}}


def test_betas_of_matrices_that_muon_trains_are_refused():
    groups = [{"match": "sublayers.*", "beta1": 0.5}]
    words = ["beta1 and beta2 are AdamW's, and sublayers.0.q_proj.weight is trained by Muon"]
    refused(lambda: build_optimizers(model(), TrainConfig(groups=groups, optimizer="muon")), *words, code=USAGE)


def test_groups_follow_the_schedule():
    optimizers = build_optimizers(model("dca"), TrainConfig(lr=0.01, groups=[{"match": "mixer.b.*", "lr": 0.1}]))
    set_learning_rate(optimizers, 0.5)
    rates = {n: g["lr"] for g in optimizers["adamw"].param_groups for n in g["param_names"]}
    assert rates["mixer.b.1"] == pytest.approx(0.0005)
    assert rates["mixer.w.1"] == pytest.approx(0.005)


def test_a_group_of_the_rule_is_no_error_where_the_rule_has_no_parameters():
    """As the plain arm of a comparison has none."""
    groups = [{"match": "mixer.*", "lr": 10}, {"match": "sublayers.*", "lr": 2}]
    assert set(optim.match_groups(["sublayers.0.weight", "norm.weight"], groups)) == {"sublayers.0.weight"}
    refused(lambda: optim.match_groups(["norm.weight"], groups), "'sublayers.*' matches no parameter", code=USAGE)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"match": "mixer.c.*", "lr": 1}, ["'mixer.c.*' matches no parameter", "did you mean 'mixer."]),
        ({"match": "mixer.b.*", "lrr": 1}, ["unknown key 'lrr'", "did you mean 'lr'?"]),
        ({"lr": 1}, ["needs match"]),
        ({"match": "mixer.b.*"}, ["lr or weight_decay"]),
        ({"match": "mixer.b.*", "lr": -1}, ["lr must be a finite number"]),
        ({"match": "mixer.b.*", "beta2": 1.0}, ["beta2 must be a number from 0 to below 1, got 1.0"]),
        ({"match": "mixer.b.*", "weight_decay": "x"}, ["weight_decay must be a finite number"]),
    ],
)
def test_groups_that_cannot_be(group, words):
    def build():
        optim.check_groups([group])
        build_optimizers(model("dca"), TrainConfig(groups=[group]))

    refused(build, *words, code=USAGE)
