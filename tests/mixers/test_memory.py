"""What a pass keeps for its backward grows with the sites, not with their square."""

import pytest
import torch

from depthmix import create_mixer
from harness import MIXERS, as_tuple
from ops.helpers import saved_storages

TOKENS, DIM = 384, 256  # beside an activation a number for each pair of sites and token is little
CASES = [*((name, {}) for name in MIXERS), ("laurel", {"variant": "pa"}), ("dca", {"window": 2})]


def kept(name, options, n_blocks):
    """Bytes of all that is kept, parameters left out."""
    mixer = create_mixer(name, dim=DIM, n_blocks=n_blocks, **options)
    with saved_storages(TOKENS) as found:
        state = mixer.start(torch.randn(TOKENS, DIM, dtype=torch.bfloat16).requires_grad_())
        for site in range(mixer.n_sites):
            state = mixer.write(state, site, sum(torch.tanh(h) for h in as_tuple(mixer.read(state, site))))
        mixer.finish(state)
    parameters = {p.untyped_storage().data_ptr() for p in mixer.parameters()}
    return sum(size for at, size in found.items() if at not in parameters)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_twice_the_blocks_keep_twice_as_much(name, options):
    assert kept(name, options, 8) < 2.4 * kept(name, options, 4)
