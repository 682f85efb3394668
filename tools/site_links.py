"""Check that every internal link, image and anchor of the built site leads somewhere.

    python tools/site_links.py site

mkdocs checks links between Markdown pages. This checks the pages that come out: API references, generated tables and pages, images,
and anchors. Nothing may be fetched from another host, except where a reader follows a link.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors of a page, its links, and what it loads by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect ids, names of anchors, links and sources."""
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and "href" in given and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given["href"])
        elif tag in ("img", "script", "source", "iframe") and "src" in given:
            self.loads.append(given["src"])


def broken(site: Path) -> list[str]:
    """Return a line for each link that leads nowhere, and for each thing that a page would fetch from another host."""
    texts = {path.resolve(): path.read_text() for path in sorted(site.rglob("*.html"))}
    pages = {path: Page(text) for path, text in texts.items()}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for target in dict.fromkeys([*page.links, *page.loads]):
            parts = urlsplit(target)
            if parts.scheme in ("data", "mailto", "javascript"):
                continue
            if parts.scheme or parts.netloc:
                if target in page.loads:
                    found.append(f"{name}: loads {target}")
                continue
            there = _file(site, path, unquote(parts.path))
            if there is None:
                found.append(f"{name}: {target}: there is no such file")
            elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].anchors:
                found.append(f"{name}: {target}: there is no such anchor")
    return found


def _file(site: Path, source: Path, target: str) -> Path | None:
    """Return the file that a link's path names, or None. A folder stands for its index.html."""
    if not target:
        return source
    start = site.resolve() if target.startswith("/") else source.parent
    there = (start / target.lstrip("/")).resolve()
    there = there / "index.html" if there.is_dir() else there
    return there if there.is_file() else None


def main(arguments: Sequence[str]) -> int:
    """Print what is broken in the folder of a built site, and return the exit status."""
    if len(arguments) != 1 or not (Path(arguments[0]) / "index.html").is_file():
        print("usage: python tools/site_links.py FOLDER, where FOLDER holds a built site", file=sys.stderr)
        return 2
    lines = broken(Path(arguments[0]))
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
