"""What a mixer says of step 0: the part of the plain stream that a read is."""

from typing import Any

import pytest
import torch

from depthmix import create_mixer, list_mixers

CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in list_mixers()] + [
    ("attnres", {"block_size": 2}),
    ("attnres", {"block_size": 3, "ways": 3}),
    ("attnres", {"routing": "add", "block_size": 2}),
    ("attnres", {"weights": "sigmoid"}),
    ("attnres", {"query_init": 0.5}),
    ("attnres", {"weights": "static", "window": 2}),
    ("layerscale", {"init": 1.0}),
    ("mhc", {"head": "mean"}),
    ("mhc", {"head": "learned", "n": 3}),
    ("mhc", {"schedule": "single_pass"}),
    ("mhc", {"init": "uniform"}),
    ("dca", {"window": 1}),
    ("denseformer", {"dilation": 2, "period": 2}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_reads_at_step_0_are_the_share_of_the_plain_stream(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    mixer = create_mixer(name, dim=8, n_blocks=3, **options).double()
    stream = torch.randn(5, 8, dtype=torch.float64)
    state = mixer.start(stream)
    known = 0
    for site in range(mixer.n_sites + 1):
        share = mixer.plain_share(site)
        h = mixer.finish(state) if site == mixer.n_sites else mixer.read(state, site)
        for mixture in h if isinstance(h, tuple) else (h,):
            if share is not None:
                torch.testing.assert_close(mixture, share * stream, rtol=1e-5, atol=1e-9)
                known += 1
            else:
                assert not torch.allclose(mixture, stream)
        if site < mixer.n_sites:
            y = torch.randn(5, 8, dtype=torch.float64)
            state, stream = mixer.write(state, site, y), stream + y
    assert known or options.get("init") == "uniform"
