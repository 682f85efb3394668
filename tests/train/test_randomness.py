"""Two trainings in one process, and whoever draws random numbers beside them, do not change each other."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from depthmix import Decoder, DecoderConfig
from depthmix.mixers import list_mixers, register, registry
from depthmix.mixers.residual import Residual
from depthmix.models import blocks
from depthmix.randomness import OwnRandom, may_draw, seed_random
from depthmix.runs.checkpoint import list_checkpoints, load_checkpoint
from depthmix.train.loop import RNG, Trainer, train
from train import small
from train.runs import metrics

CPU = torch.device("cpu")
LIMIT = 60  # seconds until a thread is taken to hang


def outcome(folder):
    saved = load_checkpoint(list_checkpoints(folder.checkpoints)[0])
    return metrics(folder), saved.model, saved.optimizer[RNG]


def same(one, other):
    (lines, model, rng), (other_lines, other_model, other_rng) = one, other
    return (
        lines == other_lines
        and torch.equal(rng, other_rng)
        and all(torch.equal(model[n], other_model[n]) for n in (*model, *other_model))
    )


def in_threads(*calls):
    """What calls return that run at the same time, each in a thread of its own."""
    found = [None] * len(calls)

    def work(i):
        try:
            found[i] = calls[i]()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * LIMIT)
        assert not thread.is_alive(), "hangs"
    wrong = [value for value in found if isinstance(value, BaseException)]
    if wrong:
        raise next((e for e in wrong if not isinstance(e, threading.BrokenBarrierError)), wrong[0])
    return found


@pytest.fixture
def noisy(monkeypatch):
    """A rule of somebody's own that draws in every read while it trains."""
    monkeypatch.setattr(registry, "_MIXERS", dict(registry._MIXERS))

    class Noisy(Residual):
        def _read(self, state, site):
            return functional.dropout(super()._read(state, site), 0.1, self.training)

    register("noisy")(Noisy)
    return "noisy"


# Weights


def drawn_by_torch(build, seed):
    torch.manual_seed(seed)
    return build(), torch.get_rng_state()


@pytest.mark.parametrize("mixer", list_mixers())
def test_a_training_draws_the_weights_that_torchs_generator_would(mixer):
    def build():
        return Decoder(DecoderConfig(vocab_size=11, dim=8, n_blocks=2, n_heads=2, mixer=mixer))

    expected, state = drawn_by_torch(build, 3)
    before, own = torch.get_rng_state(), OwnRandom(7, CPU)
    with own.building():
        seed_random(3)
        found = build()
    assert all(torch.equal(p, q) for p, q in zip(found.parameters(), expected.parameters(), strict=True))
    assert torch.equal(own.state(), state)
    assert torch.equal(torch.get_rng_state(), before)
    assert not may_draw(found)


def test_every_kind_of_draw_is_the_trainings_own():
    """Whatever takes a generator, and what takes none."""

    def build():
        given = torch.Generator().manual_seed(5)
        return [
            nn.init.orthogonal_(torch.zeros(4, 4)),
            nn.init.trunc_normal_(torch.zeros(4)),
            torch.randn(5),
            torch.rand(3, generator=given),
            torch.randperm(9),
            torch.randint(7, (4,)),
            torch.rand_like(torch.zeros(3)),
            torch.bernoulli(torch.full((9,), 0.5)),
            torch.multinomial(torch.ones(5), 3),
            functional.dropout(torch.ones(9), 0.5),
            nn.Linear(3, 3).weight.detach(),
            torch.normal(torch.zeros(3), 1.0),
        ]

    expected, state = drawn_by_torch(build, 3)
    before, own = torch.get_rng_state(), OwnRandom(3, CPU)
    with own.building():
        found = build()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(own.state(), state)
    assert torch.equal(torch.get_rng_state(), before)


def test_outside_of_a_training_torchs_generator_is_seeded():
    seed_random(9)
    found = torch.rand(3)
    torch.manual_seed(9)
    assert torch.equal(found, torch.rand(3))


# Whole trainings


@pytest.mark.parametrize("mixer", ["residual", "noisy"])
def test_a_training_leaves_torchs_generator_alone(tmp_path, noisy, mixer):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = outcome(train(small.config(tmp_path / "one", mixer=mixer)))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert same(outcome(train(small.config(tmp_path / "other", mixer=mixer))), one)


def test_two_trainings_whose_weights_are_drawn_in_turns(tmp_path, monkeypatch):
    configs = [{"seed": 0, "mixer": "highway"}, {"seed": 1, "mixer": "mudd"}]
    expected = [outcome(train(small.config(tmp_path / f"alone-{i}", **c))) for i, c in enumerate(configs)]
    turns, init = threading.Barrier(2), blocks.init_matrix

    def in_turns(*args):
        turns.wait(LIMIT)
        init(*args)

    monkeypatch.setattr(blocks, "init_matrix", in_turns)
    found = in_threads(
        *(lambda i=i, c=c: train(small.config(tmp_path / f"beside-{i}", **c)) for i, c in enumerate(configs))
    )
    assert all(same(outcome(folder), one) for folder, one in zip(found, expected, strict=True))


def test_two_trainings_that_draw_in_their_steps(tmp_path, monkeypatch, noisy):
    configs = [{"seed": 0, "mixer": noisy}, {"seed": 1, "mixer": noisy, "n_blocks": 2}]
    expected = [outcome(train(small.config(tmp_path / f"alone-{i}", **c))) for i, c in enumerate(configs)]
    turns, launch = threading.Barrier(2), Trainer.launch

    def in_turns(self, step):
        turns.wait(LIMIT)
        return launch(self, step)

    monkeypatch.setattr(Trainer, "launch", in_turns)
    found = in_threads(
        *(lambda i=i, c=c: train(small.config(tmp_path / f"beside-{i}", **c)) for i, c in enumerate(configs))
    )
    assert all(same(outcome(folder), one) for folder, one in zip(found, expected, strict=True))


def test_somebody_who_draws_beside_a_training(tmp_path, monkeypatch):
    """In the same thread between the steps, and in another while the weights are drawn."""
    expected = outcome(train(small.config(tmp_path / "alone")))
    launch, init = Trainer.launch, blocks.init_matrix

    def draws(*args):
        torch.rand(3)

    def launched(self, step):
        draws()
        return launch(self, step)

    def initialised(*args):
        in_threads(draws)
        init(*args)

    monkeypatch.setattr(Trainer, "launch", launched)
    monkeypatch.setattr(blocks, "init_matrix", initialised)
    assert same(outcome(train(small.config(tmp_path / "beside"))), expected)


def test_a_training_that_draws_goes_on_with_the_same_numbers(tmp_path, noisy):
    config = small.config(tmp_path / "run", mixer=noisy)
    whole = outcome(train(config))
    folder = train(small.config(tmp_path / "again", mixer=noisy))
    newest = list_checkpoints(folder.checkpoints)[0]
    (newest / "model.safetensors").write_bytes(b"")
    (folder.path / "result.json").unlink()
    torch.manual_seed(77)
    assert same(outcome(train(small.config(tmp_path / "again", mixer=noisy))), whole)
