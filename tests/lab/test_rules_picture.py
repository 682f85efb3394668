"""The figure of lab/short-trainings.md: what every rule gains, in panels."""

import itertools

import pytest

from lab.claims import Measurement
from lab.rules_picture import plot_rules


def test_rules_have_their_columns_side_by_side():
    """Columns of one panel apart in a row, a series of one colour in all panels, hollow with one seed, ends at a panel's edge."""
    books = {
        "18M": {"dca": Measurement(-0.1, -0.2, -0.05, 2), "mudd": Measurement(0.1, 0.0, 9.0, 2)},
        "54M": {"dca": Measurement(-0.05, -0.06, -0.04, 1)},
    }
    code = {"54M": {"mudd": Measurement(-1.0, -1.1, -0.9, 2)}}
    figure = plot_rules({"dca": "dca", "mudd": "mudd"}, {"books, tokens": books, "code": code})
    left, right = figure.axes
    dots = [
        [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())] for axes in (left, right)
    ]
    assert [line.get_xdata()[0] for line in dots[0]] == [-0.1, 0.1, -0.05]
    first, below, second = (line.get_ydata()[0] for line in dots[0])
    assert first < 0 < second < 0.5 < below < 1  # the same series is above the row's middle in every row
    assert dots[1][0].get_ydata()[0] == 1  # alone in its panel
    assert dots[1][0].get_color() == dots[0][2].get_color() != dots[0][0].get_color()
    assert [line.get_markerfacecolor() == line.get_color() for line in dots[0]] == [True, True, False]
    assert left.get_xlim() == pytest.approx((-0.14, 0.14))
    assert right.get_xlim() == pytest.approx((-1.2, 0.2))
    assert max(x for line in left.lines for x in line.get_xdata()) == pytest.approx(0.14)  # not 9
    cut = [line for line in (*left.lines, *right.lines) if line.get_marker() in ("<", ">")]
    assert [(line.get_marker(), line.get_xdata()[0]) for line in cut] == [
        ("<", pytest.approx(-0.14)),
        (">", pytest.approx(0.14)),
    ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["18M", "54M"]
    assert figure.legends[0].get_title().get_text().startswith("nats against plain")


def test_panels_of_rules_are_equally_far_apart():
    """What is said of all of them belongs to none."""
    one = {"18M": {"dca": Measurement(-0.1, -0.2, 0.0, 2)}}
    figure = plot_rules(
        {"dca": "a rule (dca:with=a,long=list,of=options,beside=panels)"}, {"books": one, "code": one, "images": one}
    )
    figure.draw_without_rendering()
    places = [axes.get_position() for axes in figure.axes]
    first, second = (right.x0 - left.x1 for left, right in itertools.pairwise(places))
    assert first == pytest.approx(second, abs=0.01)


def test_seven_columns_are_told_apart_and_stay_in_their_rows():
    by_column = {
        f"{i}M": {"dca": Measurement(-0.1, -0.2, 0.0, 2), "mudd": Measurement(-0.1, -0.2, 0.0, 2)} for i in range(7)
    }
    axes = plot_rules({"dca": "dca", "mudd": "mudd"}, {"books": by_column}).axes[0]
    dots = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert len({line.get_color() for line in dots}) == 7
    assert all(abs(line.get_ydata()[0] - row) < 0.5 for row in (0, 1) for line in dots[row::2])
