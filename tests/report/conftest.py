"""A browser for tests of pages: Debian's chromium, driven by playwright. DEPTHMIX_BROWSER=required fails where there is none."""

import asyncio
import os
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]


def none_here(why):
    if os.environ.get("DEPTHMIX_BROWSER") == "required":
        pytest.fail(f"DEPTHMIX_BROWSER=required, but {why}", pytrace=False)
    pytest.skip(f"no test in a browser: {why}")


@pytest.fixture(scope="session")
def browser():
    """One chromium for all tests of a process. Playwright leaves its event loop running, with which every other test's asyncio.run would fail: hence `in_use`."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        none_here("there is no chromium (apt-get install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        none_here("there is no playwright (pip install playwright)")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, headless=True, args=FLAGS)
        loop = asyncio._get_running_loop()
        chromium.in_use = lambda used: asyncio._set_running_loop(loop if used else None)
        chromium.in_use(False)
        yield chromium
        chromium.in_use(True)
        chromium.close()


def watch(page):
    """Whatever goes wrong on a page, in `page.problems`: errors and warnings of the console, failed and foreign requests."""

    def console(message):
        if message.type in ("error", "warning"):
            page.problems.append(f"console {message.type}: {message.text}")

    def request(request):
        url = urlsplit(request.url)
        if url.scheme not in ("data", "blob", "about") and url[:2] != urlsplit(page.place)[:2]:
            page.problems.append(f"asked for {request.url}")

    page.on("console", console)
    page.on("pageerror", lambda error: page.problems.append(f"uncaught: {error}"))
    page.on("request", request)
    page.on("requestfailed", lambda request: page.problems.append(f"failed: {request.url}"))
    return page


@pytest.fixture(scope="session")
def free_pages():
    """Pages that tests have left, by whether they are a phone's: opening another takes a second of CPU time."""
    return {True: [], False: []}


@pytest.fixture
def open_page(browser, free_pages):
    """Call it with a file or an address. A test that means a problem to happen takes it out of `page.problems`; any other fails it."""
    opened = []
    browser.in_use(True)

    def open_one(place, width=1280, dark=False, height=900):
        free = free_pages[width < 600]
        page = free.pop() if free else watch(browser.new_context(has_touch=width < 600).new_page())
        opened.append((page, free))
        page.place = Path(place).resolve().as_uri() if isinstance(place, Path) or "://" not in place else place
        page.problems = []
        page.set_default_timeout(10_000)
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme="dark" if dark else "light", reduced_motion="reduce")
        page.goto(page.place)
        return page

    yield open_one
    problems = [problem for page, _ in opened for problem in page.problems]
    for page, free in opened:
        page.goto("about:blank")
        free.append(page)
    browser.in_use(False)
    assert problems == []
