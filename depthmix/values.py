"""Convert a flag's text or a line of a recipe to the values of a command's dataclass."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

from depthmix.errors import UserError
from depthmix.names import nearest as nearest_of
from depthmix.shown import VALUE, shown

nearest = functools.partial(nearest_of, cutoff=0.65)  # many flags are alike: suggest only close names


def coerce(command: str, name: str, hint: Any, value: Any) -> Any:
    """Convert a flag's text or a recipe's value to the field's type. Raises UserError where it does not fit."""
    if hint is Any:
        return value
    members = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    expected = describe(hint)
    if type(None) in members and (value is None or (isinstance(value, str) and value.lower() == "none")):
        return None
    for kind in members:
        if get_origin(kind) is Literal:
            value = "off" if value is False and "off" in get_args(kind) else value  # YAML reads off as false
            if value in get_args(kind):
                return value
        if get_origin(kind) is list and isinstance(value, list):
            item = get_args(kind)[0]
            parts = [v.split(",") if get_origin(item) is dict and isinstance(v, str) else v for v in value]
            if item is int and (joined := [v for v in parts if isinstance(v, str) and "," in v]):
                apart = joined[0].replace(",", " ")
                raise UserError(f"{command}: {name} are written apart, as in {apart[:VALUE]}, got {shown(joined[0])}")
            if item is str and "" in parts:
                raise UserError(f"{command}: {name} must not hold an empty word, got {shown(value)}")
            return [coerce(command, name, item, v) for v in parts]
        if get_origin(kind) is dict:
            return pairs(command, name, value)
        if kind is bool and isinstance(value, bool):
            return value
        if kind is str and isinstance(value, str) and "\0" not in value:
            return value
        if kind in (int, float) and not isinstance(value, bool):
            try:
                number = kind(value)
            except (TypeError, ValueError, OverflowError):
                continue
            if isinstance(value, str) or number == value:
                return number
    near = nearest(
        str(value) if isinstance(value, str | int | float) else "",
        [c for k in members if get_origin(k) is Literal for c in get_args(k)],
    )
    raise UserError(f"{command}: {name} must be {expected}, got {shown(value)}{near}{_read_by_yaml(value, hint)}")


def _read_by_yaml(value: Any, hint: Any) -> str:
    """Explain how YAML turned a word of a recipe into a value of another type. The values of flags are text."""
    if isinstance(value, bool) and hint is not bool:
        return "; YAML reads yes, no, on and off as true and false: put the word in quotes"
    if isinstance(value, datetime.date):
        return "; YAML reads it as a date: put it in quotes"
    return "; put it in quotes" if isinstance(value, int | float) and hint is str else ""


def pairs(command: str, name: str, value: Any) -> dict[str, Any]:
    """Convert a dictionary, or a list of key=value as on the command line, to a dictionary of values."""
    from depthmix.mixers.options import parse_value

    if isinstance(value, list) and all(isinstance(v, str) and "=" in v for v in value):
        given: dict[str, Any] = {}
        for key, _, text in ((part.strip() for part in item.partition("=")) for item in value):
            if key in given:
                raise UserError(f"{command}: {name} gives {key[:VALUE]} twice")
            given[key] = text
        value = given
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: parse_value(v) if isinstance(v, str) else v for k, v in value.items()}
    raise UserError(f"{command}: {name} must be written as option=value option=value, got {shown(value)}")


def describe(hint: Any) -> str:
    """Describe a type in words."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join("none" if m is type(None) else describe(m) for m in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    if get_origin(hint) is list:
        return "a list"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(hint, "option=value pairs")


def typed(command: str, config: Any) -> Any:
    """Convert the values of a configuration made in Python: NumPy numbers to Python's, and paths to text.

    Raises:
        UserError: A value does not have its field's type. Unlike on the command line, text is not parsed as a number.
    """
    hints, plain = typing.get_type_hints(type(config)), {}
    for field in dataclasses.fields(config):
        plain[field.name] = value = _plain(getattr(config, field.name))
        _check_type(command, field.name, hints[field.name], value)
    return dataclasses.replace(config, **plain)


def _plain(value: Any) -> Any:
    from depthmix.mixers.options import plain_value

    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else plain_value(value)


def _check_type(command: str, name: str, hint: Any, value: Any) -> None:
    members = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if isinstance(value, float) and float in members:  # the command itself refuses values that are not finite
        return
    text = any(kind is str or get_origin(kind) is Literal for kind in members)
    if isinstance(value, str) and not text:
        raise UserError(f"{command}: {name} must be {describe(hint)}, got {value!r}")
    coerce(command, name, hint, value)


def build_config(
    command: str, config: type, given: dict[str, Any], known: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {}
) -> Any:
    """Build a command's dataclass from, in rising priority, its defaults, recorded options, the recipe and the flags.

    Args:
        command: Name of the command, for messages.
        config: The dataclass.
        given: The flags by field, and the path of the recipe as `recipe`.
        known: Returns the recorded options, given the recipe and the flags.

    Raises:
        UserError: An option is unknown or has a wrong value.
    """
    hints = typing.get_type_hints(config)
    recipe = given.pop("recipe", None)
    if recipe == "":
        raise UserError(f"{command}: --recipe is empty; give the path of a YAML file, or leave it out")
    lines: dict[str, Any] = {} if recipe is None else _read_lines(command, recipe)
    values = {**_drop_replaced_options(lines, given), **given}
    for name in values:
        if name not in hints:
            raise UserError(
                f"{command}: unknown option {shown(name)} in the recipe {recipe}{nearest(name, list(hints))}{_commands_with(name)}"
            )
    given = {name: coerce(command, name, hints[name], value) for name, value in values.items()}
    return config(**{**known(given), **given})


def check_at_least(config: Any, least: int, *names: str) -> None:
    """Raise UserError for the first of the named options that is below `least`. None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            or_none = " or none" if getattr(type(config), name) is None else ""
            raise UserError(f"{name} must be at least {least}{or_none}, got {value}")


# What a recipe takes from its base: the options of a training, without those that name one run.
NOT_INHERITED = ("out", "mixer", "mixer_options", "seed")


def _read_lines(command: str, recipe: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a recipe and the training options of its `base`, a recipe whose path is relative to this one's folder."""
    from depthmix import config
    from depthmix.strict_yaml import read_recipe

    lines = read_recipe(command, recipe)
    folder = os.path.dirname(recipe)
    modules = lines.get("modules")
    if isinstance(modules, list) and all(isinstance(path, str) for path in modules):
        lines["modules"] = [os.path.normpath(os.path.join(folder, path)) for path in modules]
    base = lines.pop("base", None)
    if base is None:
        return lines
    if not isinstance(base, str) or not base:
        raise UserError(f"{command}: base in {recipe} must be the path of a recipe, got {shown(base)}")
    path = os.path.normpath(os.path.join(folder, base))
    if path in (recipe, *above):
        raise UserError(f"{command}: the recipe {recipe} is its own base")
    inherited = _read_lines(command, path, (recipe, *above))
    options = [field.name for field in dataclasses.fields(config.CompareConfig)]
    if unknown := next((name for name in inherited if name not in options), None):
        what = f"the base {path} of {recipe} has an unknown option {shown(unknown)}"
        raise UserError(f"{command}: {what}{nearest(unknown, options)}")
    known = {field.name for field in dataclasses.fields(config.TrainConfig)} - {*NOT_INHERITED}
    return {**{name: value for name, value in inherited.items() if name in known}, **lines}


def _drop_replaced_options(lines: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Drop the options of a recipe's mixer where a flag names another mixer or gives other options."""
    rule, _, options = str(lines.get("mixer", "")).partition(":")
    if "mixer_options" in given and "mixer" not in given and options:
        return {**lines, "mixer": rule}
    if "mixer" in given and "mixer" in lines and given["mixer"] != rule:
        return {name: value for name, value in lines.items() if name != "mixer_options"}
    return lines


def _commands_with(name: str) -> str:
    """Name the commands that have an option of this name."""
    from depthmix import config

    commands_with_it = [
        c for c in vars(config).values() if isinstance(c, type) and name in getattr(c, "__dataclass_fields__", {})
    ]
    commands = " and ".join(f"`depthmix {c.__name__.removesuffix('Config').lower()}`" for c in commands_with_it)
    return f"; {commands} {'has' if len(commands_with_it) == 1 else 'have'} it" if commands_with_it else ""
