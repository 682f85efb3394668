"""Options of a mixer, read from its constructor's annotations and checked before it runs.

An annotation such as `block_size: Annotated[int | None, at_least(1)] = None` or `gate: Literal["vector", "scalar"]` is the only
description of an option. Validation, error messages, documentation and the command line all use it.
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
# Arguments that every mixer has; they are no options.
REQUIRED = ("dim", "n_blocks", "sites")
# Parameters are fp32 and cannot hold a larger number.
FLOAT32_MAX = 3.4028234663852886e38


class OptionError(ValueError):
    """Raised for an unknown mixer or option, and for a value that an option does not take."""


@dataclass(frozen=True)
class AtLeast:
    low: float


def at_least(low: float) -> AtLeast:
    """Return a lower bound on a number, for use in Annotated."""
    return AtLeast(low)


@dataclass(frozen=True)
class Option:
    """The name of an option, its default and the values it accepts."""

    name: str
    default: Any
    kinds: tuple[type, ...]  # of int, float, bool, str
    choices: tuple[Any, ...]  # of a Literal
    optional: bool  # None is accepted
    low: float | None

    def describe(self) -> str:
        """Return in words which values the option accepts."""
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
    """Return the Option that an annotation describes."""
    members, lows = _members(annotation)
    choices = tuple(c for m in members if get_origin(m) is Literal for c in get_args(m))
    kinds = tuple(m for m in members if m in KINDS)
    unknown = [m for m in members if m not in (*KINDS, type(None)) and get_origin(m) is not Literal]
    if unknown:
        known = "int, float, bool, str, None, Literal[...] and Annotated[..., at_least(n)]"
        raise OptionError(f"{owner}: the annotation of {name} may be of {known}, got {unknown[0]!r}")
    return Option(name, default, kinds, choices, type(None) in members, next(iter(lows), None))


def _members(annotation: Any) -> tuple[list[Any], list[float]]:
    """Return the members of an annotation's union, and the bounds in it."""
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        members, lows = _members(inner)
        return members, lows + [e.low for e in extra if isinstance(e, AtLeast)]
    if get_origin(annotation) not in (typing.Union, types.UnionType):
        return [annotation], []
    parts = [_members(part) for part in get_args(annotation)]
    return [m for members, _ in parts for m in members], [low for _, lows in parts for low in lows]


def options_of(owner: str, constructor: Callable[..., Any]) -> dict[str, Option]:
    """Return the options of a mixer's constructor by name: its keyword arguments except dim, n_blocks and sites."""
    hints = typing.get_type_hints(constructor, include_extras=True)
    options = {}
    for name, parameter in inspect.signature(constructor).parameters.items():
        if name in ("self", *REQUIRED):
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise OptionError(f"{owner}: {parameter} cannot be checked; the constructor names its options one by one")
        if name not in hints or parameter.default is parameter.empty:
            lacks = "a default" if name in hints else "an annotation that says what it accepts"
            raise OptionError(f"{owner}: option {name!r} needs {lacks}, as in `{name}: int = 3`")
        options[name] = parse_option(owner, name, hints[name], parameter.default)
        options[name].check(owner, parameter.default)
    return options


def parse_value(text: str) -> Any:
    """Return the value of an option that is written as text: on the command line, in an arm and in a recipe alike.

    The text is none or null, true, false, a number, or stands for itself. Quotes keep a text a text.
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


def check_options(owner: str, options: Mapping[str, Option], values: Mapping[str, Any]) -> None:
    """Raise OptionError for an unknown option or a value that does not fit."""
    if not isinstance(values, Mapping):
        raise OptionError(f"{owner}: options must be a dictionary of names and values ({{}} for none), got {values!r}")
    for name, value in values.items():
        if name not in options:
            valid = f"its options are {', '.join(options)}" if options else "it has no options"
            raise OptionError(f"{owner}: unknown option {name!r}; {valid}{nearest(name, options)}")
        options[name].check(owner, value)
