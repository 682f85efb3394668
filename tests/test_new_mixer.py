"""`make new-mixer` begins a mechanism that passes its battery, and what is left to do cannot be forgotten."""

import os
import shutil
import subprocess
import sys

import pytest

import forking
from project import ROOT, code_blocks


def copied(tmp_path):
    """The project with one mechanism of its own, so that pytest has little to collect."""
    for name in ("depthmix", "tests/mixers", "tests/oracles", "docs", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for path in (tmp_path / "depthmix/mixers").glob("*.py"):
        if "\n@register(" in path.read_text() and path.stem != "residual":
            path.unlink()
            (tmp_path / "tests/oracles" / path.name).unlink()
    for name in ("conftest.py", "harness.py", "project.py", "test_docs.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    for name in ("pyproject.toml", "Makefile", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.fixture
def tree(tmp_path):
    return copied(tmp_path)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """For tests in which nothing is written."""
    return copied(tmp_path_factory.mktemp("project"))


def new_mixer(tree, name):
    command = [sys.executable, tree / "tools" / "new_mixer.py", name]
    return subprocess.run(command, capture_output=True, text=True)


def marks(root):
    files = [*root.glob("depthmix/**/*.py"), *root.glob("tests/oracles/*.py")]
    return {str(f.relative_to(root)) for f in files if "YOURS:" in f.read_text()}


def test_a_new_mixer_is_listed_and_passes_its_battery(tree):
    made = new_mixer(tree, "halving")
    assert made.returncode == 0, made.stderr
    files = {"depthmix/mixers/halving.py", "tests/oracles/halving.py"}
    assert marks(tree) == files == set(made.stdout.splitlines()[:-1])
    # Compiling a rule is the same for all of them, and takes as long as everything else here together.
    chosen = "(halving and not compile) or oracle"
    quick = ["-v", "-p", "no:cacheprovider"]
    files = [
        f"tests/mixers/test_{part}.py" for part in ("battery", "exact", "layout", "plain_share", "rounding", "traffic")
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTEST_ADDOPTS": ""}
    code = "import sys; del sys.modules['project']; import pytest; sys.exit(pytest.main(sys.argv[1:]))"  # the tree has its own
    done = forking.python(code, *quick, "-k", chosen, *files, env=environment, cwd=tree)
    assert done.returncode == 0, done.stdout
    passed = [line for line in done.stdout.splitlines() if " PASSED" in line]
    for test in ("step_0_or_1[halving", "in_fp64[halving-init=0.9"):
        assert any(test in line for line in passed), test


def test_the_example_in_contributing_is_what_is_written(tree):
    new_mixer(tree, "halving")
    assert code_blocks(ROOT / "CONTRIBUTING.md") == [(tree / "depthmix/mixers/halving.py").read_text()]


def test_no_place_is_left_marked():
    """A mechanism that was begun with `make new-mixer` is finished."""
    assert marks(ROOT) == set()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "NAME must be a lower-case Python name, as in NAME=halving, got ''"),
        ("Halving", "got 'Halving'"),
        ("../halving", "got '../halving'"),
        ("for", "got 'for'"),
        ("residual", "depthmix/mixers/residual.py already exists"),
        ("trace", "tests/oracles/trace.py already exists"),
    ],
)
def test_a_name_that_cannot_be_is_refused_and_nothing_is_written(name, said, untouched):
    before = {f: f.read_bytes() for f in untouched.rglob("*") if f.is_file()}
    made = new_mixer(untouched, name)
    assert made.returncode == 1
    assert said in made.stderr
    assert {f: f.read_bytes() for f in untouched.rglob("*") if f.is_file()} == before
