"""The documents say what is true."""

import re

import pytest
import torch

from depthmix import list_mixers
from depthmix.mixers import mixer_class
from harness import MIXERS, Sublayers, embedding, run_stack
from project import ROOT, code_blocks, python

MECHANISMS = (ROOT / "docs" / "mechanisms.md").read_text()


def section(name):
    found = re.search(rf"^## {name}\b.*?(?=^## |\Z)", MECHANISMS, re.S | re.M)
    assert found, f"docs/mechanisms.md has no section on {name}"
    return found.group()


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_option_and_parameter_is_described(name):
    text = section(name) + (section("grn") if name == "dca" else "")
    mixer = mixer_class(name)(dim=24, n_blocks=2)
    for word in (*mixer.options, *{k.split(".")[0] for k, _ in mixer.named_parameters()}):
        assert re.search(rf"`{word}\b", text), f"{name}: {word} is not described"


def test_readme_lists_every_mixer_and_fits_a_screen():
    readme = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in list_mixers())
    assert len(readme.splitlines()) <= 60
    assert len(code_blocks(ROOT / "README.md")[0].strip().splitlines()) <= 12
    for target in re.findall(r"\]\(([^)#]+)", readme):
        assert (ROOT / target).exists(), target


def test_the_example_in_contributing_is_a_mixer():
    """In a process of its own: it registers a name."""
    (code,) = code_blocks(ROOT / "CONTRIBUTING.md")
    check = """
import torch, depthmix
mixer = depthmix.create_mixer("halving", dim=4, n_blocks=1)
print(mixer.mixing([torch.randn(2, 4) for _ in range(3)])[0].tolist(), "halving" in depthmix.list_mixers())
"""
    assert python(code + check).strip() == "[[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.25, 0.5, 1.0]] True"


def test_the_page_on_speed_quotes_its_result_files():
    """Every line of the step table, and every ratio and share in the page's other tables, is one of the committed results."""
    page = (ROOT / "docs" / "speed.md").read_text()
    results = "\n".join(f.read_text() for f in sorted((ROOT / "docs" / "results" / "h200").glob("*.md")))
    steps = [line for line in page.splitlines() if line.startswith("|") and "tokens | " in line]
    assert len(steps) == 8
    assert set(steps) <= set(results.splitlines())
    others = re.findall(r"^\| (?:Full|Block|read|make_bank|scores|source_backward|layer_backward).*", page, re.M)
    assert len(others) == 13
    for line in others:
        for ratio in re.findall(r"\| ([01]\.\d+) (?=\|)", line):
            assert re.search(rf"\| {float(ratio):g}\b", results), (line, ratio)


def test_the_readme_quotes_the_comparison_at_equal_time():
    """Every number of its table is in the comparison's own."""
    rows = (ROOT / "docs" / "results" / "gutenberg-54m-time" / "table.md").read_text().splitlines()
    own = {row.split(" | ")[0]: row for row in rows if row.startswith("| ")}
    quoted = [line for line in (ROOT / "README.md").read_text().splitlines() if " ± " in line and line.startswith("| ")]
    assert len(quoted) == 3
    for line in quoted:
        arm, *cells = line.strip("| ").split(" | ")
        assert all(f"| {cell} |" in own[f"| {arm}"] for cell in cells), line


def test_make_targets_in_the_documents_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in ("README.md", "CONTRIBUTING.md"):
        assert set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / page).read_text(), re.M)) <= targets


def test_ci_runs_lint_and_the_readme_test_command_and_nothing_else():
    lines = [x for x in (ROOT / ".ci" / "run").read_text().splitlines() if x and not x.startswith(("#", "set "))]
    assert lines == ["make lint", "make test"]


def test_site_by_site_description_of_m():
    """The definition in docs/mechanisms.md, for a rule where it can be read off: what finish reads is M's last row times the sources."""
    mixer = mixer_class("denseformer")(dim=24, n_blocks=3).double()
    with torch.no_grad():
        for alpha in mixer.alpha.values():
            alpha += 0.3 * torch.randn_like(alpha)
    out, _, sources = run_stack(mixer, Sublayers(3), embedding())
    row = mixer.mixing(sources)[0, -1]
    torch.testing.assert_close(out, sum(w * s for w, s in zip(row, sources, strict=True)))
