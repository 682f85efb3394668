"""Every example runs, learns, and takes other mixers; the pages show what is in them."""

import importlib.util
import re

import pytest
import torch
from torch import nn

from project import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "docs" / "guides" / "examples.md").read_text()


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


def test_the_page_shows_every_example_and_what_is_in_it():
    """Each section names one example; its blocks are pieces of that file."""
    sections = re.split(r"^## ", PAGE, flags=re.M)[1:]
    shown = [re.search(r"examples/(\w+\.py)", section)[1] for section in sections]
    assert sorted(shown) == [p.name for p in EXAMPLES]
    for name, section in zip(shown, sections, strict=True):
        blocks = [block.split("```")[0] for block in section.split("```python\n")[1:]]
        assert blocks
        assert all(block in (ROOT / "examples" / name).read_text() for block in blocks)
