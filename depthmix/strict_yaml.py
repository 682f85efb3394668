"""Read YAML as a person reads it, and refuse what YAML 1.1, which PyYAML implements, would take for something else.

    steps: 010        the octal number 8: refused        lr: 1e-3     text in YAML 1.1: read as the number
    steps: 1:30       90, a number of base 60: refused   a name twice: the last one would win without a word: refused

A text also cannot grow: aliases may stand for a text a hundred times, and aliases of aliases for gigabytes.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from depthmix.errors import UserError
from depthmix.shown import VALUE

LIMIT = 100_000  # characters of values, with every alias written out; the longest recipe here has four thousand
OCTAL = re.compile(r"[-+]?0[0-7_]+")
BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
# A number to YAML 1.2 and to everybody else; YAML 1.1 wants 1.0e-3.
EXPONENT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")


class TooLarge(ValueError):
    """Error for a text that expands to more than a recipe can need."""


class Ambiguous(ValueError):
    """Error for a line that YAML reads in another way than a person. The message goes on after the name of the file."""


class RecipeLoader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate names and misread numbers."""

    def construct_number(self, node: Any) -> int | float:
        if problem := misread_number(node.value):
            raise Ambiguous(f"at line {node.start_mark.line + 1}: {problem}")
        is_int = node.tag == "tag:yaml.org,2002:int"
        return self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # which is no YAML that a dictionary can hold
            if key.value in names:
                raise Ambiguous(f"gives {key.value[:VALUE]} twice, again at line {key.start_mark.line + 1}")
            names.add(key.value)
        return super().construct_mapping(node, deep)


for _kind in ("int", "float"):
    RecipeLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", RecipeLoader.construct_number)
RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))


def read_recipe(command: str, path: str) -> dict[str, Any]:
    """Read the lines of a YAML recipe. Raises UserError if it cannot be read or is not valid."""
    recipe = f"{command}: the recipe {path}"
    try:
        with open(path, encoding="utf-8") as file:
            loaded = load_yaml(file.read(LIMIT + 1), RecipeLoader)
    except TooLarge as error:
        raise UserError(f"{recipe} is too large: {error}; write out what it needs") from None
    except Ambiguous as error:
        raise UserError(f"{recipe} {error}") from None
    except OSError as error:
        raise UserError(f"{command}: cannot read the recipe {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise UserError(f"{recipe} is not YAML{where}") from None
    if not isinstance(loaded, dict) or not all(isinstance(k, str) for k in loaded):
        raise UserError(f"{recipe} must hold lines of option: value")
    return loaded


def load_yaml(text: str, loader: type[yaml.SafeLoader]) -> Any:
    """Return what a YAML text says.

    Args:
        text: one document.
        loader: a plain loader, or `RecipeLoader`.

    Raises:
        TooLarge: its values have more than LIMIT characters once aliases are written out, or one holds itself.
        yaml.YAMLError, ValueError, RecursionError: it is not YAML.
    """
    if len(text) > LIMIT:
        raise TooLarge(f"it has more than {LIMIT:,} characters")
    reader = loader(text)
    try:
        node = reader.get_single_node()
        if node is None:
            return None
        if _expanded(node, {}) > LIMIT:
            raise TooLarge(f"its aliases expand to more than {LIMIT:,} characters")
        return reader.construct_document(node)
    finally:
        reader.dispose()


def _expanded(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Count the characters of a node with all aliases in it written out; each node is looked at once."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise TooLarge("one of its values holds itself")
        return size
    known[id(node)] = None
    if isinstance(node, yaml.ScalarNode):
        size = 1 + len(node.value)
    elif isinstance(node, yaml.MappingNode):
        size = 1 + sum(_expanded(key, known) + _expanded(value, known) for key, value in node.value)
    else:
        size = 1 + sum(_expanded(item, known) for item in node.value)
    known[id(node)] = size
    return size


def misread_number(text: str) -> str:
    """Say what YAML takes a plain scalar for, where that is not the number one reads in it.

    Args:
        text: A scalar that YAML resolves to a number, as it stands in the file.

    Returns:
        What is wrong and what to write instead; "" for a number that means what it looks like.

    Example:
        >>> misread_number("010")
        'YAML reads 010 as the octal number 8: write 10, or quotes around text'
    """
    digits = text.replace("_", "")
    if OCTAL.fullmatch(text) and int(digits, 8) != int(digits):
        return f"YAML reads {text} as the octal number {int(digits, 8)}: write {int(digits)}, or quotes around text"
    if BASE_60.fullmatch(text):
        return f"YAML reads {text} as a number of base 60: write it in digits, or quotes around text"
    return ""
