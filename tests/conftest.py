"""What every test gets: fresh tensors full of NaN, so that memory nobody wrote cannot pass."""

import os

import pytest
import torch
from torch.utils import _device

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


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
