"""Models of transformers that mix over depth with modules of their own, seen as models with a mixer."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from depthmix.mixers import Mixer
from depthmix.mixers.published import MODEL_TYPES

VIEW = "depthmix.hf.viewed"  # imports transformers


def with_mixer(model: Any) -> Any:
    """Return a view of a transformers model that already mixes over depth, in which a mixer does the mixing.

    Args:
        model: Any model.

    Returns:
        The view, a module that is called as the model is; other models as they are.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if (
        kind not in MODEL_TYPES
        or not isinstance(model, nn.Module)
        or any(isinstance(m, Mixer) for m in model.modules())
    ):
        return model
    return importlib.import_module(VIEW).Viewed(model)
