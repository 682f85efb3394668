"""Rules of training recipes on a model small enough to compute by hand: two blocks, two channels, fixed outputs."""

import pytest
import torch

from depthmix import create_mixer

E = torch.tensor([1.0, -1.0], dtype=torch.float64)
OUTPUTS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 1.0]], dtype=torch.float64)


def pass_through(name, parameters, **options):
    """All reads, and what finish returns, for the given parameters."""
    mixer = create_mixer(name, dim=2, n_blocks=2, **options).double()
    with torch.no_grad():
        for key, value in parameters.items():
            mixer.get_parameter(key).copy_(torch.tensor(value))
    state, seen = mixer.start(E), []
    for site, y in enumerate(OUTPUTS):
        seen.append(mixer.read(state, site).tolist())
        state = mixer.write(state, site, y)
    return [*seen, mixer.finish(state).tolist()]


def check(found, expected):
    for site, (ours, by_hand) in enumerate(zip(found, expected, strict=True)):
        assert ours == pytest.approx(by_hand, abs=1e-4), site


def test_lambdas_and_backout_of_nanochat():
    start = {"r": (1.15, 1.05), "c": (0.2, 0.05), "b": (0.2,)}
    mixer = create_mixer("lambdas", dim=2, n_blocks=2, backout=True)
    for key, value in start.items():
        assert mixer.get_parameter(key).tolist() == pytest.approx(value)
    expected = [(1.35, -1.35), (2.35, -1.35), (2.5175, -0.4175), (3.5175, 0.5825), (2.014, 1.266)]
    check(pass_through("lambdas", start, backout=True), expected)
    del start["b"]
    check(pass_through("lambdas", start)[-1:], [(2.5175, 1.5825)])


def test_lambdas_for_each_channel_of_parameter_golf():
    """A block with r = (0.5, 1) and c = (0.5, 0) reads half the stream and half the embedding in its first channel."""
    parameters = {"r": ((1.0, 1.0), (0.5, 1.0)), "c": ((0.0, 0.0), (0.5, 0.0))}
    expected = [(1, -1), (2, -1), (1.5, 0), (2.5, 1), (1.5, 2)]
    check(pass_through("lambdas", parameters, channels=True), expected)


def test_the_middle_block_of_backout():
    """Three blocks: the stream after block 1, and not the last one, is taken off."""
    mixer = create_mixer("lambdas", dim=2, n_blocks=3, backout=True, init="plain").double()
    torch.nn.init.constant_(mixer.b, 0.5)
    state = mixer.start(E)
    for site, y in enumerate([*OUTPUTS, *OUTPUTS[:2]]):
        state = mixer.write(state, site, y)
    check([mixer.finish(state).tolist()], [((2 + 1) - 0.5 * 2, (2 + 1) - 0.5 * 2)])
