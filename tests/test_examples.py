"""Every example runs, learns, and takes other mixers; the pages show what is in them."""

import importlib.util
import re

import pytest
import torch
from torch import nn

from project import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = sorted((ROOT / "docs" / "models").glob("*.md"))


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_it_learns_as_it_is(path, capsys):
    losses = load(path).main(steps=15)
    assert sum(losses[-3:]) / 3 < losses[0] - 0.05
    assert "loss" in capsys.readouterr().out


ONE, THREE = (
    [("mhc", {}), ("hyper", {})],
    [("dca", {}), ("mudd", {}), ("attnres", {"ways": 3})],
)  # inputs of an attention
OTHERS = [(path, *kinds[i % len(kinds)]) for i, path in enumerate(EXAMPLES) for kinds in (ONE, THREE)]


@pytest.mark.parametrize(("path", "mixer", "options"), OTHERS, ids=lambda x: getattr(x, "stem", str(x)))
def test_it_takes_other_mixers(path, mixer, options):
    losses = load(path).main(mixer, steps=2, **options)
    assert torch.isfinite(torch.tensor(losses)).all()


def test_a_fused_projection_of_one_mixture_two_or_three():
    qkv = load(ROOT / "examples" / "nanogpt.py").qkv
    fused, h = nn.Linear(8, 24), [torch.randn(2, 5, 8) for _ in range(3)]
    q, k, v = ([t.chunk(3, -1)[i] for t in map(fused, h)] for i in range(3))  # [of each mixture]
    for read, expected in ((h[0], (q[0], k[0], v[0])), ((h[0], h[1]), (q[0], k[0], v[1])), (h, (q[0], k[1], v[2]))):
        got = qkv(fused, tuple(read) if isinstance(read, list) else read)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_every_example_has_a_page_and_every_page_an_example():
    shown = {re.search(r"examples/(\w+\.py)", page.read_text())[1] for page in PAGES}
    assert {p.name for p in EXAMPLES} == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_pages_show_what_is_in_the_example(page):
    text = page.read_text()
    code = (ROOT / "examples" / re.search(r"examples/(\w+\.py)", text)[1]).read_text()
    blocks = text.split("```python\n")[1:]
    assert blocks
    for block in blocks:
        assert block.split("```")[0] in code
