"""docs/scale.md says what is true: its layouts can be had, and what it names is there."""

import re

import yaml

from depthmix.config import TrainConfig
from depthmix.parallel.layout import SIZES, Layout
from project import ROOT

PAGE = (ROOT / "docs" / "scale.md").read_text()


def test_the_line_of_the_recipe():
    block, comment = re.search(r"```yaml\n(parallel:.*?)# (\d+) processes\n```", PAGE, re.S).groups()
    assert Layout.of(yaml.safe_load(block)["parallel"]).size == int(comment)
    assert {name for name in SIZES if f"| `{name}`" in PAGE} == set(SIZES)


def test_options_and_blocks_can_be_read():
    for name in re.findall(r"`(\w+): [\w.]+`", PAGE):
        assert name in TrainConfig.__dataclass_fields__, name
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.S):
        assert isinstance(yaml.safe_load(block), dict)
