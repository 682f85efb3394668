"""What was compiled is kept for the next model inside `compiled_once`, and forgotten elsewhere. That torch then compiles
nothing twice was measured; here it is enough that it is asked for what that takes."""

import pytest
import torch

from depthmix.train import compiled


@pytest.fixture
def resets(monkeypatch):
    found = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: found.append(1))
    return found


def test_every_model_begins_anew_unless_what_was_compiled_is_kept(resets):
    from torch._dynamo import config

    compiled.begin_model()
    compiled.begin_model()
    assert len(resets) == 2
    before = config.recompile_limit, config.automatic_dynamic_shapes
    with compiled.compiled_once():
        assert len(resets) == 3
        compiled.begin_model()
        compiled.begin_model()
        assert len(resets) == 3
        assert (config.recompile_limit, config.automatic_dynamic_shapes) == (compiled.MANY, False)
    assert (config.recompile_limit, config.automatic_dynamic_shapes) == before
    assert len(resets) == 4
    with compiled.compiled_once(False):
        compiled.begin_model()
    assert len(resets) == 5
