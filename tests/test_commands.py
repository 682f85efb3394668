"""The commands in the documents run, and the demo's path works, at a tenth of their size or less."""

import re
import shlex
import shutil

import numpy as np
import pytest
from PIL import Image

from depthmix.cli import main
from depthmix.report.serve import Server
from depthmix.train import step_times
from project import ROOT
from train.small import overriding

MODEL = "--n-blocks 1 --dim 16 --n-heads 2 --seq-len 32 --batch-size 2"
SMALL = f"{MODEL} --steps 4 --warmup 1 --eval-every 4 --eval-tokens 100 --quiet"
PAGES = ("quickstart", "guides/data", "guides/comparing", "guides/large-comparisons", "guides/inspecting")
DEMO = "depthmix compare --recipe recipes/demo.yaml"


def commands(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = re.findall(
        r"^(?:    )?(depthmix (?:data|train|compare|eval|generate|inspect|explore|report|list|doctor)\b.*)$",
        text,
        re.M,
    )
    assert found, page
    return found


def small(command):
    """A command's arguments, at a size that takes a second or two."""
    argv, more = shlex.split(command)[1:], ""
    if argv[:2] == ["compare", "recipes/studies/tiny.yaml"]:  # `place` makes it small
        return argv
    if argv[0] in ("train", "compare"):
        more += SMALL
    if argv[0] == "inspect":
        more += "--tokens 100 --causal-tokens 64 --batch-size 2"
    if argv[0] == "report":
        more += "--tokens 100 --causal-tokens 64"
    if argv[0] == "compare":  # more seeds: tests/compare
        more += " --seeds 0 --jobs 1 --sample-tokens 8"
    if "--budget" in argv:  # the recipe's own arms run once
        more += " --arms residual attnres"
    return overriding(argv, shlex.split(more))


def interrupted(self, poll_interval):
    raise KeyboardInterrupt


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder like the project's, where commands may write."""
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    tiny = tmp_path / "recipes" / "studies" / "tiny.yaml"
    tiny.write_text(tiny.read_text().replace("steps: 40\nwarmup: 4", "steps: 4\nwarmup: 1"))
    (tmp_path / "corpora" / "sotu").mkdir(parents=True)
    for path in sorted((ROOT / "corpora" / "sotu").glob("*.txt"))[:6]:
        shutil.copy(path, tmp_path / "corpora" / "sotu")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(step_times, "A_SECOND", 0.05)  # how exact step times are is tested elsewhere
    monkeypatch.setattr(Server, "serve_forever", interrupted)  # what is served is tested elsewhere, too
    return tmp_path


def test_every_command_of_the_page_on_vision_runs(place, capsys, monkeypatch):
    """On a few images of noise, in the shapes that the page speaks of."""
    monkeypatch.setattr("depthmix.compare.engine.draw_figures", lambda *_: ([], []))  # tests/train/test_images.py
    noise = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    np.savez("digits.npz", images=noise[:, :8, :8, 0], labels=np.arange(20) % 4)
    for split in ("train", "test"):
        for i, image in enumerate(noise):
            folder = place / "cifar10" / split / f"class-{i % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{i}.png")
    few = "--n-blocks 1 --dim 12 --n-heads 1 --batch-size 4 --steps 2 --warmup 1 --eval-every 1 --quiet"
    for command in commands("guides/images"):
        argv = shlex.split(command)[1:]
        more = few if argv[0] in ("train", "compare") else ""
        more += " --seeds 0 --compile off --no-cuda-graph" if argv[0] == "compare" else ""
        assert main(overriding(argv, shlex.split(more))) == 0, f"{command}: {capsys.readouterr().err}"
    assert "accuracy" in (place / "runs" / "cifar10-vit" / "table.md").read_text()


FIGURES = ("engine.draw_figures", "report.draw_curves", "report.draw_insides")
INSIDE = ("engine.look_inside",)
# Each kind of figures once; those of a comparison are the first of the report's.
DRAWN = ("depthmix compare recipes/studies/tiny.yaml", "depthmix report runs/demo --out runs/demo-inside.html")


def test_every_command_of_the_pages_runs(place, capsys):
    """In a reader's order, in one folder, and once where pages repeat each other; of the demo also what it promises."""
    shown = {}
    for command in dict.fromkeys(c for page in PAGES for c in commands(page)):
        if "data/my-corpus" in command:
            shutil.copytree("data/sotu", "data/my-corpus")
        with pytest.MonkeyPatch.context() as patch:
            for name in (*(() if command in DRAWN else FIGURES), *(() if command == DEMO else INSIDE)):
                nothing = ([], []) if name == "engine.draw_figures" else []
                patch.setattr(f"depthmix.compare.{name}", lambda *_, nothing=nothing: nothing)
            assert main(small(command)) == 0, f"{command}: {capsys.readouterr().err}"
        shown[command] = capsys.readouterr().out
    assert all("Open http://127.0.0.1:" in text for c, text in shown.items() if c.startswith("depthmix explore"))
    assert "residual" in shown[DEMO]
    assert "My fellow Americans" in shown[DEMO]
    report = (place / "runs" / "demo" / "report.html").read_text()
    assert report.count('<details class="inside">') == 2
    assert "What is inside" not in report  # what could not be shown
    assert (place / "runs" / "figures" / "depth-map-residual.svg").is_file()
    assert (place / "runs" / "demo" / "table.csv").read_text().count("\n") >= 3
    assert "6 of 6 runs are done." in shown["depthmix compare recipes/studies/tiny.yaml"]
    assert "6 of 6 runs are done" in (place / "docs" / "results" / "tiny" / "table.md").read_text()
    assert (place / "docs" / "results" / "tiny" / "differences.png").stat().st_size > 1000
