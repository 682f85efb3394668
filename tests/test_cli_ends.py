"""How the program ends when it is not the user's mistake: bugs, interruptions, streams that close, a full disk."""

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch._dynamo.exc import BackendCompilerFailed

import depthmix
from depthmix.cli import COMMANDS, main
from project import ROOT
from train import small

PROGRAM = Path(sys.executable).with_name("depthmix")


def test_a_package_that_is_not_installed(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "yaml", None)
    monkeypatch.delitem(sys.modules, "depthmix.strict_yaml", raising=False)
    assert main(["train", "--recipe", str(tmp_path / "x.yaml")]) == 2
    assert (
        capsys.readouterr().err
        == "depthmix: this needs the package yaml: pip install '.[train]' in a clone of depthmix\n"
    )


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (MemoryError(), 2, "out of memory: use a smaller model, batch_size"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), 2, "out of memory: use a smaller"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), 2, "out of memory: use a smaller"),
        (
            BackendCompilerFailed(print, RuntimeError("no C++"), None),
            2,
            "torch.compile failed (backend='print' raised:",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            OSError(28, "No space left on device", "/x/y"),
            6,
            "cannot write or read /x/y: No space left on device; make room",
        ),
        (ValueError("two\nlines"), 1, "internal error (ValueError: two lines): this is a bug in depthmix, or"),
        (RuntimeError("shapes do not match"), 1, "internal error (RuntimeError: shapes do not match): this is a bug"),
        (ModuleNotFoundError("gone", name="depthmix.gone"), 1, "internal error (ModuleNotFoundError: gone)"),
        (RuntimeError("Storage size calculation overflowed with sizes=[9, 9]"), 2, "out of memory: use a smaller"),
    ],
)
def test_other_ends(error, code, words, capsys, monkeypatch):
    def fail():
        raise error

    monkeypatch.setitem(COMMANDS, "list", (None, fail, ""))
    assert main(["list"]) == code
    err = capsys.readouterr().err
    assert err.startswith(f"depthmix: {words}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("argv", [["--debug", "list"], ["list", "--debug"]])
def test_debug_shows_where(argv, capsys, monkeypatch):
    def fail():
        raise RuntimeError("shapes do not match")

    monkeypatch.setitem(COMMANDS, "list", (None, fail, ""))
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert "in fail" in err
    assert err.splitlines()[-1].startswith("depthmix: internal error (RuntimeError: shapes do not match)")
    assert main(["--debug", "train"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("depthmix: data is needed: Folder written by `depthmix data`\n")


def test_a_bug_in_training_is_in_the_runs_log(tmp_path, monkeypatch, capsys):
    def fail(self, step):
        raise ValueError("no such step")

    monkeypatch.setattr("depthmix.train.loop.Trainer.step", fail)
    assert main(["train", *small.flags(small.config(tmp_path / "run"))]) == 1
    assert "internal error (ValueError: no such step)" in capsys.readouterr().err
    assert "in fail" in (tmp_path / "run" / "log.txt").read_text()


# The program, of which one command is replaced, so that it prints without the seconds in which torch is imported.
PRINTS = """
import sys
from depthmix.cli import COMMANDS, main
COMMANDS["list"] = (None, lambda: print("a rule"), "")
sys.exit(main(["list"]))
"""


def test_a_reader_that_leaves():
    """`depthmix list | head -0`, with a pipe nobody reads from the start: silent, and as if SIGPIPE had ended it."""
    command = [sys.executable, "-c", PRINTS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 141


def test_closed_streams(monkeypatch, tmp_path):
    """`depthmix doctor >&- 2>&-`: Python then has None for them."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["list"]) == 0
    assert main(["eval", "--run", str(tmp_path / "gone")]) == 4


def test_what_a_stream_has_no_letters_for(monkeypatch):
    """A prompt in Japanese on a terminal that knows ASCII, or a folder whose name is no text."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setitem(COMMANDS, "list", (None, lambda: print("東 \udcff"), ""))
    assert main(["list"]) == 0
    assert out.buffer.getvalue() == b"\\u6771 \\udcff\n"


def outside(folder, torch, *argv):
    """The program with another torch: (exit code, stdout, stderr)."""
    (folder / "torch.py").write_text(torch)
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run([str(PROGRAM), *argv], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_an_interruption_while_torch_is_imported(tmp_path):
    torch = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    assert outside(tmp_path, torch, "list") == (130, "", "depthmix: interrupted\n")


def test_what_does_not_need_torch_does_not_wait_for_it(tmp_path):
    """Most of the 2 s that a command takes at least."""
    begun = time.perf_counter()
    assert outside(tmp_path, "raise ImportError", "--version") == (0, f"depthmix {depthmix.__version__}\n", "")
    assert time.perf_counter() - begun < 1.5  # 0.1 s where nothing else runs
    code, _, err = outside(tmp_path, "raise ImportError", "train", "--stepz", "5")
    assert (code, err) == (2, "depthmix: train: unknown argument '--stepz'; did you mean '--steps'?\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_to_a_full_disk():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", PRINTS]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert done.returncode == 6
    advice = "make room, then run the same command again"
    assert done.stderr == f"depthmix: cannot write or read: No space left on device; {advice}\n"


def test_it_runs_as_a_module():
    """Where the program is not on the path, as on a machine with a torch of its own."""
    command = [sys.executable, "-m", "depthmix", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("depthmix ")
