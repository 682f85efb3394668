"""Count the words of sentences on the project's pages, and fail where they are too long.

    python tools/prose.py                  # the pages that keep the limits, as `make lint` does
    python tools/prose.py docs/results.md  # any other page

A page has fewer than 18 words per sentence on average, and no sentence of more than 40. Code, tables, headings and lists of
references do not count. A span of code and a link's text count, a link's address does not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEAN, LONGEST = 18, 40

# Pages that keep the limits, as patterns. Add one as soon as it does.
DONE = [
    "README.md",
    "CODE_OF_CONDUCT.md",
    "RELEASING.md",
    "SECURITY.md",
    "docs/concepts/*.md",
    "docs/faq.md",
    "docs/findings.md",
    "docs/guides/*.md",
    "docs/install.md",
    "docs/other-packages.md",
    "docs/quickstart.md",
    "docs/which-rule.md",
]

_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")
# Rows of tables, headings, formulas, and directives of the site.
_NOT_PROSE = re.compile(r"\s*(?:\||#|\$\$|!!!|\?\?\?|:::|--8<--)")
# A full stop, question or exclamation mark, closing marks, and the beginning of another sentence.
_END = re.compile(r"(?<=[.!?])[\"'”*)\]]*\s+(?=[\"'“*(\[]*[A-Z0-9])")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|cf|vs|etc|No|Fig|Eq)\.(?=\s)")


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a Markdown page that are prose."""
    text = re.sub(r"\A---\n.*?^---\n", "", text, flags=re.S | re.M)
    text = re.sub(r"^( *)(```|~~~).*?^\1\2[^\n]*$", "", text, flags=re.S | re.M)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    block: list[str] = []
    in_item = False
    for line in [*text.splitlines(), ""]:
        item = _ITEM.match(line)
        if item or not line.strip() or _NOT_PROSE.match(line):
            if block and not (in_item and _is_reference(" ".join(block))):
                yield " ".join(block)
            block = [line[item.end() :]] if item else []
            in_item = bool(item) or (in_item and not line.strip())
        elif block:
            block.append(line.strip())
        # Four spaces begin code, except inside a list.
        elif in_item or not line.startswith("    "):
            in_item = in_item and line.startswith(" ")
            block = [line.strip()]


def _is_reference(item: str) -> bool:
    """Tell whether a list item is little more than links, as in a list of further reading."""
    linked = sum(len(link.split()) for link in _LINK.findall(item))
    return linked > len(_LINK.sub("", item).split())


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a Markdown page, with a span of code as one word and without the addresses of links."""
    for paragraph in paragraphs(text):
        plain = _LINK.sub(r"\1", re.sub(r"`[^`]+`|\$[^$]+\$", "code", paragraph))
        plain = re.sub(r"<[^>]+>", "", plain)
        plain = _ABBREVIATION.sub(lambda found: found[0].replace(".", "·"), plain)
        for sentence in _END.split(plain):
            if words(sentence):
                yield sentence.strip().replace("·", ".")


def words(sentence: str) -> list[str]:
    """Return the words of a sentence: numbers count, signs alone do not."""
    return [word for word in sentence.split() if re.search(r"\w", word)]


def offences(name: str, text: str) -> list[str]:
    """Return a line for each limit that a page exceeds."""
    found = list(sentences(text))
    if not found:
        return []
    lengths = [len(words(sentence)) for sentence in found]
    lines = [
        f"{name}: {length} words (at most {LONGEST}): {sentence[:100]}"
        for sentence, length in zip(found, lengths, strict=True)
        if length > LONGEST
    ]
    mean = sum(lengths) / len(lengths)
    if mean >= MEAN:
        lines.append(f"{name}: {mean:.1f} words per sentence on average (fewer than {MEAN})")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Print the offences on the given pages, or on those in `DONE`, and return the exit status."""
    pages = [Path(page) for page in arguments] or [page for name in DONE for page in sorted(ROOT.glob(name))]
    lines = [line for page in pages for line in offences(str(page), page.read_text())]
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
