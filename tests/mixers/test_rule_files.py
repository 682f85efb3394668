"""A rule's file is its paper in plain PyTorch: it never says how it runs, and it computes what its faster ways compute."""

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

from depthmix import Mixer
from depthmix.mixers import mixer_class
from harness import MIXERS, PAIRWISE, Sublayers, build, embedding, label, run_stack

# Every method of Mixer is here: what a rule may override, and what it may not.
OVERRIDABLE = {
    "reset_parameters",
    "ways",
    "_start",
    "_read",
    "_write",
    "_finish",
    "output_gains",
    "weight_options",
}
FIXED = {
    "__init__",
    "start",
    "read",
    "write",
    "finish",
    "mixing",
    "extra_repr",
    "_apply",
    "_scaled",
    "_hand_out",
}
WORDS = re.compile(r"kernel|triton|launch|slot|fused", re.IGNORECASE)


def classes_of(name):
    """The classes of a rule that lie below Mixer."""
    return [cls for cls in mixer_class(name).__mro__ if issubclass(cls, Mixer) and cls is not Mixer]


def methods_of(cls):
    """Methods and properties that a class itself defines."""
    kinds = (property, classmethod, staticmethod)
    return {name for name, value in vars(cls).items() if inspect.isfunction(value) or isinstance(value, kinds)}


def test_a_rule_may_override_at_most_nine_methods():
    assert methods_of(Mixer) | {"weight_options"} == OVERRIDABLE | FIXED
    assert len(OVERRIDABLE) <= 9


@pytest.mark.parametrize("name", MIXERS)
def test_a_rule_overrides_nothing_else(name):
    """Neither of Mixer nor of the classes above it, such as torch.nn.Module."""
    inherited = {method for base in Mixer.__mro__ for method in methods_of(base)}
    for cls in classes_of(name):
        assert methods_of(cls) & inherited <= OVERRIDABLE | {"__init__"}, cls


def files():
    """The contract, and every file in which a part of a rule stands."""
    modules = {cls.__module__ for name in MIXERS for cls in classes_of(name)} | {Mixer.__module__}
    return sorted(Path(sys.modules[module].__file__) for module in modules)


@pytest.mark.parametrize("file", files(), ids=lambda file: file.stem)
def test_a_rule_does_not_say_how_it_runs(file):
    lines = enumerate(file.read_text().splitlines(), 1)
    assert [f"{number}: {line}" for number, line in lines if WORDS.search(line)] == []


FASTER = [(name, choice) for name, choice in PAIRWISE if mixer_class(name).fast_paths]


@pytest.mark.parametrize(("name", "choice"), FASTER, ids=[label(*case) for case in FASTER])
def test_the_rule_computes_what_its_faster_ways_compute(name, choice):
    """Output, every read and every gradient, and a prefix in one way that continues in the other."""
    mixer, sublayers, e = build(name, 2, choice, random=True), Sublayers(2), embedding().requires_grad_()
    inputs, direction = [e, *sublayers.parameters(), *mixer.parameters()], torch.randn_like(e)
    results = []
    paths = mixer._paths
    for chosen in (paths, ()):
        mixer._paths = chosen
        out, reads, _ = run_stack(mixer, sublayers, e)
        gradients = torch.autograd.grad((out * direction).sum(), inputs, allow_unused=True)
        results.append([out, *(h for read in reads for h in read), *gradients])
    state = mixer.start(e)
    for site in range(mixer.n_sites):
        if site == 2:
            mixer._paths = paths
        h = mixer.read(state, site)
        state = mixer.write(state, site, sublayers(site, h if isinstance(h, tuple) else (h,)))
    torch.testing.assert_close(mixer.finish(state), results[0][0], rtol=1e-9, atol=1e-9)
    for fast, plain in zip(*results, strict=True):
        assert (fast is None) == (plain is None)
        if fast is not None:
            torch.testing.assert_close(fast, plain, rtol=1e-8, atol=1e-9 * max(1.0, float(plain.detach().abs().max())))
