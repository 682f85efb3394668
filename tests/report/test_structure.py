"""The page without a browser: what is in it, that text stays text, and what it may run."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from depthmix.errors import UserError
from depthmix.insight.statistics import rank_correlation
from depthmix.report.content import Content, Effect
from depthmix.report.documents import distinct, labels
from depthmix.report.effects import effects
from depthmix.report.model_data import NATS, SHARE, explorer_data, models_data, script_json
from depthmix.report.page import SCRIPTS, WEB, make_page, script
from project import ROOT
from report.measured_documents import EVIL, content, document


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
    words = dict.fromkeys(("title", "subtitle", "badge", "baseline", "recipe", "command"), EVIL)
    lists = {key: [EVIL] for key in ("warnings", "notes", "reading")}
    pairs = {"facts": [(EVIL, EVIL)], "environment": [(EVIL, EVIL)]}
    samples = [{"arm": EVIL, "prompt": EVIL, "text": f"{EVIL} and {EVIL}"}]
    more = {"samples": samples, "effects": [Effect(EVIL, -0.1, 0.05, 1.1)]}
    return make_page(Content(**{**vars(said), **words, **lists, **pairs, **more}))


def test_text_from_outside_is_text(evil):
    parsed = Parsed(evil)
    assert parsed.text.count("alert('%{x}')</script><b>&amp;") >= 20
    assert not {"img", "iframe", "link", "object", "embed"} & {tag for tag, _ in parsed.tags}
    assert sum(tag == "b" for tag, _ in parsed.tags) == 2  # the prompt of the one sample and the one difference
    for attributes, code in parsed.scripts:
        if attributes.get("type") == "application/json":
            assert not set("<>&\u2028\u2029") & set(code)
            json.loads(code)


def test_only_the_pages_own_script_may_run_and_nothing_is_fetched(evil):
    parsed = Parsed(evil)
    policy = next(a["content"] for t, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    ran = [code for attributes, code in parsed.scripts if attributes.get("type") != "application/json"]
    hashes = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in ran]
    assert re.search(r"script-src ([^;]*);", policy)[1].split() == [f"'sha256-{h}'" for h in hashes]
    assert policy.startswith("default-src 'none';")
    assert "connect-src" not in policy
    assert not [value for _, a in parsed.tags for name, value in a.items() if name in ("src", "href", "action")]
    assert not any(name.startswith("on") for _, a in parsed.tags for name in a)


def test_the_scripts_are_short_and_make_no_markup():
    assert {path.stem for path in WEB.glob("*.js")} == set(SCRIPTS)
    code = [line for line in script().splitlines() if line.strip() and not line.strip().startswith(("//", "/*"))]
    assert len(code) <= 1200
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", script())


def test_a_page_of_five_models_of_twelve_blocks_is_under_a_megabyte():
    text = ["word"] * 32
    documents = [
        document(f"model {i}", blocks=12, ways=ways, steps=range(0, 2000, 200), text=text)
        for i, ways in enumerate((1, 1, 2, 3, 1))
    ]
    html = make_page(content([d["label"] for d in documents], documents))
    assert 4e5 < len(html.encode()) < 1e6


def test_shares_weights_and_cuts_arrive_as_whole_numbers():
    found = document("a", ways=2, signed=True, text=["one", " two", " three"])
    (model,) = explorer_data([found])
    shares, whole = found["text"]["contributions"][1][2][1], model["text"]["share"][1][2][1]
    assert whole == [round(SHARE * share) for share in shares]
    weights, total = found["text"]["weights"][1][2][1], model["text"]["total"][1][2][1]
    assert total == pytest.approx(sum(map(abs, weights)), rel=5e-3)
    back = [part / SHARE * total for part in model["text"]["weight"][1][2][1]]
    assert back == pytest.approx(weights, abs=1e-2)
    assert any(weight < 0 for weight in back)
    assert model["text"]["cuts"][1][3] == [round(NATS * cut) for cut in found["text"]["cuts"][1][3]]
    assert model["text"]["cuts"][2][0] == [None]
    assert model["readers"][-1] == "prediction"
    assert model["readers"][:2] == ["attention 0", "mlp 0"]


def test_a_document_of_another_version_is_refused_in_a_sentence():
    with pytest.raises(
        UserError, match="the measurements of runs/0 have schema 1, and this version of depthmix needs 2"
    ):
        make_page(Content(title="t", documents=[document("a") | {"schema": 1}]))


def test_what_is_not_measured_is_left_out():
    plain = document("plain", edges=False)
    (model,) = models_data([plain])
    assert model["text"] is model["inside"]["edges"] is model["inside"]["streams"] is model["depth"]["skips"] is None
    html = make_page(Content(title="t", documents=[plain]))
    assert 'id="words"' not in html
    assert 'id="curves"' not in html
    assert 'class="effects"' not in html
    assert 'id="maps"' in html
    assert make_page(Content(title="t")).count("<section") == 0
    without_cuts = document("plain", edges=False, text=["a", " b"])
    assert explorer_data([without_cuts])[0]["text"]["cuts"] is None
    both = [document("one token", text=["a"]), without_cuts]
    assert [(model["label"], model["place"]) for model in explorer_data(both)] == [("plain", 1)]


def test_numbers_that_are_not_there_are_gaps():
    """What is not finite is null in a document."""

    def emptied(value):
        if isinstance(value, dict):
            return {key: emptied(item) for key, item in value.items()}
        if isinstance(value, list):
            return [emptied(item) for item in value]
        return None if isinstance(value, float) else value

    whole = document("a", ways=2, streams=2, steps=(0, 5), text=["a", " b"])
    parts = ("loss", "mixing", "dynamics", "edges", "skips", "streams", "training", "structure", "text")
    empty = {**whole, **{part: emptied(whole[part]) for part in parts}, "structure": None}
    html = make_page(content(["a", "b"], [empty, whole, {**empty, "label": "b"}]))
    assert html.count('<details class="inside"') == 3
    assert "NaN" not in next(code for a, code in Parsed(html).scripts if a.get("id") == "page-data")


def test_effects_are_filled_where_the_interval_excludes_zero():
    shown, hidden, lead = (
        Effect("a", -0.1, 0.02, 1.1),
        Effect("b", -0.01, 0.03, 1.2, busy=True),
        Effect("c", 0.2, None, None),
    )
    assert (shown.shown, hidden.shown, lead.shown) == (True, False, False)
    html = effects(Content(title="t", baseline="plain", effects=[shown, hidden, lead]))
    lines = [line.partition("</tr>")[0] for line in html.split("<tr>")[2:-1]]
    assert ['class="dot shown"' in line for line in lines] == [True, False, False]
    assert ['class="interval"' in line for line in lines] == [True, True, False]
    assert ["busy" in line for line in lines] == [False, True, False]
    assert ["−0.100 ± 0.020" in lines[0], "1.20× step" in lines[1], "+0.200<" in lines[2]] == [True] * 3
    places = [float(p) for p in re.findall(r'class="dot[^"]*" style="left: ([\d.]+)%', html)]
    zero = float(re.search(r'class="zero" style="left: ([\d.]+)%', html)[1])
    assert 0 <= places[0] < places[1] < zero < places[2] <= 100
    unit = (zero - places[0]) / 0.1
    assert places[2] - zero == pytest.approx(0.2 * unit, abs=0.1)


def test_the_table_marks_cells_and_not_the_lowest_loss():
    html = make_page(content(["a", "b", "c"], []))
    assert html.count('<td class="better">1.2345 ± 0.0123</td>') == 1
    assert html.count('1.2345 ± 0.0123 <span class="tag">busy</span>') == 1
    assert 'class="best"' not in html


def test_names_no_mechanism():
    from depthmix import list_mixers

    words = re.compile(rf"\b({'|'.join(list_mixers())})\b")
    for path in [*(ROOT / "depthmix" / "report").rglob("*"), ROOT / "depthmix" / "compare" / "report.py"]:
        if path.suffix in (".py", ".js", ".css"):
            found = [line for line in path.read_text().splitlines() if words.search(line)]
            assert not [line for line in found if "plain residual" not in line], path


def test_names_are_distinct():
    assert distinct(["mlp 0", "mlp 0", "x", "mlp 0"]) == ["mlp 0 (1)", "mlp 0 (2)", "x", "mlp 0 (3)"]
    named = [document("same", seed=3), document("same", seed=4), {**document("", seed=1), "mixer_options": {"n": 1}}]
    assert labels(named) == ["same (runs/3)", "same (runs/4)", "some:n=1"]


def test_rank_correlation():
    assert rank_correlation([(1, 10), (2, 20), (3, 90)]) == pytest.approx(1.0)
    assert rank_correlation([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1.0)
    assert rank_correlation([(1, 1), (1, 2), (2, 3), (2, 4)]) == pytest.approx(0.8944, abs=1e-4)
    assert rank_correlation([(1, 1), (1, 2), (1, 3)]) is None
    assert rank_correlation([(1, 1), (2, 2)]) is None


def test_json_in_a_script_has_no_letter_that_means_something():
    value = {"text": "</script><!--&\u2028\u2029\ud800é"}
    text = script_json(value)
    assert not set(text) & set("<>&\u2028\u2029")
    assert text.isascii()
    assert json.loads(text) == value
