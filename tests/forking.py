"""Programs in processes of their own, forked from one that has imported torch: which takes two seconds every time.

Run as a script, this file is that one. Nothing else is imported there, so that a program finds depthmix and Triton as new as it would.
Programs that train may ask for a second one, which has imported what every training does: two seconds more.
"""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

from project import ROOT

# Run by the server before it forks, for programs that are about trainings and not about what is imported when.
TRAINING = """
import pytest, torch._dynamo, yaml
from train import small
small.prepare_to_fork("residual", "attnres", "mhc")
"""


@functools.cache
def _server(first=""):
    """Start a server that forks processes, one per worker and per program that it runs first. It ends when its input does."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    folders = [ROOT / "tests", ROOT] if first else [ROOT / "tests"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    server = subprocess.Popen([sys.executable, __file__, first], env=environment, **pipes)
    atexit.register(server.communicate)
    return server


def python(code, *argv, env=None, cwd=ROOT, first=""):
    """`python -c code argv`, as subprocess.run has it; `first` is nothing or TRAINING."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {"code": code, "argv": ["-c", *map(str, argv)], "env": {**(os.environ if env is None else env)}}
        request |= {"cwd": str(cwd), "out": str(out), "err": str(err)}
        status = _ask(request, wait=True, first=first)
        return subprocess.CompletedProcess(argv, status, out.read_text(), err.read_text())


def start(code, *argv, env, first=""):
    """The same without waiting for its end, and without its output, but for errors: the number of the process."""
    request = {"code": code, "argv": ["-c", *map(str, argv)], "env": env, "cwd": str(ROOT), "out": None, "err": None}
    return _ask(request, wait=False, first=first)


@contextmanager
def started(code, *argv, until):
    """One that is started, has brought `until()` about, and is killed in the end: the number of the process."""
    process = start(code, *argv, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        limit = time.monotonic() + 60
        while not until():
            assert time.monotonic() < limit, "it never came to be"
            time.sleep(0.01)
        yield process
    finally:
        _ask(process, wait=True)


def _ask(request, wait, first=""):
    server = _server(first)
    print(json.dumps([wait, request]), file=server.stdin, flush=True)
    return json.loads(server.stdout.readline())


def _run(code, argv, env, cwd, out, err):
    """In the child: never comes back."""
    status = 1
    try:
        for path, stream in ((out or "/dev/null", 1), (err, 2)):  # the server's own output is its answers
            if path:
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        sys.argv, sys.path[0] = argv, ""
        sys.path[1:1] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)  # no threads that a fork would lose
    exec(sys.argv[1])
    for line in sys.stdin:
        wait, request = json.loads(line)
        if isinstance(request, int):  # one to kill
            os.kill(request, signal.SIGKILL)
            print(os.waitstatus_to_exitcode(os.waitpid(request, 0)[1]), flush=True)
            continue
        child = os.fork()
        if child == 0:
            _run(**request)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if wait else child, flush=True)
