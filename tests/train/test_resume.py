"""Nothing lost: runs that are killed, or stopped by a signal, end as if nothing had happened, bit for bit.

Run as a script, this file is the driver: it imports torch once and forks trainings that it kills at random instants.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from depthmix.train.checkpoint import list_checkpoints, load_checkpoint
from depthmix.train.errors import CHECKPOINT, UserError
from depthmix.train.folder import RunFolder
from depthmix.train.loop import train
from project import ROOT
from train import small

PROGRAM = Path(sys.executable).with_name("depthmix")
SIZE = {"dim": 32, "n_blocks": 2, "seq_len": 32, "batch_size": 4}
LIMIT = 120  # seconds until something is taken to hang


def outcome(folder) -> tuple[bytes, bytes]:
    """What two runs that are the same share: the metrics and the weights."""
    newest = list_checkpoints(RunFolder(folder).checkpoints)[0]
    return (Path(folder) / "metrics.jsonl").read_bytes(), (newest / "model.safetensors").read_bytes()


# The driver.


def start(config, log: Path) -> int:
    """A training in a process of its own."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        train(config)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


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


def drive(work: Path, data: str, changes: dict, kills: int, kills_a_run: int) -> dict:
    """Kill runs of one configuration at random instants and let each finish at last."""
    rng, log = random.Random(0), work / "output.txt"
    begun = time.perf_counter()
    assert ended_by_itself(start(small.config(work / "whole", data=data, **changes), log), log)
    whole = time.perf_counter() - begun
    expected = outcome(work / "whole")
    killed = runs = 0
    while killed < kills:
        runs += 1
        config = small.config(work / f"run-{runs}", data=data, **changes)
        here = 0
        while True:
            child = start(config, log)
            if here < kills_a_run:
                time.sleep(rng.uniform(0, 0.25 * whole))
                os.kill(child, signal.SIGKILL)
            if ended_by_itself(child, log):
                break
            killed, here = killed + 1, here + 1
            check_nothing_lost(Path(config.out), config.save_every, expected[0])
        assert outcome(config.out) == expected, config.out
        assert RunFolder(config.out).has_result()
    return {"kills": killed, "runs": runs, "whole": whole, "lines": expected[0].count(b"\n")}


if __name__ == "__main__":
    import torch._dynamo
    import yaml  # noqa: F401 (what every training imports on its way, once for all of them)

    assert torch.get_num_threads() == 1  # by small: no OpenMP threads that a fork would lose
    reports = []
    for name, arguments in json.loads(sys.argv[2]).items():
        Path(name).mkdir()
        reports.append(drive(Path(name), sys.argv[1], **arguments))
    print(json.dumps(reports))


# The tests.


def killed(tmp_path, **scenarios) -> list[dict]:
    """What the driver reports of each."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    given = {str(tmp_path / name): arguments for name, arguments in scenarios.items()}
    command = [sys.executable, __file__, str(small.data()), json.dumps(given)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return json.loads(done.stdout)


def test_forty_kills(tmp_path):
    changes = {**SIZE, "mixer": "attnres", "steps": 40, "save_every": 3, "eval_every": 5}
    (report,) = killed(tmp_path, adamw={"changes": changes, "kills": 40, "kills_a_run": 12})
    assert report["kills"] >= 40
    assert report["lines"] == 48


def test_kills_with_muon_and_with_accumulation(tmp_path):
    changes = {**SIZE, "n_blocks": 1, "steps": 15}
    muon = {**changes, "optimizer": "muon", "mixer": "mhc"}
    parts = {**changes, "micro_batch_size": 2, "mixer": "dca", "schedule": "wsd", "tie_embeddings": True}
    counts = {"kills": 2, "kills_a_run": 2}
    reports = killed(tmp_path, muon={"changes": muon, **counts}, parts={"changes": parts, **counts})
    assert all(report["kills"] >= 2 for report in reports)


def test_a_run_killed_before_its_result_gets_it(tmp_path):
    folder = train(small.config(tmp_path / "run"))
    expected, metrics = folder.read_result(), folder.read_metrics()
    (folder.path / "result.json").unlink()
    train(small.config(tmp_path / "run"))
    changing = {"step_seconds", "seconds", "peak_memory"}
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


def test_a_checkpoint_of_somebody_else_is_refused(tmp_path):
    from depthmix.train.checkpoint import save_checkpoint

    config = small.config(tmp_path / "run")
    folder = train(config)
    (folder.path / "result.json").unlink()
    saved = load_checkpoint(list_checkpoints(folder.checkpoints)[0])
    for optimizer, state in (({}, saved.state), (saved.optimizer, {})):
        save_checkpoint(folder.checkpoints, 6, saved.model, optimizer, state, 1)
        with pytest.raises(UserError, match="was not written by `depthmix train`") as caught:
            train(config)
        assert caught.value.exit_code == CHECKPOINT


# Signals, to real processes.


def launch(config) -> subprocess.Popen:
    """`depthmix train` as a user starts it."""
    command = [str(PROGRAM), "train", *small.flags(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as here: sums differ with the number of threads
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen, path: Path, enough) -> None:
    """Until the file says enough."""
    until = time.monotonic() + LIMIT
    while not (path.exists() and enough(path.read_text())):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "hangs"
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_stops_and_saves(tmp_path, name):
    changes = {**SIZE, "steps": 100, "save_every": 1000, "eval_every": 7}
    config = small.config(tmp_path / "run", **changes)
    process = launch(config)
    wait_for(process, tmp_path / "run" / "metrics.jsonl", lambda text: text.count("\n") > 5)
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, err
    folder = RunFolder(config.out)
    step = folder.read_metrics()[-1]["step"]
    assert f"depthmix: stopped by {name} after step {step} of 100, and saved" in err
    assert "Traceback" not in err
    assert out == ""
    assert [p.name for p in list_checkpoints(folder.checkpoints)] == [f"step-{step:08d}"]
    assert 1 <= step < 100
    train(config)
    whole = train(small.config(tmp_path / "whole", **changes))
    assert outcome(folder.path) == outcome(whole.path)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_second_signal_leaves_at_once(tmp_path, name):
    config = small.config(tmp_path / "run", dim=256, n_blocks=6, seq_len=512, batch_size=128, micro_batch_size=2)
    process = launch(config)
    wait_for(process, tmp_path / "run" / "log.txt", lambda text: "starting" in text)
    time.sleep(0.3)  # now it is in its first step, which takes long
    process.send_signal(getattr(signal, name))
    time.sleep(0.3)
    assert process.poll() is None
    begun = time.monotonic()
    process.send_signal(getattr(signal, name))
    err = process.communicate(timeout=LIMIT)[1]
    assert time.monotonic() - begun < 5
    assert process.returncode == (130 if name == "SIGINT" else -signal.SIGTERM), err
    assert err == ("depthmix: interrupted\n" if name == "SIGINT" else "")
    assert not list_checkpoints(tmp_path / "run" / "checkpoints")
