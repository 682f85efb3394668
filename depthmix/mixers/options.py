"""Options of a mixer: read off its constructor's annotations, checked before it runs.

A constructor says what it accepts, `block_size: Annotated[int | None, at_least(1)] = None` or `gate: Literal["vector", "scalar"]`,
and that is what is validated, what an error message lists and what documentation and command line can show.
"""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from depthmix.names import nearest

WORDS = {"none": None, "null": None, "true": True, "false": False}
INTEGER, NUMBER = r"[+-]?\d{1,18}", r"[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|inf|nan)"
KINDS = (int, float, bool, str)
REQUIRED = ("dim", "n_blocks", "sites")  # every mixer's own, not options
FLOAT32_MAX = 3.4028234663852886e38  # parameters are fp32, and a larger number cannot be put into one


class OptionError(ValueError):
    """An unknown mixer or option, or a value it cannot take."""


@dataclass(frozen=True)
class AtLeast:
    low: float


def at_least(low: float) -> AtLeast:
    """A lower bound on a number, for use in Annotated."""
    return AtLeast(low)


@dataclass(frozen=True)
class Option:
    """One option: its name, its default and what it accepts."""

    name: str
    default: Any
    kinds: tuple[type, ...]  # of int, float, bool, str
    choices: tuple[Any, ...]  # of a Literal
    optional: bool  # None is accepted
    low: float | None

    def describe(self) -> str:
        """What the option accepts, in words."""
        bound = "" if self.low is None else f" of at least {self.low:g}"
        words = {int: "an integer", float: "a finite number", bool: "True or False", str: "a string"}
        parts = [words[k] + (bound if k in (int, float) else "") for k in self.kinds]
        parts += [repr(c) for c in self.choices] + ["None"] * self.optional
        return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"

    def check(self, owner: str, value: Any) -> None:
        """Raise OptionError unless the value fits."""
        if self._fits(value):
            return
        huge = float in self.kinds and isinstance(value, int | float) and FLOAT32_MAX < abs(value) < math.inf
        limit = f" within ±{FLOAT32_MAX:.1e}, which is what float32 holds" if huge else ""
        message = f"{owner}: {self.name} must be {self.describe()}{limit}, got {value!r}"
        if isinstance(value, str):
            message += nearest(value, [c for c in self.choices if isinstance(c, str)])
        raise OptionError(message)

    def _fits(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if any(type(value) is type(c) and value == c for c in self.choices):
            return True
        if isinstance(value, bool) or not isinstance(value, int | float):
            return type(value) in self.kinds
        if not (abs(value) <= FLOAT32_MAX if float in self.kinds else type(value) in self.kinds):
            return False
        return self.low is None or value >= self.low


def parse_option(owner: str, name: str, annotation: Any, default: Any) -> Option:
    """The Option an annotation describes."""
    members, lows = _members(annotation)
    choices = tuple(c for m in members if get_origin(m) is Literal for c in get_args(m))
    kinds = tuple(m for m in members if m in KINDS)
    strange = [m for m in members if m not in (*KINDS, type(None)) and get_origin(m) is not Literal]
    if strange:
        known = "int, float, bool, str, None, Literal[...] and Annotated[..., at_least(n)]"
        raise OptionError(f"{owner}: the annotation of {name} may be of {known}, got {strange[0]!r}")
    return Option(name, default, kinds, choices, type(None) in members, next(iter(lows), None))


def _members(annotation: Any) -> tuple[list[Any], list[float]]:
    """What an annotation is a union of, and the bounds in it."""
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        members, lows = _members(inner)
        return members, lows + [e.low for e in extra if isinstance(e, AtLeast)]
    if get_origin(annotation) not in (typing.Union, types.UnionType):
        return [annotation], []
    parts = [_members(part) for part in get_args(annotation)]
    return [m for members, _ in parts for m in members], [low for _, lows in parts for low in lows]


def options_of(owner: str, constructor: Callable[..., Any]) -> dict[str, Option]:
    """The options of a mixer's constructor by name: its keyword arguments but dim and n_blocks."""
    hints = typing.get_type_hints(constructor, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        if name in ("self", *REQUIRED):
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise OptionError(f"{owner}: {parameter} cannot be checked; the constructor names its options one by one")
        if name not in hints or parameter.default is parameter.empty:
            lacks = "a default" if name in hints else "an annotation that says what it accepts"
            raise OptionError(f"{owner}: option {name!r} needs {lacks}, as in `{name}: int = 3`")
        found[name] = parse_option(owner, name, hints[name], parameter.default)
        found[name].check(owner, parameter.default)
    return found


def parse_value(text: str) -> Any:
    """What an option's value means as text, on the command line, in an arm and in a recipe alike.

    none or null, true, false, a number, or the text itself; quotes keep what is in them text.
    """
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if re.fullmatch(INTEGER, text):
        return int(text)
    if re.fullmatch(NUMBER, text, re.IGNORECASE):
        return float(text)
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text


def plain_value(value: Any) -> Any:
    """Return a number of numpy's as Python's, which options, JSON and YAML know; anything else as it is."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return value


def check_options(owner: str, options: Mapping[str, Option], given: Mapping[str, Any]) -> None:
    """Raise OptionError for an unknown option or a value that does not fit."""
    if not isinstance(given, Mapping):
        raise OptionError(f"{owner}: options must be a dictionary of names and values ({{}} for none), got {given!r}")
    for name, value in given.items():
        if name not in options:
            valid = f"its options are {', '.join(options)}" if options else "it has no options"
            raise OptionError(f"{owner}: unknown option {name!r}; {valid}{nearest(name, options)}")
        options[name].check(owner, value)
