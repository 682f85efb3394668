"""What every test gets: fresh tensors full of NaN, so that memory nobody wrote cannot pass, and kernels without a GPU."""

import atexit
import functools
import gc
import importlib
import os
import pkgutil
import signal
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

try:  # a GPU machine has none
    from coverage import Coverage
except ImportError:
    Coverage = None


class Meter:
    """Coverage, on only while something runs that it is of: the tracer slows down whatever else Python does."""

    def __init__(self):
        self.coverage = None
        self.pause()

    def pause(self):
        """Stop what pytest-cov has started, which in a worker happens after this file is loaded."""
        running = None if Coverage is None else Coverage.current()
        if running is not None:
            self.coverage = running
            running.stop()

    @contextmanager
    def on(self):
        if self.coverage is None:
            yield
            return
        self.coverage.start()
        try:
            yield
        finally:
            self.coverage.stop()


METER = Meter()
HERE = Path(__file__).parent
COVERED = pytest.StashKey[bool]()

# A shell ignores SIGINT for programs in the background, and nohup ignores SIGHUP. Tests send both, to child processes too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Files of tests in memory, where there is room: what is saved is waited for until the disk has it, a tenth of all the time.
MEMORY = Path("/dev/shm")
if hasattr(os, "ST_NOEXEC") and os.access(MEMORY, os.W_OK):
    there = os.statvfs(MEMORY)
    if there.f_bavail * there.f_frsize > 2**30 and not there.f_flag & os.ST_NOEXEC:  # tests run programs from there
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Inductor has one small file to compile at a time: processes to do that in take longer to start.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def runs_tests(config) -> bool:
    """With -n a process that only hands them out does not: it needs no torch, and the workers start seconds earlier."""
    return hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None)


def pytest_configure(config):
    if not runs_tests(config):
        return
    gc.disable()  # until all tests are there: it would look again and again through what only grows
    METER.pause()
    import torch  # not measured

    if not torch.cuda.is_available():
        # Kernels run in Triton's interpreter. Triton asks once, when it is first imported.
        os.environ["TRITON_INTERPRET"] = "1"
    if "PYTEST_XDIST_WORKER" in os.environ:
        # As many workers as cores: with more threads than that they wait for each other and are several times slower.
        torch.set_num_threads(1)
        atexit.register(_end, os.getpid())


def _end(worker):
    """Last of all (what is registered first is), and not in processes forked from this one: giving back all objects takes seconds."""
    if os.getpid() == worker:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _poisoned(make):
    import torch

    def fresh(*args, **kwargs):
        t = make(*args, **kwargs)
        if t.is_floating_point() and t.device.type != "meta":
            with torch.no_grad():  # some of torch's own callers ask for requires_grad
                t.fill_(float("nan"))
        return t

    return fresh


@pytest.fixture(autouse=True, scope="session")
def _poison_fresh_memory():
    import torch
    from torch.utils import _device

    _device._device_constructors()  # cached by identity: without it `with torch.device(...)` misses the patched ones
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield


def pytest_collection_finish():
    """Freeze what exists before the first test, so that Python's collector need not look through it."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000)  # graphs are made of many small objects, and reference counts free nearly all of them


def pytest_unconfigure():
    # Workers end without Python's end (see `_end`), and before that pytest collects garbage twice: in seconds, of all objects.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        gc.unfreeze()  # or Triton complains of leaks when Python ends


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session):
    METER.pause()
    if runs_tests(session.config):
        rewrite_share_of_asserts(session.config)
        with METER.on(), suppress(ImportError):  # where it is measured, and not first by a test that is not
            for name in ("mixers", "ops"):
                for module in pkgutil.walk_packages([HERE.parent / "depthmix" / name], f"depthmix.{name}."):
                    importlib.import_module(module.name)
    return (yield)


def rewrite_share_of_asserts(config):
    """Rewrite the asserts in a worker's share of all files, which pytest keeps: or in a fresh clone every worker would rewrite all."""
    worker = getattr(config, "workerinput", None)
    if worker is None or config.option.file_or_dir or config.option.assertmode != "rewrite" or sys.dont_write_bytecode:
        return
    from _pytest.assertion import rewrite

    first = int(worker["workerid"].removeprefix("gw"))
    for path in sorted(HERE.rglob("test_*.py"))[first :: worker["workercount"]]:
        kept = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        if rewrite.try_makedirs(kept.parent) and rewrite._read_pyc(path, kept) is None:
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, kept)


@functools.cache
def is_of_mixers_or_ops(path):
    return not {"mixers", "ops"}.isdisjoint(path.relative_to(HERE).parts)


def pytest_collection_modifyitems(items):
    """Coverage is measured by the tests of what it is of. It doubles the interpreter's time, so of kernels by those marked `covered`."""
    interpreted = {item for item in items if "quick_interpreter" in getattr(item, "fixturenames", ())}
    nth = Counter()  # of a test's cases: every second shows the same lines
    for item in items:
        own = is_of_mixers_or_ops(item.path)
        marks = {mark.name for mark in item.iter_markers()}
        measured = own and "uncovered" not in marks and (item not in interpreted or "covered" in marks)
        item.stash[COVERED] = measured and nth[item.originalname] % 2 == 0
        nth[item.originalname] += measured


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    with METER.on() if item.stash[COVERED] else nullcontext():
        done = yield
    if nextitem is not None and nextitem.path != item.path:  # what a file has imported stays too
        gc.collect()
        gc.freeze()
    return done


@pytest.fixture(autouse=True)
def _seed():
    import torch

    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # which would note for three kinds of GPU, with a trace each, what they are to be seeded with if they ever come
        torch.default_generator.manual_seed(0)


@pytest.fixture
def quick_inductor(monkeypatch):
    """Let Inductor run its C++ compiler once per test, on the test's own code.

    It would also compile four probes for vector instructions and a header for later files. That takes three times as long
    as the code itself, in every process.
    """
    from torch._inductor import codecache, config, cpu_vec_isa

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    # A hash of Triton's 500 MB library, for keys of kernels that run on GPUs.
    monkeypatch.setattr(codecache, "triton_key", lambda: "unused")
    with config.patch({"cpp.simdlen": 1, "cpp_cache_precompile_headers": False}):
        yield


@pytest.fixture(scope="session")
def workers():
    """Processes for jobs of several, started with the first such test."""
    from parallel.workers import Workers

    found = Workers()
    yield found
    found.close()


@pytest.fixture(scope="session")
def quick_interpreter():
    """Triton's interpreter without what it does again and again: most of its time."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from quick_interpreter import quicken

    with pytest.MonkeyPatch.context() as patch:
        quicken(interpreter, patch)
        yield
