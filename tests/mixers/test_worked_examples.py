"""Rules of training recipes on a model small enough to compute by hand: two blocks, two channels, fixed outputs."""

import math

import pytest
import torch

from depthmix import Decoder, DecoderConfig, create_mixer
from depthmix.mixers import OptionError

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


def test_unet_doubles_the_stream_before_its_second_half():
    check(pass_through("unet", {"w.1": (1.0,)}), [(1, -1), (2, -1), (4, 0), (5, 1), (4, 2)])
    assert create_mixer("unet", dim=2, n_blocks=2).get_parameter("w.1").tolist() == [1.0]


def test_the_vectors_of_parameter_golf():
    """w = (1, 0.5): block 1 begins with (2, 0) + w ⊙ (2, 0) = (4, 0)."""
    check(pass_through("unet", {"w.1": (1.0, 0.5)}, gate="vector")[2:3], [(4, 0)])


def test_gates_start_at_the_shares_of_modded_nanogpt():
    """σ(−1.5), also with a gate per token, which starts at one."""
    for gate in ("sigmoid", "token"):
        found = pass_through("unet", {}, gate=gate)
        check(found[2:3], [(2 * 1.18243, 0)])


def test_each_block_reads_its_mirror():
    """Five blocks: blocks 0 and 1 push, blocks 3 and 2 pop, block 4 has no skip."""
    mixer = create_mixer("unet", dim=1, sites=[("mlp",)] * 5).double()
    assert [name for name, _ in mixer.named_parameters()] == ["w.2", "w.3"]
    state = mixer.start(torch.ones(1, dtype=torch.float64))
    reads = []
    for site in range(5):
        reads.append(mixer.read(state, site).item())
        state = mixer.write(state, site, torch.tensor([10.0**site], dtype=torch.float64))
    # 1; 1 + 1; 12 + 12, block 1's result; 124 + 2, block 0's result; 1126, and 11126 at the end
    assert [*reads, mixer.finish(state).item()] == [1, 2, 24, 126, 1126, 11126]


def test_frac_connections():
    """Two fractions of one channel each; every site has the same weights, and finish returns the fractions as they are."""
    weights = {"A_m": ((1.0, 0.5), (0.0, 1.0)), "A_r": ((1.0, 0.0), (0.2, 0.9)), "B": (1.0, 0.5)}
    parameters = {key: [value] * 4 for key, value in weights.items()}
    found = pass_through("hyper", parameters, fractions=2, static=True)
    check(found, [(1, -0.5), (1.8, 0), (1.62, 0.5), (2.558, 1.5), (1.6022, 0.6989)])
    check(pass_through("hyper", {}, fractions=2)[-1:], [(2, 2)])


def test_constrained_fractions():
    """H_pre = ((1/2, 3/4), (1/4, 1/2)), H_res = ((3/4, 1/4), (1/4, 3/4)) and H_post = (1, 1/2) at every site."""
    three = math.log(3)
    logits = (0, three, -three, 0, *(0, -three), *(three, 0, 0, three))
    expected = [(-0.25, -0.25), (0.375, 0.125), (0.875, 0.5), (1.78125, 1.03125), (0.6875, 1.8125)]
    check(pass_through("mhc", {"b": [logits] * 4}, fractions=2), expected)


@pytest.mark.parametrize("residual_map", ["sinkhorn", "birkhoff"])
@pytest.mark.parametrize("m", [2, 4])
def test_constrained_fractions_start_near_the_plain_net(m, residual_map):
    """With 24 sites: each map keeps sigmoid(8) of a fraction, and the logits differ by less than 1%, but do differ."""
    shape = {"vocab_size": 64, "dim": 48, "n_blocks": 12, "n_heads": 4}
    ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    options = {"fractions": m, "residual_map": residual_map}
    logits = []
    for rule in ({"mixer": "residual"}, {"mixer": "mhc", "mixer_options": options}):
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(**shape, **rule)).double()
        with torch.no_grad():
            logits.append(model(ids))
    assert 0.001 < ((logits[1] - logits[0]).norm() / logits[0].norm()).item() < 0.01
    kept = model.mixer._weights(torch.zeros(48, dtype=torch.float64), model.mixer._parameters_of(5))[2]
    assert kept.sum(0).tolist() == pytest.approx([1.0] * m)
    assert kept.sum(1).tolist() == pytest.approx([1.0] * m)
    # Some of the other permutations keep a fraction, too: of those of m that are left, (m - 1)! - 1.
    others = (math.factorial(m - 1) - 1) / (math.factorial(m) - 1) if residual_map == "birkhoff" else 0
    own = (1 + others * math.exp(-8)) / (1 + math.exp(-8))
    assert kept.diagonal().tolist() == pytest.approx([own] * m, abs=1e-7)


@pytest.mark.parametrize("rule", ["hyper", "mhc"])
def test_fractions_run_in_plain_pytorch(rule):
    assert create_mixer(rule, dim=24, n_blocks=2)._paths != ()
    assert create_mixer(rule, dim=24, n_blocks=2, fractions=2)._paths == ()


@pytest.mark.parametrize("rule", ["hyper", "mhc"])
def test_fractions_that_cannot_be(rule):
    with pytest.raises(OptionError, match=f"{rule}: fractions must divide dim=24, got 5"):
        create_mixer(rule, dim=24, n_blocks=2, fractions=5)
    with pytest.raises(OptionError, match=f"{rule}: with fractions there are no streams, so n may not be given, got 2"):
        create_mixer(rule, dim=24, n_blocks=2, fractions=2, n=2)


@pytest.mark.parametrize(
    ("option", "value", "only"),
    [("head", "mean", None), ("init", "uniform", "identity"), ("schedule", "single_pass", "standard")],
)
def test_options_of_streams_do_not_go_with_constrained_fractions(option, value, only):
    with pytest.raises(OptionError, match=f"mhc: with fractions {option} must be {only!r}, got {value!r}"):
        create_mixer("mhc", dim=24, n_blocks=2, fractions=2, **{option: value})
    with pytest.raises(OptionError, match="fractions may be up to 6, got 8"):
        create_mixer("mhc", dim=24, n_blocks=2, fractions=8, residual_map="birkhoff")


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (1.0, [(1, -1), (2, -1), (2, 2), (1.4142, 1.4142), (0, 2.8284)]),
        (0.5, [(1, -1), (1.5, -1), (1.5, 0.5), (1.7071, 0.7071), (0.75, 1.6642)]),
    ],
)
def test_deep_delta_learning(beta, expected):
    """The same gate at every site, and v = 2."""
    zero = torch.zeros(4, 2).tolist()
    parameters = {"w": zero, "b": [math.log(beta / (2 - beta))] * 4, "W_v": [[row] for row in zero], "b_v": [[0.0]] * 4}
    check(pass_through("delta", parameters), expected)


def test_deep_delta_learning_with_two_values():
    """k = (1, 0), v = 4 σ(0, −∞) = (2, 0), beta = 1: the first channel's values (1, 1) become (2, 0), the second's stay (−1, −1)."""
    mixer = create_mixer("delta", dim=2, n_blocks=1, values=2).double()
    with torch.no_grad():
        for p in mixer.parameters():
            p.zero_()
        mixer.b_v.copy_(torch.tensor([[0.0, -math.inf]] * 2))
    state = mixer.write(mixer.start(E), 0, OUTPUTS[0])
    check([row.tolist() for row in state.rows], [(2, -1), (0, -1)])
