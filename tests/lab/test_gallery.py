"""The gallery is made from what was kept of its models, whose weights are nowhere."""

from depthmix.cli import main
from depthmix.errors import CHECKPOINT
from lab import gallery


def test_the_committed_page_is_what_todays_code_draws():
    assert gallery.page() == gallery.PAGE.read_text(encoding="utf-8"), "make it again: python -m lab.gallery"
    assert gallery.PAGE.stat().st_size < 1e6
    assert all((gallery.GALLERY / f"{name}.png").is_file() for name, *_ in gallery.PICTURES)


def test_its_models_are_shown_as_measured_and_not_asked_again(capsys):
    command = ["report", str(gallery.KEPT), "--out", "x.html", "--text", "another text"]
    assert main(command) == CHECKPOINT
    assert "has no weights any more" in capsys.readouterr().err
