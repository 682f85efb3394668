"""The page without a browser: what is in it, that text stays text, and what it may run."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from depthmix.report import page as page_module
from depthmix.report.inside import panels, rank_correlation
from depthmix.report.page import MISSING, make_page, script_json
from depthmix.report.plots import colour_of, depth_figure, distinct, log_ticks, loss_figure, shown
from project import ROOT
from report.measured_documents import EVIL, content, curve, document

pytest.importorskip("plotly")


class Parsed(HTMLParser):
    """Tags with their attributes, scripts, and the text that a reader sees."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.scripts, self.text, self.inside = [], [], "", ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append([dict(attrs), ""])

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1][1] += data
        elif self.inside != "style":
            self.text += data


@pytest.fixture(scope="module")
def evil():
    """A page in which everything that comes from outside is markup."""
    documents = [
        document(EVIL, ways=2, steps=(0, 10), names=(EVIL, "mlp"), text=[EVIL, " &amp;"]),
        document(f"{EVIL} 2", streams=2, signed=True),
    ]
    said = content([EVIL, f"{EVIL} 2"], documents)
    words = dict.fromkeys(("title", "recipe", "command"), EVIL)
    lists = {key: [EVIL] for key in ("warnings", "notes", "reading")}
    pairs = {"facts": [(EVIL, EVIL)], "environment": [(EVIL, EVIL)]}
    samples = [{"arm": EVIL, "prompt": EVIL, "text": f"{EVIL} and {EVIL}"}]
    return make_page(type(said)(**{**vars(said), **words, **lists, **pairs, "samples": samples}))


def test_text_from_outside_is_text(evil):
    parsed = Parsed(evil)
    assert parsed.text.count("alert('%{x}')</script><b>&amp;") >= 20
    assert not {"img", "iframe", "link", "object", "embed"} & {tag for tag, _ in parsed.tags}
    assert sum(tag == "b" for tag, _ in parsed.tags) == 1  # the prompt of the one sample
    for attributes, code in parsed.scripts:
        if attributes.get("type") == "application/json":
            assert not set("<>&\u2028\u2029") & set(code)
            json.loads(code)


def test_only_the_pages_own_scripts_may_run_and_nothing_is_fetched(evil):
    parsed = Parsed(evil)
    policy = next(a["content"] for t, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    ran = [code for attributes, code in parsed.scripts if attributes.get("type") != "application/json"]
    hashes = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in ran]
    assert re.search(r"script-src ([^;]*);", policy)[1].split() == [f"'sha256-{h}'" for h in hashes]
    assert policy.startswith("default-src 'none';")
    assert "connect-src" not in policy
    links = [value for _, a in parsed.tags for name, value in a.items() if name in ("src", "href", "action")]
    assert all(link.startswith("#") for link in links)
    assert not any(name.startswith("on") for _, a in parsed.tags for name in a)


def test_every_figure_has_a_place_and_a_sentence(evil):
    parsed = Parsed(evil)
    places = {a["id"] for _, a in parsed.tags if a.get("class") == "plot"}
    data = json.loads(next(code for a, code in parsed.scripts if a.get("id") == "page-data"))
    assert places == set(data["figures"])
    captions = [c for c in re.findall(r"<figcaption>(.*?)</figcaption>", evil) if len(c) > 60]
    assert len(captions) == len(places)
    assert len(data["runs"]) == 2
    assert data["runs"][0]["ways"] == ["queries and keys", "values"]


def test_a_large_models_page_is_under_eight_megabytes():
    text = ["word"] * 48
    documents = [
        document(f"model {i}", blocks=12, ways=3, streams=4, steps=range(0, 2000, 100), text=text) for i in range(3)
    ]
    html = make_page(content(["a", "b", "c"], documents))
    assert 4e6 < len(html.encode()) < 8e6


def test_what_is_not_measured_is_left_out():
    plain = document("plain", edges=False)
    titles = [panel.title for panel in panels(plain, None)]
    assert len(titles) == 6
    every = document("all", ways=2, streams=3, steps=(0, 5, 10))
    more = [panel.title for panel in panels(every, plain)]
    assert set(titles) < set(more)
    assert len(more) == 14
    assert all(panel.figures or panel.kind == "row" for panel in panels(every, plain))


def test_numbers_that_are_not_there_are_gaps():
    """What is not finite is null in a document."""

    def emptied(value):
        if isinstance(value, dict):
            return {key: emptied(item) for key, item in value.items()}
        if isinstance(value, list):
            return [emptied(item) for item in value]
        return None if isinstance(value, float) else value

    whole = document("a", ways=2, streams=2, steps=(0, 5))
    parts = ("loss", "mixing", "dynamics", "edges", "skips", "streams", "training", "structure")
    empty = {**whole, **{part: emptied(whole[part]) for part in parts}, "structure": None}
    html = make_page(content(["a", "b"], [empty, whole, {**empty, "label": "b"}]))
    assert html.count("<h4>Who reads what") == 3
    assert "NaN" not in next(code for a, code in Parsed(html).scripts if a.get("id") == "page-data")


def test_without_plotly_everything_else_is_there(monkeypatch):
    monkeypatch.setattr(page_module, "plotly_source", lambda: "")
    html = make_page(content(["a", "b"], [document("a")]))
    assert MISSING in html
    assert "0.1 nats below" in html
    assert "1.2345 ± 0.0123" in html
    assert 'class="plot"' not in html
    assert "script-src 'none'" in html or "script-src 'sha256" in html


def test_plotly_is_never_imported():
    """Its script is read from its package: importing that takes longer than making the page."""
    for path in (ROOT / "depthmix").rglob("*.py"):
        assert not re.search(r"^\s*(import|from) plotly", path.read_text(), re.M), path


def test_names_no_mechanism():
    from depthmix import list_mixers

    words = re.compile(rf"\b({'|'.join(list_mixers())})\b")
    for path in [*(ROOT / "depthmix" / "report").iterdir(), ROOT / "depthmix" / "compare" / "report.py"]:
        if path.suffix in (".py", ".js", ".css"):
            found = [line for line in path.read_text().splitlines() if words.search(line)]
            assert not [line for line in found if "plain residual" not in line], path


# Figures.


def test_loss_figures_have_an_end_for_each_line_and_a_band_for_seeds():
    figure = loss_figure([curve("a", 4.0), curve(EVIL, 3.9)], "time")
    lines = [trace for trace in figure["data"] if trace.get("name")]
    bands = [trace for trace in figure["data"] if trace.get("fill") == "toself"]
    assert [end["text"] for end in figure["ends"]] == ["a", EVIL]  # page.js escapes them
    assert [trace["name"] for trace in lines] == ["a", shown(EVIL)]
    assert len(bands) == 2
    assert all(EVIL not in trace["hovertemplate"] for trace in lines)  # or its %{x} would be filled in
    low, high = figure["layout"]["yaxis"]["range"]
    assert all(low < end["y"] < high for end in figure["ends"])
    assert "seconds" in figure["layout"]["xaxis"]["title"]["text"]


def test_one_evaluation_and_one_seed_make_a_figure():
    figure = loss_figure([curve("a", 4.0, points=1)], "tokens")
    low, high = figure["layout"]["yaxis"]["range"]
    assert low < 4.0 < high


def test_axes_over_depth_are_logarithmic_where_values_differ_much():
    from depthmix.report.plots import Line

    names = ["a", "b", "c"]
    small, wide = (depth_figure(names, [Line("x", y, "@ink")], "RMS") for y in ([1.0, 2.0, None], [0.01, 1.0, 5.0]))
    assert small["layout"]["yaxis"]["type"] == "linear"
    assert small["layout"]["yaxis"]["range"][0] == 0
    assert small["ends"][0]["x"] == 1
    assert wide["layout"]["yaxis"]["type"] == "log"
    assert wide["ends"][0]["y"] == pytest.approx(0.699, abs=1e-3)
    negative = depth_figure(names, [Line("x", [-1.0, 1.0, 0.5], "@ink")], "cosine")
    assert negative["layout"]["yaxis"]["range"][0] < -1


def test_names_on_an_axis_are_distinct_and_colours_run_on():
    assert distinct(["mlp 0", "mlp 0", "x", "mlp 0"]) == ["mlp 0", "mlp 0 (2)", "x", "mlp 0 (3)"]
    assert [colour_of(i) for i in (0, 1, 6, 7)] == [("@ink", "solid"), ("@series1", "solid"), ("@series6", "solid"), ("@series1", "dash")]  # fmt: skip
    assert shown("a <b>\n& c") == "a &lt;b&gt; &amp; c"


def test_rank_correlation():
    assert rank_correlation([(1, 10), (2, 20), (3, 90)]) == pytest.approx(1.0)
    assert rank_correlation([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1.0)
    assert rank_correlation([(1, 1), (1, 2), (2, 3), (2, 4)]) == pytest.approx(0.8944, abs=1e-4)
    assert rank_correlation([(1, 1), (1, 2), (1, 3)]) is None
    assert rank_correlation([(1, 1), (2, 2)]) is None


def test_json_in_a_script_tag():
    text = "</script><!--&\u2028\u2029"
    assert json.loads(script_json(text)) == text
    assert not set("<>&\u2028\u2029") & set(script_json(text))


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([0.13, 0.5, None], ["0.1", "0.2", "0.5", "1", "2", "5"]),
        ([3.0, 40.0], ["1", "2", "5", "10", "20", "50", "100", "200", "500"]),
        ([2e-6, 0.01], ["1e-06", "1e-05", "0.0001", "0.001", "0.01"]),
        ([0.0, None], None),
    ],
)
def test_every_tick_of_a_log_axis_says_the_whole_number(values, shown):
    """Plotly's own have 2 and 5 for 0.2 and 0.5."""
    assert log_ticks(values).get("ticktext") == shown


def test_colours_of_the_depth_map_follow_the_root_and_the_pointer_shows_the_number():
    found = document("one", signed=False)
    (panel,) = (p for p in panels(found, found) if p.title.startswith("Who reads what"))
    heat = panel.figures[0]["data"][0]
    mean = [reader[0] for reader in found["mixing"]["mean"]]
    most = max(w for row in mean[1:] for w in row)
    assert heat["zmin"] == 0.0
    for z, own, row in zip(heat["z"], heat["customdata"], mean, strict=True):
        assert own[: len(row)] == row
        assert z[: len(row)] == pytest.approx([(w / most) ** 0.5 for w in row])
    assert "customdata" in heat["hovertemplate"]
