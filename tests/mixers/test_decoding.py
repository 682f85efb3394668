"""Passes without gradients on kernels: one launch a site, the same results as training's, and a state that is still a value."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from depthmix import create_mixer
from depthmix.fast.one_stream import DecodedStream
from depthmix.fast.slots import SlotState
from depthmix.mixers.attnres import AttnResState
from depthmix.mixers.state import State
from depthmix.ops import use_backend
from depthmix.ops.norm import RMSNorm
from depthmix.ops.slots import kernels as slot_kernels
from depthmix.ops.slots import op as slot_op
from depthmix.ops.slots import running_softmax
from depthmix.ops.torch_internals import pytree
from ops.helpers import rand

pytest.importorskip("triton")
pytestmark = [pytest.mark.usefixtures("quick_interpreter"), pytest.mark.covered]
D, N_BLOCKS = 8, 2
RULES: list[tuple[str, dict[str, Any]]] = [
    ("residual", {}),
    ("attnres", {}),
    ("attnres", {"block_size": 4}),
    ("attnres", {"block_size": 3, "ways": 2, "output_gain": 0.5}),
    ("attnres", {"window": 2, "ways": 3, "output_gain": 0.5}),
    ("dca", {}),
    ("dca", {"relu_on": "sum", "w_per_entry": True}),
    ("grn", {"version": 1}),
    ("grn", {"version": 2}),
    ("denseformer", {}),
]
STEP = {"residual": "add_norm", "attnres": "pass_on", "dca": "add_up", "grn": "add_up", "denseformer": "add_up"}


def mixer_of(name: str, n_blocks: int = N_BLOCKS, **options: Any) -> Any:
    torch.manual_seed(0)
    mixer = create_mixer(name, dim=D, n_blocks=n_blocks, **options)
    with torch.no_grad():
        for p in mixer.parameters():
            p += 0.5 * torch.randn_like(p)
    return mixer


def norms_of(mixer: Any) -> tuple[list[nn.ModuleList], RMSNorm]:
    torch.manual_seed(1)
    norms = [nn.ModuleList(RMSNorm(D) for _ in range(mixer.ways(s))) for s in range(mixer.n_sites)]
    final = RMSNorm(D)
    with torch.no_grad():
        for n in (*(n for site in norms for n in site), final):
            n.weight += 0.3 * torch.randn(D)
    return norms, final


def sublayer(site: int, h: Any) -> Tensor:
    ways = h if isinstance(h, tuple) else (h,)
    return torch.tanh(sum((k + 1) * way for k, way in enumerate(ways)) + 0.1 * site)


def run(mixer: Any, x: Tensor, norms: Any, normed: bool = True) -> list[Tensor]:
    """Everything that the sublayers and the head see."""
    by_site, final = norms
    state, seen = mixer.start(x), []
    for site in range(mixer.n_sites):
        h = mixer.read(state, site, by_site[site] if normed else None)
        seen += h if isinstance(h, tuple) else (h,)
        state = mixer.write(state, site, sublayer(site, h))
    return [*seen, mixer.finish(state, final if normed else None)]


def near(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e.detach(), rtol=1e-5, atol=1e-5)


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels of decoding that were called."""
    names: list[str] = []

    def noted(name: str, run: Any) -> Any:
        def call(*args: Any) -> Any:
            names.append(name)
            return run(*args)

        return call

    for name in ("attend", "look_back", "add_up", "add_norm"):
        monkeypatch.setattr(slot_kernels, name, noted(name, getattr(slot_kernels, name)))
    monkeypatch.setattr(running_softmax, "pass_on", noted("pass_on", running_softmax.pass_on))
    return names


@pytest.mark.parametrize(("name", "options"), RULES, ids=str)
def test_without_gradients_a_site_is_one_launch_and_reads_what_training_reads(name, options, launched):
    mixer, x = mixer_of(name, **options), rand(1, 1, D, dtype=torch.float32)
    norms = norms_of(mixer)
    with use_backend("reference"):
        expected = run(mixer, x, norms)
    with use_backend("triton"), torch.no_grad():
        near(run(mixer, x, norms), expected)
    assert len(launched) == mixer.n_sites + 1
    assert ("attend" if "window" in options else STEP[name]) in launched
    with use_backend("triton"):
        near(run(mixer, x, norms), expected)
    assert len(launched) == mixer.n_sites + 1  # training has its own kernels


@pytest.mark.parametrize(("name", "options"), [RULES[3], RULES[5], RULES[9], RULES[0]], ids=str)
def test_norms_that_no_kernel_knows_and_outputs_in_another_precision(name, options):
    mixer, x = mixer_of(name, **options), rand(2, D, dtype=torch.float16)
    norms = norms_of(mixer)
    with torch.no_grad(), use_backend("reference"):
        expected = run(mixer, x, norms, normed=False)
    with torch.no_grad(), use_backend("triton"):
        for a, e in zip(run(mixer, x, norms, normed=False), expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-2, atol=1e-2)


def finished(mixer: Any, x: Tensor, norms: Any, last: int | None) -> Tensor:
    state = mixer.start(x)
    for site in range(mixer.n_sites):
        state = mixer.write(state, site, sublayer(site, mixer.read(state, site, norms[0][site])))
    return mixer.finish(state, norms[1], last)


LAST = [*RULES, ("dca", {"window": 1}), ("attnres", {"routing": "add"}), ("hyper", {}), ("laurel", {"variant": "pa"})]


@pytest.mark.parametrize(("name", "options"), LAST, ids=str)
def test_finish_of_the_last_tokens_alone(name, options, monkeypatch):
    """Of several sequences, through the kernels for many tokens; with gradients or without."""
    monkeypatch.setattr("depthmix.ops.slots.op.STEP_TOKENS", 0)
    mixer, x = mixer_of(name, **options), rand(2, 3, D, dtype=torch.float32)
    norms = norms_of(mixer)
    with use_backend("reference"):
        expected = finished(mixer, x, norms, None)[:, -2:]
        near([finished(mixer, x, norms, 2)], [expected])
    for backend in ("triton", "reference"):
        with use_backend(backend), torch.no_grad():
            near([finished(mixer, x, norms, 2)], [expected])


def test_sources_are_passed_on_where_that_moves_little_and_read_again_elsewhere(launched, monkeypatch):
    mixer, x = mixer_of("attnres", ways=2), rand(1, D, dtype=torch.float32)
    norms = norms_of(mixer)
    half = (mixer.n_sites + 1 + N_BLOCKS) // 2  # of the readers are to come
    seen = {}
    for room in (half * D * 8, half * D * 8 - 1):
        monkeypatch.setattr(slot_op, "PASS_BYTES", room)
        launched.clear()
        with use_backend("triton"), torch.no_grad():
            found = run(mixer, x, norms)
        assert len(set(launched)) == 1
        seen[launched[0]] = found
    assert set(seen) == {"pass_on", "attend"}
    near(*seen.values())


def test_full_reads_old_sources_in_groups_where_they_are_many(launched, monkeypatch):
    monkeypatch.setattr(slot_op, "PASS_BYTES", 0)
    monkeypatch.setattr(slot_kernels, "LANE", 1)  # four sources at a time
    mixer, x = mixer_of("attnres", n_blocks=5), rand(1, D, dtype=torch.float32)
    norms = norms_of(mixer)
    with use_backend("reference"):
        expected = run(mixer, x, norms)
    with use_backend("triton"), torch.no_grad():
        near(run(mixer, x, norms), expected)
    assert launched.count("look_back") == 1  # at site 8
    assert launched.count("attend") == 11


@pytest.mark.parametrize("size", [2, 5, 30])
def test_block_mixes_finished_sources_for_a_block_of_readers(size, launched, monkeypatch):
    """Also where they are more than a tile holds, where the last block is cut off, and where there is one block."""
    monkeypatch.setattr(slot_op, "PASS_BYTES", 0)
    monkeypatch.setattr(slot_kernels, "LANE", 1)  # four sources at a time
    mixer, x = mixer_of("attnres", n_blocks=6, block_size=size, ways=3), rand(1, D, dtype=torch.float32)
    norms = norms_of(mixer)
    with use_backend("reference"):
        expected = run(mixer, x, norms)
    with use_backend("triton"), torch.no_grad():
        near(run(mixer, x, norms), expected)
    assert launched == ["pass_on"] * (mixer.n_sites + 1)


@pytest.mark.parametrize(("name", "options"), [RULES[1], RULES[2], RULES[3], RULES[5], RULES[0], RULES[9]], ids=str)
def test_a_state_is_a_value(name, options):
    """Two passes that go on from one state, reads that are repeated or left out, and a round trip as a pytree."""
    mixer, x = mixer_of(name, n_blocks=3, **options), rand(1, D, dtype=torch.float32)
    norms = norms_of(mixer)
    outs = {}
    for backend in ("reference", "triton"):
        with use_backend(backend), torch.no_grad():
            state = mixer.start(x)
            assert isinstance(state, SlotState | DecodedStream) == (backend == "triton")
            for site in range(3):
                mixer.read(state, site)  # somebody looks
                if site != 1:
                    mixer.read(state, site, norms[0][site])
                state = mixer.write(state, site, sublayer(site, x))
            left = mixer.write(state, 3, sublayer(3, x))
            right = mixer.write(state, 3, sublayer(4, x))
            seen = []
            for site in (4, 5):
                for which, other in ((0, left), (1, right)):
                    h = mixer.read(other, site, norms[0][site])
                    seen += h if isinstance(h, tuple) else (h,)
                    new = mixer.write(other, site, sublayer(site + which, x))
                    left, right = (new, right) if which == 0 else (left, new)
            leaves, spec = pytree.tree_flatten(left)
            again = pytree.tree_unflatten(leaves, spec)
            outs[backend] = [*seen, mixer.finish(left), mixer.finish(right), mixer.finish(again, norms[1])]
    near(outs["triton"], outs["reference"])


@pytest.mark.parametrize(("name", "options"), [RULES[2], RULES[5], RULES[0], RULES[9]], ids=str)
@pytest.mark.parametrize("at", [0, 3])
def test_a_state_begun_without_gradients_has_them_where_they_are_wanted(name, options, at):
    """A prefix without gradients, then training: the gradients are those of a prefix that is detached."""
    mixer, x = mixer_of(name, **options), rand(1, D, dtype=torch.float32)
    grads = {}
    for backend in ("reference", "triton"):
        mixer.zero_grad()
        with use_backend(backend):
            with torch.no_grad():
                state: State = mixer.start(x)
                for site in range(at):
                    mixer.read(state, site)
                    state = mixer.write(state, site, sublayer(site, x))
            for site in range(at, mixer.n_sites):
                state = mixer.write(state, site, sublayer(site, mixer.read(state, site)))
            out = mixer.finish(state)
            if out.requires_grad:
                out.sum().backward()
        grads[backend] = [out, *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in mixer.parameters())]
    near(grads["triton"], grads["reference"])


def test_many_tokens_have_the_kernels_of_training(launched):
    mixer = mixer_of("attnres", n_blocks=1)
    with use_backend("triton"), torch.no_grad():
        assert isinstance(mixer.start(torch.zeros(1, D).requires_grad_()), AttnResState)  # its gradient may be wanted
        assert isinstance(mixer.start(torch.zeros(256, D)), SlotState)
        assert isinstance(mixer.start(torch.zeros(257, D)), AttnResState)
        assert isinstance(mixer.start(torch.zeros(0, D)), SlotState)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_output_is_multiplied_with_its_gain_once(scaled):
    """By the launch that puts it into its slot, by a read with gradients that comes instead, or by the model."""
    mixer = mixer_of("attnres", block_size="all", ways=2, output_gain=0.5)
    x, y = (rand(1, D, dtype=torch.float32, seed=seed) for seed in (1, 2))
    with use_backend("reference"):
        expected = list(mixer.read(mixer.write(mixer.start(x), 0, y), 1).unbind(0))
    with use_backend("triton"):
        with torch.no_grad():
            given = mixer.gamma[0] * y if scaled else y
            state = mixer.write(mixer.start(x), 0, given, scaled=scaled)
            near(list(mixer.read(state, 1).unbind(0)), expected)
            state = mixer.write(mixer.start(x), 0, given, scaled=scaled)
        near(list(mixer.read(state, 1).unbind(0)), expected)
