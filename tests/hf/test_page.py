"""docs/huggingface.md: its blocks run one after the other, and its commands after them."""

import re
import shlex
import shutil

import torch

from depthmix.cli import main
from project import ROOT, code_blocks
from train import small

PAGE = ROOT / "docs" / "huggingface.md"


def test_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    shutil.copytree(small.run().path, tmp_path / "runs" / "first")
    shutil.copytree(small.corpus(), tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    place: dict = {}
    for block in code_blocks(PAGE):
        exec(block, place)
    out = capsys.readouterr().out
    assert "The sea is" in out
    assert "torch.Size([2, 7, 1, 9, 9])" in out
    assert "attnres: the logits changed by" in out
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert place["new"].config._attn_implementation == "mine"
    assert torch.isfinite(place["new"](place["ids"]).logits).all()
    commands = re.findall(r"^depthmix .*$", PAGE.read_text(), re.M)
    assert len(commands) == 3
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, command
