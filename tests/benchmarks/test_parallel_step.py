"""`parallel-step`: which ratio is bounded, and what is noted or refused where torch's engine differs from the plain loop."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from benchmarks import parallel_step, step
from benchmarks.check import WrongResult
from benchmarks.environment import COLUMNS
from benchmarks.options import Options
from benchmarks.report import Report, read_rows
from depthmix.config import TrainConfig
from depthmix.errors import UserError
from depthmix.parallel.apply import Parallel

BASE = TrainConfig(compile="off", steps=100, warmup=1, data="random tokens", quiet=True)
CONFIG = dataclasses.replace(step.small_config(BASE), n_blocks=1)


@pytest.fixture
def timed(tmp_path):
    """The rows of one case, as on a GPU; on a CPU nothing is recorded, whatever a contender is called."""

    def run(recording):
        report = Report("parallel-step", tmp_path, dict.fromkeys(COLUMNS, ""))
        options = Options(torch.device("cpu"), repeats=1, warmup=0)
        parallel_step._case("case", CONFIG, step.random_data(64, 200), recording, options, report)
        assert not dist.is_initialized()
        return read_rows(report.csv)

    return run


@pytest.mark.parametrize(("recording", "base"), [(False, "plain"), (True, "plain, recorded")])
def test_the_bound_is_against_the_plain_loop_with_the_same_settings(timed, recording, base):
    rows = timed(recording)
    ratios = {(r.who, r.metric): r for r in rows if r.metric.startswith("step / ")}
    times = {r.who: r.value for r in rows if r.metric == "step"}
    ending = ", recorded" if recording else ""
    assert set(ratios) == {(f"{name}{ending}", f"step / {base}") for name in ("DDP", "FSDP2")}
    for (who, _), row in ratios.items():
        assert row.target == "<= 1.03"
        assert row.value == pytest.approx(times[who] / times[base])


def test_a_step_that_cannot_be_recorded_is_noted_and_the_others_are_timed(timed, monkeypatch):
    taken = parallel_step._first_steps

    def first_steps(trainer):
        if isinstance(trainer.engine, Parallel) and trainer.engine.replicated is not None:
            raise UserError("cuda_graph: the step cannot be recorded (not permitted); train with cuda_graph off")
        return taken(trainer)

    monkeypatch.setattr(parallel_step, "_first_steps", first_steps)
    rows = timed(True)
    assert "not permitted" in next(r.note for r in rows if r.who == "DDP, recorded")
    assert {r.who for r in rows if r.metric == "wall"} == {"plain, recorded", "FSDP2, recorded"}


def test_refuses_to_time_a_wrong_step(timed, monkeypatch):
    right = Parallel.clip
    monkeypatch.setattr(Parallel, "clip", lambda self, limit: 1.1 * right(self, limit))
    with pytest.raises(WrongResult, match="DDP is wrong and is not timed"):
        timed(False)
    assert not dist.is_initialized()
