"""A state is a value although it keeps the tensors it was given: a change of one in place is refused, or changes nothing."""

import pytest
import torch

from depthmix.ops import use_backend
from depthmix.ops.norm import RMSNorm
from harness import DIM, MIXERS, Sublayers, as_tuple, build, embedding

every_mixer = pytest.mark.parametrize("name", MIXERS)
with_and_without_gradients = pytest.mark.parametrize("trains", [True, False], ids=["trains", "no_grad"])

# How a caller may change what it has given or got.
REFUSED = "keeps a tensor of shape .* changed in place"


class Pass:
    """One pass of two blocks. change(moment, site, tensors) may change tensors in place at a moment of a site."""

    def __init__(self, mixer, trains, normed=False):
        self.mixer, self.trains = mixer, trains
        self.sublayers, self.e = Sublayers(2), embedding()
        self.norm = RMSNorm(DIM).double() if normed else None

    def run(self, change=None, buffer=None):
        change = change or (lambda *_: None)
        mixer, weights = self.mixer, [self.sublayers.weight, *self.mixer.parameters()]
        with torch.set_grad_enabled(self.trains):
            e = self.e.clone().requires_grad_(self.trains)
            x = e * 1
            state, outputs = mixer.start(x), [x]
            change("started", 0, outputs)
            for site in range(mixer.n_sites):
                norms = None if self.norm is None else [self.norm] * mixer.ways(site)
                h = as_tuple(mixer.read(state, site, norms))
                y = self.sublayers(site, h)
                if buffer is not None:
                    y = buffer.copy_(y)
                change("read", site, list(h))
                state = mixer.write(state, site, y)
                outputs.append(y)
                change("written", site, outputs)
            out = mixer.finish(state)
            change("finished", 0, outputs)
            if not self.trains:
                return [out]
            grads = torch.autograd.grad((out * self.e).sum(), [e, *weights], allow_unused=True)
            return [out, *(torch.zeros(()) if g is None else g for g in grads)]


def spoil(tensor):
    with torch.no_grad():
        tensor.mul_(3).add_(1)


def refused_or_the_same(run, expected, change=None, **kwargs):
    """Run with a change, which is refused or has no effect."""
    try:
        found = run.run(change, **kwargs)
    except RuntimeError as error:
        if not any(words in str(error) for words in ("changed in place", "modified by an inplace operation")):
            raise
        return
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@with_and_without_gradients
@every_mixer
def test_an_output_that_changes_later_is_refused_or_without_effect(name, trains):
    """Any output, the embedding among them, changed at any later moment of the pass."""
    run = Pass(build(name, 2, random=True), trains)
    expected = run.run()
    for at in range(run.mixer.n_sites):
        for which in range(at + 2):
            refused_or_the_same(run, expected, lambda moment, site, outputs, at=at, which=which: (
                spoil(outputs[which]) if (moment, site) == ("written", at) else None
            ))  # fmt: skip
    for which in range(run.mixer.n_sites + 1):
        refused_or_the_same(run, expected, lambda moment, site, outputs, which=which: (
            spoil(outputs[which]) if moment == "finished" else None
        ))  # fmt: skip


@with_and_without_gradients
@every_mixer
def test_a_read_that_is_changed_is_refused_or_without_effect(name, trains):
    run = Pass(build(name, 2, random=True), trains)
    expected = run.run()
    for at in range(run.mixer.n_sites):
        for way in range(run.mixer.ways(at)):
            refused_or_the_same(run, expected, lambda moment, site, h, at=at, way=way: (
                spoil(h[way]) if (moment, site) == ("read", at) else None
            ))  # fmt: skip


@every_mixer
def test_outputs_in_one_buffer_are_refused_or_as_good_as_others(name):
    run = Pass(build(name, 2, random=True), trains=False)
    refused_or_the_same(run, run.run(), buffer=torch.empty_like(run.e))


@pytest.mark.parametrize("name", ["attnres", "dca", "grn"])
def test_what_is_refused_is_said(name):
    run = Pass(build(name, 2, random=True), trains=False)
    with pytest.raises(RuntimeError, match=f"read at site 1: {name} {REFUSED}.*give write a copy"):
        run.run(lambda moment, site, outputs: spoil(outputs[-1]) if (moment, site) == ("written", 0) else None)


@every_mixer
def test_a_pass_in_inference_mode_is_the_same(name):
    """There are no versions to compare."""
    run = Pass(build(name, 2, random=True), trains=False)
    expected = run.run()
    with torch.inference_mode():
        torch.testing.assert_close(run.run(), expected, rtol=0, atol=0)


KERNELS = [
    ("attnres", {}),
    ("attnres", {"block_size": 3}),
    ("grn", {}),
    ("residual", {}),
    ("hyper", {"n": 2, "static": True}),
]


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "raw"])
@pytest.mark.parametrize(("name", "choice"), KERNELS, ids=str)
def test_by_kernels_a_change_is_refused_or_without_effect(name, choice, normed):
    """A wrong gradient without a word is what autograd's own nodes never give."""
    pytest.importorskip("triton")
    run = Pass(build(name, 2, choice, random=True, dtype=torch.float32), True, normed)
    run.sublayers, run.e = run.sublayers.float(), run.e[:1, :3].float()  # a program of a kernel for every token
    run.norm = None if run.norm is None else run.norm.float()
    with use_backend("triton"):
        expected = run.run()
        for at, which in ((0, 0), (0, 1), (1, 1), (2, 3)):
            refused_or_the_same(run, expected, lambda moment, site, outputs, at=at, which=which: (
                spoil(outputs[which]) if (moment, site) == ("written", at) else None
            ))  # fmt: skip
        for at in (1,) if name == "hyper" else (1, 2):
            refused_or_the_same(run, expected, lambda moment, site, h, at=at: (
                spoil(h[0]) if (moment, site) == ("read", at) else None
            ))  # fmt: skip
