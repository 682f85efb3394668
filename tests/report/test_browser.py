"""The page in a real browser: the words and their rivers, maps, plots, tables, export, print, and whether everything can be read.

Each test opens a page and asks it many things, since opening takes a second.
"""

import math
import re

import pytest

from depthmix.report.page import make_page
from report.measured_documents import EVIL, content, document

TEXT = ["It", " was", " a", " dark", " night", ".\n", "é", ""]
LABELS = ["plain", f"{EVIL}:block_size=4,ways=2", "third"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Three models of one text, one of them of another depth, with two ways and streams."""
    documents = [
        document(LABELS[0], blocks=3, text=TEXT, steps=(0, 10, 20), signed=True),
        document(LABELS[1], blocks=3, text=TEXT, ways=2, streams=3, seed=1, steps=(0, 10)),
        document(LABELS[2], blocks=2, text=["It was", " a dark", " night", ".\né"], seed=2),
    ]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(make_page(content(LABELS, documents)), encoding="utf-8")
    return path, documents


def token(page, i):
    return page.locator(".tokens button").nth(i)


def reads(page, side=0):
    return page.locator(".chance").nth(side).inner_text()


def luminance(colour):
    numbers = [float(n) for n in re.findall(r"[\d.e-]+", colour.removeprefix("color(srgb"))][:3]
    parts = [n if colour.startswith("color(srgb") else n / 255 for n in numbers]
    linear = [n / 12.92 if n <= 0.04045 else ((n + 0.055) / 1.055) ** 2.4 for n in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_words_and_where_they_came_from(open_page, report):
    path, documents = report
    page = open_page(path)
    page.on("dialog", lambda dialog: page.problems.append(f"dialog: {dialog.message}"))
    text = documents[0]["text"]
    assert page.locator(".tokens button").all_inner_texts() == ["It", "was", "a", "dark", "night", ".↵", "é", "⋯", "…?"]

    # The word at place i was predicted by the reads at place i − 1.
    token(page, 4).click()
    assert page.inner_text("#words-title") == "Where does “night” come from, after “It was a dark”?"
    assert reads(page).startswith("read at “dark”, predicting “night”: 1 in ")
    chance = float(reads(page).split("1 in ")[1].replace(",", ""))
    assert chance == pytest.approx(math.exp(text["losses"][4]), rel=0.05)
    largest = max(
        (share, r, s) for r, ways in enumerate(text["contributions"][3]) for s, share in enumerate(ways[0]) if r == 6
    )
    said = documents[0]["sources"][largest[2]]
    page.locator(".river.m0 .hit").filter(has_text=f"prediction reads {said}:").first.dispatch_event("click")
    assert f"of what prediction reads is {said}" in page.inner_text("#words .readout >> nth=-1")

    # What the band carries without the cut, and with it: from the stored cuts.
    page.get_by_role("button", name="Cut it").click()
    rise = text["cuts"][3][6][largest[2]]
    assert f"({'+' if rise > 0 else '−'}" in page.inner_text("#words .readout >> nth=-1")
    assert page.locator(".river.m0 .band.cut").count() == 1
    assert " → " in reads(page)
    page.get_by_role("button", name="Join it again").click()
    assert page.locator(".band.cut").count() == 0

    # The first token has no prediction; the last button asks for the word after the text.
    token(page, 0).dispatch_event("click")
    assert token(page, 4).get_attribute("aria-pressed") == "true"
    token(page, 4).focus()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    assert "a guess at what comes next" in reads(page)
    assert page.locator("ol.top >> nth=0").locator("li").all_inner_texts()[0].split("\n")[0] == "sea"

    # Keys: arrows move the focus, Enter chooses; the address names word and models.
    token(page, 1).focus()
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert token(page, 3).get_attribute("aria-pressed") == "true"
    assert page.url.endswith("#word=3&models=0,1")
    page.evaluate("location.hash = 'word=2&models=0,2'")
    page.locator(".river.m1").wait_for()
    assert reads(page, 1).startswith("read at “It was”, predicting “a dark”")  # the token that holds the word
    page.locator(".side select").nth(1).select_option(label=LABELS[1])

    # All of its reads are shares of one: what leaves the prediction arrives at the embedding.
    page.locator(".side .numbers summary").first.click()
    rows = [row.split("\t") for row in page.locator(".side .numbers tbody tr").all_inner_texts()]
    total = sum(float(row[3].rstrip("%")) for row in rows if row[0] == "prediction")
    assert total == pytest.approx(100, abs=3)
    assert page.locator("img, .panels script").count() == 0
    assert EVIL in page.inner_text("#words")

    # A link to another word forgets the cut, and an open table follows the word.
    before = page.locator(".side .numbers tbody").first.inner_text()
    page.locator(".river.m0 .hit").first.dispatch_event("click")
    page.get_by_role("button", name="Cut it").click()
    page.evaluate("location.hash = 'word=5&models=0,1'")
    page.wait_for_timeout(50)
    assert "cut" not in reads(page)
    page.locator(".side .numbers summary").first.click()
    token(page, 2).click()
    second = page.locator(".side .numbers tbody").first.inner_text()
    token(page, 3).click()
    assert before == second != page.locator(".side .numbers tbody").first.inner_text()

    # Play goes through the sentence.
    token(page, 1).click()
    page.get_by_role("button", name="▶ Play").click()
    page.wait_for_timeout(1500)
    assert page.url.endswith("#word=2&models=0,1")
    page.get_by_role("button", name="❚❚ Pause").click()


def test_models_of_other_tokens_and_other_texts(open_page, tmp_path):
    """The first may cut the text finer or coarser than the second; a model of another text is left out."""
    fine = document("fine", text=["It", " was", " a", " dark", " night"])
    coarse = document("coarse", text=["It was", " a dark", " night"], ways=3, seed=1)
    other = document("other", text=["Another", " text"], seed=2)
    path = tmp_path / "page.html"
    path.write_text(make_page(content(["fine", "coarse", "other"], [fine, coarse, other])), encoding="utf-8")
    page = open_page(path)
    assert page.locator(".side select").first.locator("option").all_inner_texts() == ["fine", "coarse"]
    assert "1 with another text" in page.inner_text("#words")
    token(page, 1).click()
    assert reads(page, 1).startswith("read at “It was”, predicting “a dark”")
    token(page, 4).click()
    page.locator("#words .bar select").select_option(label="keys")
    page.locator(".side select").first.select_option(label="coarse")
    page.locator(".side select").nth(1).select_option(label="fine")
    assert reads(page).startswith("read at “a dark”, predicting “night”")
    assert page.locator("#words .bar select").input_value() == "2"


def test_maps_plots_and_tables(open_page, report):
    path, documents = report
    page = open_page(path)
    page.evaluate("document.getElementById('maps').scrollIntoView()")
    maps = page.locator("#maps figure")
    maps.nth(2).wait_for()
    assert maps.count() == 3
    first = maps.first.locator("svg")
    first.focus()
    for key in ("ArrowUp", "ArrowUp", "ArrowRight"):
        page.keyboard.press(key)
    share = documents[0]["mixing"]["contribution"][4][0][1]
    said = maps.first.locator("p.readout").inner_text()
    assert said.startswith("attention 2: ")
    assert abs(float(re.search(r"([\d.]+)% of what it reads is attention 0", said)[1]) - 100 * share) < 0.6
    assert "weight" in said
    maps.first.locator("summary").click()
    # The browser tells of the opened table later.
    maps.first.locator("tbody tr").nth(6).wait_for()
    rows = [row.split("\t") for row in maps.first.locator("tbody tr").all_inner_texts()]
    assert len(rows) == 7
    assert rows[-1][0] == "prediction"
    levels = first.locator("path[d]:not([d=''])").evaluate_all("all => all.map((p) => p.getAttribute('class'))")
    page.get_by_role("button", name="weight").click()
    changed = maps.first.locator("path[d]:not([d=''])").evaluate_all("all => all.map((p) => p.getAttribute('class'))")
    assert changed != levels
    assert any(name.startswith("c-") for name in changed)  # negative weights
    page.locator("#maps .bar select").select_option(label="values")

    page.locator("#depth").scroll_into_view_if_needed()
    depth = page.locator("#depth figure")
    depth.locator("path.line").first.wait_for()
    assert depth.locator("path.line").count() == 2  # the third model has another depth
    assert "1 of another depth" in page.inner_text("#depth")
    depth.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    size = documents[0]["dynamics"]["input_rms"][0][0]
    assert f"plain: {size:.4g}" in depth.locator("p.readout").inner_text()
    depth.locator("select").select_option(label="What each site is worth")
    page.keyboard.press("Home")

    page.locator("#curves").scroll_into_view_if_needed()
    page.locator("#curves path.line").first.wait_for()
    assert page.locator("#curves path.band").count() == 3
    page.get_by_role("button", name="time").click()
    assert "of training" in page.locator("#curves svg").text_content()

    details = page.locator("details.inside").nth(1)
    details.locator("summary").first.click()
    details.locator(".grid").wait_for()
    titles = details.locator("h3").all_inner_texts()
    assert titles[:3] == ["What is needed", "Contribution against need", "How alike the streams are"]
    assert len(titles) == 7
    assert details.locator("circle.point").count() > 20
    empty = page.locator("figure svg").evaluate_all(
        "all => all.filter((svg) => !svg.querySelector('path[d]:not([d=\"\"]), circle')).length"
    )
    assert empty == 0


def test_figures_are_exported_with_their_colours(open_page, report, tmp_path):
    page = open_page(report[0])
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    side = page.locator(".side").first
    for kind in ("SVG", "PNG"):
        with page.expect_download() as found:
            side.get_by_role("button", name=f"Copy the figure as {kind}").click()
        found.value.save_as(tmp_path / f"figure.{kind.lower()}")
    drawing = (tmp_path / "figure.svg").read_text()
    assert drawing.startswith("<svg")
    assert "color(srgb" not in drawing
    assert 'stroke="rgb(' in drawing
    assert 'class="' not in drawing
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    with page.expect_download() as found:
        page.locator(".effects").get_by_role("button", name="Copy the figure as SVG").click()
    found.value.save_as(tmp_path / "effects.svg")
    effects = (tmp_path / "effects.svg").read_text()
    assert effects.count("<circle") == 2
    assert "95% interval" in effects
    assert "third" in effects
    assert page.problems == []


def test_it_can_be_read_at_every_width_in_light_and_dark(open_page, report):
    page = open_page(report[0], width=390)
    for width, scheme in ((390, "light"), (1024, "dark"), (1920, "light")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.evaluate("document.querySelectorAll('details').forEach((details) => (details.open = true))")
        for place in ("maps", "depth", "curves"):
            page.evaluate(f"document.getElementById('{place}').scrollIntoView()")
            page.locator(f"#{place} svg").first.wait_for()
        page.wait_for_timeout(50)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        zero, same = page.evaluate(AXIS)
        assert abs(zero - same) < 1.5  # the scale stands below what it measures
        ground, seen = page.evaluate(READABLE)
        assert (luminance(ground) > 0.9) == (scheme == "light")
        assert len(seen) > 60
        poor = {(colour, back) for colour, back in seen if contrast(colour, back) < 4.5}
        assert not poor, (scheme, poor)
        marks = page.evaluate(MARKS)
        assert {mark for mark in marks if contrast(mark, ground) < 3} == set(), scheme


# The colour of every text and of what lies behind it. A text of a map's classes or of a river's guesses fades on purpose.
READABLE = """() => {
    const ground = getComputedStyle(document.body).backgroundColor, seen = [];
    const behind = (e) => {
        for (; e; e = e.parentElement) {
            const colour = getComputedStyle(e).backgroundColor;
            if (!/rgba\\(0, 0, 0, 0\\)|transparent/.test(colour)) return colour;
        }
        return ground;
    };
    const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const e = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !e.getClientRects().length) continue;
        if (e.closest("script, .unseen, option, title, .guess, i")) continue;
        const style = getComputedStyle(e);
        seen.push([e.closest("svg") ? style.fill : style.color, behind(e)]);
    }
    return [ground, seen];
}"""
AXIS = """() => [".track .zero", ".ticks .same"].map((place) => {
    const { left, right } = document.querySelector(place).getBoundingClientRect();
    return (left + right) / 2;
})"""
# Colours of marks that carry meaning: lines, the ends of both scales, dots.
MARKS = """() => [
    ...[...document.querySelectorAll("path.line")].map((e) => getComputedStyle(e).stroke),
    ...[...document.querySelectorAll(".c8, .c-8")].map((e) => getComputedStyle(e).fill),
    ...[...document.querySelectorAll(".effects .dot")].map((e) => getComputedStyle(e).borderTopColor),
    ...[...document.querySelectorAll("button, select")].filter((e) => !e.closest(".tokens")).map((e) => getComputedStyle(e).borderTopColor),
]"""


def test_it_prints_in_light_on_few_pages(open_page, report):
    page = open_page(report[0], dark=True)
    page.emulate_media(media="print", color_scheme="dark")
    assert luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) > 0.9
    pages = page.pdf(format="A4").count(b"/Type /Page\n") or page.pdf(format="A4").count(b"/Type /Page")
    assert 2 <= pages <= 8


def test_a_deep_model_and_a_long_text_are_shown_at_once(open_page, tmp_path):
    """Forty-eight blocks: the page is interactive in about a second, and nothing is cut off."""
    words = [f" {i}" for i in range(60)]
    deep = document("deep", blocks=48, text=words[:3], edges=False)
    path = tmp_path / "deep.html"
    path.write_text(make_page(content(["deep"], [deep])), encoding="utf-8")
    page = open_page(path)
    assert page.locator(".river").count() == 1
    box = page.locator("#words .depth-map").bounding_box()
    assert box["width"] < 700
    long = document("long", text=words, edges=False)
    path.write_text(make_page(content(["long"], [long])), encoding="utf-8")
    page.goto("about:blank")
    page.goto(path.resolve().as_uri() + "#word=55")
    row, button = (page.locator(place).bounding_box() for place in (".tokens", ".tokens [aria-pressed=true]"))
    assert row["y"] <= button["y"] <= row["y"] + row["height"]
    assert "“55”" in page.inner_text("#words-title")
