"""The measured share of the plain stream that a read is at step 0."""

import pytest
import torch

from depthmix import create_mixer
from depthmix.mixers import initial_share
from depthmix.mixers.initial_share import initial_shares
from harness import MIXERS, complete
from oracles import MODULES
from oracles.cases import OPTIONS, pairwise

MORE = {  # besides the options that oracles try
    "attnres": [{"routing": "add", "block_size": 2}, {"query_init": 0.5}],
    "layerscale": [{"init": 1.0}],
    "mhc": [{"head": "learned", "n": 3}],
}


@pytest.mark.parametrize("name", MIXERS)
def test_reads_at_step_0_are_the_share_of_the_plain_stream(name: str) -> None:
    """With every two values of the options, against other random numbers than those of the measurement."""
    torch.manual_seed(0)
    for options in [{}, *pairwise(name, OPTIONS.get(name, [{}])), *MORE.get(name, [])]:
        mixer = create_mixer(name, dim=8, n_blocks=3, **options).double()
        stream = torch.randn(5, 8, dtype=torch.float64)
        state = mixer.start(stream)
        for site in range(mixer.n_sites + 1):
            share = initial_shares(mixer)[site]
            h = mixer.finish(state) if site == mixer.n_sites else mixer.read(state, site)
            for mixture in h if isinstance(h, tuple) else (h,):
                said = f"the share at site {site} of {name} with {options} is {share}, and its read at step 0 is "
                if share is None:
                    assert not torch.allclose(mixture, stream), f"{said}all of the plain stream"
                else:
                    off = (mixture - share * stream).abs().max() / stream.abs().max()
                    assert off < 2e-5, f"{said}another part of the plain stream, or none of it"  # eps of 1e-6 in mhc
            if site < mixer.n_sites:
                y = torch.randn(5, 8, dtype=torch.float64)
                state, stream = mixer.write(state, site, y), stream + y
        shares = initial_shares(mixer)
        if not MODULES[name].starts_plain(complete(name, options)):
            assert any(share != 1 for share in shares), options


@pytest.mark.parametrize(
    ("name", "options", "shares"),
    [
        ("residual", {}, (1, 1, 1, 1, 1)),
        ("attnres", {}, (1, 1 / 2, 1 / 3, 1 / 4, 1 / 5)),
        ("attnres", {"weights": "sigmoid", "heads": 3}, (1 / 2,) * 5),
        ("attnres", {"routing": "add"}, (1, 3 / 2, 4 / 3, 5 / 4, 1)),
        ("attnres", {"window": 2}, (1, 1 / 2, 1 / 3, None, None)),
        ("hyper", {}, (1, 1, 1, 1, 4)),
        ("mhc", {"n": 3, "convention": "deepseek"}, (1, 1, 1, 1, 3)),
        ("mhc", {"init": "uniform"}, (None,) * 5),
        ("mhc", {"fractions": 2}, (None,) * 5),
        ("rezero", {}, (1, None, None, None, None)),
        ("layerscale", {"init": 1.0}, (1, 1, 1, 1, 1)),
    ],
    ids=str,
)
def test_shares_are_those_of_the_equations(name, options, shares):
    assert initial_shares(create_mixer(name, dim=24, n_blocks=2, **options)) == shares


def test_measuring_is_the_same_each_time_and_draws_nothing(monkeypatch):
    """A trained mixer, one on the meta device and replaced functions of torch.nn.init make no difference."""
    torch.manual_seed(0)
    seed = torch.get_rng_state()
    with torch.device("meta"):
        mixer = create_mixer("highway", dim=24, n_blocks=2)
    for name in ("uniform_", "constant_"):
        monkeypatch.setattr(torch.nn.init, name, lambda *given, **named: None)
    found = []
    for _ in range(2):
        monkeypatch.setattr(initial_share, "_measured", {})
        vars(mixer).pop(initial_share.KEPT, None)
        found.append(initial_shares(mixer))
    assert found == [(1.0, None, None, None, None)] * 2
    assert torch.equal(torch.get_rng_state(), seed)
