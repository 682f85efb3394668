"""Arms: what is read, what it is called, and what is refused."""

import pytest

from depthmix.compare.arms import Arm, check_arms, parse_arm, parse_arms, slug
from depthmix.errors import USAGE, UserError
from depthmix.mixers import OptionError, list_mixers, mixer_class
from depthmix.mixers.options import check_options
from depthmix.values import pairs


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("residual", "residual", {}),
        ("attnres:block_size=4,ways=3", "attnres", {"block_size": 4, "ways": 3}),
        (" attnres : ways = 3 , block_size = 4 ", "attnres", {"block_size": 4, "ways": 3}),
        ("attnres:block_size=none,key_norm=false", "attnres", {"block_size": None, "key_norm": False}),
        ("attnres:eps=1e-5", "attnres", {"eps": 1e-5}),
        ("highway:gate=scalar,bias=-1", "highway", {"gate": "scalar", "bias": -1}),
        ("highway:gate='scalar'", "highway", {"gate": "scalar"}),
        ("mhc:residual_map=identity,head=null", "mhc", {"residual_map": "identity", "head": None}),
    ],
)
def test_an_arm_is_read_with_types_and_read_back_from_its_label(text, name, options):
    arm = parse_arm(text)
    assert arm == Arm(name, options)
    assert [type(v) for v in arm.options.values()] == [type(options[k]) for k in arm.options]
    assert parse_arm(arm.label) == arm


def test_labels_do_not_depend_on_the_order_and_folders_are_plain():
    assert parse_arm("attnres:ways=3,block_size=4").label == "attnres:block_size=4,ways=3"
    assert slug(parse_arm("attnres:ways=3,block_size=4").label) == "attnres-block_size=4-ways=3"
    odd = [slug(Arm("x", {"a": text}).label) for text in ("../b", "..:b", "<script>", "a" * 300)]
    assert len(set(odd)) == 4
    assert all(len(f) < 120 and not set(f) & set('/\\:<>"|?* ') for f in odd)
    assert all(slug(parse_arm(name).label) == name for name in list_mixers())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("atnres", "did you mean 'attnres'"),
        ("attnres:blocksize=4", "did you mean 'block_size'"),
        ("attnres:block_size=four", "block_size must be an integer"),
        ("attnres:block_size=0", "at least 1"),
        ("attnres:block_size=4.5", "block_size must be an integer"),
        ("attnres:ways=4", "ways must be 1, 2 or 3"),
        ("attnres:weights=sofmax", "did you mean 'softmax'"),
        ("attnres:eps=nan", "finite"),
        ("attnres:ways=3,ways=1", "ways twice"),
        ("attnres:ways", "ways needs a value, ways=…: 1, 2 or 3"),
        ("attnres:ways=", "ways needs a value"),
        ("attnres:block_size=4,ways", "ways needs a value"),
        ("attnres:way", "expected option=value, got 'way'; did you mean 'ways'?"),
        ("attnres:way=", "unknown option 'way'"),
        ("attnres:", "expected option=value"),
        ("attnres:ways=3,", "expected option=value"),
        ("residual:ways=3", "it has no options"),
        (":ways=3", "no rule"),
        ("", "no rule"),
        ({"attnres": None}, "NAME:option=value"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_arm(text, words):
    with pytest.raises(UserError) as caught:
        parse_arm(text)
    message = str(caught.value)
    assert words in message
    assert repr(text) in message
    assert "\n" not in message
    assert caught.value.exit_code == USAGE


def test_duplicates_and_empty_lists_are_refused():
    for same in (["dca", "dca"], ["attnres", "attnres:block_size=none"], ["attnres:ways=1", "attnres:key_norm=true"]):
        with pytest.raises(UserError, match="are the same"):
            parse_arms(same)
    assert len(parse_arms(["attnres", "attnres:ways=2", "attnres:ways=3"])) == 3
    for empty in ([], "residual"):
        with pytest.raises(UserError, match="list of at least one"):
            parse_arms(empty)


def outcome(read):
    """What an option comes to: its type and value, or what is wrong with it."""
    try:
        value = read()
    except (UserError, OptionError) as error:
        return str(error).partition("attnres: ")[2]
    return type(value), value


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        ("block_size", "null", None),
        ("block_size", "None", None),
        ("block_size", "+4", 4),
        ("block_size", " 4 ", 4),
        ("block_size", "1_0", "'1_0'"),
        ("block_size", "1e3", "1000.0"),
        ("block_size", "'4'", "'4'"),
        ("key_norm", "FALSE", False),
        ("key_norm", "1", "got 1"),
        ("weights", "'static'", "static"),
        ("weights", '"none"', "'none'"),
        ("eps", ".5", 0.5),
        ("eps", "1E-5", 1e-5),
        ("eps", "-inf", "-inf"),
        ("eps", "infinity", "'infinity'"),
        ("eps", "9" * 400, "inf"),
    ],
)
def test_a_value_means_the_same_in_an_arm_and_on_the_command_line_and_in_a_recipe(option, text, expected):
    def checked(given):
        check_options("attnres", mixer_class("attnres").options, given)
        return given[option]

    found = outcome(lambda: parse_arm(f"attnres:{option}={text}").options[option])
    assert found == outcome(lambda: checked(pairs("train", "mixer_options", [f"{option}={text}"])))
    assert found == outcome(lambda: checked(pairs("train", "mixer_options", {option: text.strip()})))
    assert found == (type(expected), expected) or expected in found


def test_an_option_given_twice_on_the_command_line_is_refused():
    with pytest.raises(UserError, match="mixer_options gives ways twice"):
        pairs("train", "mixer_options", ["ways=3", "block_size=4", "ways=1"])


@pytest.mark.parametrize(
    "same",
    [
        ["attnres", "attnres:block_size=1"],
        ["attnres:block_size=12", "residual", "attnres:block_size=100"],  # in six blocks both hold every site
        ["attnres:heads=5", "attnres:heads=5,window=40"],
        ["mhc", "mhc:head=sum"],
    ],
)
def test_one_mechanism_under_two_names_is_refused(same):
    names = [repr(text) for text in same if text != "residual"]
    with pytest.raises(UserError, match=f"{names[0]} and {names[1]} are the same rule in a model of 6 blocks"):
        check_arms(parse_arms(same), dim=40, n_blocks=6)


@pytest.mark.parametrize(
    "different",
    [
        ["attnres", "attnres:block_size=2", "attnres:block_size=11", "attnres:eps=1e-5", "attnres:window=2"],
        ["highway", "highway:bias=-1"],  # the same function with another start
        ["layerscale", "layerscale:init=1e-5"],
        ["laurel:rank=4", "laurel:rank=8"],
        ["dca", "dca:relu_on=sum"],
    ],
)
def test_mechanisms_that_differ_are_not(different):
    check_arms(parse_arms(different), dim=40, n_blocks=6)


def test_options_that_do_not_fit_the_model_fail_before_anything_runs():
    check_arms(parse_arms(["attnres:heads=4", *[n for n in list_mixers() if n != "attnres"]]), dim=64, n_blocks=2)
    with pytest.raises(UserError, match=r"arm 'attnres:heads=5'.*heads must divide"):
        check_arms(parse_arms(["attnres:heads=5"]), dim=64, n_blocks=2)
