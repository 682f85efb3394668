"""What every test gets: fresh tensors full of NaN, so that memory nobody wrote cannot pass, and kernels without a GPU."""

import functools
import gc
import importlib
import os
import pkgutil
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.utils import _device

try:  # a GPU machine has none
    from coverage import Coverage
except ImportError:
    Coverage = None

HERE = Path(__file__).parent
COVERED = pytest.StashKey[bool]()

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter. Triton asks once, when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1"

if "PYTEST_XDIST_WORKER" in os.environ:
    # As many workers as cores: with more threads than that they wait for each other and are several times slower.
    torch.set_num_threads(1)


def _poisoned(make):
    def fresh(*args, **kwargs):
        t = make(*args, **kwargs)
        if t.is_floating_point() and t.device.type != "meta":
            with torch.no_grad():  # some of torch's own callers ask for requires_grad
                t.fill_(float("nan"))
        return t

    return fresh


@pytest.fixture(autouse=True, scope="session")
def _poison_fresh_memory():
    _device._device_constructors()  # cached by identity: without it `with torch.device(...)` misses the patched ones
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield


def pytest_collection_finish():
    """What is there before the first test stays: Python's collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # or Triton complains of leaks when Python ends


def pytest_collection_modifyitems(items):
    """Coverage is measured by the tests of what it is of. It doubles the interpreter's time, so of kernels by those marked `covered`."""
    interpreted = {item for item in items if "quick_interpreter" in getattr(item, "fixturenames", ())}
    if interpreted:
        with suppress(ImportError):  # here, where it is measured, and not first by a test that is not
            for module in pkgutil.walk_packages([HERE.parent / "depthmix" / "ops"], "depthmix.ops."):
                importlib.import_module(module.name)
    nth = Counter()  # of a test's cases: every second shows the same lines
    for item in items:
        own = not {"mixers", "ops"}.isdisjoint(item.path.relative_to(HERE).parts)
        measured = own and (item not in interpreted or item.get_closest_marker("covered") is not None)
        item.stash[COVERED] = measured and nth[item.originalname] % 2 == 0
        nth[item.originalname] += measured


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Without the tracer pytest's own work around a test is faster too, so it is off for all of that and not only for the call."""
    measured = None if Coverage is None or item.stash[COVERED] else Coverage.current()
    if measured is None:
        return (yield)
    measured.stop()
    try:
        return (yield)
    finally:
        measured.start()


@pytest.fixture(autouse=True)
def _seed():
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # which would note for three kinds of GPU, with a trace each, what they are to be seeded with if they ever come
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def quick_interpreter():
    """Triton's interpreter patches its language again at every call of a function inside a kernel: half of its time.

    And it makes a table of all dtypes whenever it looks one up.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patched, slow = set(), interpreter.InterpretedFunction.__call__
    scalar, known = type(interpreter.tl.float32), functools.cache(interpreter._get_np_dtype)

    def np_dtype(dtype):
        element = dtype if type(dtype) is scalar else dtype.element_ty
        block = type(dtype) in (scalar, interpreter.tl.block_type) and type(element) is scalar
        return known(element) if block else known.__wrapped__(dtype)  # others cannot be keys

    def call(self, *args, **kwargs):
        if self.fn.__module__ in patched:
            return self.rewrite()(*args, **kwargs)
        patched.add(self.fn.__module__)
        return slow(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        patch.setattr(interpreter, "_get_np_dtype", np_dtype)
        yield
