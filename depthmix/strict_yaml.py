"""Read YAML as a person reads it, and refuse values that YAML 1.1, which PyYAML implements, reads as something else.

    steps: 010     refused: YAML 1.1 reads the octal number 8
    steps: 1:30    refused: YAML 1.1 reads 90, a number of base 60
    a name twice   refused: the last value would silently win
    lr: 1e-3       read as the number; YAML 1.1 reads a text

The expanded size is limited, too: aliases of aliases in a short text could expand to gigabytes.
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
# A number in YAML 1.2. YAML 1.1 requires 1.0e-3.
EXPONENT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")


class TooLarge(ValueError):
    """Error for a text that expands to more than a recipe can need."""


class Ambiguous(ValueError):
    """Error for a line that YAML reads differently from a person. The message continues after the name of the file."""


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
                continue  # not a valid key of a dictionary
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
    """Parse a YAML text.

    Args:
        text: One document.
        loader: A plain loader, or `RecipeLoader`.

    Returns:
        The value of the document.

    Raises:
        TooLarge: The values have more than LIMIT characters with aliases expanded, or a value contains itself.
        yaml.YAMLError, ValueError, RecursionError: The text is not YAML.
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
    """Count the characters of a node with all aliases expanded. Each node is visited once."""
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
    """Explain how YAML misreads a plain scalar that looks like another number.

    Args:
        text: A scalar that YAML resolves to a number, as written in the file.

    Returns:
        The problem and what to write instead; "" for a number that YAML reads as a person does.

    Examples:
        >>> misread_number("010")
        'YAML reads 010 as the octal number 8: write 10, or quotes around text'
    """
    digits = text.replace("_", "")
    if OCTAL.fullmatch(text) and int(digits, 8) != int(digits):
        return f"YAML reads {text} as the octal number {int(digits, 8)}: write {int(digits)}, or quotes around text"
    if BASE_60.fullmatch(text):
        return f"YAML reads {text} as a number of base 60: write it in digits, or quotes around text"
    return ""
