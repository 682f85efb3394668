"""The options of an entry: where to run, against whom, how often, and where the results go."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from depthmix import ops
from depthmix.device import choose_device

RIVALS = ("fla", "flash-attn-res")
KNOWN_RIVALS = (*RIVALS, "fla-level0")


@dataclass
class Options:
    """The options of every entry. An entry ignores those that do not concern it."""

    device: torch.device
    small: bool = False  # tiny sizes, for a machine without a GPU
    repeats: int = 10  # timed rounds; the median is reported
    warmup: int = 2
    rivals: tuple[str, ...] = RIVALS
    cases: str = ""  # only the cases whose name contains this text
    tune_limit: float = 45.0  # seconds that flash-attn-res may spend on choosing its configurations
    recipe: str = "recipes/gutenberg-54m.yaml"
    arms: tuple[str, ...] = ()  # of `step`; by default those of the table
    backend: str = "default"  # of our operators
    against: str = ""  # `host`: another checkout to measure in the same run

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that is timed: bf16, as in training."""
        return torch.bfloat16

    def wanted(self, case: str) -> bool:
        """Tell whether the user asked for a case."""
        return self.cases in case


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that make up `Options`."""
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto")
    parser.add_argument("--small", action="store_true", help="tiny sizes: everything runs on a CPU in seconds")
    parser.add_argument(
        "--repeats",
        type=int,
        help="timed rounds, of which the median is reported (default 10, or 3 with --small); step takes four times as many",
    )
    parser.add_argument(
        "--rivals", default=",".join(RIVALS), help="rivals to compare with, separated by commas, or none"
    )
    parser.add_argument("--cases", default="", metavar="TEXT", help="only run cases whose name contains this text")
    parser.add_argument(
        "--tune-limit", type=float, default=45.0, metavar="S", help="seconds for flash-attn-res to tune"
    )
    parser.add_argument("--recipe", default="recipes/gutenberg-54m.yaml", help="step: recipe with the sizes to use")
    parser.add_argument(
        "--arms", nargs="+", default=[], help="step: arms to time instead of the table's; the first is the base"
    )
    parser.add_argument(
        "--backend",
        default="default",
        choices=("default", "triton", "reference"),
        help="force one of our operators' backends",
    )
    parser.add_argument(
        "--against", default="", metavar="FOLDER", help="host: another checkout, measured in turns with this one"
    )


def from_arguments(given: argparse.Namespace) -> Options:
    """Return the options of a command line."""
    rivals = tuple(r for r in given.rivals.split(",") if r and r != "none")
    if unknown := [r for r in rivals if r not in KNOWN_RIVALS]:
        raise SystemExit(f"benchmarks: unknown rival {unknown[0]!r}; known are {', '.join(KNOWN_RIVALS)}")
    repeats = given.repeats if given.repeats is not None else 3 if given.small else 10
    if repeats < 1:
        raise SystemExit(f"benchmarks: repeats must be at least 1, got {repeats}")
    return Options(
        device=choose_device(given.device),
        small=given.small,
        repeats=repeats,
        warmup=1 if given.small else 2,
        rivals=rivals,
        cases=given.cases,
        tune_limit=given.tune_limit,
        recipe=given.recipe,
        arms=tuple(given.arms),
        backend=given.backend,
        against=given.against,
    )


def backend(name: str) -> AbstractContextManager[Any]:
    """Force a backend of our operators. With "default" they choose themselves."""
    use_backend: Any = getattr(ops, "use_backend", None)
    if name == "default" or (use_backend is None and name == "reference"):
        return nullcontext()
    if use_backend is None:
        raise SystemExit(f"benchmarks: this version has no backend {name!r} to force")
    forced: AbstractContextManager[Any] = use_backend(name)
    return forced
