"""The page in a real browser: figures are drawn, hover, click and keys do what they say, and everything can be read.

Loading and drawing takes seconds, so there are two pages, and each test asks one of them everything.
"""

import itertools
import re

import pytest

from depthmix.report.inside import panels
from depthmix.report.page import make_page
from report.measured_documents import EVIL, content, document

pytest.importorskip("plotly")

LABELS = ["plain", f"{EVIL}:block_size=4,ways=2"]
SIX = [
    *LABELS,
    "streams:residual_map=identity,head=mean",
    "another:window=2",
    "yet-another-one:static=true,rate=0.125",
    "last",
]
MAP, ROW = ".run:nth-of-type(2) [data-kind=map]", ".run:nth-of-type(2) [data-kind=row]"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Six arms whose losses nearly meet; two models, one with two ways and streams."""
    documents = [
        document(LABELS[0], steps=(0, 10, 20), signed=True, edges=False),
        document(LABELS[1], ways=2, streams=3, seed=1),
    ]
    samples = [{"arm": LABELS[1], "prompt": "Once", "text": f"Once {EVIL}"}]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(make_page(content(SIX, documents, samples=samples)), encoding="utf-8")
    return path, documents


def draw_all(page):
    """Scroll through, as figures are drawn when they come near."""
    page.evaluate(
        """async () => {
            const plots = [...document.querySelectorAll(".plot")];
            for (const plot of plots) {
                plot.scrollIntoView();
                while (!plot.querySelector("svg.main-svg .subplot")) await new Promise(requestAnimationFrame);
            }
            scrollTo(0, 0);
        }"""
    )


def wait(page, condition):
    """Until it holds; playwright's own waiting would evaluate a string, which the page's policy forbids."""
    page.evaluate(
        f"""async () => {{
            for (let i = 0; !({condition}); i++) {{
                if (i > 600) throw new Error("it never came to be");
                await new Promise(requestAnimationFrame);
            }}
        }}"""
    )


def boxes(page, selector):
    """Of what the selector finds, on the page."""
    return page.evaluate(
        """(selector) => [...document.querySelectorAll(selector)].map((e) => {
            const { left, right, top, bottom } = e.getBoundingClientRect();
            return [left + scrollX, right + scrollX, top + scrollY, bottom + scrollY];
        })""",
        selector,
    )


def cell(page, selector, row, column, n):
    """The middle of a cell of a map of n rows."""
    page.locator(selector).scroll_into_view_if_needed()
    box = page.locator(f"{selector} .nsewdrag").bounding_box()
    return box["x"] + (column + 0.5) * box["width"] / n, box["y"] + (row + 0.5) * box["height"] / n


def test_at_a_desk(open_page, report):
    path, documents = report
    page = open_page(path)
    page.on("dialog", lambda dialog: page.problems.append(f"dialog: {dialog.message}"))
    draw_all(page)
    figures_are_drawn(page, documents)
    rows_are_shown(page, documents[1])
    names_follow_a_zoom(page)


def test_on_a_phone_and_wider(open_page, report):
    page = open_page(report[0], width=390)
    draw_all(page)
    grounds = []
    for width, scheme in ((390, "light"), (1024, "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        svg = "document.querySelector('#figure-0 svg').getBoundingClientRect()"
        wait(page, f"{svg}.right <= {width} && {svg}.width > {min(width, 1200)} * 0.8")
        wait(
            page,
            "getComputedStyle(document.querySelector('.xtick text')).fill === getComputedStyle(document.body).color",
        )
        nothing_is_cut_off(page, width)
        grounds.append(everything_can_be_read(page))
    assert luminance(grounds[0]) > 0.9
    assert luminance(grounds[1]) < 0.05
    it_prints_in_light(page)


def figures_are_drawn(page, documents):
    """None is empty, and text is text."""
    marks = page.evaluate(
        """() => [...document.querySelectorAll(".plot")].map((p) => p.querySelectorAll("path.js-line, .hm image, .hm path, .points path, .box, .point").length)"""
    )
    assert len(marks) == 2 + sum(len(panels(own, None)) for own in documents)
    assert min(marks) > 0  # no chart is empty
    body = page.inner_text("body")
    assert body.count("<script>alert('%{x}')</script><b>&amp;") >= 5
    ends = page.locator("#figure-0 .annotation-text").all_text_contents()
    assert any("<script>alert('%{x}')</script>" in "".join(text.split()) for text in ends)


def rows_are_shown(page, document):
    """By mouse and by keys; hover names site, source and weight."""
    n, mean = len(document["readers"]), document["mixing"]["mean"]
    page.mouse.move(*cell(page, MAP, 3, 2, n))
    page.wait_for_selector(f"{MAP} .hoverlayer .hovertext")
    hover = page.text_content(f"{MAP} .hoverlayer")
    assert "mlp 1 reads mlp 0" in hover
    assert f"weight {mean[3][0][2]:.4f}" in hover

    readout = page.locator(".run:nth-of-type(2) .readout")
    assert readout.text_content().startswith("finish reads most of ")
    page.mouse.click(*cell(page, MAP, 3, 4, n))  # where there is no source: the row counts
    assert readout.text_content().startswith("mlp 1 reads most of ")
    assert page.locator(f"{ROW} .box").count() == 4
    largest = max(mean[3][0])
    assert f"{document['sources'][mean[3][0].index(largest)]}: {float(f'{largest:.3g}')}" in readout.text_content()

    page.focus(MAP)
    page.keyboard.press("ArrowUp")
    assert readout.text_content().startswith("mlp 1")  # not before Enter
    page.keyboard.press("Enter")
    assert readout.text_content().startswith("attention 1 (queries and keys) reads most of ")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    assert readout.text_content().startswith("attention 0")
    page.select_option("#way-1", "1")
    assert readout.text_content().startswith("attention 0 (values)")
    page.mouse.move(*cell(page, MAP, 2, 1, n))
    wait(page, f"document.querySelector('{MAP} .hoverlayer').textContent.includes('{mean[2][1][1]:.4f}')")


def names_follow_a_zoom(page):
    page.locator("#figure-0").scroll_into_view_if_needed()
    box = page.locator("#figure-0 .nsewdrag").bounding_box()
    top = "document.querySelector('#figure-0 .annotation-text-g').getBoundingClientRect().top"
    before = page.evaluate(top)
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.8 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.95 * box["width"], box["y"] + 0.99 * box["height"], steps=4)
    page.mouse.up()
    wait(page, f"{top} < {before} - 20")
    assert not any(meet(*pair) for pair in itertools.combinations(boxes(page, "#figure-0 .annotation-text-g"), 2))


def meet(a, b):
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] - 1 and b[2] < a[3] - 1


def nothing_is_cut_off(page, size):
    """Tables scroll in their box, the page does not, and labels neither leave it nor lie on each other."""
    assert page.evaluate("document.documentElement.scrollWidth") <= size
    box = page.locator(".scroll").first
    assert box.evaluate("e => e.scrollWidth > e.clientWidth && e.getBoundingClientRect().right <= innerWidth")
    last, first = page.locator("thead th").last, page.locator("tbody th").first
    box.evaluate("e => { e.scrollLeft = 1e5; }")
    assert last.bounding_box()["x"] + last.bounding_box()["width"] <= size
    assert first.bounding_box()["x"] >= 0  # the arm stays in sight
    for name in ("figure-0", "figure-1"):
        labels = boxes(page, f"#{name} .annotation-text-g")
        assert len(labels) == len(SIX)
        assert not [pair for pair in itertools.combinations(labels, 2) if meet(*pair)]
        [plot] = boxes(page, f"#{name} .nsewdrag")
        assert all(plot[1] <= left and right <= size for left, right, _, _ in labels)
    for left, right, _, _ in boxes(page, ".xtick text, .ytick text, .g-xtitle text, .g-ytitle text, .cbaxis text"):
        assert left >= 0
        assert right <= size
    meeting = page.evaluate(
        """() => [...document.querySelectorAll(".plot")].filter((plot) => {
            const title = plot.querySelector(".g-ytitle text")?.getBoundingClientRect();
            const ticks = [...plot.querySelectorAll(".ytick text")].map((tick) => tick.getBoundingClientRect());
            return title && ticks.some((tick) => tick.left < title.right - 1 && tick.top < title.bottom && title.top < tick.bottom);
        }).map((plot) => plot.parentElement.innerText)"""
    )
    assert meeting == []


def luminance(colour):
    parts = [float(v) / 255 for v in re.findall(r"[\d.]+", colour)[:3]]
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one, other):
    """As the Web Content Accessibility Guidelines define it."""
    a, b = sorted((luminance(one), luminance(other)), reverse=True)
    return (a + 0.05) / (b + 0.05)


COLOURS = """() => {
    const found = {};
    const behind = (e) => {
        for (; e; e = e.parentElement) {
            const colour = getComputedStyle(e).backgroundColor;
            if (colour && !/, 0\\)$/.test(colour)) return colour;
        }
    };
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const e = walk.currentNode.parentElement;
        if (!walk.currentNode.textContent.trim() || e.closest("script, noscript, [hidden]") || !e.getClientRects().length) continue;
        const style = getComputedStyle(e);
        found[`${e.namespaceURI.endsWith("svg") ? style.fill : style.color} on ${behind(e)}`] = e.textContent.slice(0, 30);
    }
    return found;
}"""


def everything_can_be_read(page):
    """Text has the contrast that guidelines ask for, and lines theirs; returns the ground they lie on."""
    found = page.evaluate(COLOURS)
    assert len(found) > 8
    for pair, text in found.items():
        assert contrast(*pair.split(" on ")) >= 4.5, (pair, text)
    lines = page.evaluate("[...document.querySelectorAll('path.js-line')].map((p) => getComputedStyle(p).stroke)")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    drawn = {line for line in lines if line not in ("none", "rgba(0, 0, 0, 0)")}
    assert len(drawn) >= 6
    assert all(contrast(line, ground) >= 3 for line in drawn)
    return ground


def it_prints_in_light(page):
    ink = "getComputedStyle(document.querySelector('.xtick text')).fill"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".plot").count() == page.locator(".plot .main-svg .subplot").count()
    assert contrast(page.evaluate(ink), "rgb(255, 255, 255)") > 7
    assert max(right - left for left, right, _, _ in boxes(page, ".plot svg.main-svg")) <= 704  # as wide as paper
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert contrast(page.evaluate(ink), "rgb(0, 0, 0)") > 7
