"""Hooks of mkdocs: tables and the page of commands (site_tables.py), the notebook, and pages for files beside docs/.

The documentation links to examples, recipes and results beside docs/. A site has no files beside it, so each linked file becomes a
page under repository/. Folders, and files that only such a page links to, keep their words and lose the link. CHANGELOG.md is
changelog.md on the site. The search leaves these pages out.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import site_tables  # mkdocs looks for a hook's imports beside it
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]

CHANGELOG, COMMANDS = "CHANGELOG.md", "reference/command-line.md"
NOTEBOOK, FIRST_STEPS = "examples/notebooks/first_steps.ipynb", "guides/first-steps.md"
IMAGE = re.compile(r"!\[([^\[\]]*)\]\(([^()\s#]+)()\)")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s#]+)(#[^()\s]*)?\)")
CODE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}
SHOWN = {".md", ".txt", *LANGUAGES}
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file beside docs/ that a page links to."""
    commands = site_tables.command_line()
    texts = {file.src_uri: site_tables.fill(file.content_string) for file in files if file.src_uri.endswith(".md")}
    texts[COMMANDS] = commands
    known: dict[str, str] = {CHANGELOG: "changelog.md"}
    for uri, text in texts.items():
        for path in linked(text, f"docs/{uri}"):
            known.setdefault(path, page_of(path))
    for path in linked((ROOT / CHANGELOG).read_text(), CHANGELOG):
        known.setdefault(path, page_of(path))
    for path in [path for path in known if path.endswith(".md")]:
        images = [resolve(m[2], path) for m in IMAGE.finditer((ROOT / path).read_text())]
        known |= {
            image: f"repository/{image}"
            for image in images
            if (ROOT / image).is_file() and not image.startswith("docs/")
        }
    for path, uri in known.items():
        if uri.endswith(".md"):
            files.append(File.generated(config, uri, content=content_of(path, uri, known)))
        else:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, COMMANDS, content=relink(commands, f"docs/{COMMANDS}", COMMANDS, known)))
    files.append(File.generated(config, FIRST_STEPS, content=notebook()))
    config["pages_of_files"] = known
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Put tables where marks are, and point links that leave docs/ at the pages made of those files."""
    if page.file.generated_by:
        return markdown
    return relink(site_tables.fill(markdown), f"docs/{page.file.src_uri}", page.file.src_uri, config["pages_of_files"])


def notebook() -> str:
    """Return the notebook as a page, without what its cells printed."""
    parts = []
    for cell in json.loads((ROOT / NOTEBOOK).read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    title, *rest = parts
    return "\n\n".join([title, f"This page is the notebook `{NOTEBOOK}`.", *rest]) + "\n"


def linked(markdown: str, source: str) -> list[str]:
    """Return the files beside docs/ that the page `source` links to, as paths in the repository."""
    found = [resolve(m[2], source) for m in LINK.finditer(CODE.sub("", markdown))]
    return [path for path in found if path and not path.startswith("docs/") and (ROOT / path).suffix in SHOWN]


def resolve(target: str, source: str) -> str:
    """Return a link's target as a path in the repository; nothing for an address of the web."""
    if re.match(r"\w+:", target):
        return ""
    return os.path.normpath(os.path.join(os.path.dirname(source), target))


def page_of(path: str) -> str:
    """Return the page of the site that shows a file."""
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def content_of(path: str, uri: str, known: dict[str, str]) -> str:
    """Return the page of a file: Markdown with its links changed, anything else as a block of code."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        shown = relink(text, path, uri, known)
        return shown if path == CHANGELOG else HIDDEN + shown
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"{HIDDEN}# {path}\n\n````{language}\n{text.rstrip()}\n````\n"


def relink(markdown: str, source: str, uri: str, known: dict[str, str]) -> str:
    """Return the text of `source` as the page `uri`: its links lead to pages of the site, or become plain words.

    Args:
        markdown: text of the file.
        source: path of the file in the repository.
        uri: page of the site, as a path in docs/.
        known: page of each file of the repository that has one.
    """

    def one(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        path = resolve(target, source)
        if not path:
            return match[0]
        page = (
            path.removeprefix("docs/") if path.startswith("docs/") and not (ROOT / path).is_dir() else known.get(path)
        )
        if page is None or page.endswith(".jsonl"):
            return words
        # From one page in docs/ to another, the link is right as it stands.
        if source.startswith("docs/") and path.startswith("docs/"):
            return match[0]
        mark = "!" if match[0].startswith("!") else ""
        return f"{mark}[{words}]({os.path.relpath(page, os.path.dirname(uri) or '.')}{anchor})"

    def all_of(text: str) -> str:
        return LINK.sub(one, IMAGE.sub(one, text) if uri.startswith("repository/") else text)

    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [all_of(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, all_of(markdown[end:])])
