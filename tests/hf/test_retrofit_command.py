"""`depthmix retrofit`: from folder to folder, and what it says when it cannot."""

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM

from depthmix.cli import main
from depthmix.errors import CHECKPOINT, DISK, USAGE
from depthmix.mixers import registry
from hf.test_retrofit import ids, make


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    make("llama").save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_folder_with_the_same_logits(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mixed"
    given = [str(plain), "--mixer", "attnres", "--mixer-options", "block_size=2", "--out", str(out)]
    assert main(["retrofit", *given]) == 0
    said = capsys.readouterr().out
    assert "the logits changed by" in said
    assert "DepthmixLlamaForCausalLM with attnres" in said
    before, after = (AutoModelForCausalLM.from_pretrained(f).eval()(ids()).logits for f in (plain, out))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert main(["retrofit", *given]) == USAGE
    assert "exists already" in capsys.readouterr().err


def test_folders_of_others_are_left_alone(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one with the very name under which the new folder is written."""
    (tmp_path / ".tmp-mixed").mkdir()
    (tmp_path / ".tmp-mixed" / "notes.txt").write_text("mine")
    argv = ["retrofit", str(plain), "--mixer", "residual", "--out", str(tmp_path / "mixed")]
    assert main(argv) == 0
    monkeypatch.setattr(os, "getpid", lambda: 77)
    (tmp_path / ".tmp-mixed").rename(tmp_path / ".tmp-more-77")
    assert main([*argv[:-1], str(tmp_path / "more")]) == DISK
    assert ".tmp-more-77" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / ".tmp-more-77").iterdir()] == ["notes.txt"]
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert main([*argv[:-1], str(tmp_path / "link")]) == USAGE


def test_what_is_wrong_is_said(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, foreign, broken, corrupt = (tmp_path / name for name in ("empty", "foreign", "broken", "corrupt"))
    for folder in (empty, foreign, broken, corrupt):
        folder.mkdir()
    (corrupt / "config.json").write_bytes((plain / "config.json").read_bytes())
    (corrupt / "model.safetensors").write_bytes(b"nothing like it")
    (foreign / "config.json").write_text('{"model_type": "nobody-knows"}')
    make("cohere").save_pretrained(broken)
    for options, code, words in (
        (["--out", "x"], USAGE, "--model is missing"),
        (["--model", str(plain), "--mixer", "dca"], USAGE, "--out is missing"),
        (["--model", str(plain), "--out", "x"], USAGE, "--mixer is missing"),
        (["--mixer", "dca", "--model", str(corrupt), "--out", "x"], CHECKPOINT, "cannot be loaded"),
        (["--mixer", "dca", "--model", str(tmp_path / "nowhere"), "--out", "x"], CHECKPOINT, "does not exist"),
        (["--mixer", "dca", "--model", str(empty), "--out", "x"], CHECKPOINT, "no config.json"),
        (["--mixer", "dca", "--model", str(foreign), "--out", "x"], CHECKPOINT, "cannot be loaded"),
        (
            ["--mixer", "dca", "--model", str(broken), "--out", str(tmp_path / "x")],
            USAGE,
            "the architecture 'cohere' is not known",
        ),
        (["--model", str(plain), "--out", str(tmp_path / "x"), "--mixer", "nothing"], USAGE, "nothing"),
    ):
        assert main(["retrofit", *options]) == code
        assert words in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


LOOKS_AHEAD = """
from depthmix.mixers import register
from depthmix.mixers.one_stream import OneStream


@register("ahead")
class Ahead(OneStream):
    "A rule that reads the next token."

    def __init__(self, dim, n_blocks):
        super().__init__(dim, n_blocks)

    def _join(self, state, site, y):
        return state.x + y.roll(-1, -2)
"""


def test_a_rule_that_reads_later_tokens_is_refused(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_MIXERS", dict(registry._MIXERS))
    (tmp_path / "ahead.py").write_text(LOOKS_AHEAD)
    given = ["--mixer", "ahead", "--modules", str(tmp_path / "ahead.py"), "--out", str(tmp_path / "out")]
    assert main(["retrofit", str(plain), *given]) == USAGE
    assert "mixer 'ahead' cannot be used: what a site reads of a token depends on tokens to come" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
