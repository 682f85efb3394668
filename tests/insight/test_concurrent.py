"""Measurements beside other calls of the same model: each thread has what it has alone, and the model stays as it was."""

import functools
import threading

import pytest
import torch

from depthmix import depth_mixing
from depthmix.insight import depth_map, edge_effects, magnitudes, skip_effects
from depthmix.insight.intercept import intercepted
from depthmix.mixers.sharding import CONTRACT
from insight.small_decoder import decoder, tokens
from threads import LIMIT, at_once, meet_at

MEASURES = {
    "mixing": lambda model, ids: depth_mixing(model, ids),
    "map": lambda model, ids: depth_map(model, [ids]).mean,
    "magnitudes": lambda model, ids: magnitudes(model, ids),
    "skips": lambda model, ids: skip_effects(model, [ids]).change,
    "edges": lambda model, ids: edge_effects(model, [ids]).change,
}
every_measure = pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)


def beside(module, call, other, passes=1):
    """What two calls return, the other made from beginning to end while the first is in its pass of that number through a module."""
    inside, over, thread, count = threading.Event(), threading.Event(), [], [0]

    def wait(*_):
        if threading.current_thread() is thread[0]:
            count[0] += 1
            if count[0] == passes:
                inside.set()
                assert over.wait(LIMIT)

    def first():
        thread.append(threading.current_thread())
        return call()

    def second():
        assert inside.wait(LIMIT)
        try:
            return other()
        finally:
            over.set()

    handle = module.register_forward_pre_hook(wait)
    try:
        return at_once(first, second)
    finally:
        handle.remove()


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@every_measure
@torch.no_grad()
def test_inference_beside_a_measurement(measure):
    model, ids = decoder("attnres", {"ways": 2}), tokens(length=5)
    alone, logits = measure(model, ids), model(ids)
    passes = 2 if measure in (MEASURES["skips"], MEASURES["edges"]) else 1  # the first of these changes nothing
    with torch.no_grad():
        found, seen = beside(model.sublayers[1], lambda: measure(model, ids), lambda: model(ids).detach(), passes)
    same(found, alone)
    same(seen, logits)
    assert not set(CONTRACT) & set(vars(model.mixer))


@every_measure
def test_two_measurements_at_once(measure):
    model = decoder("attnres", {"ways": 2})
    calls = [functools.partial(measure, model, tokens(length=5, seed=seed)) for seed in (1, 2)]
    alone = [call() for call in calls]
    meet_at(model.sublayers[0], 2)
    same(at_once(*calls), alone)
    assert not set(CONTRACT) & set(vars(model.mixer))


def test_a_compiled_model_runs_beside_a_measurement_and_is_measured_itself():
    model, ids = decoder("highway", n_blocks=1), tokens()  # few lines to trace
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected = depth_mixing(model, ids)
    with torch.no_grad():
        logits = compiled(ids)

        def silent(state, site, y):
            raise AssertionError("another thread's write was called")

        with intercepted(model.mixer, write=silent):
            (seen,) = at_once(torch.no_grad()(lambda: compiled(ids)))
    torch.testing.assert_close(seen, logits)
    torch.testing.assert_close(depth_mixing(compiled, ids), expected)


def with_dropout():
    """A decoder in train mode with dropout, but for one sublayer."""
    model = decoder("attnres")
    for sublayer in model.sublayers:
        sublayer.register_forward_hook(lambda module, _, y: torch.nn.functional.dropout(y, 0.5, module.training))
    model.train().sublayers[2].eval()
    return model


@every_measure
def test_what_is_random_in_training_is_off_and_the_mode_and_the_random_generator_stay(measure):
    model, ids = with_dropout(), tokens(length=5)
    modes, random = [module.training for module in model.modules()], torch.get_rng_state()
    found = measure(model, ids)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    same(found, measure(model.eval(), ids))


@every_measure
def test_two_measurements_of_a_model_in_train_mode(measure):
    """The first to end does not put the mode back, under which the other one would be random."""
    model, ids = with_dropout(), tokens(length=5)
    modes, alone = [module.training for module in model.modules()], measure(model, ids)
    calls = (lambda: measure(model, ids),) * 2
    same(beside(model.sublayers[1], *calls), [alone] * 2)
    assert [module.training for module in model.modules()] == modes
