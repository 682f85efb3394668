"""YAML that cannot grow: an alias may stand for a text a hundred times, and aliases of aliases for gigabytes."""

from __future__ import annotations

from typing import Any

import yaml

LIMIT = 100_000  # characters of values, with every alias written out; the longest recipe here has four thousand


class TooLarge(ValueError):
    """Error for a text that expands to more than a recipe can need."""


def load_yaml(text: str, loader: type[yaml.SafeLoader]) -> Any:
    """Return what a YAML text says.

    Args:
        text: one document.
        loader: how it is read.

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
