"""Which sites a model has: what can be said, what is refused, and what mechanisms make of it."""

import copy
import pickle

import pytest
import torch

from depthmix import OptionError, create_mixer
from depthmix.mixers.layout import Layout
from depthmix.mixers.registry import register
from depthmix.mixers.residual import Residual
from harness import DIM, LAYOUTS, MIXERS, as_tuple, build, embedding

CROSS = ("attention", "cross_attention", "mlp")


def test_a_number_of_blocks_is_so_many_of_attention_and_an_mlp():
    assert Layout.of("x", 2) == Layout.of("x", 2, ("attention", "mlp")) == Layout((("attention", "mlp"),) * 2)
    assert Layout.of("x", 2) == Layout.of("x", None, [["attention", "mlp"], ["attention", "mlp"]])


def test_where_blocks_begin_and_end_and_which_sites_are_attention():
    layout = Layout.of("x", sites=[("attention", "mlp"), ("mlp",), ("window_attention", "cross_attention", "moe")])
    assert (layout.n_blocks, layout.n_sites) == (3, 6)
    assert layout.names == ("attention", "mlp", "mlp", "window_attention", "cross_attention", "moe")
    assert layout.block == (0, 0, 1, 2, 2, 2, 3)
    assert layout.begins == (True, False, True, True, False, False, True)
    assert layout.ends == (False, True, True, False, False, True)
    assert layout.attention == (0, 3)


FORM = r"sites must be the names of a block's sites, as in \('attention', 'mlp'\), or a list of such blocks"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n_blocks": 2, "sites": "attention"}, f"{FORM}, got 'attention'"),
        ({"n_blocks": 2, "sites": ()}, FORM),
        ({"n_blocks": 2, "sites": 3}, f"{FORM}, got 3"),
        ({"n_blocks": 2, "sites": ("attention", "")}, f"{FORM}; '' is no name"),
        ({"n_blocks": 2, "sites": ("attention", "m l p")}, f"{FORM}; 'm l p' is no name"),
        ({"sites": [("attention", 1)]}, f"{FORM}; 1 is no name"),
        ({"sites": [("attention", "mlp"), ()]}, rf"{FORM}, got \(\) as a block"),
        ({"sites": [("attention", "mlp"), "mlp"]}, f"{FORM}, got 'mlp' as a block"),
        ({"sites": CROSS}, "n_blocks must be an integer of at least 1, got None"),
        ({}, "n_blocks must be an integer of at least 1, got None"),
        ({"n_blocks": 3, "sites": [CROSS] * 2}, "sites has 2 blocks, n_blocks is 3; leave n_blocks out"),
        ({"n_blocks": 0, "sites": CROSS}, "n_blocks must be an integer of at least 1, got 0"),
    ],
)
def test_what_is_no_layout_is_refused_with_the_form_it_has(given, said):
    with pytest.raises(OptionError, match=f"^residual: {said}"):
        create_mixer("residual", dim=4, **given)


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_takes_every_layout(name):
    for blocks in LAYOUTS.values():
        mixer = build(name, blocks)
        assert mixer.n_blocks == len(blocks)
        assert mixer.n_sites == sum(map(len, blocks))


WAYS = [("attnres", {"ways": 2}, 2), ("attnres", {"ways": 3}, 3), ("dca", {}, 3), ("mudd", {}, 3)]


@pytest.mark.parametrize(("name", "options", "ways"), WAYS)
def test_only_attention_has_ways(name, options, ways):
    mixer = build(name, LAYOUTS["uneven"], options)
    assert [mixer.ways(s) for s in range(mixer.n_sites)] == [ways, 1, 1, ways, 1, 1, ways]


@pytest.mark.parametrize(("name", "options", "ways"), WAYS)
def test_ways_without_attention_are_refused(name, options, ways):
    with pytest.raises(OptionError, match=f"{name}.*no site is.*: a name that ends in 'attention' makes it one"):
        create_mixer(name, dim=DIM, n_blocks=2, sites=("attn", "mlp"), **options)
    with pytest.raises(OptionError, match="no site is"):
        create_mixer(name, dim=DIM, n_blocks=2, sites=("cross_attention", "mlp"), **options)


@pytest.mark.parametrize("name", ["dca", "mudd"])
def test_attention_that_is_not_first_in_its_block_is_refused_where_blocks_are_read_at_their_first_site(name):
    said = rf"{name} reads the mixtures of queries, keys and values at the first site of a block; attention has to come first, and block 1 is \('mlp', 'attention'\)"
    with pytest.raises(OptionError, match=said):
        create_mixer(name, dim=DIM, sites=[("attention", "mlp"), ("mlp", "attention")])


ONE_WAY = [n for n in MIXERS if all(build(n, 1).ways(site) == 1 for site in range(2))]


@pytest.mark.parametrize("name", ONE_WAY)
def test_attention_may_be_anywhere_for_other_rules(name):
    assert create_mixer(name, dim=DIM, n_blocks=2, sites=("mlp", "attention")).n_sites == 4


@pytest.mark.parametrize("name", ONE_WAY)
def test_names_that_say_nothing_about_attention_change_nothing(name):
    """But for ways, a rule sees blocks and sites, not what they are called."""
    torch.manual_seed(0)
    one = build(name, 2)
    torch.manual_seed(0)
    other = build(name, [("time_mix", "channel_mix")] * 2)
    assert one.state_dict().keys() == other.state_dict().keys()
    state, twin = (m.start(embedding()) for m in (one, other))
    for site in range(4):
        assert len(as_tuple(one.read(state, site))) == len(as_tuple(other.read(twin, site))) == 1
        y = embedding()
        state, twin = one.write(state, site, y), other.write(twin, site, y)


def test_block_sizes_of_attention_residuals_count_sites_whatever_the_blocks_are():
    """Six sites in two blocks of three or in three of two: the same sources."""
    sources = [embedding() for _ in range(7)]
    usual, cross = build("attnres", 3, {"block_size": 4}), build("attnres", [CROSS] * 2, {"block_size": 4})
    assert torch.equal(usual.mixing(sources), cross.mixing(sources))


def test_a_layout_is_part_of_how_a_mixer_is_built_and_not_of_what_is_saved():
    mixer = build("dca", LAYOUTS["uneven"])
    assert not [k for k in mixer.state_dict() if "layout" in k]
    for twin in (copy.deepcopy(mixer), pickle.loads(pickle.dumps(mixer))):
        assert twin.layout == mixer.layout
    assert "sites=(('attention', 'mlp'), ('mlp',)" in repr(mixer)
    assert "n_blocks=2, sites=('attention', 'cross_attention', 'mlp')" in repr(build("grn", [CROSS] * 2))
    assert "sites" not in repr(build("grn", 2))


def test_a_mixer_derived_from_another_keeps_the_layout_it_was_given(monkeypatch):
    monkeypatch.setattr("depthmix.mixers.registry._MIXERS", {})

    @register("derived")
    class Derived(Residual):
        def __init__(self, dim: int, n_blocks: int, *, extra: int = 1) -> None:
            super().__init__(dim, n_blocks)

    mixer = create_mixer("derived", dim=4, n_blocks=3, sites=("attention",), extra=2)
    assert mixer.n_sites == 3


@pytest.mark.parametrize("name", ["denseformer", "grn"])
def test_no_average_is_taken_in_the_middle_of_a_block_of_three(name):
    """What a later site of a block reads is the block's first read and the outputs since, with weight one."""
    mixer = build(name, [CROSS] * 2, random=True)
    m = mixer.mixing([embedding() for _ in range(7)])[0]
    for first in (0, 3):
        for later in (first + 1, first + 2):
            torch.testing.assert_close(m[later, : first + 1], m[first, : first + 1])
            assert (m[later, first + 1 : later + 1] == 1).all()
