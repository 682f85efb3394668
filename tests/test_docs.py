"""The documents say what is true."""

import ast
import importlib
import re
import runpy
import textwrap
import unicodedata

import pytest
import torch

from depthmix.mixers import mixer_class
from harness import MIXERS, Sublayers, embedding, run_stack
from project import ROOT, code_blocks

# Pages that are made when the site is built (tools/site_hooks.py).
MADE = ("changelog.md", "guides/first-steps.md", "reference/command-line.md")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "experiments" / "README.md",
    ROOT / "lab" / "README.md",
    ROOT / "lab" / "LOG.md",
    ROOT / "lab" / "short-trainings.md",
    ROOT / "lab" / "theory" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
MECHANISMS = (ROOT / "docs" / "reference" / "rules.md").read_text()


def section(name):
    return re.search(rf"^## {name}\b.*?(?=^## |\Z)", MECHANISMS, re.S | re.M).group()


# A rule may do without a section.
@pytest.mark.parametrize("name", [name for name in MIXERS if re.search(rf"^## {name}\b", MECHANISMS, re.M)])
def test_sections_describe_every_option_and_parameter_of_their_rule(name):
    text = section(name) + (section("grn") if name == "dca" else "")
    mixer = mixer_class(name)(dim=24, n_blocks=2)
    for word in (*mixer.options, *{k.split(".")[0] for k, _ in mixer.named_parameters()}):
        assert re.search(rf"`{word}\b", text), f"{name}: {word} is not described"


def outside_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def anchors(page):
    """The anchors of a page's headings, as Markdown's table of contents names them."""
    found = set()
    for title in re.findall(r"^#+ (.+)$", outside_code(page.read_text()), re.M):
        given = re.search(r"\{#([\w-]+)\}$", title)
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        plain = re.sub(r"[^\w\s-]", "", unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode())
        found.add(given[1] if given else re.sub(r"[-\s]+", "-", plain.strip().lower()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_anchors_and_paths_lead_somewhere(page):
    text = page.read_text()
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)(?:#([^)\s]*))?\)", outside_code(text)):
        there = page.parent / target if target else page
        assert there.exists() or str(there.resolve().relative_to(ROOT / "docs")) in MADE, target
        # Anchors of pages that are made with the site: tools/site_links.py, in `make docs`.
        if anchor and there.suffix == ".md" and there.exists():
            assert anchor in anchors(there), f"{target}#{anchor}"
    for path in re.findall(
        r"`((?:benchmarks|corpora|depthmix|docs|examples|lab|recipes|tests|tools)/[\w./=-]*)(?:::\w+)?`", text
    ):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_the_pages_import_is_there(page):
    for node in (node for block in code_blocks(page) for node in ast.walk(ast.parse(textwrap.dedent(block)))):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_the_layout_in_contributing_is_the_layout():
    """Every folder and file it names is there, and every folder that is there has a line."""
    layout = re.search(r"^## Where things are\n\n(.*?)\n\n", (ROOT / "CONTRIBUTING.md").read_text(), re.S | re.M)[1]
    lines = dict(line.split(maxsplit=1) for line in layout.splitlines())
    for path, words in lines.items():
        folder = ROOT / path if path.endswith("/") else (ROOT / path).parent
        assert (ROOT / path).exists(), path
        for name in re.findall(r"[\w/]+(?:\.py\b|/)", words):
            assert any(folder.rglob(name.rstrip("/"))) or (ROOT / name).exists(), (path, name)
    packages = {f"depthmix/{p.parent.name}/" for p in (ROOT / "depthmix").glob("*/__init__.py")}
    assert packages | {"benchmarks/", "docs/", "examples/", "lab/", "recipes/", "tests/", "tools/"} <= set(lines)


def test_the_page_on_speed_says_how_long_first_calls_take():
    """The slowest kernel's, and the slowest stack's."""
    page = (ROOT / "docs" / "reference" / "performance.md").read_text()
    results = (ROOT / "benchmarks" / "results" / "h200" / "kernels.md").read_text()
    kernels = re.findall(r"^\| each kernel, .* \| ([\d.]+) \(", results, re.M)
    stacks = re.findall(r"^\| (?:Full|Block) stack, forward\+backward, .* \| ([\d.]+) \|$", results, re.M)
    said = re.search(r"first call of a kernel takes ([\d.]+) s at most, .* of a stack, .*, ([\d.]+) s\.", page)
    assert said.groups() == tuple(f"{max(map(float, found)):.1f}" for found in (kernels, stacks))


def test_the_findings_quote_what_was_measured():
    found = runpy.run_path(str(ROOT / "lab" / "findings.py"))["table"](ROOT / "lab/results/gutenberg-54m-inside")
    assert found in (ROOT / "docs" / "findings.md").read_text()


def test_make_targets_in_the_documents_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in ("README.md", "CONTRIBUTING.md"):
        assert set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / page).read_text(), re.M)) <= targets


def test_ci_runs_lint_and_the_readme_test_command_and_skips_no_browser():
    lines = [x for x in (ROOT / ".ci" / "run").read_text().splitlines() if x and not x.startswith(("#", "set "))]
    assert lines[0] == "export DEPTHMIX_BROWSER=required"
    assert lines[1].endswith("|| tools/install_chromium.sh")
    assert lines[2:] == ["make lint", "make test"]


def test_site_by_site_description_of_m():
    """The definition in docs/reference/rules.md, for a rule where it can be read off: what finish reads is M's last row times the sources."""
    mixer = mixer_class("denseformer")(dim=24, n_blocks=3).double()
    with torch.no_grad():
        for alpha in mixer.alpha.values():
            alpha += 0.3 * torch.randn_like(alpha)
    out, _, sources = run_stack(mixer, Sublayers(3), embedding())
    row = mixer.mixing(sources)[0, -1]
    torch.testing.assert_close(out, sum(w * s for w, s in zip(row, sources, strict=True)))
