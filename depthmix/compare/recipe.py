"""A comparison's recipe, checked: models, seeds, data sets and sizes.

    base: ../gutenberg-54m.yaml        # a recipe, from this file's folder, whose training options apply here
    steps: 600                         # any option of `depthmix train`, for all arms
    seeds: [0, 1, 2]
    budget: tokens                     # or time
    domains: {books: data/books}       # data sets by name; or `data: FOLDER`
    sizes: {54m: {}, 6m: {dim: 256}}   # options by size
    arms:
      - residual                       # the baseline, which the others are compared with
      - {label: slow b, mixer: "dca:window=2", set: {lr: 0.001}, seeds: [0], sizes: [54m]}

A cell is one domain at one size. Arms are compared within a cell. Options of an arm override those of a size, which override
those for all arms.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthmix.compare.arms import Arm, check_arms, parse_arm, parse_arms, slug
from depthmix.compare.modules import load_modules
from depthmix.config import CompareConfig, TrainConfig
from depthmix.errors import UserError
from depthmix.names import DEFAULT_MIXER, nearest
from depthmix.values import build_config, check_at_least, coerce

# Arm, domain, size and seed of a run.
Key = tuple[str, str, str, int]
ARM_KEYS = ("label", "mixer", "set", "seeds", "sizes")
# Options that no arm can set, and why.
COMMON_OPTIONS = {"eval_tokens": "losses on different text cannot be compared"}
COMMON_AT_EQUAL_TIME = {"steps": "an arm takes the steps that fit into the baseline's time"}
# Options of a training, and the keys of a comparison that state them.
STATED_BY = {
    "data": "domains",
    "out": "out",
    "seed": "seeds",
    "mixer": "arms",
    "mixer_options": "arms",
    "device": "device",
    "quiet": "quiet",
}


@dataclass(frozen=True)
class RecipeArm:
    """An arm: a rule, and how its training differs from that of the others."""

    label: str
    arm: Arm
    settings: dict[str, Any]
    seeds: dict[str, list[int]]  # by domain
    sizes: list[str]


@dataclass(frozen=True)
class Cell:
    """A domain at a size."""

    domain: str
    size: str
    settings: dict[str, Any]
    seeds: list[int] | None = None  # None: all seeds of the comparison

    @property
    def name(self) -> str:
        """Name in tables; empty where there is only one cell."""
        return " ".join(word for word in (self.domain, self.size) if word)


@dataclass(frozen=True)
class Recipe:
    """A checked recipe."""

    config: CompareConfig
    domains: dict[str, str]  # folders
    cells: list[Cell]
    arms: list[RecipeArm]

    @property
    def name(self) -> str:
        """Title of the table: the name of the results' folder."""
        return Path(self.config.out).absolute().name

    @property
    def labels(self) -> list[str]:
        """Names of the arms, the baseline first."""
        return [arm.label for arm in self.arms]

    @property
    def timed(self) -> bool:
        """True if step times are measured in turns."""
        return self.config.step_times or self.config.budget == "time"

    def seeds_at(self, cell: Cell) -> dict[str, list[int]]:
        """Return the seeds of every arm that is run in a cell."""
        arms = [arm for arm in self.arms if cell.size in arm.sizes and arm.seeds[cell.domain]]
        return {
            arm.label: [seed for seed in arm.seeds[cell.domain] if cell.seeds is None or seed in cell.seeds]
            for arm in arms
        }

    @property
    def run_keys(self) -> list[Key]:
        """Keys of all runs."""
        return [
            (label, cell.domain, cell.size, seed)
            for cell in self.cells
            for label, seeds in self.seeds_at(cell).items()
            for seed in seeds
        ]

    def train_config(self, arm: RecipeArm, cell: Cell, seed: int) -> TrainConfig:
        """Return the training of one run, before its steps are scaled to equal time."""
        values = {f.name: getattr(self.config, f.name) for f in dataclasses.fields(TrainConfig)}
        values |= {**cell.settings, **arm.settings, "data": self.domains[cell.domain], "seed": seed}
        values |= {"mixer": arm.arm.name, "mixer_options": dict(arm.arm.options)}
        names = [name for name in (cell.domain, cell.size, arm.label) if name]
        values["out"] = Path(self.config.out).joinpath(*map(slug, names), f"seed-{seed}").as_posix()
        values["eval_every"] = values["eval_every"] or max(1, values["steps"])
        return TrainConfig(**values)


def load_recipe(path: str | Path, **options: Any) -> Recipe:
    """Read a recipe from a file."""
    return check_recipe(build_config("compare", CompareConfig, {**options, "recipe": str(path)}))


def check_recipe(config: CompareConfig) -> Recipe:
    """Check everything in a recipe that needs no data.

    Raises:
        UserError: An option, an arm, a size or a domain cannot be used.
    """
    _check_options(config)
    load_modules(Path(), config.modules, "compare: modules")
    domains = _domains(config)
    sizes = config.sizes or {"": {}}
    cells = [_cell(domain, size, options, config.seeds) for domain in domains for size, options in sizes.items()]
    names = [cell.name for cell in cells]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"compare: two pairs of a domain and a size are called {repeated!r}; rename one of them")
    arms = _arms(config, dict.fromkeys(domains, config.seeds), list(sizes))
    _check_sections(config, cells, arms)
    return Recipe(config, domains, cells, arms)


def _check_options(config: CompareConfig) -> None:
    from depthmix.runs.init import check_finished
    from depthmix.train.generate import check_prompt

    if not config.out:
        raise UserError("compare needs --out, the folder for its results")
    if config.mixer != DEFAULT_MIXER or config.mixer_options:
        raise UserError("compare takes its rules from --arms, not from --mixer and --mixer-options")
    if config.parallel:
        raise UserError("compare runs in one process: leave parallel out, or train the arms one by one")
    if config.seed != CompareConfig.seed:
        raise UserError(f"compare takes its seeds from --seeds, not from --seed: --seeds {config.seed}")
    if config.budget not in ("tokens", "time"):
        raise UserError(f"budget must be tokens or time, got {config.budget!r}")
    _check_seeds("compare", config.seeds)
    check_at_least(config, 1, "steps", "save_every", "sample_tokens", "jobs")
    check_at_least(config, 0, "eval_every")
    if not 0 <= config.minutes < math.inf:
        raise UserError(f"minutes must be a number of at least 0, got {config.minutes:g}")
    if config.prompt and not config.save_models:
        raise UserError("a prompt needs trained models: set save_models, or leave the prompt out")
    check_prompt(config.prompt)
    check_finished(config.init)
    _check_power(config.power)


def _check_power(power: Mapping[str, Any]) -> None:
    _check_keys("compare: power", power, ("difference", "spread"))
    spread = power.get("spread", [])
    values = [
        *(spread if isinstance(spread, list) else [spread]),
        *([power["difference"]] if "difference" in power else []),
    ]
    if not all(isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < math.inf for v in values):
        raise UserError(f"compare: power: difference and spread must be numbers above 0, in nats, got {dict(power)!r}")


def _check_keys(where: str, given: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in given:
        if key not in keys:
            raise UserError(f"{where}: unknown key {key!r}; there are {', '.join(keys)}{nearest(str(key), keys)}")


def _check_seeds(where: str, seeds: Any) -> list[int]:
    if not isinstance(seeds, list) or not seeds or any(isinstance(s, bool) or not isinstance(s, int) for s in seeds):
        raise UserError(f"{where}: seeds must be a list of at least one integer, got {seeds!r}")
    if min(seeds) < 0:
        raise UserError(f"{where}: seed must be at least 0, got {min(seeds)}")
    if len(set(seeds)) < len(seeds):
        raise UserError(f"{where}: every seed counts once, got {seeds!r}")
    return seeds


def _domains(config: CompareConfig) -> dict[str, str]:
    """Return the folders of prepared data by name; one folder without a name for `data`."""
    if not config.domains:
        if not config.data:
            raise UserError("data is needed: a folder written by `depthmix data`, or domains with a folder each")
        return {"": config.data}
    if not all(isinstance(folder, str) and folder for folder in config.domains.values()):
        raise UserError(f"compare: domains maps names to folders of prepared data, got {config.domains!r}")
    return dict(config.domains)


@functools.cache  # evaluating every annotation takes a while, and each arm needs them
def _options() -> dict[str, Any]:
    return typing.get_type_hints(TrainConfig)


def _settings(where: str, given: Any) -> dict[str, Any]:
    """Return options of a training with their types checked."""
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise UserError(f"{where} must hold options of a training, option: value, got {given!r}")
    for key in given:
        if key in STATED_BY:
            raise UserError(f"{where} cannot hold {key}; a comparison sets it with {STATED_BY[key]}")
        if key not in _options():
            raise UserError(f"{where}: unknown option {str(key)!r}{nearest(str(key), _options())}")
    return {key: coerce(where, key, _options()[key], value) for key, value in given.items()}


def _cell(domain: str, size: str, given: Any, seeds: Sequence[int]) -> Cell:
    seeds_of_size, where = None, f"compare: sizes, {size}"
    if isinstance(given, dict) and "seeds" in given:
        seeds_of_size = _check_seeds(where, given["seeds"])
        given = {key: value for key, value in given.items() if key != "seeds"}
        if unknown := [seed for seed in seeds_of_size if seed not in seeds]:
            raise UserError(f"{where}: the comparison has no seed {unknown[0]}; a size can only leave seeds out")
    return Cell(domain, size, _settings(where, given), seeds_of_size)


def _arms(config: CompareConfig, seeds: dict[str, list[int]], sizes: list[str]) -> list[RecipeArm]:
    if not config.arms:
        raise UserError("arms must be a list of at least one rule, e.g. residual attnres:block_size=4")
    plain = [given for given in config.arms if isinstance(given, str)]
    parse_arms(plain or [DEFAULT_MIXER])  # refuses two arms with the same options
    arms: list[RecipeArm] = []
    for given in config.arms:
        entry = {"mixer": given} if isinstance(given, str) else given
        if not isinstance(entry, dict) or not isinstance(entry.get("mixer"), str):
            raise UserError(f"compare: an arm is a rule, or has mixer and {', '.join(ARM_KEYS)}, got {given!r}")
        arm = parse_arm(entry["mixer"])
        label = entry.get("label", arm.label)
        where = f"compare: arm {label!r}"
        _check_keys(where, entry, ARM_KEYS)
        if not isinstance(label, str) or not label.strip() or not label.isprintable():
            raise UserError(f"compare: the label of an arm is one line of text, got {label!r}")
        if label in [other.label for other in arms]:
            raise UserError(f"compare: two arms are called {label!r}; give one of them a label")
        settings = _settings(f"{where}: set", entry.get("set", {}))
        arm_seeds = _seeds_by_domain(where, entry["seeds"], seeds) if "seeds" in entry else seeds
        arm_sizes = _sizes_of(where, entry["sizes"], sizes) if "sizes" in entry else sizes
        arms.append(RecipeArm(label, arm, settings, arm_seeds, arm_sizes))
        _check_common_options(config, where, settings)
    first = arms[0]
    if len(first.sizes) < len(sizes):
        raise UserError(f"compare: the baseline, {first.label!r}, must be run at every size")
    if without_seeds := [domain for domain, domain_seeds in first.seeds.items() if not domain_seeds]:
        raise UserError(f"compare: the baseline, {first.label!r}, needs a seed on {without_seeds[0]}")
    for one, other in itertools.combinations(arms, 2):
        if one.arm == other.arm and one.settings == other.settings:
            raise UserError(f"compare: arm {one.label!r} is there twice, under another label; remove one of them")
    if len(plain) == len(config.arms):
        check_arms([arm.arm for arm in arms], config.dim, config.n_blocks)
    return arms


def _check_common_options(config: CompareConfig, where: str, settings: Mapping[str, Any]) -> None:
    for key, why in {**COMMON_OPTIONS, **(COMMON_AT_EQUAL_TIME if config.budget == "time" else {})}.items():
        if key in settings:
            raise UserError(f"{where}: {key} must be set for all arms or by size, since {why}")


def _seeds_by_domain(where: str, given: Any, known: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return an arm's seeds by domain, given as one list or by domain. An empty list leaves a domain out."""
    if not isinstance(given, dict):
        return dict.fromkeys(known, _check_seeds(where, given))
    for domain in given:
        if domain not in known:
            raise UserError(f"{where}: seeds: there is no domain {domain!r}{nearest(str(domain), known)}")
    return known | {domain: _check_seeds(where, seeds) if seeds != [] else [] for domain, seeds in given.items()}


def _sizes_of(where: str, given: Any, known: Sequence[str]) -> list[str]:
    if not isinstance(given, list) or not given:
        raise UserError(f"{where}: sizes must be a list of sizes, got {given!r}")
    for size in given:
        if size not in known:
            raise UserError(f"{where}: there is no size {size!r}{nearest(str(size), known)}")
    return list(given)


def _check_sections(config: CompareConfig, cells: Sequence[Cell], arms: Sequence[RecipeArm]) -> None:
    """Refuse a section whose numbers the runs would not record, or whose numbers could not be compared."""
    options = [vars(config), *(cell.settings for cell in cells), *(arm.settings for arm in arms)]
    if "depth" in config.sections and not any(settings.get("dynamics_every") for settings in options):
        raise UserError("compare: the section depth needs what dynamics_every records; set it")
    for arm in arms if "stability" in config.sections else ():
        rates: dict[tuple[str, float], str] = {}
        for cell in (cell for cell in cells if cell.size in arm.sizes):
            rate = {"lr": config.lr, **cell.settings, **arm.settings}["lr"]
            other = rates.setdefault((cell.domain, rate), cell.size)
            if other != cell.size:
                words = f"{arm.label} has the same rate at {other!r} and {cell.size!r}"
                raise UserError(f"compare: the section stability is for sizes that are learning rates, and {words}")


def check_only(recipe: Recipe) -> dict[str, set[Any]]:
    """Return the arms, seeds, sizes and domains that `only` names, by kind. An empty set stands for all.

    Raises:
        UserError: A word names nothing, or no run has all of them together.
    """
    seeds = {seed for arm in recipe.arms for domain_seeds in arm.seeds.values() for seed in domain_seeds}
    known: dict[str, dict[str, Any]] = {
        "arm": {arm.label: arm.label for arm in recipe.arms},
        "seed": {str(seed): seed for seed in seeds},
        "size": {cell.size: cell.size for cell in recipe.cells},
        "domain": {domain: domain for domain in recipe.domains},
    }
    chosen: dict[str, set[Any]] = {
        kind: {names[w] for w in recipe.config.only if w in names} for kind, names in known.items()
    }
    every_name = [name for names in known.values() for name in names if name]
    if unknown := next((word for word in recipe.config.only if word not in every_name), None):
        what = f"there is no arm, seed, size or domain {unknown!r}{nearest(unknown, every_name)}"
        raise UserError(f"compare: only: {what}")
    if not any(is_chosen(chosen, key) for key in recipe.run_keys):
        raise UserError(f"compare: only: no run is of {' and '.join(recipe.config.only)} together")
    return chosen


def is_chosen(chosen: Mapping[str, set[Any]], key: Key) -> bool:
    """Tell whether `only` names a run.

    Args:
        chosen: Result of `check_only`.
        key: Key of the run.
    """
    kinds = ("arm", "domain", "size", "seed")
    return all(not chosen[kind] or value in chosen[kind] for kind, value in zip(kinds, key, strict=True))
