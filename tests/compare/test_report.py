"""Figures and the report: what they show, where, and that text stays text."""

import json
import re
import shutil
import sys
from html.parser import HTMLParser

import pytest
import yaml

from compare.run_folders import write_run
from depthmix.cli import main
from depthmix.compare.figures import curve_over_seeds, draw_curves, plot_curves
from depthmix.compare.inside import affordable_tokens
from depthmix.compare.recipe import check_recipe
from depthmix.compare.records import Records, write_records
from depthmix.compare.report import ReportedRuns, command_of, content_of, environments, explored, gather, of_results
from depthmix.compare.results import Results
from depthmix.compare.rows import make_rows, read_run, result_of_folder
from depthmix.config import CompareConfig, ReportConfig
from depthmix.errors import CHECKPOINT, DISK, USAGE
from depthmix.report import measure
from depthmix.report.depth_figures import draw_insides, file_names
from depthmix.report.figures import MISSING
from depthmix.report.page import make_page
from depthmix.runs.code_record import CODE
from depthmix.runs.folder import RunFolder
from report.measured_documents import document
from train import bad, small
from train.checkpoints import match_run

fails = bad.fails


def two_arms(tmp_path, label="arm"):
    runs = []
    for name, shift in (("plain", 0.0), (label, -0.1)):
        for seed in (0, 1):
            losses = [x + shift + 0.02 * seed for x in (6.0, 5.0, 4.5, 4.2, 4.0)]
            folder = tmp_path / f"run{len(runs)}"
            runs.append(read_run(write_run(folder, losses, seed=seed, step_seconds=0.5 + seed), name))
    return runs


def found_of(runs, labels, **more):
    return ReportedRuns({"": runs}, {"": make_rows(runs, labels)}, labels, **more)


def test_curves_are_means_over_seeds(tmp_path):
    x, mean, low, high = curve_over_seeds(two_arms(tmp_path)[:2], "time")
    assert x == [100.0, 200.0, 300.0, 400.0, 500.0]  # half a second and one and a half
    assert mean[-1] == pytest.approx(4.01)
    assert (low[-1], high[-1]) == (4.0, 4.02)
    assert curve_over_seeds(two_arms(tmp_path)[:2], "tokens")[0] == [1000, 2000, 3000, 4000, 5000]


class Page(HTMLParser):
    """Tags, references and text of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.links, self.text = [], [], ""
        self.tables: list[list[list[str]]] = []  # of lines of cells
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_data(self, data):
        self.text += data
        if self.tables and self.tables[-1] and self.tables[-1][-1]:
            self.tables[-1][-1][-1] += data


def test_figures_are_files_and_the_same_again(tmp_path):
    pytest.importorskip("matplotlib")
    evil = "<script>alert('arm')</script>$x^"
    runs = two_arms(tmp_path, evil)
    assert draw_curves(runs, ["plain", evil], tmp_path / "figures") == []
    for name in ("loss-tokens", "loss-time"):
        assert (tmp_path / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / "figures" / f"{name}.svg").read_text()
    before = (tmp_path / "figures" / "loss-time.svg").read_bytes()
    draw_curves(runs, ["plain", evil], tmp_path / "figures")
    assert (tmp_path / "figures" / "loss-time.svg").read_bytes() == before


def test_figures_of_the_inside_are_files(tmp_path):
    pytest.importorskip("matplotlib")
    documents = [document("a/b:c=1", ways=2), document("$x^", signed=True, seed=1)]
    assert draw_insides(documents, tmp_path) == []
    names = {"depth-map-a-b-c=1", "depth-map-x", "over-depth"}
    assert {p.name for p in tmp_path.iterdir()} == {f"{name}.{ending}" for name in names for ending in ("svg", "png")}
    svg = (tmp_path / "depth-map-a-b-c=1.svg").read_text()
    assert all(f">{word}<" in svg for word in ("queries and keys", "values", "attention 1", "embedding", "finish"))
    assert "$x^" in (tmp_path / "over-depth.svg").read_text()


def test_files_of_two_models_have_two_names():
    assert file_names(["a:b", "a,b", "a-b", "", "..", "x" * 200]) == ["a-b", "a-b-again1", "a-b-again2", "model", "model-again1", "x" * 80]  # fmt: skip


def test_text_stays_text(tmp_path):
    evil = "<script>alert('arm')</script>$x^"
    runs = two_arms(tmp_path, evil)
    recipe = {"arms": ["plain", evil], "data": "<img src=x>", "budget": "tokens", "steps": 500, "seeds": [0, 1]}
    sample = {"arm": evil, "prompt": "<b>Once", "text": "<b>Once</b><script>alert('sample')</script>"}
    found = found_of(runs, ["plain", evil], recipe=recipe, samples=[sample], notes=["note <i>"])
    page = Page(make_page(content_of(found, [document(evil)], "depthmix report <u>")))
    assert not {"img", "i", "u", "link", "iframe"} & set(page.tags)
    for text in ("alert('arm')", "alert('sample')", "<b>Once", "<img src=x>", "note <i>", "How to read this", "<u>"):
        assert text in page.text
    assert all(link.startswith("#") for link in page.links)


def test_without_matplotlib_everything_else_is_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    runs = two_arms(tmp_path)
    notes = draw_curves(runs, ["plain", "arm"], tmp_path / "figures")
    assert notes == [MISSING] == draw_insides([document("a")], tmp_path / "figures")
    assert not (tmp_path / "figures").exists()
    recipe = {"arms": ["plain", "arm"], "budget": "time", "seeds": [0, 1]}
    page = Page(make_page(content_of(found_of(runs, ["plain", "arm"], recipe=recipe, notes=notes), [], "")))
    assert MISSING in page.text
    assert "table" in page.tags


SIX = ["residual", "attnres", "attnres:block_size=4", "attnres:block_size=4,ways=3", "dca", "mhc:residual_map=identity,head=mean"]  # fmt: skip


@pytest.fixture
def six_arms(tmp_path):
    losses = [[x - 0.05 * i for x in (6.0, 5.0, 4.5, 4.2, 4.0)] for i in range(len(SIX))]
    return [read_run(write_run(tmp_path / f"run{i}", losses[i]), arm) for i, arm in enumerate(SIX)]


@pytest.mark.parametrize("axis", ["tokens", "time"])
def test_the_legend_of_six_arms_lies_on_no_curve(six_arms, axis):
    pytest.importorskip("matplotlib")
    figure = plot_curves(six_arms, SIX, axis)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box, (axes,) = legend.get_window_extent(), figure.axes
    assert len(legend.get_texts()) == 6
    assert axes.get_legend() is None
    assert not box.overlaps(axes.get_tightbbox())
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= box.y0
    assert axes.bbox.height > 0.6 * figure.bbox.height


def test_the_report_shows_what_counts_first_and_costs_in_a_table_of_their_own(six_arms):
    recipe = {"arms": SIX, "budget": "tokens", "steps": 500, "seeds": [0]}
    html = make_page(content_of(found_of(six_arms, SIX, recipe=recipe), [], ""))
    effects, results, costs = Page(html).tables
    names = [line[0] for line in effects[1:-1]]  # the lowest loss first, a rule's title before its label
    assert all(name.endswith(label) for name, label in zip(names, reversed(SIX[1:]), strict=True))
    assert results[0][:3] == ["arm", "against residual", "val. loss"]
    assert costs[0][:1] + costs[0][3:5] == ["arm", "step, ms", "ratio"]
    assert [line[0] for line in results[1:]] == [line[0] for line in costs[1:]] == SIX
    assert max(len(results[0]), len(costs[0])) <= 9  # what fits 1,400 pixels
    assert "attnres:<wbr>block_size=4,<wbr>ways=3" in html  # where a long name may go on below
    assert html.count('<div class="scroll"') == 2


# `depthmix report`.


def test_the_command_that_made_a_page_makes_it_again():
    config = ReportConfig(run=["runs/a b", "runs/c"], out="x.html", tokens=5)
    assert command_of("report", config) == "depthmix report 'runs/a b' runs/c --out x.html --tokens 5"
    compared = CompareConfig(
        arms=["a:b=1", "c"], mixer_options={"ways": 2}, deterministic=True, qk_norm=False, quiet=True
    )
    assert command_of("compare", compared) == (
        "depthmix compare --mixer-options ways=2 --no-qk-norm --deterministic --arms a:b=1 c"
    )


@pytest.fixture
def run(tmp_path):
    shutil.copytree(small.run().path, tmp_path / "first")
    # Another test may have measured the run that they share.
    (tmp_path / "first" / measure.INSIGHT).unlink(missing_ok=True)
    return tmp_path / "first"


def test_a_report_of_a_run_is_measured_once_for_a_checkpoint(run, tmp_path, monkeypatch, capsys):
    words = ["--tokens", "64", "--causal-tokens", "16", "--device", "cpu"]
    assert main(["report", str(run), "--out", str(tmp_path / "out" / "report.html"), *words]) == 0
    assert f"Report: {tmp_path / 'out' / 'report.html'}" in capsys.readouterr().out
    html = (tmp_path / "out" / "report.html").read_text()
    assert len(html) < 1e6
    page = Page(html)
    for word in (
        "Who reads what",
        "Inside the model",
        "torch",
        "n_blocks",
    ):
        assert word in page.text
    assert f"depthmix report {run} --out" in page.text
    kept = json.loads((run / measure.INSIGHT).read_text())
    assert kept["checkpoint"].startswith("step-")
    assert kept["asked"]["text"]  # of the validation split, as nobody gave one
    assert kept["document"]["text"]["tokens"]
    figures = {p.name for p in (tmp_path / "out" / "figures").iterdir()}
    assert {"loss-tokens.svg", "over-depth.png"} <= figures
    assert any(name.startswith("depth-map-") for name in figures)

    asked = []
    monkeypatch.setattr(
        "depthmix.train.inspect.inspect_run", lambda config, _: asked.append(config) or kept["document"]
    )
    served = Page(make_page(explored([str(run)]), live=[])).text  # whatever was asked, and cut connections with it
    assert served.index("Text to look into") < served.index("Results") < served.index("Inside the model")
    assert not asked
    question = measure.InspectConfig(str(run), text=kept["asked"]["text"], tokens=64, causal_tokens=16, device="cpu")
    assert measure.measured(question) == {**kept["document"], "run": str(run)}
    assert not asked
    (run / "checkpoints" / kept["checkpoint"].split()[0] / "manifest.json").open("a").write(" ")  # another checkpoint
    measure.measured(question)
    assert len(asked) == 1
    question.tokens = 65
    measure.measured(question)
    assert len(asked) == 2
    (run / measure.INSIGHT).write_text("{")
    assert explored([str(run)]) is not None
    assert len(asked) == 3
    assert asked[-1].causal_tokens == 0
    assert explored([str(run / "checkpoints")]) is None  # no run


def changed(run, name, **values):
    other = run.with_name(name)
    shutil.copytree(run, other)
    found = {**yaml.safe_load((other / "recipe.yaml").read_text()), **values}
    (other / "recipe.yaml").write_text(yaml.safe_dump(found))
    match_run(other)
    RunFolder(other).write_result({**RunFolder(other).read_result(), "seed": found["seed"]})
    return other


def comparison_of(folder, *names, **more):
    """A comparison's folder with these runs, each in the folder of that name."""
    said = {"arms": ["residual"], "seeds": [0, 1, 2], "data": "data", "out": str(folder), **more}
    (folder / "comparison.yaml").write_text(yaml.safe_dump(said))
    lines = [{"kind": "code", "id": "c", "files": {}}]
    for arm, name in names:
        seed, result = result_of_folder(RunFolder(folder / name))
        place = {"arm": arm, "domain": "", "size": "", "seed": seed, "path": name}
        lines.append(
            {"kind": "run", **place, "result": result, "config": {}, "environment": {}, "data": "", "code": "c"}
        )
    write_records(folder, Records(lines))
    return folder


def test_seeds_of_one_recipe_are_one_row_and_other_recipes_are_not_compared(run):
    seeds = gather([run, changed(run, "second", seed=1)])
    assert len(seeds.labels) == len(seeds.models) == 1
    assert [r.seed for r in seeds.runs[""]] == [0, 1]
    together = gather(
        [changed(run, "alone", seed=2), comparison_of(run.parent, ("residual", "second"), ("residual", "first"))]
    )
    assert [r.seed for r in together.runs[""]] == [2, 1, 0]
    assert together.models == [(together.labels[0], run.parent / "alone")]
    twice = gather([run, run])
    assert len(twice.runs[""]) == 1
    longer = gather([run, changed(run, "third", lr=0.5)])
    assert not longer.comparable
    assert len(longer.labels) == 2
    content = content_of(longer, [], "")
    assert not content.verdict
    assert "against" not in " ".join(content.tables[0].heading)
    assert re.search(r"\(lr: [\d.e-]+ and 0\.5\)\.$", content.warnings[0])
    assert "model of the first" in dict(content.facts)
    assert "model" not in dict(content.facts)
    assert not any("every arm" in fact for _, fact in content.facts)
    assert not any("to reach" in text for text in (*content.notes, *content.tables[0].heading))
    unfinished = changed(run, "fourth", seed=2)
    (unfinished / "result.json").unlink()
    found = gather([run, unfinished])
    assert len(found.runs[""]) == 1
    assert "has not finished" in found.notes[0]


def test_runs_of_other_data_are_not_compared_and_other_code_is_said(run):
    second = changed(run, "of-code", seed=1)
    assert gather([run, second]).warnings == []
    parts = json.loads((second / CODE).read_text())
    parts[0]["files"]["models/layers.py"] = "of old"
    (second / CODE).write_text(json.dumps(parts))
    found = gather([run, second])
    assert found.comparable
    assert found.warnings == [
        "These runs were made by different code (models/layers.py changed): a difference between them may come from that."
    ]
    (second / CODE).unlink()
    (second / "data.json").write_text("{}")
    match_run(second)
    found = gather([run, second])
    assert not found.comparable
    assert len(found.labels) == 2
    assert found.warnings == [
        "These runs were trained on data that was prepared differently, so their losses do not compare."
    ]


def test_a_comparison_is_reported_with_all_its_arms(tmp_path):
    for i, arm in enumerate(("residual", "dca")):
        for seed in (0, 1):
            write_run(tmp_path / arm / f"seed-{seed}", [5.0, 4.0 - i], seed=seed)
    names = [(arm, f"{arm}/seed-{seed}") for arm in ("residual", "dca") for seed in (0, 1)]
    more = {"arms": ["residual", "dca"], "prompt": "a", "notes": ["a note"]}
    comparison_of(tmp_path, *names, **more)
    found = gather([tmp_path])
    assert found.labels == [label for label, _ in found.models] == ["residual", "dca"]
    assert found.models[1][1] == tmp_path / "dca" / "seed-0"
    content = content_of(found, [], "")
    assert "not finished" in content.warnings[0]
    assert "1.0000 nats lower" in content.verdict[0]
    assert content.notes[0] == "a note"
    assert content.tables[1].lines[1][4] == "1.00"  # the ratio of the runs' own step times
    records = Records([json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()])
    for line in records.runs:  # which are not to be trusted where others had the cores
        line["result"]["core_wait"] = 0.6
    records.add({"kind": "step_times", "domain": "", "size": "", "seconds": {"residual": 0.1, "dca": 0.3}})
    (tmp_path / "runs.jsonl").unlink()
    write_records(tmp_path, records)
    assert content_of(gather([tmp_path]), [], "").tables[1].lines[1][4] == "3.00"
    (tmp_path / "runs.jsonl").write_text("{}")
    with pytest.raises(Exception, match="is damaged"):
        gather([tmp_path])


def test_a_page_has_a_table_for_every_size(tmp_path):
    config = CompareConfig(out=str(tmp_path), data="data", arms=["residual", "dca"], sizes={"s": {}, "m": {"dim": 8}})
    config.question = "Does it\nhelp?"
    lines = [{"kind": "code", "id": "c", "files": {}}]
    for size in ("s", "m"):
        for i, arm in enumerate(config.arms):
            _, result = result_of_folder(RunFolder(write_run(tmp_path / size / arm, [5.0, 4.0 - i])))
            place = {"arm": arm, "domain": "", "size": size, "seed": 0}
            lines.append(
                {"kind": "run", **place, "result": result, "config": {}, "environment": {}, "data": "", "code": "c"}
            )
    content = content_of(of_results(Results(check_recipe(config), Records(lines))), [], "")
    assert [table.title for table in content.tables] == ["s", "What it cost, s", "m", "What it cost, m"]
    assert content.verdict[0].startswith("On s, after")
    assert content.facts[0] == ("question", "Does it help?")
    assert content.verdict[2].startswith("m: dca: 1.000 nats below residual")
    assert not content.curves


def test_where_runs_were_made_is_said_once(tmp_path):
    for i, torch in enumerate(("2.13", "2.13", "2.11")):
        (tmp_path / str(i)).mkdir()
        found = {"torch": torch, "started": f"2026-01-0{i + 1}", "command": ["/home/me/secret"], "git_commit": None}
        (tmp_path / str(i) / "environment.json").write_text(json.dumps(found))
    (tmp_path / "3").mkdir()
    said = environments([tmp_path / str(i) for i in range(4)])
    assert said == [("torch", "2.13, 2.11"), ("started", "2026-01-01 to 2026-01-03")]


def test_what_cannot_be_reported_is_one_sentence(fails, run, tmp_path):
    out = tmp_path / "r.html"
    fails("report", USAGE, "report needs at least one run")
    fails(f"report {tmp_path / 'nowhere'} --out {out}", CHECKPOINT, "does not exist")
    fails(f"report {tmp_path} --out {out}", CHECKPOINT, "is not a run folder", str(run))
    fails(f"report {run} --out {tmp_path / 'r.txt'}", USAGE, "ends in .html")
    fails(f"report {run} --out {run}", USAGE, "ends in .html")
    fails(f"report {run} --out {run / 'recipe.yaml' / 'r.html'}", DISK, "is a file")
    fails(f"report {run} --out {out} --tokens 0", USAGE, "tokens must be at least 1")
    fails(f"report {run} --out {out} --causal-tokens -1", USAGE, "causal_tokens must be at least 0")
    fails(f"report {run} --out {out} --data {tmp_path / 'none'}", 3, "There is no folder")
    shutil.rmtree(run / "checkpoints")
    fails(f"report {run} --out {out}", CHECKPOINT, "has no checkpoint yet")
    assert not out.exists()


def test_cutting_connections_stays_within_its_time(six_arms):
    """Twelve sites, 1,000 tokens in a step of one second: a third of a millisecond a token, 38 passes, three times that."""
    fast = affordable_tokens(six_arms[0], 6, 1000, 4.0)
    step = six_arms[0].step_seconds
    assert fast == int(4.0 / (3 * (455 / 12) * step / 3000))
    assert affordable_tokens(six_arms[0], 6, 10**9, 4.0) == 4096
    assert affordable_tokens(six_arms[0], 64, 1000, 4.0) < fast
