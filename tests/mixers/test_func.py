"""torch.func and forward-mode derivatives: per-sample gradients, Jacobians and second derivatives of every rule."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

from depthmix.ops import BackendError, use_backend
from harness import MIXERS, Sublayers, as_tuple, build

D, BLOCKS = 8, 2
# The rules whose operators have a backward of their own, in the forms that reach it.
CASES = [(name, {}) for name in MIXERS] + [
    ("attnres", {"block_size": 2, "ways": 2}),
    ("attnres", {"weights": "static"}),
    ("grn", {"version": 3, "relu_on": "sum"}),
]


class Stack(torch.nn.Module):
    def __init__(self, name, options):
        super().__init__()
        self.mixer = build(name, BLOCKS, options, random=True, dim=D)
        self.sublayers = Sublayers(BLOCKS, D)
        norms = ([torch.nn.RMSNorm(D, eps=1e-5) for _ in range(self.mixer.ways(s))] for s in range(self.mixer.n_sites))
        self.norms = torch.nn.ModuleList(map(torch.nn.ModuleList, norms)).double()

    def forward(self, x):
        state = self.mixer.start(x)
        for site, norms in enumerate(self.norms):
            h = as_tuple(self.mixer.read(state, site, norms))
            state = self.mixer.write(state, site, self.sublayers(site, h))
        return self.mixer.finish(state)


def case(name, options):
    stack = Stack(name, options)
    return stack, dict(stack.named_parameters()), torch.randn(2, 3, D, dtype=torch.float64)


every_case = pytest.mark.parametrize(("name", "options"), CASES, ids=lambda v: v if isinstance(v, str) else str(v))


@every_case
def test_per_sample_gradients(name, options):
    stack, parameters, x = case(name, options)

    def loss(parameters, x):
        return functional_call(stack, parameters, (x,)).square().mean()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for k, sample in enumerate(x):
        expected = torch.autograd.grad(stack(sample).square().mean(), parameters.values(), allow_unused=True)
        for key, e in zip(parameters, expected, strict=True):
            torch.testing.assert_close(
                found[key][k], torch.zeros_like(parameters[key]) if e is None else e, rtol=1e-9, atol=1e-12
            )


@every_case
def test_derivatives_in_all_modes_agree(name, options):
    stack, _, x = case(name, options)
    x, v = x[:1], torch.randn_like(x[:1])

    def last(x):
        return stack(x)[0, -1]

    by_rows = jacrev(last)(x)
    torch.testing.assert_close(jacfwd(last)(x), by_rows, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(jvp(last, (x,), (v,))[1], (by_rows * v).flatten(1).sum(1), rtol=1e-9, atol=1e-12)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(last(forward_ad.make_dual(x, v))).tangent
    torch.testing.assert_close(tangent, (by_rows * v).flatten(1).sum(1), rtol=1e-9, atol=1e-12)
    plain = torch.autograd.functional.jacobian(last, x)
    torch.testing.assert_close(by_rows, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["attnres", "dca"])
def test_second_derivatives(name):
    stack, _, x = case(name, {})
    x = x[:1, :2]
    found = hessian(lambda x: stack(x).square().sum())(x)
    expected = torch.autograd.functional.hessian(lambda x: stack(x).square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_kernels_leave_it_to_the_reference_and_say_so_where_they_are_forced():
    pytest.importorskip("triton")
    mixer = build("attnres", 1, dim=D, dtype=torch.float32)

    def finish(x):
        state = mixer.start(x)
        for site in range(2):
            state = mixer.write(state, site, mixer.read(state, site))
        return mixer.finish(state).sum()

    with use_backend("triton"), pytest.raises(BackendError, match=r"torch\.func and forward-mode .* the reference"):
        grad(finish)(torch.randn(3, D))
    with use_backend("triton"):  # a state made with kernels, read under a transform
        state = mixer.start(torch.randn(3, D))
        state = mixer.write(state, 0, mixer.read(state, 0))
    y = torch.randn(3, D, requires_grad=True)
    found = grad(lambda y: mixer.finish(mixer.write(state, 1, y)).sum())(y.detach())
    (expected,) = torch.autograd.grad(mixer.finish(mixer.write(state, 1, y)).sum(), y)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
