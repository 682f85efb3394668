"""What a mixer says of step 0: the part of the plain stream that a read is."""

import pytest
import torch

from depthmix import create_mixer
from harness import MIXERS, complete
from oracles import MODULES
from oracles.cases import OPTIONS

MORE = {  # besides the options that oracles try
    "attnres": [{"routing": "add", "block_size": 2}, {"query_init": 0.5}],
    "layerscale": [{"init": 1.0}],
    "mhc": [{"head": "learned", "n": 3}],
}


@pytest.mark.parametrize("name", MIXERS)
def test_reads_at_step_0_are_the_share_of_the_plain_stream(name: str) -> None:
    """With all options: `plain_share` says it for retrofits, and the default, all of the stream, is seldom right."""
    torch.manual_seed(0)
    for options in [{}, *OPTIONS.get(name, []), *MORE.get(name, [])]:
        mixer = create_mixer(name, dim=8, n_blocks=3, **options).double()
        stream = torch.randn(5, 8, dtype=torch.float64)
        state = mixer.start(stream)
        for site in range(mixer.n_sites + 1):
            share = mixer.plain_share(site)
            h = mixer.finish(state) if site == mixer.n_sites else mixer.read(state, site)
            for mixture in h if isinstance(h, tuple) else (h,):
                said = f"plain_share({site}) of {name} with {options} is {share}, and its read at step 0 is "
                if share is None:
                    assert not torch.allclose(mixture, stream), f"{said}all of the plain stream"
                else:
                    off = (mixture - share * stream).abs().max() / stream.abs().max()
                    assert off < 2e-5, f"{said}another part of the plain stream, or none of it"  # eps of 1e-6 in mhc
            if site < mixer.n_sites:
                y = torch.randn(5, 8, dtype=torch.float64)
                state, stream = mixer.write(state, site, y), stream + y
        shares = [mixer.plain_share(site) for site in range(mixer.n_sites + 1)]
        if not MODULES[name].starts_plain(complete(name, options)):
            assert any(share != 1 for share in shares), options
