"""Options: what is wrong is said at once, with what would be right."""

import itertools
import json

import numpy as np
import pytest

import depthmix
from depthmix import Decoder, DecoderConfig, OptionError, create_mixer
from depthmix.mixers import mixer_class
from depthmix.mixers.attnres import AttnRes
from depthmix.names import nearest
from harness import MIXERS

BAD = [
    ("atnres", {}, "unknown mixer 'atnres'; there are attnres, dca, .* did you mean 'attnres'"),
    ("", {}, "unknown mixer ''"),
    ("attnres:ways=2", {}, "'attnres:ways=2' is a rule with its options, which are given apart here: mixer 'attnres'"),
    ("atnres:ways=2", {}, "unknown mixer"),
    (
        "attnres",
        {"blok_size": 4},
        "attnres: unknown option 'blok_size'; its options are block_size, .* did you mean 'block_size'",
    ),
    ("residual", {"window": 1}, "residual: unknown option 'window'; it has no options"),
    ("attnres", {"block_size": 0}, "attnres: block_size must be an integer of at least 1, 'all' or None, got 0"),
    ("attnres", {"block_size": 2.0}, "block_size must be an integer .* got 2.0"),
    ("attnres", {"block_size": "4"}, "block_size must be an integer .* got '4'"),
    ("attnres", {"block_size": True}, "block_size must be an integer .* got True"),
    ("attnres", {"window": -1}, "window must be an integer of at least 1 or None, got -1"),
    ("attnres", {"window": 0}, "window must be an integer of at least 1 or None, got 0"),
    ("attnres", {"ways": 4}, "ways must be 1, 2 or 3, got 4"),
    ("attnres", {"ways": True}, "ways must be 1, 2 or 3, got True"),
    ("attnres", {"query": "learn"}, "query must be 'learned' or 'input', got 'learn'; did you mean 'learned'"),
    ("attnres", {"weights": "softmx"}, "weights must be .*; did you mean 'softmax'"),
    ("attnres", {"heads": 5}, r"heads must divide dim=24 \(one of 1, 2, 3, 4, 6, 8, 12, 24\), got 5"),
    ("attnres", {"eps": float("nan")}, "eps must be a finite number of at least 0, got nan"),
    ("attnres", {"eps": -1.0}, "eps must be a finite number of at least 0, got -1.0"),
    ("attnres", {"eps": "small"}, "eps must be a finite number"),
    ("attnres", {"key_norm": 1}, "key_norm must be True or False, got 1"),
    ("attnres", {"key_norm": None}, "key_norm must be True or False, got None"),
    ("attnres", {"weights": "static", "heads": 2}, "weights='static' has no queries and keys"),
    ("attnres", {"weights": "static", "query": "input"}, "weights='static' has no queries and keys"),
    ("attnres", {"weights": "static", "query_init": 0.02}, "weights='static' has no queries and keys"),
    ("attnres", {"query_init": -0.02}, "query_init must be a finite number of at least 0, got -0.02"),
    ("attnres", {"weights": "static", "key_norm": False}, "weights='static' has no queries and keys"),
    ("attnres", {"routing": "plus"}, "routing must be 'replace' or 'add'"),
    ("dca", {"window": -2}, "dca: window must be an integer of at least 1 or None, got -2"),
    ("dca", {"relu_on": "both"}, "relu_on must be 'dynamic' or 'sum'"),
    ("grn", {"version": 4}, "grn: version must be 1, 2 or 3, got 4"),
    ("grn", {"version": 2, "relu_on": "sum"}, "options of version 3"),
    ("grn", {"version": 1, "w_per_entry": True}, "options of version 3"),
    ("highway", {"gate": "vectr"}, "did you mean 'vector'"),
    ("highway", {"bias": float("inf")}, "bias must be a finite number, got inf"),
    ("denseformer", {"dilation": 0}, "dilation must be an integer of at least 1, got 0"),
    ("denseformer", {"period": None}, "period must be an integer of at least 1, got None"),
    ("hyper", {"n": 0}, "n must be an integer of at least 1, got 0"),
    ("hyper", {"static": "yes"}, "static must be True or False, got 'yes'"),
    ("mhc", {"n": 1}, "n must be an integer of at least 2, got 1"),
    ("mhc", {"residual_map": "birkoff"}, "did you mean 'birkhoff'"),
    ("mhc", {"residual_map": "birkhoff", "convention": "deepseek"}, "convention='deepseek' is one of Sinkhorn"),
    ("mhc", {"schedule": "single_pass", "head": "mean"}, "takes no head"),
    ("mhc", {"iterations": 0}, "iterations must be an integer of at least 1, got 0"),
    ("laurel", {"variant": "lr", "rank": 25}, "rank must be an integer from 1 to dim=24, got 25"),
    ("laurel", {"variant": "rw", "rank": 4}, "variant='rw' has none"),
    ("layerscale", {"init": "small"}, "init must be a finite number or None, got 'small'"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_bad_options_are_named_with_the_valid_ones(name, options, message):
    with pytest.raises(OptionError, match=message):
        create_mixer(name, dim=24, n_blocks=3, **options)


@pytest.mark.parametrize("size", ["dim", "n_blocks"])
def test_impossible_sizes(size):
    for name, value in itertools.product(MIXERS, [0, -1, 2.0, "8", None, True]):
        with pytest.raises(OptionError, match=f"{name}: {size} must be an integer of at least 1, got {value!r}"):
            create_mixer(name, **{"dim": 24, "n_blocks": 3, size: value})


@pytest.mark.parametrize("name", MIXERS)
def test_every_option_rejects_what_it_is_not_for(name):
    """Whatever the option: an object of no sensible type, and an option nobody has."""
    options = mixer_class(name).options
    for option in options:
        with pytest.raises(OptionError, match=f"{name}: {option} must be "):
            create_mixer(name, dim=24, n_blocks=3, **{option: object()})
    with pytest.raises(OptionError, match=f"{name}: unknown option 'nobody_has_this'"):
        create_mixer(name, dim=24, n_blocks=3, nobody_has_this=1)


@pytest.mark.parametrize("name", MIXERS)
def test_defaults_can_be_given(name):
    defaults = {n: o.default for n, o in mixer_class(name).options.items()}
    given, silent = create_mixer(name, dim=24, n_blocks=2, **defaults), create_mixer(name, dim=24, n_blocks=2)
    assert repr(given) == repr(silent)
    assert f"n_blocks={2}" in repr(silent)


def test_a_mixer_says_all_its_options():
    """Also those that are kept under another name, since a method has theirs."""
    shown = repr(create_mixer("attnres", dim=24, n_blocks=2, ways=2, block_size=4))
    assert "ways=2" in shown
    assert "block_size=4, ways=2" in shown


def test_permutations_are_few():
    with pytest.raises(OptionError, match="each of n! permutations; n may be up to 6, got 7"):
        create_mixer("mhc", dim=24, n_blocks=2, residual_map="birkhoff", n=7)
    assert create_mixer("mhc", dim=24, n_blocks=2, n=7).n == 7


def test_a_class_checks_its_options_too():
    with pytest.raises(OptionError, match="block_size must be"):
        AttnRes(dim=24, n_blocks=2, block_size=0)


def test_an_integer_is_a_number():
    assert create_mixer("highway", dim=24, n_blocks=1, bias=-3).bias == -3


def test_list_mixers():
    assert depthmix.list_mixers() == sorted(depthmix.list_mixers())
    expected = {
        "residual",
        "rezero",
        "layerscale",
        "highway",
        "denseformer",
        "hyper",
        "mhc",
        "grn",
        "dca",
        "attnres",
        "laurel",
        "mudd",
    }
    assert expected <= set(depthmix.list_mixers())


def test_nothing_near_is_not_suggested():
    assert nearest("zzzz", ["attnres"]) == ""


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numbers_of_numpy_are_numbers(kind):
    mixer = create_mixer("attnres", dim=kind(24), n_blocks=kind(2), block_size=kind(2), eps=np.float32(0.5))
    assert (type(mixer.dim), type(mixer.n_blocks), type(mixer.chosen["block_size"])) == (int, int, int)
    assert mixer.chosen["eps"] == 0.5
    assert "block_size=2" in repr(mixer)
    model = DecoderConfig(
        vocab_size=kind(16),
        dim=kind(8),
        n_blocks=kind(2),
        n_heads=2,
        mixer_options={"block_size": kind(2)},
        mixer="attnres",
    )
    json.dumps(Decoder(model).described(8))
    with pytest.raises(OptionError, match="key_norm must be True or False, got 1"):
        create_mixer("attnres", dim=24, n_blocks=2, key_norm=kind(1))
    with pytest.raises(OptionError, match=r"dim must be an integer of at least 1, got array\(\[8\]\)"):
        create_mixer("attnres", dim=np.array([8]), n_blocks=2)


def test_options_that_are_no_dictionary():
    with pytest.raises(OptionError, match=r"attnres: options must be a dictionary of names and values .* got None"):
        DecoderConfig(vocab_size=16, dim=8, n_blocks=2, n_heads=2, mixer="attnres", mixer_options=None)
