"""Nothing lost: runs that are killed, or stopped by a signal, end as if nothing had happened, bit for bit.

Run as a script, this file is the driver: it forks trainings that it kills at random instants, or sends signals to. Every other
process a test needs would take seconds to start.
"""

import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Client, Listener
from pathlib import Path

import pytest

import forking
from depthmix.cli import main
from depthmix.errors import CHECKPOINT, UserError
from depthmix.runs.checkpoint import list_checkpoints, load_checkpoint
from depthmix.runs.folder import RunFolder
from depthmix.train.loop import train
from project import ROOT
from train import small

SIZE = {"dim": 32, "n_blocks": 2, "seq_len": 32, "batch_size": 4}
LIMIT = 120  # seconds until something is taken to hang


def outcome(folder) -> tuple[bytes, bytes]:
    """What two runs that are the same share: the metrics and the weights."""
    newest = list_checkpoints(RunFolder(folder).checkpoints)[0]
    return (Path(folder) / "metrics.jsonl").read_bytes(), (newest / "model.safetensors").read_bytes()


# The driver.


def start(call, log: Path) -> int:
    """A call in a process of its own, which ends with what it returns."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        faulthandler.dump_traceback_later(LIMIT / 2, exit=True)  # so that the log says where it hangs
        code = call()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def trains(config):
    return lambda: train(config) and 0


def ended_by_itself(child: int, log: Path) -> bool:
    """Whether a process that has ended did so well, and not by the kill."""
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise AssertionError(log.read_text())
    return os.WIFEXITED(status)


def check_nothing_lost(folder: Path, save_every: int, metrics: bytes) -> None:
    """After a kill: what is there is good, and what the metrics prove to have been saved is there."""
    path = folder / "metrics.jsonl"
    found = path.read_bytes() if path.exists() else b""
    assert metrics.startswith(found), "what is written is what an uninterrupted run writes"
    checkpoints = list_checkpoints(folder / "checkpoints")
    steps = [load_checkpoint(p).step for p in checkpoints]  # every one is good, a kill during a save or not
    lines = [json.loads(line) for line in found.splitlines(keepends=True) if line.endswith(b"\n")]
    last = max((line["step"] for line in lines), default=0)
    proven = (last - 1) // save_every * save_every  # a line of the next step is written after the save
    assert max(steps, default=0) >= proven, (steps, last)


def drive(work: str, data: str, changes: dict, kills: int, kills_a_run: int) -> dict:
    """Kill runs of one configuration at random instants and let each finish at last."""
    work = Path(work)
    rng, log = random.Random(0), work / "output.txt"
    begun = time.perf_counter()
    assert ended_by_itself(start(trains(small.config(work / "whole", data=data, **changes)), log), log)
    whole = time.perf_counter() - begun
    expected = outcome(work / "whole")
    killed = runs = 0
    while killed < kills:
        runs += 1
        config = small.config(work / f"run-{runs}", data=data, **changes)
        here = 0
        while True:
            child, begun = start(trains(config), log), time.perf_counter()
            if here < kills_a_run:
                time.sleep(rng.uniform(0, 0.25 * whole))
                os.kill(child, signal.SIGKILL)
            if ended_by_itself(child, log):
                if here == 0:  # before the kill: the first run met a machine that stood still, and kills come too late
                    whole = min(whole, time.perf_counter() - begun)
                break
            killed, here = killed + 1, here + 1
            check_nothing_lost(Path(config.out), config.save_every, expected[0])
        assert outcome(config.out) == expected, config.out
        assert RunFolder(config.out).has_result()
    return {"kills": killed, "runs": runs, "whole": whole, "lines": expected[0].count(b"\n")}


def wait_for(path: str, words: str, count: int = 1) -> None:
    """Until the file holds the words so many times."""
    until = time.monotonic() + LIMIT / 2
    while not (os.path.exists(path) and Path(path).read_text().count(words) >= count):
        assert time.monotonic() < until, "hangs"
        time.sleep(0.005)


def send_signals(argv: list[str], log: str, name: str, after: tuple, pauses: list[float]) -> dict:
    """Run the program until a file says that it has come so far, then send it signals; what becomes of it."""
    child = start(lambda: main(argv), Path(log))
    try:
        wait_for(*after)
        for pause in pauses:
            time.sleep(pause)
            assert os.waitpid(child, os.WNOHANG) == (0, 0), Path(log).read_text()
            os.kill(child, getattr(signal, name))
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    _, status, used = os.wait4(child, 0)
    seconds = used.ru_utime + used.ru_stime  # of a core: a machine that stands still does not count
    return {"code": os.waitstatus_to_exitcode(status), "output": Path(log).read_text(), "seconds": seconds}


if __name__ == "__main__":
    import torch._dynamo
    import yaml  # noqa: F401 (what every training imports on its way, once for all of them)

    assert torch.get_num_threads() == 1  # by small: no OpenMP threads that a fork would lose
    small.prepare_to_fork("residual", "attnres", "mhc")
    channel = Client(sys.argv[1])
    while (asked := channel.recv()) is not None:
        what, arguments = asked
        signal.alarm(LIMIT)
        try:
            answer = {"drive": drive, "send_signals": send_signals}[what](**arguments)
        except Exception:
            answer = traceback.format_exc()
        channel.send(answer)


# The tests.


@pytest.fixture(scope="module")
def ask():
    """A function that asks the driver; all tests of a worker share one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/socket") as listener:
        code = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
        forking.start(code, listener.address, env=environment, first=forking.TRAINING)
        with listener.accept() as driver:

            def request(what, **arguments):
                driver.send([what, arguments])
                answer = driver.recv()
                assert isinstance(answer, dict), answer
                return answer

            yield request
            driver.send(None)


def test_five_kills(tmp_path, ask):
    """Of one process; tests/parallel kills those of several."""
    changes = {"mixer": "attnres", "steps": 24, "save_every": 3, "eval_every": 5}
    report = ask("drive", work=str(tmp_path), data=str(small.data()), changes=changes, kills=5, kills_a_run=5)
    assert report["kills"] >= 5
    assert report["lines"] == 29


def test_kills_of_another_training(tmp_path, ask):
    changes = {
        "steps": 15,
        "optimizer": "muon",
        "mixer": "mhc",
        "micro_batch_size": 2,
        "schedule": "wsd",
        "tie_embeddings": True,
    }
    report = ask("drive", work=str(tmp_path), data=str(small.data()), changes=changes, kills=2, kills_a_run=2)
    assert report["kills"] >= 2


def test_a_run_killed_before_its_result_gets_it(tmp_path):
    folder = train(small.config(tmp_path / "run"))
    expected, metrics = folder.read_result(), folder.read_metrics()
    (folder.path / "result.json").unlink()
    train(small.config(tmp_path / "run"))
    changing = {"step_seconds", "step_quartiles", "core_wait", "seconds", "peak_memory"}
    result = folder.read_result()
    assert {k: v for k, v in result.items() if k not in changing} == {
        k: v for k, v in expected.items() if k not in changing
    }
    assert result["step_seconds"] > 0
    assert folder.read_metrics() == metrics


def test_a_broken_newest_checkpoint_is_passed_over_and_said_so(tmp_path, capsys):
    config = small.config(tmp_path / "run", steps=9)
    folder = train(config)
    expected = outcome(folder.path)
    (folder.path / "result.json").unlink()
    newest, older = list_checkpoints(folder.checkpoints)
    (newest / "model.safetensors").write_bytes(b"torn")
    train(config)
    assert outcome(folder.path) == expected
    assert f"{newest} is broken and was passed over" in capsys.readouterr().err
    assert f"resuming at step {int(older.name[-8:])}" in (folder.path / "log.txt").read_text()


def test_a_checkpoint_too_many_is_removed_at_the_start(tmp_path):
    """As a kill leaves it between the last save and the removal of what is older: no save comes any more."""
    folder = train(small.config(tmp_path / "run", save_every=2, keep=9))
    assert len(list_checkpoints(folder.checkpoints)) == 3
    (folder.path / "result.json").unlink()
    (folder.checkpoints / ".tmp-step-00000002-1").mkdir()
    train(small.config(tmp_path / "run", save_every=2, keep=2))
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["step-00000004", "step-00000006"]
    assert load_checkpoint(list_checkpoints(folder.checkpoints)[0]).step == 6


def test_a_checkpoint_of_somebody_else_is_refused(tmp_path):
    from depthmix.runs.checkpoint import save_checkpoint

    config = small.config(tmp_path / "run")
    folder = train(config)
    (folder.path / "result.json").unlink()
    saved = load_checkpoint(list_checkpoints(folder.checkpoints)[0])
    for optimizer, state in (({}, saved.state), (saved.optimizer, {})):
        save_checkpoint(folder.checkpoints, 6, saved.model, optimizer, state, 1)
        with pytest.raises(UserError, match="was not written by `depthmix train`") as caught:
            train(config)
        assert caught.value.exit_code == CHECKPOINT


# Signals.


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_stops_and_saves(tmp_path, ask, name):
    changes = {**SIZE, "steps": 40, "save_every": 1000, "eval_every": 7}
    config = small.config(tmp_path / "run", **changes)
    after = str(tmp_path / "run" / "metrics.jsonl"), "\n", 6
    argv = ["train", *small.flags(config)]
    ended = ask("send_signals", argv=argv, log=str(tmp_path / "output.txt"), name=name, after=after, pauses=[0])
    assert ended["code"] == 130, ended
    folder = RunFolder(config.out)
    step = folder.read_metrics()[-1]["step"]
    assert ended["output"].startswith(f"depthmix: stopped by {name} after step {step} of 40, and saved")
    assert ended["output"].count("\n") == 1
    assert [p.name for p in list_checkpoints(folder.checkpoints)] == [f"step-{step:08d}"]
    assert 1 <= step < 40
    train(config)
    whole = train(small.config(tmp_path / "whole", **changes))
    assert outcome(folder.path) == outcome(whole.path)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_second_signal_leaves_at_once(tmp_path, ask, name):
    # A step of many short parts: two signals within one call of torch's would be one to Python.
    config = small.config(tmp_path / "run", dim=128, n_blocks=4, seq_len=64, batch_size=4096, micro_batch_size=2)
    after = str(tmp_path / "run" / "log.txt"), "starting"
    argv = ["train", *small.flags(config)]
    # The first comes in the first step, which takes long; the second finds it still at work.
    ended = ask("send_signals", argv=argv, log=str(tmp_path / "output.txt"), name=name, after=after, pauses=[0.2, 0.6])
    assert ended["seconds"] < 5
    assert ended["code"] == (130 if name == "SIGINT" else -signal.SIGTERM), ended
    assert ended["output"] == ("depthmix: interrupted\n" if name == "SIGINT" else "")
    assert not list_checkpoints(tmp_path / "run" / "checkpoints")
