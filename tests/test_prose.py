"""`tools/prose.py`: which words of a page count, and which pages keep the limits."""

import runpy

import pytest

from project import ROOT

PROSE = runpy.run_path(str(ROOT / "tools" / "prose.py"))

PAGE = """---
title: Not counted
---
# A heading that is not counted

One sentence of six words here. Is this one a second? Yes,
and it goes on over a line.

* An item without a full stop
* Another item. It has two sentences, `with code in a span` as one word.

  A second paragraph of the item.
* [A link](there.md), [and another link](here.md)

| a table | of words. That do not count. |
|---|---|

    code = "indented. Not counted."

```python
fenced = "code. Not counted."
```

See [a link's text](https://example.org/an/address) and about 1.5 nats, e.g. here.
"""


def test_sentences_leave_out_what_is_not_prose():
    assert list(PROSE["sentences"](PAGE)) == [
        "One sentence of six words here.",
        "Is this one a second?",
        "Yes, and it goes on over a line.",
        "An item without a full stop",
        "Another item.",
        "It has two sentences, code as one word.",
        "A second paragraph of the item.",
        "See a link's text and about 1.5 nats, e.g. here.",
    ]


def test_only_words_with_a_letter_or_digit_count():
    assert PROSE["words"]("Plus – and = are 5 words.") == ["Plus", "and", "are", "5", "words."]


@pytest.mark.parametrize(("length", "said"), [(40, 0), (41, 1)])
def test_one_long_sentence_is_named(length, said):
    page = "Short. " * 10 + " ".join(["Word"] + ["word"] * (length - 1)) + "."
    found = PROSE["offences"]("page.md", page)
    assert len(found) == said
    assert all(line.startswith(f"page.md: {length} words (at most 40): Word word") for line in found)


@pytest.mark.parametrize(
    ("length", "said"), [(17, []), (18, ["page.md: 18.0 words per sentence on average (fewer than 18)"])]
)
def test_a_long_average_is_named(length, said):
    page = (" ".join(["Word"] + ["word"] * (length - 1)) + ". ") * 3
    assert PROSE["offences"]("page.md", page) == said


def test_a_page_without_prose_has_no_average():
    assert PROSE["offences"]("page.md", "# Heading\n\n| a | b |\n") == []


def test_the_command_names_offenders_and_fails(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("Word " * 50 + ".")
    assert PROSE["main"]([str(page)]) == 1
    assert capsys.readouterr().out.count("page.md: 50") == 2
    page.write_text("A few words.")
    assert PROSE["main"]([str(page)]) == 0
    assert capsys.readouterr().out == ""


def test_the_pages_that_are_done_keep_the_limits(capsys):
    assert PROSE["main"]([]) == 0, capsys.readouterr().out
