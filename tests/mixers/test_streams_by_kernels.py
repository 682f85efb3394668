"""Hyper-Connections and mHC by kernels, in Triton's interpreter: what the reference gives, and states that are values."""

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from depthmix.ops import use_backend
from depthmix.ops.norm import RMSNorm
from harness import DIM, build

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")

CASES = [
    ("hyper", {"n": 2}),
    ("hyper", {"n": 3, "norm": "rmsnorm", "tanh": False}),
    ("hyper", {"n": 2, "static": True}),
    ("mhc", {"n": 2, "iterations": 3}),
    ("mhc", {"n": 3, "convention": "deepseek", "iterations": 2, "head": "learned"}),
    ("mhc", {"n": 2, "residual_map": "identity", "head": "mean"}),
    ("mhc", {"n": 2, "residual_map": "birkhoff", "schedule": "single_pass"}),
    ("mhc", {"n": 3, "residual_map": "birkhoff"}),
    ("mhc", {"n": 2, "iterations": 2, "schedule": "single_pass"}),
]
every_case = pytest.mark.parametrize(("name", "choice"), CASES, ids=str)


class Stack(torch.nn.Module):
    def __init__(self, name, choice, n_blocks=1):
        super().__init__()
        self.mixer = build(name, n_blocks, choice, random=True, dtype=torch.float32)
        self.norms = torch.nn.ModuleList(RMSNorm(DIM, eps=1e-5) for _ in range(2 * n_blocks))
        self.weight = torch.nn.Parameter(torch.randn(2 * n_blocks, DIM))
        for norm in self.norms:
            torch.nn.init.normal_(norm.weight)

    def site(self, state, site, normed=True):
        h = self.mixer.read(state, site, self.norms[site] if normed else None)
        return self.mixer.write(state, site, torch.tanh(h * self.weight[site].to(h.dtype)))

    def forward(self, x, around=lambda f, *a: f(*a), normed=True):
        state = self.mixer.start(x)
        for site in range(self.mixer.n_sites):
            state = around(self.site, state, site, normed)
        return self.mixer.finish(state)


def results(stack, x, **options):
    x = x.detach().requires_grad_()
    out = stack(x, **options)
    grads = torch.autograd.grad(out.square().sum(), [x, *stack.parameters()], allow_unused=True)
    return [out.detach(), *(torch.zeros(()) if g is None else g for g in grads)]


def assert_near(actual, expected, tol=1e-5):
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        a, e = a.detach(), e.detach()
        assert a.shape == e.shape, i
        assert float((a.double() - e.double()).abs().max()) <= tol * max(1.0, float(e.abs().max())), i


@pytest.mark.covered
@every_case
def test_outputs_and_all_gradients_are_the_references(name, choice):
    stack, x = Stack(name, choice), torch.randn(3, 1, DIM)
    normed = choice["n"] == 2  # otherwise it is applied after the read
    with use_backend("triton"):
        got = results(stack, x, normed=normed)
    assert_near(got, results(stack.double(), x.double(), normed=normed))


@pytest.mark.parametrize(("name", "choice"), [CASES[2], CASES[6]], ids=str)
def test_checkpointing_gives_the_same_bits(name, choice):
    stack, x = Stack(name, choice), torch.randn(2, DIM)
    with use_backend("triton"):
        plain = results(stack, x)
        saved = results(stack, x, around=lambda f, *a: checkpoint(f, *a, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, saved, strict=True))


@pytest.mark.parametrize(("name", "choice"), [CASES[0], CASES[2], CASES[3], CASES[6]], ids=str)
def test_a_state_is_a_value(name, choice):
    """Written twice, with or without the read before it, and after a pytree round trip."""
    mixer = build(name, 1, choice, random=True, dtype=torch.float32)
    sources = [torch.randn(2, DIM) for _ in range(3)]
    with use_backend("triton"):
        state = mixer.start(sources[0])
        for site in range(2):
            leaves, spec = pytree.tree_flatten(state)
            bare = mixer.write(pytree.tree_unflatten(leaves, spec), site, sources[site + 1])
            with torch.no_grad():
                mixer.read(state, site)
            first = mixer.write(state, site, sources[site + 1])
            mixer.read(state, site)
            second = mixer.write(state, site, sources[site + 1])
            for a, b, c in zip(*(pytree.tree_leaves(s) for s in (bare, first, second)), strict=True):
                if a is not None:
                    assert torch.equal(a, b)
                    assert torch.equal(a, c)
                    assert a.requires_grad == b.requires_grad == c.requires_grad
            state = second
        out = mixer.finish(state)
    with use_backend("reference"):  # a state made by kernels
        assert_near([mixer.finish(state)], [out])


@pytest.mark.parametrize("name", ["hyper", "mhc"])
def test_zero_tokens(name):
    stack, empty = Stack(name, {"n": 2}), torch.zeros(0, 2, DIM)
    with use_backend("triton"):
        out, dx, *grads = results(stack, empty)
    assert out.shape == dx.shape == empty.shape
    assert all(not g.any() for g in grads)


def test_narrower_outputs_and_second_derivatives():
    """An fp32 stack with bf16 outputs, and create_graph=True through the reference."""
    stack, x = Stack("mhc", {"n": 2, "iterations": 2}), torch.randn(2, DIM, requires_grad=True)
    with use_backend("triton"):
        state = stack.mixer.start(x)
        for site in range(2):
            h = stack.mixer.read(state, site, stack.norms[site])
            assert h.dtype == torch.float32
            state = stack.mixer.write(state, site, h.bfloat16())
        assert stack.mixer.finish(state).dtype == torch.float32

    def second(x):
        (g,) = torch.autograd.grad(stack(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), [x, stack.weight])

    with use_backend("triton"):
        got = second(x)
    assert_near(got, second(x), 1e-4)
