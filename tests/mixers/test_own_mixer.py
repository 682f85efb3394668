"""Mistakes in a rule of one's own, in the order in which they are made: one sentence each, and never a wrong number."""

from typing import Annotated, Literal

import pytest
import torch
from torch import nn

from depthmix import ContractError, create_mixer
from depthmix.mixers import Mixer, OptionError, State, register, register_state, registry
from depthmix.mixers.options import at_least

D = 6


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(registry, "_MIXERS", dict(registry._MIXERS))


@register_state
class Kept(State):
    x: torch.Tensor

    def template(self):
        return self.x


class Sum(Mixer):
    """The plain sum; what is wrong in a test is all that differs."""

    def _start(self, x):
        return Kept(x=x)

    def _read(self, state, site):
        return state.x

    def _write(self, state, site, y):
        return state.next(x=state.x + y)

    def _finish(self, state):
        return state.x


def made(**body):
    """A mixer of two blocks of a class with this body."""
    register("own")(type("Own", (Sum,), body))
    return create_mixer("own", dim=D, n_blocks=2)


def through(mixer, dtype=torch.float32):
    """One pass, with a norm for each way."""
    x = torch.randn(2, 3, D, dtype=dtype)
    state = mixer.start(x)
    for site in range(mixer.n_sites):
        mixer.read(state, site, [nn.Identity()] * mixer.ways(site))
        state = mixer.write(state, site, x)
    return mixer.finish(state)


def test_without_a_mistake_it_runs():
    assert through(made(), torch.bfloat16).dtype == torch.bfloat16


def two(x):
    return (x, x)


NARROW = r"must give tensors of shape \[2, 3, 6\], got \[2, 3, 5\]"
RETURNS = {
    "one of two": ({"ways": lambda m, s: 2}, "read at site 0: own has 2 ways there, got 1"),
    "two of one": ({"_read": lambda m, state, s: two(state.x)}, "read at site 0: own has 1 way there, got 2"),
    "a list": ({"_read": lambda m, state, s: [state.x]}, r"must give tensors of shape \[2, 3, 6\], got list"),
    "too narrow": ({"_read": lambda m, state, s: state.x[..., 1:]}, f"read at site 0: own {NARROW}"),
    "a narrow end": ({"_finish": lambda m, state: state.x[..., 1:]}, f"finish: own {NARROW}"),
    "two at the end": ({"_finish": lambda m, state: two(state.x)}, "finish: own has 1 way there, got 2"),
    "no state": ({"_write": lambda m, state, s, y: None}, "write at site 0: own must return a state, got NoneType"),
    "the old state": ({"_write": lambda m, state, s, y: state}, r"of site 1, which state.next\(...\) makes"),
    "a wide state": (
        {"_write": lambda m, state, s, y: state.next(x=state.x.double() + y)},
        r"put torch.float64 of shape \[2, 3, 6\], where it was torch.float32 of \[2, 3, 6\], into the state",
    ),
}


@pytest.mark.parametrize("mistake", RETURNS)
def test_what_a_rule_returns(mistake):
    body, said = RETURNS[mistake]
    with pytest.raises(ContractError, match=said):
        through(made(**body))


@pytest.mark.parametrize("part", ["_start", "_read", "_write", "_finish"])
def test_what_a_rule_lacks(part):
    lacking = made(**{part: getattr(Mixer, part)})
    with pytest.raises(NotImplementedError, match=rf"own does not implement {part}\("):
        through(lacking)


def test_a_state_without_a_template():
    @register_state
    class Bare(State):
        x: torch.Tensor

    with pytest.raises(NotImplementedError, match=r"Bare does not implement template\(\)"):
        through(made(_start=lambda m, x: Bare(x=x)))


def test_more_ways_than_a_model_has_projections():
    with pytest.raises(OptionError, match="own: a site has 1, 2 or 3 ways, site 0 has 4"):
        made(ways=lambda m, s: 4)


def no_annotation(self, dim: int, n_blocks: int, *, k=3): ...
def no_names(self, dim: int, n_blocks: int, **options: int): ...
def no_default(self, dim: int, n_blocks: int, *, k: int): ...
def a_list(self, dim: int, n_blocks: int, *, k: list[int] | None = None): ...
def no_choice(self, dim: int, n_blocks: int, *, k: Literal["a", "b"] = "c"): ...
def no_integer(self, dim: int, n_blocks: int, *, k: int = 2.5): ...


@pytest.mark.parametrize(
    ("constructor", "said"),
    [
        (no_annotation, "own: option 'k' needs an annotation that says what it accepts, as in `k: int = 3`"),
        (no_names, r"own: \*\*options: int cannot be checked; the constructor names its options one by one"),
        (no_default, "own: option 'k' needs a default"),
        (a_list, r"own: the annotation of k may be of int, .*Annotated.*, got list\[int\]"),
        (no_choice, "own: k must be 'a' or 'b', got 'c'"),
        (no_integer, "own: k must be an integer, got 2.5"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_options_that_cannot_be_checked(constructor, said):
    with pytest.raises(OptionError, match=said):
        made(__init__=constructor)


def test_a_bound_may_stand_in_a_union():
    def build(self, dim: int, n_blocks: int, *, k: Annotated[int, at_least(1)] | None = None):
        Mixer.__init__(self, dim, n_blocks)

    made(__init__=build)
    assert create_mixer("own", dim=D, n_blocks=1, k=4).chosen == {"k": 4}
    with pytest.raises(OptionError, match="own: k must be an integer of at least 1 or None, got 0"):
        create_mixer("own", dim=D, n_blocks=1, k=0)


def test_an_option_that_hides_a_method():
    def build(self, dim: int, n_blocks: int, *, read: int = 1):
        Mixer.__init__(self, dim, n_blocks)
        self.read = read

    with pytest.raises(OptionError, match=r"own: option 'read' is kept as self.read, which hides the method"):
        made(__init__=build)


def test_names_that_a_command_could_not_say_or_that_are_there():
    for name in ("my:rule", "my rule", "", Sum):  # the last is what @register without a name gets
        with pytest.raises(OptionError, match=r"as in @register\('my_rule'\), got"):
            register(name)
    with pytest.raises(OptionError, match=r"there is a mixer 'rezero' already, depthmix.mixers.rezero.ReZero"):
        register("rezero")(type("Mine", (Sum,), {}))
    made()
    assert made(extra=1).extra == 1  # a cell of a notebook that is run again
