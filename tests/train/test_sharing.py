"""Trainings in several threads of one process: each has the bits that it has alone, or is refused."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from depthmix.errors import USAGE, UserError
from depthmix.train import brief
from depthmix.train.compiled import compiled_once
from depthmix.train.loop import Trainer, train
from depthmix.train.sharing import Demands, claim
from train import small
from train.refused import refused

STEPS = 4


def losses(trainer, before_step):
    found = []
    for step in range(STEPS):
        before_step()
        found.append(trainer.step(step))
    return found


def test_two_trainings_in_turns_have_the_bits_of_each_alone():
    """Both are under way at every step; only the model's start draws from the process's generator."""
    configs = [
        small.config("nowhere", mixer=mixer, n_blocks=2, warmup=1, steps=STEPS, seed=seed)
        for seed, mixer in enumerate(("attnres", "dca"))
    ]
    alone, together = (
        [Trainer(config, small.token_data(), torch.device("cpu")) for config in configs] for _ in range(2)
    )
    expected = [losses(trainer, lambda: None) for trainer in alone]
    barrier = threading.Barrier(2, timeout=60)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(losses, together, [barrier.wait] * 2)) == expected


def under_way(pool, config, until):
    """A training in another thread, which has made a step and waits for `until` after each."""
    begun = threading.Event()

    def stop(left):
        begun.set()
        assert until.wait(60)
        return False

    result = pool.submit(brief.train_briefly, config, small.token_data(), stop=stop)
    assert begun.wait(60)
    return result


def test_the_mode_stays_until_the_last_training_has_ended():
    """The first to come leaves first, and the other trains on in deterministic mode."""
    config = small.config("nowhere", deterministic=True, n_blocks=1, steps=2, warmup=1)
    ends, later = threading.Event(), threading.Event()
    before = torch.are_deterministic_algorithms_enabled()
    with ThreadPoolExecutor(2) as pool:
        try:
            first, second = under_way(pool, config, ends), under_way(pool, config, later)
            ends.set()
            expected = first.result()
            assert torch.are_deterministic_algorithms_enabled()
            later.set()
            assert second.result()["train_curve"] == expected["train_curve"]
        finally:
            ends.set()
            later.set()
    assert torch.are_deterministic_algorithms_enabled() == before


@pytest.mark.parametrize("mode", [True, False])
def test_a_training_of_the_other_mode_is_refused(tmp_path, mode):
    config = small.config("nowhere", deterministic=mode, steps=2, warmup=1)
    other = small.config(tmp_path / "run", deterministic=not mode, steps=2, warmup=1)
    end, words = threading.Event(), f"deterministic is {not mode} in this training and {mode} in the other"
    with ThreadPoolExecutor(1) as pool:
        try:
            result = under_way(pool, config, end)
            refused(lambda: train(other), words, "one after the other", code=USAGE)
            assert torch.are_deterministic_algorithms_enabled() == mode
        finally:
            end.set()
        result.result()
    assert not (tmp_path / "run").exists()
    train(other)  # now it can


def test_only_one_thread_compiles_or_has_processes(tmp_path):
    compiles, divided = Demands(compiles=True), Demands(divided=True)
    with ThreadPoolExecutor(1) as pool:

        def claimed(demands):
            with claim(demands):
                return True

        for held, other, words in (
            (compiles, compiles, "torch.compile has one cache"),
            (divided, divided, "torch.distributed has one group"),
        ):
            with claim(held):
                with pytest.raises(UserError, match=words):
                    pool.submit(claimed, other).result()
                assert claimed(other)  # the same thread does one thing at a time
                assert pool.submit(claimed, Demands(deterministic=True)).result()
            assert pool.submit(claimed, other).result()
        with compiled_once():
            config = small.config(tmp_path / "run", compile="sublayers")
            with pytest.raises(UserError, match="both compile their models"):
                pool.submit(train, config).result()
    assert not (tmp_path / "run").exists()
