"""A study's file: a question, arms and seeds, on one or several data sets and sizes.

question: in words
base: ../gutenberg-54m.yaml        # a recipe, from this file; its arms, seeds and budget do not count
set: {steps: 600}                  # any option of `depthmix train`, for all arms
seeds: [0, 1, 2]
budget: tokens                     # or time, as with `depthmix compare`
data: {books: data/books}          # domains; or one folder
sizes: {54m: {}, 6m: {dim: 256}}   # options by size
modules: [../../examples/experiments]  # Python files that register mechanisms of their own, from this file
power: {difference: 0.01, spread: [0.004, 0.008]}
step_times: true                   # measured in turns when all runs are there, for the costs; at equal time always, and first
sections: [power-laws]             # what the table says besides: power-laws, stability, depth
notes: [what has to be said under the table]
arms:
  - residual                       # the first is what the others are compared with
  - {label: slow b, mixer: "dca:window=2", set: {lr: 0.001}, seeds: [0], sizes: [54m]}
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import depthmix
from depthmix.compare.arms import Arm, parse_arm
from depthmix.compare.modules import load_modules
from depthmix.config import CompareConfig, TrainConfig
from depthmix.errors import UserError
from depthmix.names import nearest
from depthmix.strict_yaml import read_recipe
from depthmix.values import coerce, is_study

FOLDER = Path("recipes") / "studies"
KEYS = (
    "question",
    "base",
    "set",
    "seeds",
    "budget",
    "data",
    "sizes",
    "modules",
    "power",
    "step_times",
    "sections",
    "notes",
    "arms",
)
SECTIONS = ("power-laws", "stability", "depth")
ARM_KEYS = ("label", "mixer", "set", "seeds", "sizes")
SAME_FOR_ALL = {"eval_tokens": "losses on different text cannot be compared"}  # options that no arm has for itself
AT_EQUAL_TIME = {"steps": "an arm makes those that fit into the first one's time"}
# What a study says in other words, and what a run without a folder has no use for.
ELSEWHERE = {
    "data": "data",
    "out": "--out",
    "seed": "seeds",
    "mixer": "arms",
    "mixer_options": "arms",
    "device": "--device",
    "quiet": "--quiet",
}


@dataclasses.dataclass(frozen=True)
class StudyArm:
    """One arm: a mechanism, and how its training differs from the others'."""

    label: str
    arm: Arm
    settings: dict[str, Any]
    seeds: dict[str, list[int]]  # by domain
    sizes: list[str]  # at which it is run


@dataclasses.dataclass(frozen=True)
class Cell:
    """One data set and size: where arms are compared with each other."""

    domain: str
    size: str
    settings: dict[str, Any]
    seeds: list[int] | None = None  # others are left out

    @property
    def name(self) -> str:
        """What tables call it; nothing where there is only one."""
        return " ".join(word for word in (self.domain, self.size) if word)


@dataclasses.dataclass(frozen=True)
class Study:
    """A study's file, checked."""

    name: str
    path: Path
    question: str
    settings: dict[str, Any]  # of TrainConfig, for every run
    seeds: list[int]
    budget: str
    domains: dict[str, str]  # folders
    active: list[str]  # domains to run now
    cells: list[Cell]
    arms: list[StudyArm]
    power: dict[str, Any]
    step_times: bool  # measured in turns, for the costs
    sections: list[str]
    notes: list[str]

    @property
    def labels(self) -> list[str]:
        """The arms' names."""
        return [arm.label for arm in self.arms]

    @property
    def called(self) -> str:
        """What a command calls it: by its name, where that is enough, else by the file, from here."""
        known = next((p for p in _places() if (p / f"{self.name}.yaml").resolve() == self.path.resolve()), None)
        return self.name if known else Path(os.path.relpath(self.path)).as_posix()

    def runs_at(self, cell: Cell) -> dict[str, list[int]]:
        """The arms that are to be run there, and their seeds."""
        arms = [arm for arm in self.arms if cell.size in arm.sizes and arm.seeds[cell.domain]]
        known = {arm.label: arm.seeds[cell.domain] for arm in arms}
        return {label: [s for s in own if cell.seeds is None or s in cell.seeds] for label, own in known.items()}

    def config(self, arm: StudyArm, cell: Cell, seed: int, **more: Any) -> TrainConfig:
        """One run: evaluated once, at its end, unless the study asks for more."""
        said = {**self.settings, **cell.settings, **arm.settings}
        own = {"data": self.domains[cell.domain], "mixer": arm.arm.name, "mixer_options": dict(arm.arm.options)}
        config = TrainConfig(**{**said, **own, "seed": seed, **more})
        return config if "eval_every" in said else dataclasses.replace(config, eval_every=max(1, config.steps))


def _places() -> list[Path]:
    """Where studies are known by their names."""
    return [FOLDER, Path(depthmix.__file__).parents[1] / FOLDER]


def find_study(name: str) -> Path:
    """The file of a study, by name or path."""
    if not name:
        raise UserError(f"study needs the name of a file in {FOLDER}, or a path")
    places = _places()
    tried = [Path(name), *(folder / f"{name}.yaml" for folder in places)]
    found = next((path for path in tried if path.is_file()), None)
    if found is None:
        known = sorted({path.stem for folder in places for path in folder.glob("*.yaml")})
        there = f"there are {', '.join(known)}" if known else f"there is none in {FOLDER}"
        raise UserError(f"unknown study {name!r}; {there}, or give the path of a file{nearest(name, known)}")
    return found


def read_study(name: str, data: Iterable[str] = ()) -> Study:
    """A study's file with everything in it checked that needs no data; data: folders that take the place of its own."""
    path = find_study(name)
    given = read_recipe("study", str(path))
    _known(given, KEYS, str(path))
    question = given.get("question")
    if not isinstance(question, str) or not question.strip():
        raise UserError(f"{path}: question is needed, what the study asks, in words")
    load_modules(path.parent, given.get("modules", []), f"{path}: modules")
    base = _base(path, given.get("base"))
    said = base.pop("data", None)
    domains, active = _domains(path, given.get("data", said), list(data))
    sizes = given.get("sizes", {"": {}})
    if not isinstance(sizes, dict) or not sizes:
        raise UserError(f"{path}: sizes maps names to options, got {sizes!r}")
    seeds = _seeds(path, given.get("seeds", [0]))
    cells = [_cell(path, domain, str(size), said, seeds) for domain in domains for size, said in sizes.items()]
    names = [cell.name for cell in cells]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{path}: two pairs of a domain and a size are called {twice!r}; give one another name")
    budget = given.get("budget", "tokens")
    if budget not in ("tokens", "time"):
        raise UserError(
            f"{path}: budget must be tokens or time, got {budget!r}{nearest(str(budget), ('tokens', 'time'))}"
        )
    notes = given.get("notes", [])
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise UserError(f"{path}: notes is a list of sentences")
    settings = {**base, **_settings(path, "set", given.get("set", {}))}
    arms = _arms(path, given.get("arms"), dict.fromkeys(domains, seeds), [str(size) for size in sizes])
    for arm in arms:
        for key, why in {**SAME_FOR_ALL, **(AT_EQUAL_TIME if budget == "time" else {})}.items():
            if key in arm.settings:
                raise UserError(f"{path}, arm {arm.label!r}: {key} is said for all arms or by size, since {why}")
    sections = _sections(path, given.get("sections", []))
    _check_sections(path, sections, settings, cells, arms)
    return Study(
        name=path.stem,
        path=path,
        question=" ".join(question.split()),
        settings=settings,
        seeds=seeds,
        budget=budget,
        domains=domains,
        active=active,
        cells=cells,
        arms=arms,
        power=_power(path, given.get("power", {})),
        step_times=_yes_or_no(path, "step_times", given.get("step_times", False)) or budget == "time",
        sections=sections,
        notes=[" ".join(note.split()) for note in notes],
    )


def _known(given: Mapping[str, Any], keys: Iterable[str], where: str) -> None:
    for key in given:
        if key not in keys:
            raise UserError(f"{where}: unknown key {key!r}; there are {', '.join(keys)}{nearest(str(key), keys)}")


def _base(path: Path, base: Any) -> dict[str, Any]:
    """The options of a recipe that are those of a training; what it says of arms, seeds and budgets does not count."""
    if base is None:
        return {}
    if not isinstance(base, str):
        raise UserError(f"{path}: base is the path of a recipe, got {base!r}")
    found = read_recipe("study", str(path.parent / base))
    if is_study(found):
        advice = "base takes a recipe of training options"
        if isinstance(found.get("base"), str):
            advice += f", such as that study's own base, {os.path.normpath(Path(base).parent / found['base'])}"
        raise UserError(f"{path}: base {base} is a study itself; {advice}")
    known = {f.name for f in dataclasses.fields(TrainConfig)}
    options = [f.name for f in dataclasses.fields(CompareConfig)]
    if lost := next((key for key in found if key not in options), None):
        raise UserError(f"{path}: its base {base} has an unknown option {lost!r}{nearest(lost, options)}")
    dropped = {*ELSEWHERE, "eval_every"} - {"data"}
    kept = {key: value for key, value in found.items() if key in known and key not in dropped}
    return {**_coerced(str(path.parent / base), {k: v for k, v in kept.items() if k != "data"}), **_only(kept, "data")}


def _only(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {key: given[key]} if key in given else {}


def _settings(path: Path, where: str, given: Any) -> dict[str, Any]:
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise UserError(f"{path}: {where} holds options of a training, option: value, got {given!r}")
    for key in given:
        if key in ELSEWHERE:
            raise UserError(f"{path}: {where} cannot hold {key}; a study says it with {ELSEWHERE[key]}")
    return _coerced(f"{path}, {where}", given)


@functools.cache  # it evaluates every annotation, and a study asks for each arm
def _options() -> dict[str, Any]:
    return typing.get_type_hints(TrainConfig)


def _coerced(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    hints = _options()
    for key in given:
        if key not in hints:
            raise UserError(f"{where}: unknown option {str(key)!r}{nearest(str(key), hints)}")
    return {key: coerce(where, key, hints[key], value) for key, value in given.items()}


def _domains(path: Path, said: Any, given: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Folders by domain, and which to run: all of the study's, or those the command line names, as DOMAIN=FOLDER or, of one, FOLDER."""
    if isinstance(said, str):
        said = {"": said}
    if not isinstance(said, dict) or not said or not all(isinstance(v, str) and v for v in said.values()):
        raise UserError(f"{path}: data is a folder, or maps the names of domains to folders, got {said!r}")
    domains = {str(name): folder for name, folder in said.items()}
    active = []
    for text in given:
        name, equals, folder = text.partition("=")
        if len(domains) == 1 and (not equals or name not in domains):
            domains, active = dict.fromkeys(domains, text), list(domains)
        elif equals and name in domains and folder:
            domains[name] = folder
            active.append(name)
        else:
            wanted = " ".join(f"{name}=FOLDER" for name in domains) if domains.keys() != {""} else "one folder"
            raise UserError(f"study: --data {text} does not fit; {path} wants {wanted}{nearest(name, domains)}")
    return domains, active or list(domains)


def _seeds(where: Path | str, seeds: Any) -> list[int]:
    numbers = isinstance(seeds, list) and all(isinstance(s, int) and not isinstance(s, bool) for s in seeds)
    if not numbers or not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"{where}: seeds is a list of different whole numbers, got {seeds!r}")
    return seeds


def _seeds_of(where: str, given: Any, known: dict[str, list[int]]) -> dict[str, list[int]]:
    """An arm's by domain: the same for all, or for some its own, which may be none."""
    if not isinstance(given, dict):
        return dict.fromkeys(known, _seeds(where, given))
    for domain in map(str, given):
        if domain not in known:
            raise UserError(f"{where}, seeds: the study has no domain {domain!r}{nearest(domain, known)}")
    return known | {str(domain): _seeds(where, own) if own != [] else [] for domain, own in given.items()}


def _cell(path: Path, domain: str, size: str, said: Any, seeds: Sequence[int]) -> Cell:
    own = None
    if isinstance(said, dict) and "seeds" in said:
        own, said = _seeds(path, said["seeds"]), {key: value for key, value in said.items() if key != "seeds"}
        if lost := [seed for seed in own if seed not in seeds]:
            raise UserError(f"{path}: sizes, {size}: the study has no seed {lost[0]}; a size leaves some of its out")
    return Cell(domain, size, _settings(path, f"sizes, {size}", said), own)


def _sizes_of(where: str, given: Any, known: Sequence[str]) -> list[str]:
    if not isinstance(given, list) or not given:
        raise UserError(f"{where}: sizes is a list of the study's, got {given!r}")
    for size in map(str, given):
        if size not in known:
            raise UserError(f"{where}: the study has no size {size!r}{nearest(size, known)}")
    return [str(size) for size in given]


def _power(path: Path, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise UserError(f"{path}: power holds difference and spread, got {given!r}")
    _known(given, ("difference", "spread"), f"{path}: power")
    spread = given.get("spread", [])
    values = [*(spread if isinstance(spread, list) else [spread]), *_only(given, "difference").values()]
    if not all(isinstance(v, int | float) and not isinstance(v, bool) and 0 < v < math.inf for v in values):
        raise UserError(f"{path}: power, difference and spread are numbers above 0, in nats, got {given!r}")
    return {**given, "spread": spread if isinstance(spread, list) else [spread]}


def _yes_or_no(path: Path, name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise UserError(f"{path}: {name} is true or false, got {given!r}")
    return given


def _sections(path: Path, given: Any) -> list[str]:
    if not isinstance(given, list):
        raise UserError(f"{path}: sections is a list of {', '.join(SECTIONS)}, got {given!r}")
    for name in given:
        if name not in SECTIONS:
            raise UserError(
                f"{path}: unknown section {name!r}; there are {', '.join(SECTIONS)}{nearest(str(name), SECTIONS)}"
            )
    return list(given)


def _check_sections(
    path: Path, sections: Sequence[str], settings: Mapping[str, Any], cells: Sequence[Cell], arms: Sequence[StudyArm]
) -> None:
    """UserError for a section that its runs could not fill, or would fill with what is not comparable."""
    everywhere = [settings, *(cell.settings for cell in cells), *(arm.settings for arm in arms)]
    if "depth" in sections and not any(said.get("dynamics_every") for said in everywhere):
        raise UserError(f"{path}: the section depth is made of what dynamics_every keeps; set it")
    for arm in arms if "stability" in sections else ():
        rates: dict[tuple[str, float], str] = {}
        for cell in (cell for cell in cells if cell.size in arm.sizes):
            rate = {**settings, **cell.settings, **arm.settings}.get("lr", TrainConfig().lr)
            other = rates.setdefault((cell.domain, rate), cell.size)
            if other != cell.size:
                words = f"{arm.label} has the same at {other!r} and {cell.size!r}"
                raise UserError(f"{path}: the section stability is for sizes that are learning rates, and {words}")


def _arms(path: Path, given: Any, seeds: dict[str, list[int]], sizes: Sequence[str]) -> list[StudyArm]:
    if not isinstance(given, list) or not given:
        raise UserError(f"{path}: arms is a list of at least one arm")
    arms: list[StudyArm] = []
    for item in given:
        said = {"mixer": item} if isinstance(item, str) else item
        if not isinstance(said, dict) or not isinstance(said.get("mixer"), str):
            raise UserError(f"{path}: an arm is a mechanism, or has mixer and other keys, got {item!r}")
        label = said.get("label", said["mixer"])
        _known(said, ARM_KEYS, f"{path}, arm {label!r}")
        if not isinstance(label, str) or not label.strip() or not label.isprintable():
            raise UserError(f"{path}: the label of an arm is one line of text, got {label!r}")
        if label in [arm.label for arm in arms]:
            raise UserError(f"{path}: two arms are called {label!r}; give one a label of its own")
        settings = _settings(path, f"arm {label!r}", said.get("set", {}))
        own = _seeds_of(f"{path}, arm {label!r}", said["seeds"], seeds) if "seeds" in said else seeds
        there = _sizes_of(f"{path}, arm {label!r}", said["sizes"], sizes) if "sizes" in said else list(sizes)
        arms.append(StudyArm(label, parse_arm(said["mixer"]), settings, own, there))
    if len(arms[0].sizes) < len(sizes):
        raise UserError(f"{path}: the first arm, {arms[0].label!r}, is run at every size: others are compared with it")
    if nowhere := [domain for domain, own in arms[0].seeds.items() if not own]:
        words = f"the first arm, {arms[0].label!r}, has no seed on {nowhere[0]}"
        raise UserError(f"{path}: {words}, where others are compared with it")
    for arm in arms:
        if sum(other.arm == arm.arm and other.settings == arm.settings for other in arms) > 1:
            raise UserError(f"{path}: arm {arm.label!r} is there twice, under another label; remove one")
    return arms
