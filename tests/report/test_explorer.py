"""The token explorer in a browser: what is chosen is what is shown."""

import json
import re

import pytest

from depthmix.report.explorer import EXPLORER_SCRIPT, explorer, labels, script_json
from report.documents import document, write_page

TOKENS = ["The", " sea", " is", "\n", "deep", "."]


@pytest.fixture
def shown(open_page, tmp_path):
    """The page of some documents."""

    def show(*documents, **how):
        return open_page(write_page(tmp_path / "page.html", documents), **how)

    return show


def weights_on(page, panel=0, map=0):
    """What a map's cells say: [reader][source]."""
    said = page.evaluate(
        "([p, m]) => [...document.querySelectorAll('.panel')[p].querySelectorAll('table')[m].tBodies[0].rows]"
        ".map((row) => [...row.querySelectorAll('td')].map((cell) => cell.getAttribute('aria-label')))",
        [panel, map],
    )
    return [[float(label.rsplit(": ")[-1].replace("−", "-")) for label in row] for row in said]


def pressed(page, panel=0):
    return (
        page.locator(".panel")
        .nth(panel)
        .locator(".tokens button")
        .evaluate_all("all => all.map((b) => b.getAttribute('aria-pressed')).indexOf('true')")
    )


def token(page, i, panel=0):
    return page.locator(".panel").nth(panel).locator(".tokens button").nth(i)


def test_a_click_shows_where_the_token_was_read_from_and_hover_names_it(shown):
    found = document(TOKENS)
    page = shown(found)
    assert pressed(page) == found["text"]["losses"].index(max(found["text"]["losses"][1:]))  # the hardest one at first
    for i in (1, 4, 0):
        token(page, i).click()
        assert pressed(page) == i
        assert weights_on(page) == [reader[0] for reader in found["text"]["weights"][i]]
        assert weights_on(page, map=1) == [reader[0] for reader in found["mixing"]["mean"]]
    assert page.inner_text(".about") == "Token 1 of 6, “The”: it has no loss, since nothing comes before it."
    assert "mean over 20,000 tokens" in page.inner_text(".maps")
    page.locator("table").first.locator("tbody tr").nth(3).locator("td").nth(1).hover()
    own, mean = found["text"]["weights"][0][3][0], found["mixing"]["mean"][3][0][1]
    said = page.inner_text(".readout")
    assert said.startswith(f"mlp 1 reads attention 0: weight {own[1]} for this token, {mean} in the mean.")
    assert f"It reads most from {found['sources'][own.index(max(own))]} (" in said


def test_stronger_colours_are_larger_weights_and_signs_differ(shown):
    found = document(TOKENS, least=-1.0)
    page = shown(found)
    token(page, 0).click()
    cells = page.locator("table").first.locator("tbody td")
    parts = cells.evaluate_all("all => all.map((c) => parseFloat(c.style.getPropertyValue('--part')))")
    negative = cells.evaluate_all("all => all.map((c) => c.classList.contains('negative'))")
    colours = cells.evaluate_all("all => all.map((c) => getComputedStyle(c).backgroundColor)")
    flat = [w for reader in found["text"]["weights"][0] for w in reader[0]]
    assert sorted(range(len(flat)), key=parts.__getitem__) == sorted(range(len(flat)), key=lambda i: abs(flat[i]))
    assert negative == [w < 0 for w in flat]
    assert len(set(colours)) > len(flat) * 0.8


def test_the_keyboard_does_what_the_mouse_does(shown):
    found = document(TOKENS)
    page = shown(found)
    token(page, 0).click()
    for keys, at in (("ArrowRight ArrowRight", 2), ("End", 5), ("ArrowLeft", 4), ("ArrowUp", 0), ("ArrowDown", 4)):
        for key in keys.split():
            page.keyboard.press(key)
        assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(f"token {at + 1},")
    assert pressed(page) == 0
    page.keyboard.press("Enter")
    assert pressed(page) == 4
    page.keyboard.press("Home")
    page.keyboard.press("Space")
    assert pressed(page) == 0
    page.keyboard.press("Tab")  # the row is one stop, and so is a map
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp"):
        page.keyboard.press(key)
    weight = found["text"]["weights"][0][1][0][1]
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert focused == f"mlp 0 reads attention 0: {weight}"
    assert page.inner_text(".readout").startswith("mlp 0 reads attention 0")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('table').getAttribute('aria-label')").startswith("mean over")


def test_attention_that_reads_several_mixtures_has_a_choice_of_them(shown):
    found = document(TOKENS, ways=3)
    page = shown(found)
    token(page, 1).click()
    assert page.locator("select.way option").all_inner_texts() == ["queries", "keys", "values"]
    page.select_option("select.way", label="values")
    own = found["text"]["weights"][1]
    assert weights_on(page) == [reader[-1] for reader in own]  # the MLP's only one stays
    assert weights_on(page, map=1) == [reader[-1] for reader in found["mixing"]["mean"]]
    assert weights_on(page) != [reader[0] for reader in own]


def test_two_models_side_by_side(shown):
    """Of other depth and with other tokens: the same place in the text is chosen in both, and any two of three can be shown."""
    one, two, three = (
        document(TOKENS, "plain"),
        document(["The ", "sea is", "\ndeep."], "other", blocks=3, seed=1),
        document(TOKENS, "third", seed=2),
    )
    page = shown(one, two, three)
    assert page.locator(".panel").count() == 2
    token(page, 2).click()
    assert (pressed(page, 0), pressed(page, 1)) == (2, 1)
    assert weights_on(page, 0) == [reader[0] for reader in one["text"]["weights"][2]]
    assert weights_on(page, 1) == [reader[0] for reader in two["text"]["weights"][1]]
    boxes = [page.locator(".panel").nth(i).bounding_box() for i in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"]
    page.locator("table").first.locator("tbody tr").nth(1).locator("td").nth(0).hover()
    assert [p.inner_text().partition(":")[0] for p in page.locator(".readout").all()] == ["mlp 0 reads embedding"] * 2
    assert "It reads everything alike" not in page.inner_text(".panels")
    page.locator("select.model").nth(1).select_option(label="third")
    assert weights_on(page, 1) == [reader[0] for reader in three["text"]["weights"][2]]
    token(page, 4, panel=1).click()
    assert (pressed(page, 0), pressed(page, 1)) == (4, 4)


def test_text_is_text(shown):
    tokens = ["<script>alert(1)</script>", "<img\tsrc=x\tonerror=alert(2)>", "</script", ">", "&lt;", "\u2028", "\"'"]
    found = document(tokens, label="</script><b>name</b>")
    page = shown(found, document(tokens, label="<i>"))
    assert token(page, 0).inner_text() == "<script>alert(1)</script>"
    assert page.locator(".tokens").first.locator("button").all_inner_texts()[1:] == [
        "<img⇥src=x⇥onerror=alert(2)>",
        *("</script", ">", "&lt;", "U+2028", "\"'"),
    ]
    assert page.locator("select.model option").first.inner_text() == "</script><b>name</b>"
    assert page.locator("img, .panels script, .panels b:not(.readout b)").count() == 0


def test_what_cannot_be_seen_is_written_out(shown):
    tokens = ["a", " ", "\n", "\t", "🌊", "", "\u0301x", "\u202e", "\u200d", " b"]
    page = shown(document(tokens))
    found = page.locator(".tokens button").all_inner_texts()
    assert found == ["a", "·", "↵", "⇥", "🌊", "⋯", "◌\u0301x", "U+202E", "U+200D", "·b"]
    assert "more bytes of “🌊”" in token(page, 5).get_attribute("aria-label")
    boxes = [token(page, i).bounding_box() for i in (2, 3)]
    assert boxes[1]["y"] > boxes[0]["y"] + 10  # a line of the text is a line here


def test_the_chosen_token_of_a_long_text_is_in_sight(shown):
    found = document([f" {i}" for i in range(600)])
    found["text"]["losses"][500] = 99.0  # the hardest, which is chosen at first
    page = shown(found)
    row, button = (page.locator(place).bounding_box() for place in (".tokens", "[aria-pressed=true]"))
    assert pressed(page) == 500
    assert row["y"] <= button["y"] <= row["y"] + row["height"] - button["height"]
    assert page.evaluate("scrollY") == 0  # but the page stays where it is


def luminance(colour):
    numbers = [float(n) for n in re.findall(r"[\d.]+", colour.removeprefix("color(srgb"))][:3]
    parts = [n if colour.startswith("color(srgb") else n / 255 for n in numbers]
    linear = [n / 12.92 if n <= 0.04045 else ((n + 0.055) / 1.055) ** 2.4 for n in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_tokens_can_be_read_whatever_their_loss_in_light_and_dark(shown):
    found = document([*"abcdefgh"])
    found["text"]["losses"] = [None, *range(7)]
    page, seen = shown(found), []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colours = page.locator(".tokens button").evaluate_all(
            "all => all.map((b) => getComputedStyle(b)).map((s) => [s.color, s.backgroundColor])"
        )
        assert len({background for _, background in colours}) == 7  # the first has none, the second has loss 0
        for pair in colours:
            low, high = sorted(map(luminance, pair))
            assert (high + 0.05) / (low + 0.05) >= 4.5, pair
        seen.append(luminance(colours[0][1]))
    assert seen[0] > 0.8 > 0.1 > seen[1]
    marked = page.locator(".tokens button[aria-pressed=true]").evaluate("b => getComputedStyle(b).boxShadow")
    assert "2px inset" in marked  # not by colour alone


def test_the_largest_loss_has_the_strongest_colour(shown):
    """Also where 100 x / x is a hair more than 100."""
    found = document(TOKENS)
    found["text"]["losses"] = [None, 0.2, 1.289, 0.1, 1.0, 0.5]
    parts = (
        shown(found)
        .locator(".tokens button")
        .evaluate_all("all => all.map((b) => parseFloat(b.style.getPropertyValue('--part')))")
    )
    assert max(parts[1:]) == parts[2] == 100


def test_a_phone_shows_all_of_it(shown):
    page = shown(document(TOKENS * 6, blocks=12, ways=2), width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    box = page.locator("table").first.bounding_box()
    assert box["x"] + box["width"] <= 390
    page.locator("table").first.locator("tbody tr").nth(20).locator("td").nth(3).tap()
    assert page.inner_text(".readout").startswith("attention 10 reads attention 1: weight")


def test_numbers_that_are_none_or_all_one_do_not_break_it(shown):
    found = document(TOKENS)
    found["text"]["weights"][1][2][0][1] = found["text"]["losses"][1] = None
    found["text"]["weights"][1][4][0] = [1.0] * 5
    page = shown(found)
    token(page, 1).click()
    assert page.locator("td.unknown").count() == 1
    page.locator("td.unknown").hover()
    assert "attention 1 reads attention 0: weight not a number" in page.inner_text(".readout")
    assert page.inner_text(".about").endswith("its loss is not a number.")
    page.locator("table").first.locator("tbody tr").nth(4).locator("td").nth(0).hover()
    assert page.inner_text(".readout").endswith("It reads everything alike.")


def test_what_a_model_is_called():
    found = [document("a", seed=1), document("a", seed=2), document("a", "same", seed=3), document("a", "same", seed=4)]
    assert labels(found) == ["some:n=1", "some:n=2", "same (runs/3)", "same (runs/4)"]


def test_documents_without_a_text_are_left_out():
    without = document("a") | {"text": None}
    assert explorer([without]) == ""
    assert explorer([]) == ""
    assert '"label":"b"' in explorer([without, document("b", "b")])
    assert "<textarea" in explorer([without], live=True)


def test_json_in_a_script_has_no_letter_that_means_something():
    value = {"text": "</script><!--&\u2028\u2029\ud800é"}
    written = script_json(value)
    assert not set(written) & set("<>&\u2028\u2029")
    assert written.isascii()
    assert json.loads(written) == value


def test_the_script_is_short_and_makes_no_markup():
    assert len(EXPLORER_SCRIPT.splitlines()) < 250
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", EXPLORER_SCRIPT)


@pytest.mark.parametrize("blocks", [20, 48])
def test_at_a_desk_maps_are_not_cut_off(shown, blocks):
    """Those of a deep model stand below each other."""
    page = shown(document(TOKENS, blocks=blocks), width=1440)
    sizes = page.locator(".scroll").evaluate_all("all => all.map((box) => [box.scrollWidth, box.clientWidth])")
    assert all(inside <= outside for inside, outside in sizes)
    first, second = (page.locator("table").nth(i).bounding_box() for i in (0, 1))
    assert (first["y"] == second["y"]) == (blocks == 20)
