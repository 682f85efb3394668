"""Which rules can take the place of plain residuals, and what their norms need so that nothing changes."""

from typing import Any

import pytest
import torch
from torch import nn

from depthmix import create_mixer, list_mixers
from depthmix.mixers.plain import eps_of_plain, is_plain, why_not_plain

EPS = 1e-5


def test_only_the_plain_residual_is_plain_for_good() -> None:
    assert [name for name in list_mixers() if is_plain(create_mixer(name, dim=8, n_blocks=2))] == ["residual"]
    assert not is_plain(create_mixer("layerscale", dim=8, n_blocks=2, init=1.0))  # plain, until it is trained


@pytest.mark.parametrize(
    ("name", "options", "reader"),
    [
        ("highway", {}, "site 1"),
        ("rezero", {}, "site 1"),
        ("layerscale", {}, "site 1"),
        ("layerscale", {"init": 1.0}, None),
        ("attnres", {"window": 2}, "site 3"),
        ("attnres", {"window": 4}, None),
        ("attnres", {"window": 3}, "the final norm"),
        ("mhc", {"init": "uniform"}, "site 0"),
        ("mhc", {}, None),
    ],
)
def test_why_a_rule_cannot_begin_as_plain(name: str, options: dict[str, Any], reader: str | None) -> None:
    reason = why_not_plain(create_mixer(name, dim=8, n_blocks=2, **options))
    if reader is None:
        assert reason is None
    else:
        assert reason is not None
        assert reason.startswith(name)
        assert f"what {reader} reads" in reason


@pytest.mark.parametrize(
    ("name", "options"),
    [("attnres", {}), ("attnres", {"block_size": 2, "ways": 3}), ("hyper", {}), ("mhc", {}), ("dca", {})],
)
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_norms_of_reads_are_those_of_the_plain_stream(name: str, options: dict[str, Any], norm: Any) -> None:
    """With activations so small that eps is most of what a norm divides by."""
    mixer = create_mixer(name, dim=8, n_blocks=2, **options).double()
    stream = 1e-3 * torch.randn(5, 8, dtype=torch.float64)
    state, wanted = mixer.start(stream), norm(8, eps=EPS).double()
    changed = 0
    for site in range(mixer.n_sites + 1):
        h = mixer.finish(state) if site == mixer.n_sites else mixer.read(state, site)
        ours = norm(8, eps=eps_of_plain(mixer, site, EPS)).double()
        for mixture in h if isinstance(h, tuple) else (h,):
            torch.testing.assert_close(ours(mixture), wanted(stream), rtol=1e-5, atol=1e-9)
            changed += not torch.allclose(wanted(mixture), wanted(stream), rtol=1e-2)
        if site < mixer.n_sites:
            y = 1e-3 * torch.randn(5, 8, dtype=torch.float64)
            state, stream = mixer.write(state, site, y), stream + y
    assert changed or name == "dca"  # which reads the stream itself
