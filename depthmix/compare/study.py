"""`depthmix study`: run what is missing of a study, in pieces, and write what it found.

After every run its numbers are on disk: a kill at any moment loses the run in progress and nothing else.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from depthmix.compare.checks import check_code, check_pieces, check_runs, data_mark
from depthmix.compare.making import Outcome, in_words, make_run
from depthmix.compare.pictures import DIFFERENCES, LAWS, LOSSES
from depthmix.compare.pieces import Deadline, Piece, in_order, predicted
from depthmix.compare.recipe import Cell, Study, StudyArm, read_study
from depthmix.compare.records import RUNS, Records, read_records, write_records
from depthmix.compare.sheet import RESULTS as SHEET
from depthmix.compare.sheet import TABLE, power_lines, write_sheet
from depthmix.config import StudyConfig, TrainConfig
from depthmix.data.images import ImageData
from depthmix.data.prepared import open_data
from depthmix.device import choose_device, release_memory
from depthmix.errors import CHECKPOINT, DIVERGED, INTERNAL, INTERRUPTED, UserError
from depthmix.files import check_writable
from depthmix.names import nearest
from depthmix.ownership import check_foreign_files, check_new_folder
from depthmix.runs.environment import environment

RESULTS = Path("docs") / "results"
OUTPUTS = (SHEET, TABLE, *(f"{stem}.{ending}" for stem in (DIFFERENCES, LOSSES, LAWS) for ending in ("svg", "png")))
MEASURING = 20.0  # seconds that an arm's step times may take: a model is built three times, for a second of steps
AT_LEAST = 4.0  # and what they take anywhere
# Of a run's environment what is kept: no paths.
KEPT = ("depthmix", "git_commit", "python", "torch", "cuda", "device", "device_name", "started")


def study(config: StudyConfig, *, begun: float | None = None) -> Records:
    """Run what is missing and fits into the time, then write table and figures; returns all results.

    begun: when the time given began, by time.monotonic(); now, if it is left out.
    """
    if not 0 <= config.minutes < math.inf:
        raise UserError(f"study: minutes must be a number, and at least 0, got {config.minutes:g}")
    said = read_study(config.study, config.data)
    check_part(said, config)
    usual = RESULTS / said.name
    out = Path(config.out) if config.out else usual
    check_new_folder(out, "a study's results")
    if not (out / RUNS).exists():
        check_foreign_files(out, OUTPUTS, RUNS)
    lost = next((name for name in config.results if not Path(name).is_file()), None)
    if lost:
        raise UserError(f"study: there is no file of results {lost}", CHECKPOINT)
    records = read_records(dict.fromkeys([out / RUNS, usual / RUNS, *map(Path, config.results)]))
    say = _silent if config.quiet else functools.partial(print, flush=True)
    for line in (said.question, *power_lines(said)):
        say(line)
    if config.report:
        pieces, used = planned(said, records, config, out), chosen(said, records.runs)
        check_runs(used, pieces, {}, None)
        check_code(said, records, used, [], config.accept_code)
        _finish(said, records, out, say, figures=True)
    else:
        Worker(said, config, records, out, say, begun).run()
    return records


def _silent(text: str) -> None:
    pass


def check_part(said: Study, config: StudyConfig) -> None:
    """UserError for arms, sizes or seeds to be run that the study does not have."""
    sizes = list(dict.fromkeys(cell.size for cell in said.cells))
    for what, asked, known in (("arm", config.arms, said.labels), ("size", config.sizes, sizes)):
        if lost := [name for name in asked if name not in known]:
            raise UserError(f"study {said.name} has no {what} {lost[0]!r}{nearest(lost[0], known)}")
    seeds = sorted({seed for arm in said.arms for own in arm.seeds.values() for seed in own})
    if other := [seed for seed in config.seeds if seed not in seeds]:
        raise UserError(f"study {said.name} has no seed {other[0]}; it has {', '.join(map(str, seeds))}")
    own = [said.runs_at(c) for c in said.cells if c.domain in said.active and c.size in (config.sizes or sizes)]
    runs = [(arm, seed) for there in own for arm, asked in there.items() for seed in asked]
    if not any(arm in (config.arms or said.labels) and seed in (config.seeds or seeds) for arm, seed in runs):
        raise UserError(f"study {said.name} has no run with these arms, sizes, seeds and data together")


def _missing(pieces: Iterable[Piece], records: Records) -> list[Piece]:
    done = {(r["arm"], r["domain"], r["size"], r["seed"]) for r in records.runs}
    return [piece for piece in pieces if piece.key not in done]


def chosen(said: Study, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs that the study names, the first of each; others stay in the file and out of the table."""
    wanted = {(arm, c.domain, c.size, s) for c in said.cells for arm, seeds in said.runs_at(c).items() for s in seeds}
    found: dict[tuple[str, str, str, int], dict[str, Any]] = {}
    for run in runs:
        key = run["arm"], run["domain"], run["size"], run["seed"]
        if key in wanted:
            found.setdefault(key, run)
    return list(found.values())


def planned(said: Study, records: Records, config: StudyConfig, out: Path) -> list[Piece]:
    """Every run of the study, in its order; at equal time those whose steps are known."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for line in records.of("step_times"):
        times.setdefault((line["domain"], line["size"]), line["seconds"])
    return in_order(said, config.device, str(out), config.quiet, times)


class Worker:
    """One call of a study: it opens the data once, checks everything it will run, and runs it."""

    def __init__(
        self,
        said: Study,
        config: StudyConfig,
        records: Records,
        out: Path,
        say: Callable[[str], None],
        begun: float | None,
    ) -> None:
        self.study, self.config, self.records, self.out, self.say = said, config, records, out, say
        self.deadline = Deadline(config.minutes, time.monotonic() if begun is None else begun)
        self.device = choose_device(config.device)
        self.environment = {key: value for key, value in environment([], config.device).items() if key in KEPT}
        self.data = {name: open_data(said.domains[name]) for name in said.active}
        self.marks = {name: data_mark(data) for name, data in self.data.items()}
        self.images = [name for name, data in self.data.items() if isinstance(data, ImageData)]
        self.failed: dict[str, str] = {}  # by arm
        self.queue: list[Piece] = []  # what is to be run, in order
        self.asked: set[tuple[str, str, str, int]] = set()
        self.begun: set[tuple[str, str, str, int]] = set()
        self.untimed = False  # a signal came while step times were measured

    def run(self) -> None:
        """Everything that is missing and fits, then the table."""
        from depthmix.train.compiled import compiled_once
        from depthmix.train.signals import StopSignal

        with StopSignal() as signal, compiled_once(self._compiles()):
            if self.study.budget == "time":
                self._measure(signal)
            pieces = self._planned()
            used, missing = chosen(self.study, self.records.runs), _missing(pieces, self.records)
            check_runs(used, pieces, self.marks, self.device.type)
            check_pieces(self.study, missing, self.data)
            check_code(self.study, self.records, used, missing, self.config.accept_code, self.images)
            own = [self.study.runs_at(cell) for cell in self.study.cells if cell.domain in self.study.active]
            total = sum(len(seeds) for arms in own for seeds in arms.values())  # also where steps are not known yet
            self.say(f"{self.study.name}: {len(pieces) - len(missing)} of {total} runs are done.")
            self.queue = self._asked_for(missing)
            self.asked = {piece.key for piece in self.queue}
            if self.queue:
                check_writable(self.out)  # before a run is made that could not be kept
            self._run_queue(signal)
            missing = _missing(pieces, self.records)
            if self.study.step_times and not self._asked_for(missing) and not signal.requested:
                self._measure(signal)
        _finish(self.study, self.records, self.out, self.say, figures=not signal.requested)
        done = len(pieces) - len(missing)
        where = f"{done} of {total} runs are done"
        again = f"{where}; the same command goes on from there"
        if signal.requested and (done < total or self.untimed):
            raise UserError(f"stopped by {signal.name}: {again}", INTERRUPTED)
        if self.failed:
            what = "; ".join(f"{arm}: {error}" for arm, error in self.failed.items())
            arms = "1 arm" if len(self.failed) == 1 else f"{len(self.failed)} arms"
            raise UserError(f"{arms} could not be run ({what}); {again}", INTERNAL)
        runs = chosen(self.study, self.records.runs)
        if done == total and all("diverged" in run for run in runs):
            raise UserError(f"all {total} runs diverged", DIVERGED)
        self.say(f"{where}." if done == total else f"{again}.")

    def _planned(self) -> list[Piece]:
        pieces = planned(self.study, self.records, self.config, self.out)
        return [piece for piece in pieces if piece.cell.domain in self.study.active]

    def _asked_for(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Those of the arms, sizes and seeds that are to be run, all where none are named."""
        arms, sizes, seeds = self.config.arms, self.config.sizes, self.config.seeds
        return [
            piece
            for piece in pieces
            if (not arms or piece.arm.label in arms)
            and (not sizes or piece.cell.size in sizes)
            and (not seeds or piece.config.seed in seeds)
        ]

    def _compiles(self) -> bool:
        said = self.study
        settings = [said.settings, *(cell.settings for cell in said.cells), *(arm.settings for arm in said.arms)]
        return any(s.get("compile", "off") != "off" for s in settings)

    def _run_queue(self, signal: Any) -> None:
        """Run one piece after the other until the queue is empty or a signal comes."""
        while not signal.requested and (task := self._take()):
            piece, evaluating = task

            def stop(left: float, evaluating: float = evaluating) -> bool:
                return signal.requested or not self.deadline.fits(left + (evaluating or left / 20))

            release_memory(self.device)  # the last run's memory is not this one's
            domain = piece.cell.domain
            outcome = make_run(piece, self.data[domain], self.marks[domain], self.environment, stop)
            if signal.requested and not outcome.lines and not outcome.error:
                self.say("Stopping.")
            else:
                self._keep(piece, outcome)

    def _take(self) -> tuple[Piece, float] | None:
        """The next run that there is time for, and the seconds that an evaluation has taken at most."""
        self.queue = [piece for piece in self.queue if piece.arm.label not in self.failed]
        name = self.environment["device_name"]
        times = [predicted(piece, self.records.runs, name) for piece in self.queue]
        first = self.study.labels[0]
        there = self.begun | {(r["arm"], r["domain"], r["size"], r["seed"]) for r in self.records.runs}
        for piece, seconds in zip(self.queue, times, strict=True):
            pair = (first, *piece.key[1:])
            paired = pair == piece.key or pair in there or pair not in self.asked  # else nothing to compare it with
            if self.deadline.fits(seconds) and paired:  # a shorter one than the next, if need be
                self.queue.remove(piece)
                self.begun.add(piece.key)
                evaluating = [r["result"].get("eval_seconds", 0.0) for r in self.records.runs if "result" in r]
                return piece, max(evaluating, default=0.0)
        if self.queue and first in self.failed:
            self.say(f"Without {first} the others have nothing to be compared with.")
            self.queue.clear()
        if self.queue:
            takes = f", which takes about {times[0]:.0f} s" if times[0] else ""
            self.say(f"No time for {self.queue[0].title}{takes}.")
            self.queue.clear()
        return None

    def _keep(self, piece: Piece, outcome: Outcome) -> None:
        """Say what came of a run, and write what it found."""
        if not outcome.lines:
            self.begun.discard(piece.key)
        if outcome.error:
            self.failed[piece.arm.label] = outcome.error
            return
        if not outcome.lines:
            self.say(f"{piece.title} would not end in time and is left out.")
            self.queue = [other for other in self.queue if other.arm is not piece.arm]
            return
        record = outcome.lines[-1]
        if "diverged" in record:
            self.say(f"{piece.title} diverged: {record['diverged']}.")
        else:
            result = record["result"]
            parts = [f"{result[f'{part}_seconds']:.1f}" for part in ("build", "first", "eval")]
            around = f"{parts[0]} to build it, {parts[1]} for its first steps, {parts[2]} to evaluate it"
            self.say(f"{piece.title}: {result['val_loss']:.4f} in {result['wall_seconds']:.0f} s ({around})")
        self.records.add(*outcome.lines)
        write_records(self.out, self.records)

    def _measure(self, signal: Any) -> None:
        """Step times in turns, where a cell lacks some, so that arms get equal time, or for the costs; they are kept with the results."""
        first = self.study.arms[0]
        more = {"device": self.config.device, "out": str(self.out), "quiet": True}
        asked, sizes = self.config.arms, self.config.sizes
        for cell in self.study.cells:
            if signal.requested or cell.domain not in self.study.active or (sizes and cell.size not in sizes):
                continue
            there = self.study.runs_at(cell)
            arms = [a for a in self.study.arms if a.label in there and (not asked or a is first or a.label in asked)]
            place = (cell.domain, cell.size)
            lines = [r for r in self.records.of("step_times") if (r["domain"], r["size"]) == place]
            known = dict(lines[0]["seconds"]) if lines else self._times_of_same_shapes(cell)
            missing = [arm for arm in arms if arm.label not in known and arm.label not in self.failed]
            if not missing and lines:
                continue
            if missing:
                one = MEASURING if self.study.budget == "tokens" else AT_LEAST  # without them nothing can be run
                if not self.deadline.fits(one * len(missing)):
                    continue
                # The first arm is measured again with arms that came later, and they are scaled to its saved time.
                group = missing if missing[0] is first else [first, *missing]
                configs = [self.study.config(arm, cell, self.study.seeds[0], **more) for arm in group]
                check_pieces(self.study, map(Piece, group, [cell] * len(group), configs), self.data)
                self.say("Measuring step times …")
                times = self._step_times(group, configs, lambda: signal.requested)
                if times is None:
                    self.untimed = True
                    continue
                scale = known.get(first.label, times[first.label]) / times[first.label]
                known = {**{arm: t * scale for arm, t in times.items()}, **known}
                others = [r for r in read_records([self.out / RUNS]).of("step_times") if r not in lines]
                theirs = [
                    r for r in others if (r["domain"], r["size"]) == place and known.keys() <= r["seconds"].keys()
                ]
                known = theirs[0]["seconds"] if theirs else known  # of another process, whose runs have its steps
            self.records.lines = [r for r in self.records.lines if r not in lines]
            line = {"kind": "step_times", "domain": cell.domain, "size": cell.size, "seconds": known}
            self.records.add({**line, "environment": self.environment})
            write_records(self.out, self.records)

    def _step_times(
        self, group: Sequence[StudyArm], configs: Sequence[TrainConfig], stopping: Callable[[], bool]
    ) -> dict[str, float] | None:
        """By arm; one that cannot run does not stop the others, unless it is the first, which they are compared with. None: stopped."""
        from depthmix.train.step_times import measure_step_times

        arms = list(zip(group, configs, strict=True))
        while True:
            try:
                times = measure_step_times([config for _, config in arms], stopping=stopping)
                return {arm.label: seconds for (arm, _), seconds in zip(arms, times, strict=True)} if times else None
            except Exception as error:
                lost = getattr(error, "measured", 0)
                if lost == 0:
                    raise
                self.failed[arms[lost][0].label] = in_words(error)
                del arms[lost]

    def _times_of_same_shapes(self, cell: Cell) -> dict[str, float]:
        """What another domain with as many words measured at this size on this device: its steps are the same."""
        words = getattr(self.data[cell.domain], "vocab_size", None)
        for line in self.records.of("step_times"):
            other = getattr(self.data.get(line["domain"]), "vocab_size", None)
            here = line.get("environment", {}).get("device_name") == self.environment.get("device_name")
            if here and line["size"] == cell.size and words is not None and other == words:
                return dict(line["seconds"])
        return {}


def _finish(said: Study, records: Records, out: Path, say: Callable[[str], None], figures: bool) -> None:
    """Write the results, the table and the figures."""
    if not records.runs:
        say(f"No run has finished yet: there are no results in {out}.")
        return
    write_records(out, records)
    for sentence in write_sheet(said, records, chosen(said, records.runs), out, figures):
        say(sentence)
