"""docs/guides/hugging-face.md and docs/guides/retrofit.md: their blocks run one after the other, and their commands."""

import re
import shlex
import shutil

import torch

from depthmix.cli import main
from project import ROOT, code_blocks
from train import small

PAGE, RETROFIT = ROOT / "docs" / "guides" / "hugging-face.md", ROOT / "docs" / "guides" / "retrofit.md"
SMALL = (
    "--steps 2 --warmup 1 --seq-len 16 --batch-size 4 --eval-tokens 32 --device cpu --quiet"  # on top of a page's own
)


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
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert place["new"].config._attn_implementation == "mine"
    assert torch.isfinite(place["new"](place["ids"]).logits).all()
    commands = re.findall(r"^depthmix .*$", PAGE.read_text(), re.M)
    assert len(commands) == 2
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, command


def test_the_page_on_retrofit(tmp_path, monkeypatch, capsys):
    shutil.copytree(small.run().path, tmp_path / "runs" / "plain")
    shutil.copytree(small.data(), tmp_path / "data" / "mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("depthmix.compare.engine.draw_figures", lambda *_: ([], []))
    monkeypatch.setattr("depthmix.compare.engine.look_inside", lambda *_: None)
    place: dict = {}
    for block in code_blocks(RETROFIT):
        exec(block, place)
    assert place["config"].dim == 32
    assert type(place["again"]).__name__ == "DepthmixLlamaForCausalLM"
    assert type(place["pretrained"]).__name__ == "LlamaForCausalLM"
    commands = re.findall(r"^depthmix .*$", RETROFIT.read_text(), re.M)
    assert len(commands) == 5
    for command in commands:
        more = "" if command.startswith("depthmix retrofit") else SMALL
        words = shlex.split(command.removesuffix(" --seeds 1 2 3"))[1:]
        assert main(small.overriding(words, more.split())) == 0, command
    out = capsys.readouterr().out
    assert out.count("attnres: the logits changed by") == 2
    assert out.count("validation loss") == 3
    assert len(list((tmp_path / "runs" / "worth").glob("*/seed-*/result.json"))) == 3
