"""What people get wrong: command lines, recipes, corpora, prepared data and runs. Each ends in one clear sentence."""

import dataclasses
import gzip
import json
import os
import pickle
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from depthmix.cli import main
from depthmix.train.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from depthmix.train.errors import CHECKPOINT, DATA, DISK, USAGE
from train import small

PROGRAM = Path(sys.executable).with_name("depthmix")


def one_sentence(err: str, words: list[str]) -> None:
    """One line, the last one, is the message; what comes before is progress and warnings, never a traceback."""
    lines = err.splitlines()
    assert "Traceback" not in err
    assert [line.startswith("depthmix: ") for line in lines[-1:]] == [True], err
    assert sum(line.startswith("depthmix: ") for line in lines) == 1, err
    for word in words:
        assert word in lines[-1], f"{word!r} is not in: {lines[-1]}"


@pytest.fixture
def fails(capsys, tmp_path, monkeypatch):
    """Run a command line (a string, with places in it) that must fail with a code and words."""
    monkeypatch.chdir(tmp_path)

    def run(line, code, *words, **places):
        places = {"data": small.data(), "corpus": small.corpus(), "tmp": tmp_path, **places}
        if "{run}" in line and "run" not in places:
            places["run"] = small.run().path
        argv = [part.format(**places) for part in shlex.split(line)]
        capsys.readouterr()
        found = main(argv)
        err = capsys.readouterr().err
        one_sentence(err, [str(w).format(**places) for w in words])
        assert found == code, err
        return err

    return run


def table(cases):
    """Parameters with their first field as the name."""
    return pytest.mark.parametrize("case", cases, ids=[str(case[0]).replace(" ", "_")[:60] for case in cases])


# Command lines.

TRAIN = "train --data {data} --out run --dim 16 --n-blocks 1 --n-heads 2 --seq-len 16 --batch-size 4 --steps 6 --warmup 2 --device cpu"
COMPARE = TRAIN.replace("train", "compare", 1)

LINES = [
    ("", USAGE, "expected a command", "train, compare, eval"),
    ("trian", USAGE, "invalid choice: 'trian'", "train", "--help"),
    ("--recipe x.yaml", USAGE, "invalid choice: 'x.yaml'", "choose from"),
    ("--verbose list", USAGE, "--verbose"),
    ("list everything", USAGE, "list: unknown argument 'everything'"),
    ("doctor --fix", USAGE, "doctor: unknown argument '--fix'"),
    ("completion", USAGE, "shell", "required"),
    ("completion fish", USAGE, "invalid choice: 'fish'", "bash", "zsh"),
    # train
    ("train", USAGE, "data is needed", "folder written by `depthmix data`"),
    ("train --data {data}", USAGE, "out is needed", "run folder"),
    ("train --out run", USAGE, "data is needed"),
    (f"{TRAIN} --stepz 5", USAGE, "unknown argument '--stepz'", "did you mean '--steps'?"),
    (f"{TRAIN} --step 5", USAGE, "unknown argument '--step'", "did you mean '--steps'?"),  # no abbreviations
    (f"{TRAIN} --mixer_options ways=3", USAGE, "did you mean '--mixer-options'?"),
    (f"{TRAIN} extra", USAGE, "unknown argument 'extra'"),
    (f"{TRAIN} --lr", USAGE, "--lr: expected one argument"),
    (f"{TRAIN} --lr fast", USAGE, "lr must be a number, got 'fast'"),
    (f"{TRAIN} --lr 0", USAGE, "lr must be a number above 0, got 0.0"),
    (f"{TRAIN} --lr=-1e-3", USAGE, "lr must be a number above 0, got -0.001"),
    (f"{TRAIN} --lr nan", USAGE, "lr must be a number above 0, got nan"),
    (f"{TRAIN} --lr inf", USAGE, "lr must be a number above 0, got inf"),
    (f"{TRAIN} --muon-lr 0", USAGE, "muon_lr must be a number above 0"),
    (f"{TRAIN} --adam-eps 0", USAGE, "adam_eps must be a number above 0"),
    (f"{TRAIN} --norm-eps=-1", USAGE, "norm_eps must be a number above 0"),
    (f"{TRAIN} --rope-theta 0", USAGE, "rope_theta must be a number above 0"),
    (f"{TRAIN} --steps 0", USAGE, "steps must be at least 1, got 0"),
    (f"{TRAIN} --steps 1.5", USAGE, "steps must be a whole number, got '1.5'"),
    (f"{TRAIN} --steps many", USAGE, "steps must be a whole number, got 'many'"),
    (f"{TRAIN} --steps none", USAGE, "steps must be a whole number, got 'none'"),
    (f"{TRAIN} --steps 1e3", USAGE, "steps must be a whole number"),
    (f"{TRAIN} --batch-size 0", USAGE, "batch_size must be at least 1"),
    (f"{TRAIN} --seq-len 0", USAGE, "seq_len must be at least 1"),
    (f"{TRAIN} --log-every 0", USAGE, "log_every must be at least 1"),
    (f"{TRAIN} --eval-every 0", USAGE, "eval_every must be at least 1"),
    (f"{TRAIN} --save-every 0", USAGE, "save_every must be at least 1"),
    (f"{TRAIN} --keep 0", USAGE, "keep must be at least 1"),
    (f"{TRAIN} --eval-tokens 0", USAGE, "eval_tokens must be at least 1 or none"),
    (f"{TRAIN} --micro-batch-size 0", USAGE, "micro_batch_size must be at least 1 or none"),
    (f"{TRAIN} --micro-batch-size 3", USAGE, "micro_batch_size must divide batch_size=4, got 3"),
    (f"{TRAIN} --micro-batch-size some", USAGE, "micro_batch_size must be a whole number or none, got 'some'"),
    (f"{TRAIN} --warmup 6", USAGE, "warmup must be shorter than the run of 6 steps, got 6"),
    (f"{TRAIN} --warmup=-1", USAGE, "warmup must be at least 0, got -1"),
    (f"{TRAIN} --final-lr 1.5", USAGE, "final_lr must be from 0 to 1, got 1.5"),
    (f"{TRAIN} --decay-fraction nan", USAGE, "decay_fraction must be from 0 to 1"),
    (f"{TRAIN} --beta1 1", USAGE, "beta1 must be at least 0 and below 1"),
    (f"{TRAIN} --beta2=-0.1", USAGE, "beta2 must be at least 0 and below 1"),
    (f"{TRAIN} --weight-decay=-1", USAGE, "weight_decay must be at least 0"),
    (f"{TRAIN} --clip=-1", USAGE, "clip must be at least 0"),
    (f"{TRAIN} --seed=-1", USAGE, "seed must be at least 0, got -1"),
    (f"{TRAIN} --seed 99999999999999999999", USAGE, "seed must be below 2**64"),
    (f"{TRAIN} --optimizer sgd", USAGE, "optimizer must be adamw or muon, got 'sgd'"),
    (f"{TRAIN} --optimizer moun", USAGE, "did you mean 'muon'?"),
    (f"{TRAIN} --schedule linear", USAGE, "schedule must be cosine or wsd or rsqrt, got 'linear'"),
    (f"{TRAIN} --precision fp16", USAGE, "precision must be auto or fp32 or bf16", "did you mean 'bf16'?"),
    (f"{TRAIN} --compile yes", USAGE, "compile must be off or sublayers or model, got 'yes'"),
    (f"{TRAIN} --on-nan ignore", USAGE, "on_nan must be stop or skip"),
    (f"{TRAIN} --mlp gelu", USAGE, "mlp must be swiglu or relu2"),
    (f"{TRAIN} --quiet=yes", USAGE, "--quiet"),
    (f"{TRAIN} --device gpu", USAGE, "device must be cpu, cuda, cuda:N, mps or auto, got 'gpu'"),
    (f"{TRAIN} --device cuda:99", USAGE, "device 'cuda:99' is not available here"),
    (f"{TRAIN} --device meta", USAGE, "device 'meta' is not available here"),
    (f"{TRAIN} --dim 0", USAGE, "dim must be an integer of at least 1, got 0"),
    (f"{TRAIN} --dim 15", USAGE, "n_heads must divide dim=15"),
    (f"{TRAIN} --dim 18", USAGE, "head_dim must be even for rotary positions, got 9"),
    (f"{TRAIN} --n-blocks 0", USAGE, "n_blocks must be an integer of at least 1"),
    (f"{TRAIN} --n-heads 0", USAGE, "n_heads must be an integer of at least 1"),
    (f"{TRAIN} --n-heads 3", USAGE, "n_heads must divide dim=16"),
    (f"{TRAIN} --n-kv-heads 3", USAGE, "n_kv_heads must divide n_heads=2, got 3"),
    (f"{TRAIN} --mlp-dim 0", USAGE, "mlp_dim must be an integer of at least 1"),
    (f"{TRAIN} --dim 1000000000000", USAGE, "out of memory: use a smaller"),
    (f"{TRAIN} --mixer resnet", USAGE, "unknown mixer 'resnet'", "residual"),
    (f"{TRAIN} --mixer atnres", USAGE, "did you mean 'attnres'?"),
    (f"{TRAIN} --mixer-options ways=3", USAGE, "residual: unknown option 'ways'", "it has no options"),
    (f"{TRAIN} --mixer-options", USAGE, "--mixer-options: expected at least one argument"),
    (f"{TRAIN} --mixer-options ways", USAGE, "mixer_options must be written as option=value"),
    (f"{TRAIN} --mixer attnres --mixer-options wayz=3", USAGE, "unknown option 'wayz'", "did you mean 'ways'?"),
    (f"{TRAIN} --mixer attnres --mixer-options ways=2", USAGE, "ways must be 1 or 3, got 2"),
    (f"{TRAIN} --mixer attnres --mixer-options block_size=0", USAGE, "block_size must be an integer of at least 1"),
    (f"{TRAIN} --mixer attnres --mixer-options heads=3", USAGE, "heads must divide dim=16"),
    (f"{TRAIN} --mixer attnres --mixer-options weights=softmux", USAGE, "did you mean 'softmax'?"),
    (f"{TRAIN} --seq-len 5000", DATA, "train split has 4912 tokens", "seq_len + 1 = 5001"),
    (f"{TRAIN} --seq-len 1300", DATA, "val split has 1235 tokens", "val_fraction"),
    ("train --data nowhere --out run", DATA, "There is no folder nowhere", "depthmix data"),
    ("train --data {corpus} --out run", DATA, "is not prepared data, it has no meta.json"),
    ("train --data {corpus}/00.txt --out run", DATA, "There is no folder"),
    (f"{TRAIN} --wandb depths", USAGE, "wandb is not installed", "pip install wandb"),
    # compare
    ("compare", USAGE, "compare needs --out"),
    ("compare --data {data} --out s", USAGE, "arms is a list of at least one mechanism"),
    ("compare --out s --arms residual", USAGE, "data"),
    (f"{COMPARE} --arms", USAGE, "--arms: expected at least one argument"),
    (f"{COMPARE} --arms resnet", USAGE, "arm 'resnet'", "unknown mixer 'resnet'"),
    (f"{COMPARE} --arms residual residual", USAGE, "arms 'residual' and 'residual' are the same"),
    (f"{COMPARE} --arms residual attnres attnres:ways=1", USAGE, "are the same; remove one"),
    (f"{COMPARE} --arms :ways=3", USAGE, "arm ':ways=3' has no mechanism"),
    (f"{COMPARE} --arms attnres:ways", USAGE, "arm 'attnres:ways': expected option=value"),
    (f"{COMPARE} --arms attnres:", USAGE, "expected option=value"),
    (f"{COMPARE} --arms attnres:wayz=3", USAGE, "unknown option 'wayz'", "did you mean 'ways'?"),
    (f"{COMPARE} --arms attnres:ways=2", USAGE, "ways must be 1 or 3"),
    (f"{COMPARE} --arms attnres:ways=3,ways=3", USAGE, "gives ways twice"),
    (f"{COMPARE} --arms attnres:heads=5", USAGE, "heads must divide dim=16"),
    (f"{COMPARE} --arms residual --seeds zero", USAGE, "seeds must be a whole number, got 'zero'"),
    (f"{COMPARE} --arms residual --seeds 1 1", USAGE, "every seed counts once"),
    (f"{COMPARE} --arms residual --seeds=-4", USAGE, "seed must be at least 0, got -4"),
    (f"{COMPARE} --arms residual --budget money", USAGE, "budget must be tokens or time, got 'money'"),
    (f"{COMPARE} --arms residual --steps 0", USAGE, "steps must be at least 1"),
    (f"{COMPARE} --arms residual --mixer dca", USAGE, "takes its mechanisms from --arms"),
    (f"{COMPARE} --arms residual --sample-tokens 0", USAGE, "sample_tokens must be at least 1"),
    (f"{COMPARE} --arms residual --dim 15", USAGE, "n_heads must divide dim=15"),
    (f"{COMPARE} --arms residual --lr 0", USAGE, "lr must be a number above 0"),
    ("compare --data nowhere --out s --arms residual", DATA, "There is no folder nowhere"),
    # eval and generate
    ("eval", USAGE, "run is needed", "depthmix train"),
    ("eval --run nowhere", CHECKPOINT, "run 'nowhere' does not exist"),
    ("eval --run {run} --batch-size 0", USAGE, "batch_size", "at least 1"),
    ("eval --run {run} --seq-len 0", USAGE, "seq_len", "at least 1"),
    ("eval --run {run} --seq-len 1300", DATA, "val split has 1235 tokens"),
    ("eval --run {run} --input nowhere.txt", DATA, "There is no file or folder nowhere.txt"),
    ("eval --run {run} --device tpu", USAGE, "device must be cpu, cuda"),
    ("eval --run {run} --text hello", USAGE, "unknown argument '--text'", "did you mean"),
    ("eval {run}", USAGE, "unknown argument"),
    ("eval --run {corpus}", CHECKPOINT, "is not a run folder: it has no recipe.yaml"),
    ("eval --run {corpus}/00.txt", CHECKPOINT, "is a file, not a run folder"),
    ("generate", USAGE, "run is needed", "depthmix train"),
    ("generate --run nowhere", CHECKPOINT, "run 'nowhere' does not exist"),
    ("generate --run {run} --temperature=-1", USAGE, "temperature must be a number of at least 0, got -1.0"),
    ("generate --run {run} --temperature nan", USAGE, "temperature must be a number of at least 0"),
    ("generate --run {run} --temperature inf", USAGE, "temperature must be a number of at least 0"),
    ("generate --run {run} --temperature hot", USAGE, "temperature must be a number, got 'hot'"),
    ("generate --run {run} --top-p 0", USAGE, "top_p must be above 0 and at most 1, got 0.0"),
    ("generate --run {run} --top-p 1.01", USAGE, "top_p must be above 0 and at most 1"),
    ("generate --run {run} --top-p nan", USAGE, "top_p must be above 0 and at most 1"),
    ("generate --run {run} --max-tokens 0", USAGE, "max_tokens must be at least 1, got 0"),
    ("generate --run {run} --max-tokens few", USAGE, "max_tokens must be a whole number"),
    ("generate --run {run} --seed=-1", USAGE, "seed must be at least 0"),
    ("generate --run {run} --seed 99999999999999999999", USAGE, "below 2**64"),
    ("generate --run {run} --device cuda:99", USAGE, "not available here"),
    ("generate --run {run} --prompt", USAGE, "--prompt: expected one argument"),
    ("generate --run {run} --prompt two words", USAGE, "unknown argument 'words'"),
    # data
    ("data", USAGE, "No folder to write was given: set out"),
    ("data --out d", USAGE, "No input was given"),
    ("data --input {corpus}", USAGE, "No folder to write was given"),
    ("data --input --out d", USAGE, "--input: expected at least one argument"),
    ("data --input nowhere --out d", DATA, "There is no file or folder nowhere"),
    ("data --input {corpus} --out d --vocab-size 256", USAGE, "vocab_size is 256", "at least 257"),
    ("data --input {corpus} --out d --vocab-size big", USAGE, "vocab_size must be a whole number, got 'big'"),
    ("data --input {corpus} --out d --vocab-size 30000", DATA, "too small for a vocabulary of 30000", "it yields"),
    ("data --input {corpus} --out d --val-fraction 0", USAGE, "val_fraction is 0.0", "between 0 and 1"),
    ("data --input {corpus} --out d --val-fraction 1", USAGE, "val_fraction is 1.0"),
    ("data --input {corpus} --out d --val-fraction nan", USAGE, "val_fraction is nan"),
    ("data --input {corpus} --out d --document page", USAGE, "document must be file or line or blank, got 'page'"),
    ("data --input {corpus} --out d --tokenizer nowhere.json", DATA, "There is no tokenizer file nowhere.json"),
    ("data --input {corpus} --out d --tokenizer {corpus}/00.txt", DATA, "is not a tokenizer.json"),
    ("data --input {corpus} --out d --tokenizer {corpus}", DATA, "cannot be read"),
    ("data --input {corpus} --out {corpus}", DATA, "is not prepared data, so it is left alone"),
    ("data --input {corpus} --out {data}", DATA, "already holds prepared data", "overwrite"),
    ("data --input {corpus} --out {corpus}/00.txt", DATA, "is not a folder"),
    ("data --input {corpus} --out {corpus}/00.txt/d", DISK, "cannot be written", "is a file"),
    ("data --input {corpus} --out /proc/d", DISK, "cannot be written"),
    ("data --input hf: --out d", USAGE, "names no dataset", "hf:NAME"),
    ("data --input {corpus} --out d --seed first", USAGE, "seed must be a whole number"),
]


@table(LINES)
def test_command_lines(case, fails):
    line, code, *words = case
    if "--wandb" in line:
        try:
            import wandb  # noqa: F401

            pytest.skip("wandb is installed")
        except ImportError:
            pass
    fails(line, code, *words)


@table([case for case in LINES if case[0].startswith("train --data") and "--wandb" not in case[0]])
def test_a_training_that_cannot_be_leaves_nothing(case, fails, tmp_path):
    """Or its folder would refuse the corrected command as another recipe."""
    fails(*case)
    assert list(tmp_path.iterdir()) == []


# Recipes.

RECIPES = [
    ("empty", b"", "must hold lines of option: value"),
    ("comment", b"# steps: 5\n", "must hold lines of option: value"),
    ("list", b"- steps\n- 5\n", "must hold lines of option: value"),
    ("number", b"5\n", "must hold lines of option: value"),
    ("text", b"steps 5\n", "must hold lines of option: value"),
    ("number as key", b"5: steps\n", "must hold lines of option: value"),
    ("binary", bytes(range(256)), "is not YAML"),
    ("nul", b"steps: 5\0", "is not YAML"),
    ("latin-1", "prompt: caf\xe9".encode("latin-1"), "is not YAML"),
    ("tabs", b"steps:\n\t5\n", "is not YAML at line 2"),
    ("open bracket", b"steps: 5\nmixer_options: {ways: 3\n", "is not YAML at line 3"),
    ("two documents", b"steps: 5\n---\nsteps: 6\n", "is not YAML"),
    ("python object", b"steps: !!python/object/apply:os.getpid []\n", "is not YAML at line 1"),
    ("no such date", b"steps: 2024-13-45\n", "is not YAML"),
    ("deep", b"[" * 5000, "is not YAML"),
    ("unknown key", b"stepz: 5\n", "unknown option 'stepz'", "did you mean 'steps'?"),
    ("flag as key", b"--steps: 5\n", "unknown option '--steps'", "did you mean 'steps'?"),
    ("dashes", b"batch-size: 5\n", "unknown option 'batch-size'", "did you mean 'batch_size'?"),
    ("recipe in a recipe", b"recipe: other.yaml\n", "unknown option 'recipe'"),
    ("of another command", b"arms: [residual]\n", "unknown option 'arms'"),
    ("text for a number", b"steps: many\n", "steps must be a whole number, got 'many'"),
    ("fraction for a number", b"steps: 1.5\n", "steps must be a whole number, got 1.5"),
    ("bool for a number", b"steps: yes\n", "steps must be a whole number, got True"),
    ("nothing for a number", b"steps:\n", "steps must be a whole number, got None"),
    ("list for a number", b"steps: [1, 2]\n", "steps must be a whole number, got [1, 2]"),
    ("dictionary for a number", b"lr: {a: 1}\n", "lr must be a number"),
    ("nan for a whole number", b"steps: .nan\n", "steps must be a whole number, got nan"),
    ("infinity for a whole number", b"steps: .inf\n", "steps must be a whole number, got inf"),
    ("number for text", b"data: 5\n", "data must be text, got 5"),
    ("nothing for text", b"out:\n", "out must be text, got None"),
    ("nul in text", b'out: "a\\0b"\n', "out must be text, got 'a\\x00b'"),
    ("text for a bool", b"quiet: 'true'\n", "quiet must be true or false, got 'true'"),
    ("number for a bool", b"quiet: 1\n", "quiet must be true or false, got 1"),
    ("wrong choice", b"schedule: cosin\n", "schedule must be cosine or wsd or rsqrt", "did you mean 'cosine'?"),
    ("list for a choice", b"schedule: [cosine]\n", "schedule must be cosine or wsd or rsqrt"),
    ("on for compile", b"compile: on\n", "compile must be off or sublayers or model, got True"),
    ("text for options", b"mixer_options: ways=3\n", "mixer_options must be written as option=value"),
    ("numbers as options", b"mixer_options: {3: 4}\n", "mixer_options must be written as option=value"),
    ("a list as an option", b"mixer: attnres\nmixer_options: {ways: [3]}\n", "ways must be 1 or 3, got [3]"),
    ("a date as an option", b"mixer: attnres\nmixer_options: {ways: 2024-01-01}\n", "ways must be 1 or 3"),
    ("negative", b"lr: -1\n", "lr must be a number above 0"),
]


@table(RECIPES)
def test_recipes(case, fails, tmp_path):
    _, content, *words = case
    (tmp_path / "recipe.yaml").write_bytes(content)
    given = "" if b"data:" in content else "--data {data}"
    given += "" if b"out:" in content else " --out run"
    given += "" if b"mixer:" in content else " --device nowhere"  # should the recipe be taken, it ends there
    one_sentence(fails(f"train {given} --recipe recipe.yaml", USAGE), words)


@table(
    [
        ("train --recipe nowhere.yaml", USAGE, "cannot read the recipe nowhere.yaml: No such file"),
        ("eval --recipe {tmp}", USAGE, "cannot read the recipe {tmp}: Is a directory"),
        ("data --recipe {corpus}/00.txt/x", USAGE, "cannot read the recipe", "Not a directory"),
        ("generate --recipe ''", USAGE, "cannot read the recipe"),
        ("compare --recipe", USAGE, "--recipe: expected one argument"),
    ]
)
def test_recipes_that_cannot_be_read(case, fails):
    fails(*case)


@table(
    [
        ("compare", "seeds: 3", "seeds must be a list, got 3"),
        ("compare", "seeds: [a]", "seeds must be a whole number, got 'a'"),
        ("compare", "seeds: [1.5]", "seeds must be a whole number, got 1.5"),
        ("compare", "arms: residual", "arms must be a list, got 'residual'"),
        ("compare", "arms: [{attnres: 3}]", "arms must be text, got {{'attnres': 3}}"),
        ("compare", "out: s\nseeds: []\narms: [residual]", "seeds must be a list of at least one integer"),
        ("data", "input: book.txt", "input must be a list, got 'book.txt'"),
        ("data", "val_fraction: half", "val_fraction must be a number, got 'half'"),
        ("eval", "input: [1]", "input must be text, got 1"),
        ("generate", "top_p: [0.9]", "top_p must be a number, got [0.9]"),
    ]
)
def test_recipes_of_other_commands(case, fails, tmp_path):
    command, text, *words = case
    (tmp_path / "recipe.yaml").write_text(text)
    fails(f"{command} --recipe recipe.yaml", USAGE, *words)


# Corpora.

GOOD = "\n".join(small.LINES * 10).encode()
CORPORA = [
    ("empty file", {"a.txt": b""}, "a.txt", "", "a.txt is empty"),
    ("white space", {"a.txt": b" \n\n\t "}, "a.txt", "", "holds no text"),
    ("one character", {"a.txt": b"x"}, "a.txt", "", "too short"),
    ("one word", {"a.txt": b"word"}, "a.txt", "", "too short"),
    ("one line as lines", {"a.txt": b"word"}, "a.txt", "--document line", "too short"),
    ("binary", {"a.txt": GOOD + bytes(range(256))}, "a.txt", "", "a.txt is not UTF-8 text", "NUL byte"),
    ("latin-1", {"a.txt": "caf\xe9 au lait".encode("latin-1")}, "a.txt", "", "not UTF-8 text", "0xe9", "byte 3"),
    ("cut off", {"a.txt": GOOD + "é".encode()[:1]}, "a.txt", "", "the last character is cut off"),
    ("UTF-16", {"a.txt": GOOD.decode().encode("utf-16")}, "a.txt", "", "not UTF-8 text"),
    ("unknown extension", {"a.docx": GOOD}, "a.docx", "", "extension that is not known", ".txt", ".parquet"),
    ("no extension", {"a": GOOD}, "a", "", "extension that is not known"),
    ("empty folder", {"sub/x.log": b"x"}, "sub", "", "holds no corpus", ".txt"),
    ("folder of empty files", {"sub/x.txt": b"", "sub/y.md": b""}, "sub", "", "holds no corpus"),
    ("a broken file in a folder", {"sub/x.txt": GOOD, "sub/y.txt": b"\xff\xfe"}, "sub", "", "y.txt is not UTF-8"),
    ("too few entries", {"a.txt": b"a b\n\nc d"}, "a.txt", "", "too small for a vocabulary of 300", "it yields"),
    ("no JSON", {"a.jsonl": b"{'text': 1}\n"}, "a.jsonl", "", "a.jsonl:1 is not JSON"),
    ("no JSON on line 2", {"a.jsonl": b'{"text": "a"}\n{"text"'}, "a.jsonl", "", "a.jsonl:2 is not JSON"),
    ("JSON list", {"a.jsonl": b'["text"]\n'}, "a.jsonl", "", "a.jsonl:1 is JSON but no object"),
    ("no such field", {"a.jsonl": b'{"body": "x"}\n'}, "a.jsonl", "", "no field 'text'", "'body'", "text_field"),
    ("wrong text field", {"a.jsonl": b'{"text": "x"}\n'}, "a.jsonl", "--text-field body", "no field 'body'"),
    ("number as text", {"a.jsonl": b'{"text": 5}\n'}, "a.jsonl", "", "field 'text' is int, not text"),
    ("half a pair", {"a.jsonl": b'{"text": "\\ud83c"}\n'}, "a.jsonl", "", "half a surrogate pair"),
    ("empty jsonl", {"a.jsonl": b"\n\n"}, "a.jsonl", "", "holds no text"),
    ("no gzip", {"a.jsonl.gz": b'{"text": "x"}\n'}, "a.jsonl.gz", "", "does not decompress"),
    ("cut gzip", {"a.jsonl.gz": gzip.compress(b'{"text": "x"}\n' * 99)[:-9]}, "a.jsonl.gz", "", "does not decompress"),
    ("no parquet", {"a.parquet": GOOD}, "a.parquet", "", "cannot be read as parquet"),
    ("link to nothing", {"sub/b.txt": None}, "sub", "", "b.txt cannot be read"),
    ("missing among others", {"a.txt": GOOD}, "a.txt b.txt", "", "There is no file or folder b.txt"),
]


@table(CORPORA)
def test_corpora(case, fails, tmp_path):
    _, files, inputs, flags, *words = case
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if content is None:
            path.symlink_to(tmp_path / "nowhere")
        else:
            path.write_bytes(content)
    fails(f"data --input {inputs} --out d --vocab-size 300 {flags}", DATA, *words)
    assert not (tmp_path / "d").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("content", [b"", b"\0binary\xff", b"   "])
def test_text_that_cannot_be_measured(content, fails, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    fails("eval --run {run} --input a.txt", DATA, "a.txt")


def test_a_pipe_is_no_corpus(fails, tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    fails("data --input a.txt --out d", DATA, "a.txt is neither a file nor a folder")


def test_a_dataset_from_elsewhere(fails, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    fails("data --input hf:some/name --out d", DATA, "needs the datasets library", "pip install datasets")


# Prepared data.


def meta(**changes):
    """A mutation of meta.json; a function gets what was there."""

    def change(folder):
        found = json.loads((folder / "meta.json").read_text())
        for path, value in changes.items():
            *parents, last = path.split("__")
            inner = found
            for key in parents:
                inner = inner[key]
            inner[last] = value(inner[last]) if callable(value) else value
        (folder / "meta.json").write_text(json.dumps(found))

    return change


def cut(name, size):
    def change(folder):
        with open(folder / name, "r+b") as file:
            file.truncate(size)

    return change


def remove(name):
    def change(folder):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def write(name, content):
    def change(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content(folder))

    return change


PREPARED = [
    ("no meta", remove("meta.json"), "it has no meta.json"),
    ("meta cut", cut("meta.json", 40), "meta.json is damaged, it is not JSON"),
    ("meta binary", write("meta.json", b"\x80\x02}q"), "meta.json is damaged, it is not JSON"),
    ("meta of somebody else", write("meta.json", b'{"a": 1}'), "is not one of `depthmix data`"),
    ("meta a list", write("meta.json", b"[1]"), "is not one of `depthmix data`"),
    ("of a later version", meta(version=2), "has version 2 of the format"),
    ("unknown type", meta(dtype="float32"), "damaged (dtype)"),
    ("no vocabulary", meta(vocab_size="many"), "damaged (vocab_size)"),
    ("a path as a name", meta(tokenizer="../tokenizer.json"), "damaged (tokenizer)"),
    ("a path as a shard", meta(splits__train__shards=["../../etc/passwd"]), "damaged (shards of train)"),
    ("no validation", meta(splits={"train": {}}), "damaged (split train)"),
    ("other counts", meta(splits__val__tokens=lambda n: n + 1), "val split has 1235 tokens on disk and 1236"),
    ("no tokenizer", remove("tokenizer.json"), "tokenizer.json is missing"),
    ("no shard", remove("val-00000.bin"), "val-00000.bin is missing"),
    ("empty shard", cut("train-00000.bin", 0), "train-00000.bin is damaged, it is cut short"),
    ("half a token", cut("train-00000.bin", 101), "train-00000.bin is damaged, it is cut short"),
    ("shard cut", cut("train-00000.bin", 100), "train split has 50 tokens on disk and 4912"),
]


@table(PREPARED)
def test_prepared_data(case, fails, tmp_path):
    _, change, *words = case
    shutil.copytree(small.data(), tmp_path / "data")
    change(tmp_path / "data")
    fails(TRAIN, DATA, *words, data=tmp_path / "data")
    assert not (tmp_path / "run").exists()


def test_tokens_beyond_the_vocabulary(fails, tmp_path):
    """Checksums are not compared at every start, but no token may point past the embedding."""
    shutil.copytree(small.data(), tmp_path / "data")
    tokens = np.full(4912, 65535, np.uint16)
    (tmp_path / "data" / "train-00000.bin").write_bytes(tokens.tobytes())
    fails(TRAIN, DATA, "damaged", data=tmp_path / "data")


# Runs.


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(small.run().path, tmp_path / "copy")
    return tmp_path / "copy"


def recipe(**changes):
    """A mutation of recipe.yaml."""

    def change(folder):
        found = yaml.safe_load((folder / "recipe.yaml").read_text())
        (folder / "recipe.yaml").write_text(yaml.safe_dump({**found, **changes}))

    return change


def every(change):
    """A mutation of every checkpoint."""

    def all_of_them(folder):
        for path in list_checkpoints(folder / "checkpoints"):
            change(path)

    return all_of_them


def resave(**changes):
    """The newest checkpoint written again with other tensors: whole, and wrong."""

    def change(folder):
        saved = load_checkpoint(list_checkpoints(folder / "checkpoints")[0])
        model = {k: v for k, v in {**saved.model, **changes}.items() if v is not None}
        save_checkpoint(folder / "checkpoints", saved.step, model, saved.optimizer, saved.state, 1)

    return change


def pickled(folder):
    """What torch.save would have written, were it to run something."""
    return pickle.dumps(print)


def foreign(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"PK")


def unclosed(folder):
    (folder / "model.safetensors").write_bytes((500).to_bytes(8, "little") + b"{" * 100)


def manifest(**changes):
    def change(folder):
        found = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**found, **changes}, indent=1) + "\n")

    return change


BROKEN_RUNS = [
    ("nothing in it", foreign, "is not a run folder: it has no recipe.yaml"),
    ("no recipe", remove("recipe.yaml"), "is not a run folder: it has no recipe.yaml"),
    ("empty recipe", cut("recipe.yaml", 0), "recipe.yaml is missing or empty"),
    ("binary recipe", write("recipe.yaml", b"\x80\xff"), "recipe.yaml is damaged"),
    ("recipe cut", write("recipe.yaml", b"data: {x"), "recipe.yaml is damaged: it is not YAML"),
    ("recipe a list", write("recipe.yaml", b"- a\n"), "recipe.yaml is damaged: it does not map names"),
    ("text in the recipe", recipe(dim="wide"), "recipe.yaml is damaged: dim is 'wide'"),
    ("null in the recipe", recipe(rope_theta=None), "recipe.yaml is damaged: rope_theta is None"),
    ("wrong options in the recipe", recipe(mixer_options={"ways": 3}), "describes no model", "unknown option 'ways'"),
    ("no such mixer", recipe(mixer="resnet"), "describes no model", "unknown mixer 'resnet'"),
    ("another mixer", recipe(mixer="mhc"), "lacks mixer.", "another mechanism or size than mhc"),
    ("another size", recipe(dim=64), "another size", "embedding.weight"),
    ("more blocks", recipe(n_blocks=3), "lacks", "another mechanism or size"),
    ("fewer blocks", recipe(n_blocks=1), "has norms.2", "another mechanism or size"),
    ("impossible size", recipe(n_heads=5), "describes no model", "n_heads must divide dim=32"),
    ("no tokenizer", remove("tokenizer.json"), "There is no tokenizer file"),
    ("tokenizer cut", cut("tokenizer.json", 200), "is not a tokenizer.json"),
    ("tokenizer of somebody else", write("tokenizer.json", b"{}"), "is not a tokenizer.json"),
    ("no checkpoints", remove("checkpoints"), "has no checkpoint yet"),
    ("no checkpoint", every(lambda p: shutil.rmtree(p)), "has no checkpoint yet"),
    ("no model", every(remove("model.safetensors")), "No checkpoint in", "model.safetensors is missing"),
    ("model cut", every(cut("model.safetensors", 1000)), "model.safetensors has 1000 bytes where manifest.json says"),
    ("model empty", every(cut("model.safetensors", 0)), "model.safetensors has 0 bytes"),
    ("pickle for a model", every(write("model.safetensors", pickled)), "model.safetensors has", "manifest.json says"),
    ("not safetensors", every(unclosed), "model.safetensors has 108 bytes"),
    ("a foreign checkpoint", every(foreign), "it has no manifest.json"),
    ("no manifest", every(remove("manifest.json")), "it has no manifest.json"),
    ("manifest cut", every(cut("manifest.json", 60)), "manifest.json is damaged"),
    ("manifest of somebody else", every(write("manifest.json", b"{}")), "manifest.json was not written by depthmix"),
    ("of a later version", every(manifest(version=2)), "has format version 2, this depthmix reads 1"),
    ("state binary", every(write("state.json", b"\x80")), "state.json has 1 bytes"),
    ("a parameter missing", resave(**{"head.weight": None}), "lacks head.weight"),
    ("a parameter too many", resave(**{"tail.weight": torch.zeros(2)}), "has tail.weight"),
    ("another shape", resave(**{"head.weight": torch.zeros(300, 16)}), "has head.weight of shape [300, 16]"),
    ("fewer entries", resave(**{"embedding.weight": torch.zeros(200, 32)}), "has 300 entries and the model 200"),
    ("a scalar embedding", resave(**{"embedding.weight": torch.zeros(())}), "embedding.weight of shape []"),
]


@table(BROKEN_RUNS)
def test_runs(case, fails, copied):
    _, change, *words = case
    change(copied)
    for command in ("generate --prompt The --max-tokens 2", "eval"):
        fails(f"{command} --run {{run}} --device cpu", CHECKPOINT, *words, run=copied)


def flip(path):
    """One bit."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_one_checkpoint_of_several(fails, copied):
    newest, older = list_checkpoints(copied / "checkpoints")
    flip(newest / "model.safetensors")
    words = "model.safetensors does not match its checksum", f"the newest older good one is {older}"
    fails(f"generate --run {newest}", CHECKPOINT, "Cannot use the checkpoint", *words)
    (older / "state.json").unlink()
    fails(f"generate --run {newest}", CHECKPOINT, "there is no older good one")
    fails(f"eval --run {copied}/checkpoints/step-00000041", CHECKPOINT, "does not exist")
    fails(f"eval --run {copied}/checkpoints", CHECKPOINT, "is not a run folder")


def test_a_broken_checkpoint_is_passed_over_with_a_warning(copied, capsys):
    newest = list_checkpoints(copied / "checkpoints")[0]
    flip(newest / "optimizer.safetensors")
    assert main(["generate", "--run", str(copied), "--max-tokens", "2", "--device", "cpu"]) == 0
    assert f"{newest} is broken and was passed over" in capsys.readouterr().err


def test_the_data_of_a_run_has_gone_or_changed(fails, copied, tmp_path):
    recipe(data="gone")(copied)
    fails("eval --run {run}", DATA, "There is no folder gone", run=copied)
    shutil.copytree(small.data(), tmp_path / "data")
    meta(vocab_size=400)(tmp_path / "data")
    recipe(data=str(tmp_path / "data"))(copied)
    fails("eval --run {run}", DATA, "has 400 entries and the model's 300", run=copied)


RESUMED = [
    ("recipe empty", cut("recipe.yaml", 0), CHECKPOINT, "recipe.yaml is missing or empty"),
    ("recipe binary", write("recipe.yaml", b"\xff\xff"), CHECKPOINT, "recipe.yaml is damaged"),
    ("recipe changed", recipe(lr=1.0), CHECKPOINT, "another recipe: lr was 1.0 and is 0.01"),
    ("metrics damaged", write("metrics.jsonl", b"loss 5\n"), CHECKPOINT, "metrics.jsonl:1 is damaged"),
    ("all models broken", every(cut("model.safetensors", 9)), CHECKPOINT, "No checkpoint in", "move that folder away"),
    ("optimizer gone", every(remove("optimizer.safetensors")), CHECKPOINT, "optimizer.safetensors is missing"),
    ("another model", resave(**{"head.weight": torch.zeros(2, 2)}), CHECKPOINT, "of shape [2, 2]"),
    ("another tokenizer", write("tokenizer.json", b"{}"), DATA, "not the tokenizer this run began with"),
    ("lock is a folder", lambda p: ((p / ".lock").unlink(), (p / ".lock").mkdir()), DISK, ".lock", "is a directory"),
    ("log is a folder", lambda p: ((p / "log.txt").unlink(), (p / "log.txt").mkdir()), DISK, "log.txt", "writ"),
]


@table(RESUMED)
def test_runs_to_go_on_with(case, fails, copied):
    _, change, code, *words = case
    (copied / "result.json").unlink()
    change(copied)
    config = dataclasses.replace(
        small.config(copied), **{k: v for k, v in vars(small_recipe()).items() if k not in ("out",)}
    )
    fails(shlex.join(["train", *small.flags(config)]), code, *words)


def small_recipe():
    from depthmix.train.config import TrainConfig

    return TrainConfig(**small.run().read_recipe())


def test_a_result_that_is_damaged(fails, copied):
    config = dataclasses.replace(small_recipe(), out=str(copied))
    for content, words in ((b"{", "is damaged: it is not JSON"), (b"[]", "is damaged: it is not a JSON object")):
        (copied / "result.json").write_bytes(content)
        fails(shlex.join(["train", *small.flags(config)]), CHECKPOINT, "result.json", words)


# Places to write to, and disks.


@table(
    [
        ("train", "f", CHECKPOINT, "f is a file; choose another folder"),
        ("train", "f/run", CHECKPOINT, "f/run", "choose another folder"),
        ("train", "full", CHECKPOINT, "is not a run folder (it holds mine.txt and no recipe.yaml)"),
        ("train", "/proc/run", DISK, "Could not write /proc/run"),
        ("train", "x" * 300, CHECKPOINT, "file name too long"),
        ("compare --arms residual", "f", CHECKPOINT, "f is a file; choose a folder"),
        ("compare --arms residual", "f/run", CHECKPOINT, "choose another folder"),
        ("compare --arms residual", "/proc/run", DISK, "/proc/run"),
    ]
)
def test_out(case, fails, tmp_path):
    command, out, code, *words = case
    (tmp_path / "f").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    line = TRAIN.replace("train", command, 1).replace("--out run", f"--out {out}")
    fails(line, code, *words)
    assert (tmp_path / "f").read_text() == "mine"


def limited(argv, size, cwd):
    """The program as a process whose files may not grow past a size, as on a full disk."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    command = [str(PROGRAM), *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, preexec_fn=limit)


def test_a_disk_that_fills_up_while_training(tmp_path):
    """The second checkpoint does not fit any more: the first is still good, and the run goes on once there is room."""
    config = small.config(tmp_path / "run", steps=4, save_every=1)
    done = limited(["train", *small.flags(config)], 20_000, tmp_path)
    assert done.returncode == DISK, done.stderr
    one_sentence(done.stderr, ["Could not write the checkpoint of step 1", "larger than a limit", "no earlier one"])
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert main(["train", *small.flags(config)]) == 0


def test_a_disk_that_is_full_while_preparing(tmp_path):
    done = limited(["data", "--input", str(small.corpus()), "--out", "d", "--vocab-size", "300"], 2000, tmp_path)
    assert done.returncode == DISK, done.stderr
    one_sentence(done.stderr, ["d cannot be written"])
    assert list(tmp_path.iterdir()) == []


def test_real_processes(tmp_path):
    """What is tested above within one process, as a user sees it."""
    for argv, code, word in (
        (["train", "--steps", "x"], USAGE, "steps must be a whole number"),
        (["generate", "--run", "nowhere"], CHECKPOINT, "does not exist"),
    ):
        done = subprocess.run([str(PROGRAM), *argv], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert done.stdout == ""
        one_sentence(done.stderr, [word])
        assert done.stderr.count("\n") == 1


def test_there_are_enough():
    lists = (LINES, RECIPES, CORPORA, PREPARED, BROKEN_RUNS, RESUMED)
    assert sum(map(len, lists)) >= 150
