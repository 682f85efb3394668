"""Options of a mixer with their defaults spelt out, so that what is saved today keeps its meaning when a default changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from depthmix.mixers.options import OptionError
from depthmix.mixers.registry import mixer_class


def all_options(mixer: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every option of a mixer: the given ones, and the defaults of the rest.

    Args:
        mixer: name of the rule. The options of a rule that is not registered are returned as they are.
        given: options by name.
    """
    return {**_defaults(mixer), **given}


def chosen_options(mixer: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a mixer that differ from its defaults: what a label has to say."""
    defaults = _defaults(mixer)
    return {name: value for name, value in options.items() if name not in defaults or value != defaults[name]}


def _defaults(mixer: str) -> dict[str, Any]:
    try:
        return {name: option.default for name, option in mixer_class(mixer).options.items()}
    except OptionError:
        return {}
