"""Measure a model in eval mode, and restore its mode afterwards.

A mode is an attribute that all threads share. Modules already in eval mode are not changed. Simultaneous measurements of a model in
train mode are counted, and the last one to end restores the mode. If one thread trains a model while another measures it, the
training runs without dropout and the weights change during the measurement: measure a copy instead.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_lock = threading.Lock()
# Number of current measurements of each module that was in train mode before the first of them.
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
            # Not `train(False)`, which modules may override: some adapters merge their weights in it.
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
