"""What the site takes from the program and from results (tools/site_tables.py), where its pages are, and the check of its links (tools/site_links.py)."""

import dataclasses
import importlib.util
import math
import re

import pytest

import depthmix
from depthmix.cli import COMMANDS
from depthmix.compare.interval import student_t
from depthmix.compare.power import detectable
from depthmix.mixers import list_mixers, mixer_class
from project import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# Made when the site is built (tools/site_hooks.py).
MADE = ["changelog.md", "guides/first-steps.md", "reference/command-line.md"]


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables():
    return tool("site_tables")


def test_every_public_name_is_in_the_reference():
    """`ops` is a module, of which the page has two functions."""
    named = re.findall(r"^::: depthmix(?:\.\w+)*\.(\w+)$", (DOCS / "reference" / "api.md").read_text(), re.M)
    assert set(depthmix.__all__) - {"ops"} <= set(named)


@pytest.mark.parametrize("rule", list_mixers())
def test_every_rule_is_described(rule):
    assert re.search(rf"^## {rule}\b", (DOCS / "reference" / "rules.md").read_text(), re.M)
    table = (DOCS / "concepts" / "depth-mixing.md").read_text().split("## Every rule as a matrix")[1]
    assert re.search(rf"^\| .*`{rule}`", table, re.M)


def test_every_page_has_its_place():
    """mkdocs.yml names each page once; pages of results are linked from the pages that quote them."""
    nav = re.findall(r"^\s+- (?:[^:]+: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = [str(p.relative_to(DOCS)) for p in PAGES if DOCS / "results" not in p.parents]
    assert sorted(nav) == sorted(pages + MADE)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_every_mark_becomes_a_table(tables, page):
    text = page.read_text()
    filled = tables.fill(text)
    assert "<!-- table:" not in filled
    assert (filled == text) == ("<!-- table:" not in text and "| option | meaning |" not in text)


@pytest.mark.parametrize("rule", list_mixers())
def test_tables_of_rules_have_their_options_and_defaults(tables, rule):
    """A rule may do without a section, or without a table of options."""
    section = re.search(rf"^## {rule}\b.*?(?=^## |\Z)", (DOCS / "reference" / "rules.md").read_text(), re.M | re.S)
    if section is None or "| option | meaning |" not in section[0]:
        assert section is None or all(f"`{name}`" in section[0] for name in mixer_class(rule).options)
        return
    rows = re.findall(r"^\| `(\w+)` \| .+ \| `(.*)` \| .+ \|$", tables.fill(section[0]), re.M)
    assert rows == [(name, str(option.default)) for name, option in mixer_class(rule).options.items()]


def test_the_page_of_commands_has_every_command_and_option(tables):
    page = tables.command_line()
    sections = {part.split("\n")[0]: part for part in page.split("\n## ")[1:]}
    for name, (config, *_) in COMMANDS.items():
        section = sections[name]
        if "All options of [`train`](#train)" in section:
            section += sections["train"]
        for field in dataclasses.fields(config) if config else ():
            shown = f"`--{field.name.replace('_', '-')}`" if field.metadata["flag"] else f"`{field.name}` (recipe)"
            assert f"| {shown} |" in section, (name, field.name)
    assert all(f"recipes/{p.name}" in page for p in (ROOT / "recipes").glob("*.yaml"))


def test_tables_of_steps_are_of_the_newest_results(tables):
    """Read from the Markdown that benchmarks write beside each CSV: another file, made by other code."""
    results = ROOT / "benchmarks" / "results" / "h200"
    newest = re.search(
        r"\| layerscale \| .* \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", (results / "step-gains.md").read_text()
    )
    row = re.search(r"^\| `layerscale` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", tables.steps("54m"), re.M)
    assert [round(float(x), 1) for x in newest.groups()][1:] == [float(x) for x in row.groups()][1:]
    full = re.search(
        r"\| ours \| [^|]* \| [^|]* \| [^|]* \| ([\d.]+) \|",
        (results / "all.md").read_text().split("| full-stack |")[1],
    )
    assert f"| {float(full[1]):.1f} |" in tables.stacks()


def test_ratios_on_the_first_pages_are_those_of_the_tables(tables):
    """Cells of tables that are made from results: 1.07 of a step, 3.7× of a stack."""
    made = "\n".join([*(tables.steps(size) for size in ("54m", "wide", "cpu")), tables.stacks(), tables.peers()])
    measured = set(re.findall(r"\| ([\d.]+)×? (?=\|)", made))
    for name in ("index.md", "which-rule.md"):
        page = (DOCS / name).read_text()
        ratios = re.findall(r"(\d+\.\d+)×", page)
        assert ratios
        assert set(ratios) <= measured, name
    said = re.search(r"([\d.]+) to ([\d.]+) times faster", (DOCS / "index.md").read_text())
    faster = sorted(float(x) for x in re.findall(r"\| ([\d.]+)× \| [\d.]+× \|", tables.stacks()))
    assert [float(x) for x in said.groups()] == [faster[0], faster[-1]]


def test_what_a_step_needs_is_that_of_the_table(tables):
    memory = {
        rule: float(cells.split(" | ")[3])
        for rule, cells in re.findall(r"^\| `([^`]+)` \| (.*) \|$", tables.steps("54m"), re.M)
    }
    said = re.search(
        r"from ([\d.]+) GiB to ([\d.]+) with Block, and to ([\d.]+) with Hyper", (DOCS / "faq.md").read_text()
    )
    assert [float(x) for x in said.groups()] == [memory[x] for x in ("residual", "attnres:block_size=4", "hyper")]
    assert "| `residual` | 1.00 |" in tables.steps("wide")


def test_the_table_of_seeds_is_what_the_program_computes():
    page = (DOCS / "concepts" / "statistics.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.M)
    assert len(rows) == 6
    for seeds, half, difference in rows:
        n = int(seeds)
        assert half == f"{student_t(n - 1) / math.sqrt(n):.2f}"
        assert difference == f"{detectable(1.0, n):.2f}"


GOOD = """<a href="#top" id="top">here</a> <a href="guides/">a folder</a> <a href="guides/#two">anchor</a> <a href="/">home</a>
<a href="https://example.org/page#any">elsewhere</a> <img src="data:image/png;base64,AA"> <link rel="canonical" href="https://x.org">"""


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("", []),
        ('<a href="gone/">', ["index.html: gone/: there is no such file"]),
        ('<a href="guides/#three">', ["index.html: guides/#three: there is no such anchor"]),
        ('<a href="#nothing">', ["index.html: #nothing: there is no such anchor"]),
        ('<img src="gone.png">', ["index.html: gone.png: there is no such file"]),
        ('<script src="https://cdn.example/x.js">', ["index.html: loads https://cdn.example/x.js"]),
    ],
)
def test_links_of_the_built_site(tmp_path, capsys, bad, said):
    """`make docs` runs this check on all pages."""
    (tmp_path / "guides").mkdir()
    (tmp_path / "guides" / "index.html").write_text('<h2 id="two">Two</h2><a href="../index.html#top">up</a>')
    (tmp_path / "index.html").write_text(GOOD + bad)
    links = tool("site_links")
    assert links.broken(tmp_path) == said
    assert links.main([str(tmp_path)]) == bool(said)
    assert links.main([str(tmp_path / "guides" / "none")]) == 2
    assert capsys.readouterr().out.splitlines() == said


def test_examples_in_docstrings_are_shown_as_code():
    """mkdocstrings takes `Examples:` for code, and `Example:` for a note in prose."""
    files = sorted((ROOT / "depthmix").rglob("*.py"))
    assert [str(p) for p in files if re.search(r"^ *Example:$", p.read_text(), re.M)] == []
