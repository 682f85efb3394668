"""The contract used wrongly: a clear error that says what was expected, never a wrong number."""

import copy

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from depthmix import ContractError, create_mixer
from harness import DIM, MIXERS, B, T, embedding

every_mixer = pytest.mark.parametrize("name", MIXERS)


@pytest.fixture
def e():
    return embedding(torch.float32)


def make(name, n_blocks=2):
    return create_mixer(name, dim=DIM, n_blocks=n_blocks)


def advance(mixer, e, sites):
    state = mixer.start(e)
    for site in range(sites):
        mixer.read(state, site)
        state = mixer.write(state, site, e)
    return state


@every_mixer
def test_sites_out_of_order(name, e):
    mixer = make(name)
    state = advance(mixer, e, 1)
    for call in (lambda s: mixer.read(state, s), lambda s: mixer.write(state, s, e)):
        for site in (0, 2):  # repeated, skipped
            with pytest.raises(ContractError, match=f"at site {site} is out of order: this state expects site 1"):
                call(site)
        for site in (-1, 4):
            with pytest.raises(ContractError, match=f"there is no site {site}; 2 blocks have sites 0 to 3"):
                call(site)


@every_mixer
def test_finish_before_the_last_write_and_reads_after_it(name, e):
    mixer = make(name)
    with pytest.raises(ContractError, match="finish is out of order: site 3 of 4 has not been written yet"):
        mixer.finish(advance(mixer, e, 3))
    with pytest.raises(ContractError, match="read at site 3 is out of order: this state expects finish"):
        mixer.read(advance(mixer, e, 4), 3)


@every_mixer
def test_tensors_that_do_not_fit(name, e):
    mixer = make(name)
    for bad, message in (
        (torch.randn(B, T, DIM + 1), rf"start: expected shape \[..., {DIM}\], got \[2, 5, 25\]"),
        (torch.ones(B, T, DIM, dtype=torch.long), "start: expected a floating-point tensor, got torch.int64"),
        (torch.tensor(1.0), rf"start: expected shape \[..., {DIM}\], got \[\]"),
        ([1.0], "start: expected a tensor, got list"),
    ):
        with pytest.raises(ContractError, match=message):
            mixer.start(bad)
    state = mixer.start(e)
    for bad, message in (
        (e[:1], r"write at site 0: expected shape \[2, 5, 24\], got \[1, 5, 24\]"),
        (e[..., :1], rf"write: expected shape \[..., {DIM}\], got \[2, 5, 1\]"),
        (
            e.double(),
            "write at site 0: expected torch.float32, the embedding's dtype, or a narrower one, got torch.float64",
        ),
        (e.long(), "write: expected a floating-point tensor"),
        (e.to("meta"), "write at site 0: expected a tensor on cpu, got one on meta"),
        (None, "write: expected a tensor, got NoneType"),
    ):
        with pytest.raises(ContractError, match=message):
            mixer.write(state, 0, bad)
    with pytest.raises(ContractError, match="read: expected the state that start or write returned, got Tensor"):
        mixer.read(e, 0)


@every_mixer
def test_parameters_on_another_device(name, e):
    mixer = make(name)
    if not list(mixer.parameters()):
        assert mixer.start(e.to("meta")).template().device.type == "meta"
        return
    with pytest.raises(ContractError, match=f"{name}'s parameters are on cpu, but the embedding is on meta"):
        mixer.start(e.to("meta"))


@every_mixer
def test_narrower_outputs_are_what_autocast_gives(name, e):
    """An fp32 embedding with bf16 outputs mixes in fp32 and stays fp32."""
    mixer = make(name)
    state = mixer.start(e)
    for site in range(mixer.n_sites):
        h = mixer.read(state, site)
        assert all(t.dtype == torch.float32 for t in (h if isinstance(h, tuple) else (h,)))
        state = mixer.write(state, site, e.bfloat16())
    assert mixer.finish(state).dtype == torch.float32


@every_mixer
def test_as_many_norms_as_ways(name, e):
    mixer = make(name)
    ways = mixer.ways(0)
    wrong = [nn.RMSNorm(DIM)] * (4 - ways)
    with pytest.raises(ContractError, match=f"read at site 0: expected {ways} norm.*, one per way, got {4 - ways}"):
        mixer.read(mixer.start(e), 0, wrong)


@every_mixer
def test_mixing_wants_all_sources(name, e):
    with pytest.raises(ContractError, match="mixing: expected 5 sources, the embedding and one per site, got 4"):
        make(name).mixing([e] * 4)


@every_mixer
def test_zero_tokens(name):
    mixer = make(name)
    empty = torch.zeros(0, T, DIM, requires_grad=True)
    out = mixer.finish(advance(mixer, empty, 4))
    assert out.shape == empty.shape
    out.sum().backward()
    assert empty.grad.shape == empty.shape


@every_mixer
def test_a_state_of_another_rule_or_size(name, e):
    """Its class may be the same: it says which mixer it is for."""
    mixer, other = make(name), "residual" if name != "residual" else "rezero"
    ours = rf"this mixer is {name}\(dim={DIM}, n_blocks=2"
    for stranger, whose in ((make(name, 3), rf"{name}\(dim={DIM}, n_blocks=3"), (make(other), rf"{other}\(dim={DIM}")):
        state = stranger.start(e)
        for call in (lambda s: mixer.read(s, 0), lambda s: mixer.write(s, 0, e)):
            with pytest.raises(ContractError, match=f"the state is one of {whose}.*{ours}"):
                call(state)
        last = advance(stranger, e, stranger.n_sites)
        with pytest.raises(ContractError, match=f"finish: the state is one of {whose}.*{ours}"):
            mixer.finish(last)
    twin = copy.deepcopy(mixer)
    twin.write(mixer.start(e), 0, e)


@pytest.mark.parametrize(
    ("name", "options", "others"),
    [("attnres", {}, {"block_size": 2}), ("grn", {}, {"window": 1}), ("hyper", {"n": 2}, {"n": 3})],
)
def test_a_state_of_other_options(name, options, others, e):
    one, two = (create_mixer(name, dim=DIM, n_blocks=2, **o) for o in (options, others))
    with pytest.raises(ContractError, match=rf"read: the state is one of {name}\(.*and this mixer is {name}\("):
        two.read(one.start(e), 0)


@every_mixer
def test_a_state_knows_its_mixer_after_a_round_trip_as_a_pytree(name, e):
    state = make(name).start(e)
    leaves, spec = pytree.tree_flatten(state)
    with pytest.raises(ContractError, match="the state is one of"):
        make(name, 3).read(pytree.tree_unflatten(leaves, spec), 0)
