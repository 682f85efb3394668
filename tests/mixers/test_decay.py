"""Groups for an optimizer of one's own, in a model of one's own."""

import pytest
import torch
from torch import nn

import depthmix
from harness import DIM, MIXERS


class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), nn.RMSNorm(DIM)
        self.inner = nn.ModuleDict({"mixer": depthmix.create_mixer(name, dim=DIM, n_blocks=2)})
        self.twin = self.linear  # tied
        self.frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)


@pytest.mark.parametrize("name", MIXERS)
def test_matrices_decay_and_of_a_mixer_what_its_paper_says(name):
    model = Model(name)
    decayed, rest = depthmix.param_groups(model, weight_decay=0.1)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    mixer = model.inner["mixer"]
    wanted = {model.linear.weight, *(p for key, p in mixer.named_parameters() if key.split(".")[0] in mixer.decayed)}
    assert set(decayed["params"]) == wanted
    assert set(rest["params"]) == {*model.parameters()} - wanted - {model.frozen}
    assert len(decayed["params"]) + len(rest["params"]) == len({*model.parameters()}) - 1
    torch.optim.AdamW([decayed, rest], lr=0.1)


def test_queries_and_gains_are_free_where_nanogpts_rule_would_decay_them():
    mixer = depthmix.create_mixer("attnres", dim=DIM, n_blocks=2)
    assert all(p.dim() >= 2 for p in mixer.parameters())
    decayed, rest = depthmix.param_groups(mixer, weight_decay=0.1)
    assert (len(decayed["params"]), len(rest["params"])) == (0, 2)
