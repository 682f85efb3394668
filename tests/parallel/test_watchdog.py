"""No process of a run goes on: who is named, when, and what all of them leave behind."""

import socket
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from depthmix.errors import INTERNAL, USAGE, UserError
from depthmix.parallel import meeting
from depthmix.parallel.progress import FIRST_TIMES, Progress
from depthmix.parallel.watchdog import SILENT, WARN_AFTER, Watchdog
from depthmix.runs.checkpoint import list_checkpoints
from depthmix.runs.folder import RunFolder
from parallel.commands import free_port
from parallel.test_failures import command, said

LIMIT = 100.0


class Run:
    """Three watchdogs in one process, a store they share and a clock that only the test moves."""

    def __init__(self, size=3, in_order=True):
        self.now, store = 0.0, dist.HashStore()
        self.counts = [10] * size
        self.lines = ["wait in torch/distributed/distributed_c10d.py:1"] * size
        self.progress = [Progress(LIMIT, lambda r=r: self.counts[r]) for r in range(size)]
        self.dogs = [
            Watchdog(store, r, size, p, in_order, lambda r=r: self.lines[r]) for r, p in enumerate(self.progress)
        ]
        for number in (1, 2):
            for p in self.progress:
                p.at("step", number)

    def passes(self, seconds, silent=()):
        """(rank, second, warning, reason to end) of all that is said meanwhile; some ranks give no signs of life."""
        found, until = [], self.now + seconds
        while self.now < until:
            for rank, dog in enumerate(self.dogs):
                if rank not in silent:
                    dog.beat(self.now)
            for rank, dog in enumerate(self.dogs):
                if rank not in silent and any(told := dog.look(self.now)):
                    found.append((rank, self.now, *told))
            self.now += 0.5
        return found


def test_the_one_that_is_behind_is_named_once_and_the_run_ends_at_the_limit():
    run = Run()
    run.passes(WARN_AFTER)
    run.counts, run.lines[1] = [12, 11, 12], "read in depthmix/data/dataset.py:88"
    [(rank, second, warning, _)] = run.passes(LIMIT - 1)
    assert (rank, second) == (0, WARN_AFTER + WARN_AFTER + SILENT)
    sentence = "rank 1 of 3 hangs in step 2, at read in depthmix/data/dataset.py:88"
    assert warning == f"no progress for {WARN_AFTER + SILENT:.0f} s: {sentence}"
    (rank, second, _, why), *again = run.passes(3)
    assert (rank, second) == (0, WARN_AFTER + LIMIT + 0.5)
    assert why == f"no progress for 100 s: {sentence}"
    assert all(line[2:] == (None, why) for line in again) or again[-1][3].endswith(sentence)


def test_progress_of_any_kind_is_progress():
    run = Run()
    for _ in range(5):
        assert run.passes(WARN_AFTER - 1) == []
        for rank, progress in enumerate(run.progress):
            progress.moved()
            run.counts[rank] += 1


def test_one_that_gives_no_signs_of_life_is_named_by_the_first_that_does():
    run = Run()
    run.passes(5)
    [(rank, _, warning, _)] = run.passes(WARN_AFTER + SILENT, silent={0})
    assert rank == 1
    assert warning.endswith("rank 0 of 3 gives no signs of life, last in step 2")


def test_while_others_go_on_nothing_is_said():
    run = Run()
    for _ in range(30):
        assert run.passes(10) == []
        run.progress[1].moved()


def test_what_may_compile_takes_longer_and_is_no_reason_to_warn():
    run = Run()
    for progress in run.progress:
        progress.at("the evaluation")
    assert run.passes(FIRST_TIMES * LIMIT - 1) == []
    [(_, _, _, why), *_] = run.passes(SILENT)
    assert why.endswith("all 3 processes stand still in the evaluation")
    for progress in run.progress:
        progress.at("step", 3)
    assert run.passes(5) == []
    for progress in run.progress:
        progress.at("the evaluation")
    assert any(why for *_, why in run.passes(LIMIT + 2))


def test_in_a_pipeline_those_that_do_not_wait_are_named():
    run = Run(in_order=False)
    run.counts, run.lines[2] = [4, 9, 30], "forward in depthmix/mixers/dca.py:7"
    [(_, _, warning, _)] = run.passes(WARN_AFTER + SILENT + 1)
    assert warning.endswith("rank 2 of 3 hangs in step 2, at forward in depthmix/mixers/dca.py:7")


def test_a_suspended_process_has_not_stood_still():
    progress = Progress(LIMIT)
    assert progress.idle(1.0) == 0
    progress.skip(50.0)
    assert progress.idle(52.0) == 1.0


def test_who_never_came_is_named_to_all(monkeypatch, capfd):
    monkeypatch.setattr(meeting, "WARN_AFTER", 0.05)
    monkeypatch.setattr(meeting, "LEAVING", 0.0)
    store, found = dist.HashStore(), {}

    def meet(rank, patience):
        try:
            meeting.new_corner(store.clone(), rank, 3, timedelta(seconds=patience))
        except meeting.NeverCame as error:
            found[rank] = str(error), error.exit_code

    other = threading.Thread(target=meet, args=(1, 60))
    other.start()
    while not store.check(["hello/1"]):
        pass
    meet(0, 0.2)
    other.join()
    assert found[0] == found[1]
    assert found[0][0].startswith("rank 2 of 3 never came, within 0.2 s; ")
    assert found[0][1] == INTERNAL
    assert "warning: rank 2 of 3 has not come for 0 s; the run ends after 0.2 s" in capfd.readouterr().err


def test_without_a_first_process_the_others_say_so(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(UserError, match=r"rank 0 never came: nothing answers at 127.0.0.1:\d+ within 0.2 s") as caught:
        meeting.open_store(1, timedelta(seconds=0.2))
    assert caught.value.exit_code == INTERNAL


def test_a_port_in_use_is_said(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 is in use: choose another") as caught:
            meeting.open_store(0, timedelta(seconds=5))
    assert caught.value.exit_code == USAGE


def test_a_run_in_which_one_process_hangs_ends_with_the_stacks_of_all(workers, tmp_path):
    out = tmp_path / "run"
    patches = {r: {"parallel.watchdog.WARN_AFTER": 0.5, "parallel.watchdog.SILENT": 0.4} for r in range(2)}
    patches = {r: {**p, "parallel.liveness.EVERY": 0.05} for r, p in patches.items()}
    argvs = [command(out, steps=50, save_every=2, hang_limit=3.0)] * 2
    [found] = workers.run(0, "parallel.commands:run", argvs, str(tmp_path), None, patches, (1, 5))
    assert [code for code, *_ in found] == [INTERNAL, INTERNAL], found
    assert "Traceback" not in "".join(output for _, output, _ in found)
    *warnings, last = said(found)
    assert all(line.startswith("depthmix: rank 0: warning: no progress for ") for line in warnings)
    # On a busy machine there may be warnings of a slow start before the one that counts.
    for line in (warnings[-1], last):
        assert "rank 1 of 2 hangs in step 6, at never in commands.py:" in line
    assert f"the stacks of all processes are in {out}/log.txt and {out}/ranks" in last
    logs = [(out / name).read_text() for name in ("log.txt", "ranks/rank-00001.txt")]
    assert all("Thread 0x" in log for log in logs)
    assert "in never" in logs[1]
    assert list_checkpoints(out / "checkpoints")[0].name == "step-00000004"
    assert RunFolder(out).read_metrics()[-1]["step"] == 5
