"""Make the gallery, docs/gallery/models.html: python -m lab.gallery [COMPARISON].

COMPARISON is a folder of `depthmix compare` whose models are still there. What they are measured to be, and what the page says of
their training, is copied to lab/results/gallery, so that the page can be made again without them: leave COMPARISON out. A test makes
the page in this way and compares it with the committed one, so the gallery is always what today's code draws.

Pictures for the documentation are taken of the page with Debian's chromium, if it is there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
from pathlib import Path

from depthmix.compare.records import RUNS
from depthmix.compare.report import KEPT as SHOWN
from depthmix.compare.report import RECIPE, content_of, gather
from depthmix.config import InspectConfig
from depthmix.files import find_json_object
from depthmix.report.measure import INSIGHT, known, measured
from depthmix.report.page import make_page
from depthmix.runs.folder import ENVIRONMENT
from depthmix.train.progress import phases

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "lab" / "results" / "gallery"
GALLERY = ROOT / "docs" / "gallery"
PAGE = GALLERY / "models.html"
# Read by every model token by token.
TEXT = 'It was a dark night when the captain came aboard. "We sail at dawn," he said, and nobody answered him.'
# Of a run's folder, what the page needs: no weights.
FILES = ("config.json", "dynamics.jsonl", INSIGHT, "metrics.jsonl", "recipe.yaml", "result.json")  # fmt: skip
# Name, place on the page, and width and height of a picture.
PICTURES = (("first-screen", None, 1400, 1000), ("depth-maps", "maps", 1400, 700))


def keep(comparison: Path) -> None:
    """Measure the first model of each arm, and copy what the page needs to KEPT."""
    for label, run in gather([comparison]).models:
        with phases() as progress:
            measured(InspectConfig(run=str(run), text=TEXT), progress, ["text"])
        place = KEPT / run.relative_to(comparison)
        place.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if (run / name).is_file():
                shutil.copyfile(run / name, place / name)
        # Paths of the machine stay there.
        measurements = find_json_object(place / INSIGHT)
        measurements["document"]["run"] = str(run.relative_to(comparison))
        (place / INSIGHT).write_text(json.dumps(measurements, allow_nan=False) + "\n", encoding="utf-8")
        environment = find_json_object(run / ENVIRONMENT)
        shown = {name: environment[name] for name in SHOWN if name in environment}
        (place / ENVIRONMENT).write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
        print(f"kept what was measured of {label}")
    for name in (RECIPE, RUNS):
        shutil.copyfile(comparison / name, KEPT / name)


def page() -> str:
    """Return the page as HTML, from what is kept."""
    # The page names the folder, so it must not depend on where the repository lies.
    with contextlib.chdir(ROOT):
        reported = gather([KEPT.relative_to(ROOT)])
        documents = [{**(known(path) or {}), "label": label} for label, path in reported.models]
        content = content_of(reported, documents, "python -m lab.gallery")
    return make_page(content)


def take_pictures() -> None:
    """Take PICTURES of the page in light mode."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        print("no pictures: there is no chromium (apt-get install chromium)")
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, place, width, height in PICTURES:
            opened = browser.new_page(viewport={"width": width, "height": height})
            opened.goto(PAGE.resolve().as_uri())
            if place:
                opened.evaluate(f"document.getElementById('{place}').scrollIntoView()")
            opened.wait_for_timeout(500)
            opened.screenshot(path=GALLERY / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("comparison", nargs="?", type=Path, help="folder of a comparison; none: what is kept")
    options = parser.parse_args()
    if options.comparison:
        keep(options.comparison)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {PAGE.stat().st_size:,} bytes")
    take_pictures()
