"""The sites of a model: the sublayers of its blocks, by name.

    n_blocks=12                                                attention and an MLP in each of 12 blocks
    n_blocks=6, sites=("attention", "cross_attention", "mlp")  the same three in each of 6 blocks
    sites=[("attention", "mlp")] * 3 + [("mlp",)]              block by block

A site whose name ends in `attention` forms queries, keys and values of what it reads, so a rule may give it a mixture for each.
In `cross_attention` keys and values come from elsewhere: it reads one mixture like any other site. Other names are the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from depthmix.mixers.options import Option, OptionError

BLOCK = ("attention", "mlp")
FORM = "the names of a block's sites, as in ('attention', 'mlp'), or a list of such blocks"
Sites = Sequence[str] | Sequence[Sequence[str]]


@dataclass(frozen=True)
class Layout:
    """The names of every block's sites: S sites in N blocks, numbered from 0."""

    blocks: tuple[tuple[str, ...], ...]
    n_blocks: int = field(init=False, repr=False)
    n_sites: int = field(init=False, repr=False)
    # Tuples and not methods: a compiler that traces a pass sees constants.
    names: tuple[str, ...] = field(init=False, repr=False)  # [S]
    block: tuple[int, ...] = field(init=False, repr=False)  # [S + 1], the block of a site; N for finish
    begins: tuple[bool, ...] = field(init=False, repr=False)  # [S + 1], whether a site is its block's first; finish is
    ends: tuple[bool, ...] = field(init=False, repr=False)  # [S], whether it is the last
    attention: tuple[int, ...] = field(init=False, repr=False)  # the sites that are attention

    def __post_init__(self) -> None:
        block = tuple(i for i, names in enumerate(self.blocks) for _ in names)
        n_sites, names = len(block), tuple(name for names in self.blocks for name in names)
        block = (*block, len(self.blocks))
        for name, value in {
            "n_blocks": len(self.blocks),
            "n_sites": n_sites,
            "names": names,
            "block": block,
            "begins": tuple(s == 0 or block[s] != block[s - 1] for s in range(n_sites + 1)),
            "ends": tuple(block[s] != block[s + 1] for s in range(n_sites)),
            "attention": tuple(s for s, name in enumerate(names) if is_attention(name)),
        }.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, owner: str, n_blocks: Any = None, sites: Any = None) -> Layout:
        """Build a layout from the arguments of `create_mixer`; owner: the rule that an error names."""
        blocks = None if sites is None else _blocks(owner, sites)
        if n_blocks is not None or blocks is None or blocks[1]:
            Option("n_blocks", None, (int,), (), False, 1).check(owner, n_blocks)
        if blocks is None:
            return cls((BLOCK,) * n_blocks)
        named_blocks, alike = blocks
        if alike:
            return cls(named_blocks * n_blocks)
        if n_blocks is not None and n_blocks != len(named_blocks):
            mismatch = f"sites has {len(named_blocks)} blocks, n_blocks is {n_blocks}"
            raise OptionError(f"{owner}: {mismatch}; leave n_blocks out")
        return cls(named_blocks)

    def short(self) -> tuple[Any, ...]:
        """Return the `sites` that `create_mixer` takes together with n_blocks: one block if all are alike."""
        return self.blocks[0] if len(set(self.blocks)) == 1 else self.blocks


def is_attention(name: str) -> bool:
    """Tell whether a site of this name forms queries, keys and values from what it reads."""
    return name.endswith("attention") and not name.endswith("cross_attention")


def _blocks(owner: str, sites: Any) -> tuple[tuple[tuple[str, ...], ...], bool]:
    """Return the blocks that `sites` names, and True if it names the sites of one block that all blocks are like."""
    if isinstance(sites, str) or not isinstance(sites, Sequence) or not len(sites):
        raise OptionError(f"{owner}: sites must be {FORM}, got {sites!r}")
    alike = all(isinstance(name, str) for name in sites)
    blocks = (tuple(sites),) if alike else tuple(_names(owner, block) for block in sites)
    for name in (name for block in blocks for name in block):
        if not isinstance(name, str) or not name.isidentifier():
            raise OptionError(f"{owner}: sites must be {FORM}; {name!r} is no name")
    return blocks, alike


def _names(owner: str, block: Any) -> tuple[Any, ...]:
    if isinstance(block, str) or not isinstance(block, Sequence) or not len(block):
        raise OptionError(f"{owner}: sites must be {FORM}, got {block!r} as a block")
    return tuple(block)
