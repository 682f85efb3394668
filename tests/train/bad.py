"""Bad input: a command line that must fail, and what is done to folders beforehand."""

import json
import shlex
import shutil

import pytest

from depthmix.cli import main
from train import small


def one_sentence(err: str, words: list[str]) -> None:
    """One line, the last one, is the message; what comes before is progress and warnings, never a traceback."""
    lines = err.splitlines()
    assert "Traceback" not in err
    assert [line.startswith("depthmix: ") for line in lines[-1:]] == [True], err
    assert sum(line.startswith("depthmix: ") for line in lines) == 1, err
    for word in words:
        assert word in lines[-1], f"{word!r} is not in: {lines[-1]}"


@pytest.fixture
def fails(capsys, tmp_path, monkeypatch):
    """Run a command line (a string, with places in it) that must fail with a code and words."""
    monkeypatch.chdir(tmp_path)

    def run(line, code, *words, **places):
        places = {"data": small.data(), "corpus": small.corpus(), "tmp": tmp_path, **places}
        if "{run}" in line and "run" not in places:
            places["run"] = small.run().path
        start = next((start for start in (TRAIN, COMPARE) if line.startswith(start)), "")
        parts = small.overriding(shlex.split(start), shlex.split(line[len(start) :]))
        argv = [part.format(**places) for part in parts]
        capsys.readouterr()
        found = main(argv)
        err = capsys.readouterr().err
        one_sentence(err, [str(w).format(**places) for w in words])
        assert found == code, err
        return err

    return run


def table(cases):
    """Parameters with their first field as the name."""
    return pytest.mark.parametrize("case", cases, ids=[str(case[0]).replace(" ", "_")[:60] for case in cases])


TRAIN = "train --data {data} --out run --dim 16 --n-blocks 1 --n-heads 2 --seq-len 16 --batch-size 4 --steps 6 --warmup 2 --device cpu"
COMPARE = TRAIN.replace("train", "compare", 1)


# Mutations of a folder.


def meta(**changes):
    """A mutation of meta.json; a function gets what was there."""

    def change(folder):
        found = json.loads((folder / "meta.json").read_text())
        for path, value in changes.items():
            *parents, last = path.split("__")
            inner = found
            for key in parents:
                inner = inner[key]
            inner[last] = value(inner[last]) if callable(value) else value
        (folder / "meta.json").write_text(json.dumps(found))

    return change


def cut(name, size):
    def change(folder):
        with open(folder / name, "r+b") as file:
            file.truncate(size)

    return change


def remove(name):
    def change(folder):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def write(name, content):
    def change(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content(folder))

    return change
