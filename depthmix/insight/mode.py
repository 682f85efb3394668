"""Measure a model in eval mode, and leave it in the mode that it was in.

A mode is an attribute that all threads share. A module that is in eval mode already is not touched, and measurements at once of one
model in train mode count: the last of them to end puts it back. A thread that trains a model while another measures it runs
without dropout meanwhile, and its weights change under the measurement: measure a copy then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_lock = threading.Lock()
# Measurements at once of each module that was in train mode before the first of them.
_measured: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module of a model in eval mode inside this context, so that nothing is random and no random generator
    advances.
    """
    with _lock:
        mine = [module for module in model.modules() if module.training or module in _measured]
        for module in mine:
            _measured[module] = _measured.get(module, 0) + 1
            # Not `train(False)`, which a module may take for more than a mode: some adapters merge their weights.
            module.training = False
    try:
        yield
    finally:
        with _lock:
            for module in mine:
                _measured[module] -= 1
                if not _measured[module]:
                    del _measured[module]
                    module.training = True
