"""Products of matrices in a mixer are fp32 whatever precision the process allows for its others."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from depthmix.ops import matmul as module
from depthmix.ops.matmul import _ieee, _ieee_matmul, lowered, matmul
from harness import EVERY_VALUE, Sublayers, build, embedding, run_stack
from small_cases import each

PRODUCTS = {"matmul", "mm", "bmm", "addmm", "baddbmm", "convolution"}


@pytest.fixture(params=["high", "medium"])
def lowered_precision(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    assert lowered("cpu")
    assert lowered("cuda")
    yield request.param
    torch.set_float32_matmul_precision(before)


def test_values_and_gradients(lowered_precision):
    a, b = torch.randn(2, 3, 5, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    g = torch.randn(2, 3, 7)
    out = matmul(a, b)
    found = torch.autograd.grad(out, (a, b), g)
    wide = [t.detach().double().requires_grad_() for t in (a, b)]
    expected = wide[0] @ wide[1]
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    for f, e in zip(found, torch.autograd.grad(expected, wide, g.double()), strict=True):
        torch.testing.assert_close(f.double(), e, rtol=1e-5, atol=1e-6)


def test_second_derivatives(lowered_precision):
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    first = torch.autograd.grad(matmul(a, b).square().sum(), a, create_graph=True)[0]
    found = torch.autograd.grad(first.square().sum(), (a, b))
    wide = [t.detach().double().requires_grad_() for t in (a, b)]
    first = torch.autograd.grad((wide[0] @ wide[1]).square().sum(), wide[0], create_graph=True)[0]
    for f, e in zip(found, torch.autograd.grad(first.square().sum(), wide), strict=True):
        torch.testing.assert_close(f.double(), e, rtol=1e-4, atol=1e-4)


class Precision(TorchDispatchMode):
    """Notes the setting in force at every fp32 product, inside our operator and outside of it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in PRODUCTS and any(isinstance(t, torch.Tensor) and t.dtype == torch.float32 for t in args):
            self.seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        if name == "ieee_matmul":  # its product is below this mode, so look from inside
            with self:
                return _ieee_matmul(*args)
        return func(*args, **(kwargs or {}))


def test_the_setting_is_ieee_inside_and_as_it_was_outside(lowered_precision):
    before = [torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision]
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    with Precision() as mode:
        matmul(a, b).sum().backward()
    assert mode.seen == ["ieee"] * 3
    with pytest.raises(RuntimeError):
        torch.ops.depthmix.ieee_matmul(a, a)
    assert [torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision] == before
    assert torch.get_float32_matmul_precision() == lowered_precision


class Watched:
    """The setting of one device, which notes that somebody has read it."""

    def __init__(self, precision):
        self.precision, self.read = precision, threading.Event()

    @property
    def fp32_precision(self):
        self.read.set()
        return self.precision

    @fp32_precision.setter
    def fp32_precision(self, value):
        self.precision = value


@pytest.mark.parametrize(("precision", "expected"), [("tf32", True), ("ieee", False), ("none", False)])
def test_another_threads_product_does_not_hide_the_setting(monkeypatch, precision, expected):
    """Asked while another thread has put IEEE in force for one product, it answers with what is in force after it."""
    settings, found = Watched(precision), []
    monkeypatch.setattr(module, "_settings", lambda device_type: settings)
    asking = threading.Thread(target=lambda: found.append(lowered("cpu")))
    with _ieee("cpu"):
        settings.read.clear()
        asking.start()
        assert settings.read.wait(60)
        assert settings.precision == "ieee"
    asking.join(60)
    assert found == [expected]
    assert settings.precision == precision


def test_a_setting_that_is_chosen_meanwhile_stays(monkeypatch):
    settings = Watched("tf32")
    monkeypatch.setattr(module, "_settings", lambda device_type: settings)
    with _ieee("cpu"):
        settings.fp32_precision = "bf16"
    assert settings.precision == "bf16"


@each(("name", "choice"), EVERY_VALUE)
def test_no_product_of_a_mixer_is_lowered(name, choice):
    """Forward and backward, in every form of every rule."""
    mixer, e = build(name, 2, choice, random=True, dtype=torch.float32), embedding(torch.float32).requires_grad_()
    sublayers = Sublayers(2, dtype=torch.float32)
    sublayers.forward = lambda site, reads: sum(reads).tanh()  # no products but the mixer's
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with Precision() as mode:
            run_stack(mixer, sublayers, e)[0].sum().backward()
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(mode.seen) <= {"ieee"}


def test_nothing_changes_where_nothing_is_lowered():
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    assert not lowered("cpu")
    assert not lowered("mps")
    assert torch.equal(matmul(a, b), a @ b)


def test_operator_is_well_formed():
    a, b = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    torch.library.opcheck(torch.ops.depthmix.ieee_matmul, (a, b))
