"""Arms of a comparison: `attnres:block_size=4,ways=3` is a rule and its options."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from depthmix.compare.equivalence import is_same_rule
from depthmix.config import PlanConfig, RetrofitConfig, TrainConfig
from depthmix.errors import UserError
from depthmix.mixers import OptionError, create_mixer, mixer_class
from depthmix.mixers.options import check_options, nearest, parse_value

WithMixer = TypeVar("WithMixer", TrainConfig, PlanConfig, RetrofitConfig)


@dataclass(frozen=True)
class Arm:
    """A rule with its options, typed and in the order of the rule's constructor."""

    name: str
    options: dict[str, Any]

    @property
    def label(self) -> str:
        """Name in tables and figures; `parse_arm` reads it back."""
        given = ",".join(f"{k}={_format(v)}" for k, v in self.options.items())
        return f"{self.name}:{given}" if given else self.name


def slug(label: str) -> str:
    """Return a label in characters that every file system accepts; different labels give different slugs."""
    plain = label.replace(":", "-").replace(",", "-")
    if re.fullmatch(r"[A-Za-z0-9._=+-]{1,100}", plain):
        return plain
    digest = hashlib.sha256(label.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9._=+-]', '_', plain)[:90]}-{digest}"


def rule_of(arm: Any) -> Any:
    """Return the rule of an arm as a recipe gives it: the text itself, or the `mixer` of a mapping."""
    return arm.get("mixer") if isinstance(arm, dict) else arm


def parse_arm(text: str, what: str = "arm") -> Arm:
    """Parse an arm, "NAME" or "NAME:option=value,option=value".

    Args:
        text: The arm.
        what: The word for it in error messages.

    Returns:
        The arm, with every name and value checked.

    Raises:
        UserError: A name or a value is wrong.
    """
    if not isinstance(text, str):
        raise UserError(f"{what} {text!r}: write NAME or NAME:option=value,option=value, and quote it in a recipe")
    name, colon, rest = (part.strip() for part in text.partition(":"))
    if not name:
        raise UserError(f"{what} {text!r} has no rule; write NAME or NAME:option=value,option=value")
    try:
        known = mixer_class(name).options
        given: dict[str, Any] = {}
        for part in rest.split(",") if colon else []:
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if key in known and not value:
                raise UserError(f"{what} {text!r}: {key} needs a value, {key}=…: {known[key].describe()}")
            if not key or not equals:
                hint = nearest(key, known) if key else ""
                raise UserError(f"{what} {text!r}: expected option=value, got {part.strip()!r}{hint}")
            if key in given:
                raise UserError(f"{what} {text!r} gives {key} twice")
            given[key] = parse_value(value)
        check_options(name, known, given)
    except OptionError as error:
        raise UserError(f"{what} {text!r}: {error}") from None
    return Arm(name, {key: given[key] for key in known if key in given})


def options_apart(command: str, config: WithMixer) -> WithMixer:
    """Split a configuration's mixer, such as `attnres:ways=2`, into its name and its options."""
    if ":" not in config.mixer:
        return config
    if config.mixer_options:
        raise UserError(f"{command}: options of the mixer are in {config.mixer!r} and in mixer_options; give them once")
    arm = parse_arm(config.mixer, "mixer")
    return dataclasses.replace(config, mixer=arm.name, mixer_options=arm.options)


def parse_arms(texts: Sequence[str]) -> list[Arm]:
    """Parse all arms of a comparison. Raises UserError for two arms with the same options."""
    if isinstance(texts, str) or not texts:
        raise UserError("arms is a list of at least one rule, e.g. residual attnres:block_size=4")
    arms = [parse_arm(text) for text in texts]
    meanings: list[tuple[str, dict[str, Any]]] = []
    for text, arm in zip(texts, arms, strict=True):
        defaults = {key: option.default for key, option in mixer_class(arm.name).options.items()}
        meaning = (arm.name, {**defaults, **arm.options})
        if meaning in meanings:
            raise UserError(f"arms {texts[meanings.index(meaning)]!r} and {text!r} are the same; remove one")
        meanings.append(meaning)
    return arms


def check_arms(arms: Sequence[Arm], dim: int, n_blocks: int) -> None:
    """Check before any training that all arms fit the model and that no two of them are the same rule in it.

    Args:
        arms: The arms.
        dim: Width of the model.
        n_blocks: Blocks of the model.

    Raises:
        UserError: An option does not fit the model, or two arms compute the same.
    """
    for arm in arms:
        try:
            with torch.device("meta"):  # without memory
                create_mixer(arm.name, dim=dim, n_blocks=n_blocks, **arm.options)
        except OptionError as error:
            raise UserError(f"arm {arm.label!r}: {error}") from None
    for one, other in itertools.combinations(arms, 2):
        if one.name == other.name and is_same_rule(one.name, one.options, other.options, dim, n_blocks):
            what = f"are the same rule in a model of {n_blocks} blocks"
            raise UserError(f"arms {one.label!r} and {other.label!r} {what}; remove one")


def _format(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
