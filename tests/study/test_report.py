"""Figures and the report: what they show, where, and that text stays text."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from depthmix.study.figures import MISSING, curve_over_seeds, draw_figures, plot
from depthmix.study.report import make_report
from depthmix.study.rows import make_rows, read_run
from study.test_table import write_run


def two_arms(tmp_path, label="arm"):
    runs = []
    for name, shift in (("plain", 0.0), (label, -0.1)):
        for seed in (0, 1):
            losses = [x + shift + 0.02 * seed for x in (6.0, 5.0, 4.5, 4.2, 4.0)]
            folder = tmp_path / f"run{len(runs)}"
            runs.append(read_run(write_run(folder, losses, seed=seed, step_seconds=0.5 + seed), name))
    return runs


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


def test_figures_and_report(tmp_path):
    pytest.importorskip("matplotlib")
    evil = "<script>alert('arm')</script>$x^"
    runs = two_arms(tmp_path, evil)
    assert draw_figures(runs, ["plain", evil], tmp_path / "figures") == []
    for name in ("loss-tokens", "loss-time"):
        assert (tmp_path / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / "figures" / f"{name}.svg").read_text()
    before = (tmp_path / "figures" / "loss-time.svg").read_bytes()
    draw_figures(runs, ["plain", evil], tmp_path / "figures")
    assert (tmp_path / "figures" / "loss-time.svg").read_bytes() == before

    recipe = {"arms": ["plain", evil], "data": "<img src=x>", "budget": "tokens", "steps": 500, "seeds": [0, 1]}
    sample = {"arm": evil, "prompt": "<b>Once", "text": "<b>Once</b><script>alert('sample')</script>"}
    rows = make_rows(runs, ["plain", evil])
    html = make_report(recipe, rows, [sample], ["note <i>"], tmp_path / "figures")
    page = Page(html)
    assert not {"script", "img", "i", "link", "iframe"} & set(page.tags)
    assert page.tags.count("svg") == 2
    assert page.links
    assert all(link.startswith("#") for link in page.links)  # nothing is fetched
    for text in ("alert('arm')", "alert('sample')", "<b>Once", "<img src=x>", "note <i>", "How to read this"):
        assert text in page.text
    assert "prefers-color-scheme: dark" in html
    assert "currentColor" in html


def test_without_matplotlib_everything_else_is_there(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    runs = two_arms(tmp_path)
    notes = draw_figures(runs, ["plain", "arm"], tmp_path / "figures")
    assert notes == [MISSING]
    assert not (tmp_path / "figures").exists()
    recipe = {"arms": ["plain", "arm"], "budget": "time", "seeds": [0, 1]}
    page = Page(make_report(recipe, make_rows(runs, ["plain", "arm"]), [], notes, Path(tmp_path / "figures")))
    assert MISSING in page.text
    assert "svg" not in page.tags
    assert "table" in page.tags


SIX = ["residual", "attnres", "attnres:block_size=4", "attnres:block_size=4,ways=3", "dca", "mhc:residual_map=identity,head=mean"]  # fmt: skip


@pytest.fixture
def six_arms(tmp_path):
    losses = [[x - 0.05 * i for x in (6.0, 5.0, 4.5, 4.2, 4.0)] for i in range(len(SIX))]
    return [read_run(write_run(tmp_path / f"run{i}", losses[i]), arm) for i, arm in enumerate(SIX)]


@pytest.mark.parametrize("axis", ["tokens", "time"])
def test_the_legend_of_six_arms_lies_on_no_curve(six_arms, axis):
    pytest.importorskip("matplotlib")
    figure = plot(six_arms, SIX, axis)
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


def test_the_report_shows_what_counts_first_and_costs_in_a_table_of_their_own(six_arms, tmp_path):
    recipe = {"arms": SIX, "budget": "tokens", "steps": 500, "seeds": [0]}
    html = make_report(recipe, make_rows(six_arms, SIX), [], [], tmp_path)
    results, costs = Page(html).tables
    assert results[0][:3] == ["arm", "against residual", "val. loss"]
    assert costs[0][:1] + costs[0][3:5] == ["arm", "step, ms", "ratio"]
    assert [line[0] for line in results[1:]] == [line[0] for line in costs[1:]] == SIX
    assert max(len(results[0]), len(costs[0])) <= 9  # what fits 1,400 pixels
    # Where it does not fit, the arm stays in sight, its name may go on below, and a shade says that there is more.
    first = re.search(r"th:first-child, td:first-child \{([^}]*)\}", html).group(1)
    assert "position: sticky" in first
    assert "white-space: normal" in first
    assert "attnres:<wbr>block_size=4,<wbr>ways=3" in html
    assert re.search(r"\.scroll \{ overflow-x: auto; background: .* local, .* scroll; \}", html)
    assert html.count('<div class="scroll"><table>') == 2
