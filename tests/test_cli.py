"""The command line: every option twice, as a flag and in a recipe, and every command once for real."""

import dataclasses
import itertools
import json
import math
import shutil
import subprocess
import sys
import typing
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from torch.nn import functional

import depthmix
from depthmix import list_mixers, strict_yaml, values
from depthmix.cli import COMMANDS, main
from depthmix.config import (
    AccelerateConfig,
    CompareConfig,
    DataConfig,
    EvalConfig,
    ExploreConfig,
    GenerateConfig,
    InspectConfig,
    PlanConfig,
    ReportConfig,
    RetrofitConfig,
    TrainConfig,
)
from depthmix.data.dataset import TokenData
from depthmix.errors import USAGE, UserError
from depthmix.mixers import mixer_class
from depthmix.runs.folder import RunFolder
from depthmix.runs.restore import load_model
from train import small

PROGRAM = Path(sys.executable).with_name("depthmix")
CONFIGS = {name: config for name, (config, _, _) in COMMANDS.items() if config}
FIELDS = [
    (command, f.name) for command, config in CONFIGS.items() for f in dataclasses.fields(config) if f.metadata["flag"]
]


@pytest.fixture
def parsed(monkeypatch):
    """The configuration a command line comes to, without running it."""

    def parse(command, *argv):
        got = []
        monkeypatch.setitem(COMMANDS, command, (CONFIGS[command], got.append, ""))
        assert main([command, *map(str, argv)]) == 0
        return got[0]

    return parse


def spoken(capsys, *argv, code=0):
    """What a command prints."""
    assert main([*map(str, argv)]) == code, capsys.readouterr().err
    return capsys.readouterr().out


# Options.


@pytest.mark.parametrize("command", [*COMMANDS, "completion"])
def test_help(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10000")
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: depthmix {command}")
    for field in dataclasses.fields(CONFIGS[command]) if command in CONFIGS else ():
        if field.metadata["flag"]:
            assert f"--{field.name.replace('_', '-')} " in text
            assert field.metadata["help"] in text, field.name
    if command in CONFIGS:
        assert "--recipe FILE" in text
        assert " ".join(CONFIGS[command].__doc__.split()) in " ".join(text.split())


def test_the_programs_help(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name, (_, _, about) in COMMANDS.items():
        assert f"{name} {about}" in text
    assert "Exit codes: 0 done; 1 a bug (--debug shows where); 2 wrong option" in text
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"depthmix {depthmix.__version__}\n"


def test_defaults_are_shown(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10000")
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    text = capsys.readouterr().out
    for word in (
        "(default: 0.0015)",
        "(default: residual)",
        "(default: True)",
        "Seeds; every arm runs once per seed (default: 0)",
    ):
        assert word in text
    assert "(default: )" not in text
    assert "(default: None)" not in text


def another(hint, default):
    """A value of the type that is not the default."""
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != default)
    if get_origin(hint) is list:
        if get_origin(get_args(hint)[0]) is dict:
            return [{"match": "a.*", "lr": 0.25}, {"match": "b", "none": None}]
        return [3, 5] if get_args(hint) == (int,) else ["one", "two words", "x:a=1,b=none"]
    if get_origin(hint) is dict:
        return {"block_size": 4, "on": True, "none": None, "word": "a=b", "share": 0.25}
    if hint is bool:
        return not default
    return {str: "text: with # and 'quotes' é", int: 7, float: 0.375}.get(hint, 7)


@pytest.mark.parametrize("command", CONFIGS)
def test_every_option_is_a_flag_and_a_line_of_a_recipe(command, parsed, tmp_path):
    for name in [name for of, name in FIELDS if of == command]:
        check_option(command, name, parsed, tmp_path)


def check_option(command, name, parsed, tmp_path):
    config = CONFIGS[command]
    hint, default = typing.get_type_hints(config)[name], getattr(config(), name)
    value = another(hint, default)
    expected = dataclasses.replace(config(), **{name: value})
    assert expected != config()
    flag = "--" + name.replace("_", "-")
    given = [flag if value else f"--no-{name.replace('_', '-')}"] if hint is bool else [flag, *small.written(value)]
    assert parsed(command, *given) == expected, name
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({name: value}, allow_unicode=True))
    found = parsed(command, "--recipe", recipe)
    assert found == expected, name
    assert type(getattr(found, name)) is type(value), name


def test_flags_come_on_top_of_a_recipe(parsed, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("dim: 48\nsteps: 9\nquiet: true\nmixer: attnres\nmixer_options: {ways: 3, block_size: 4}\n")
    plain = dataclasses.replace(
        TrainConfig(), dim=48, steps=9, quiet=True, mixer="attnres", mixer_options={"ways": 3, "block_size": 4}
    )
    assert parsed("train", "--recipe", recipe) == plain
    found = parsed("train", "--steps", 5, "--recipe", recipe, "--no-quiet", "--mixer-options", "block_size=none")
    expected = dataclasses.replace(plain, steps=5, quiet=False, mixer_options={"block_size": None})  # whole values
    assert found == expected


@pytest.mark.parametrize(
    ("lines", "flags", "found"),
    [
        ("mixer: attnres:ways=2", "--mixer-options block_size=4", ("attnres", {"block_size": 4})),
        ("mixer: attnres\nmixer_options: {ways: 2}", "--mixer attnres:block_size=4", ("attnres:block_size=4", {})),
        ("mixer: attnres\nmixer_options: {ways: 2}", "--mixer dca", ("dca", {})),
        ("mixer: attnres\nmixer_options: {ways: 2}", "--mixer attnres", ("attnres", {"ways": 2})),
        ("mixer: attnres:ways=2", "--mixer dca --mixer-options window=2", ("dca", {"window": 2})),
        ("mixer_options: {ways: 2}", "--mixer attnres", ("attnres", {"ways": 2})),
        ("dim: 48", "--mixer-options ways=2", ("residual", {"ways": 2})),
    ],
)
def test_the_options_of_a_recipes_mixer_are_not_those_of_another(lines, flags, found, parsed, tmp_path):
    (tmp_path / "recipe.yaml").write_text(lines)
    config = parsed("train", "--recipe", tmp_path / "recipe.yaml", *flags.split())
    assert (config.mixer, config.mixer_options) == found


def test_numbers_with_an_exponent_are_numbers_everywhere(tmp_path):
    """YAML 1.1 reads 1e-3 as text, and nested values of a recipe are not coerced."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("power: {difference: 1e-3, spread: [.5E2, 2.e+1]}\nlabel: 1e-3x\nout: e-3\n")
    found = strict_yaml.read_recipe("compare", str(recipe))
    assert found == {"power": {"difference": 0.001, "spread": [50.0, 20.0]}, "label": "1e-3x", "out": "e-3"}


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("lr: 1e-3", "lr", 0.001),  # text to YAML
        ("lr: 5.E-2", "lr", 0.05),
        ("groups: [{match: a, lr: 1e-3}]", "groups", [{"match": "a", "lr": 0.001}]),
        ("steps: '010'", "steps", 10),
        ("steps: 00_7", "steps", 7),
        ("steps: 0x1F", "steps", 31),
        ("out: '12:30'", "out", "12:30"),
        ("out: 1e3-wide", "out", "1e3-wide"),
        ("lr: 1", "lr", 1.0),
        ("steps: 1_000", "steps", 1000),
        ("steps: 10.0", "steps", 10),
        ("compile: off", "compile", "off"),  # false to YAML
        ("compile: model", "compile", "model"),
        ("n_kv_heads: none", "n_kv_heads", None),
        ("n_kv_heads: null", "n_kv_heads", None),
        ("n_kv_heads:", "n_kv_heads", None),
        ("eval_tokens: 64", "eval_tokens", 64),
        ("quiet: yes", "quiet", True),
        ("mixer_options: {}", "mixer_options", {}),
        ("mixer_options: [ways=3, gate=none]", "mixer_options", {"ways": 3, "gate": None}),
        ("wandb: 'off'", "wandb", "off"),
        ("data: none", "data", "none"),
    ],
)
def test_what_people_write_into_recipes(line, name, value, parsed, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(line)
    found = getattr(parsed("train", "--recipe", recipe), name)
    assert found == value
    assert type(found) is type(value)


def test_a_runs_recipe_is_a_recipe(parsed):
    run = small.run()
    assert parsed("train", "--recipe", run.path / "recipe.yaml") == TrainConfig(**run.read_recipe())


def test_values_of_mixer_options(parsed):
    words = ["a=1", "b=-0.5", "c=1e-3", "d=True", "e=false", "f=None", "g=softmax", "h=", "i=x=y"]
    found = parsed("train", "--mixer-options", *words).mixer_options
    assert found == {
        "a": 1,
        "b": -0.5,
        "c": 0.001,
        "d": True,
        "e": False,
        "f": None,
        "g": "softmax",
        "h": "",
        "i": "x=y",
    }
    assert type(found["d"]) is bool


@pytest.mark.parametrize(
    ("command", "where"), [("train", "train.loop.train"), ("retrofit", "runs.retrofit.retrofit_folder")]
)
def test_a_mixer_may_have_its_options_behind_it(command, where, tmp_path, monkeypatch, capsys):
    got = []

    def run(config):
        got.append((config.mixer, config.mixer_options))
        raise UserError("so far")

    monkeypatch.setattr(f"depthmix.{where}", run)
    (tmp_path / "recipe.yaml").write_text("mixer: attnres:ways=2\n")
    for given in (["--mixer", "attnres:block_size=all,ways=2"], ["--recipe", tmp_path / "recipe.yaml"]):
        assert main([command, *map(str, given)]) == USAGE
    for given in (["--mixer", "attnres", "--mixer-options", "ways=3"], ["--mixer", "dca"]):
        assert main([command, *given]) == USAGE
    rules = [{"block_size": "all", "ways": 2}, {"ways": 2}, {"ways": 3}]
    assert got == [*(("attnres", options) for options in rules), ("dca", {})]
    assert capsys.readouterr().err.count("so far") == 4
    for mixer, more, words in (
        (
            "attnres:ways=2",
            ["--mixer-options", "block_size=4"],
            f"{command}: options of the mixer are in 'attnres:ways=2' and",
        ),
        ("attnres:way=2", [], "mixer 'attnres:way=2': attnres: unknown option 'way'"),
        ("atnres:ways=2", [], "did you mean 'attnres'?"),
    ):
        assert main([command, "--mixer", mixer, *more]) == USAGE
        assert words in capsys.readouterr().err
    assert len(got) == 4


def test_flags_that_take_several_values_come_twice(parsed):
    assert parsed("data", "--input", "a", "b", "--input", "c").input == ["a", "b", "c"]
    found = parsed("train", "--mixer-options", "a=1", "--mixer-options", "b=2").mixer_options
    assert found == {"a": 1, "b": 2}


def test_none_and_negative_numbers_on_the_command_line(parsed):
    found = parsed("train", "--n-kv-heads", "None", "--seed", "-3", "--lr=-1e-3")
    assert (found.n_kv_heads, found.seed, found.lr) == (None, -3, -0.001)


# Commands, for real.


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A corpus prepared and a model trained from the command line."""
    folder = tmp_path_factory.mktemp("made")
    data = DataConfig(input=[str(small.corpus())], out=str(folder / "data"), vocab_size=280, val_fraction=0.25)
    assert main(["data", *small.flags(data)]) == 0
    config = small.config(folder / "run", data=str(folder / "data"), steps=8)
    assert main(["train", *small.flags(config)]) == 0
    return folder


def test_data_says_what_it_took_and_what_it_skipped(tmp_path, capsys):
    texts, out = tmp_path / "texts", tmp_path / "out"
    texts.mkdir()
    for i in range(3):
        (texts / f"{i}.txt").write_text(f"{i} " + "The sea is wide.\n" * 60)
    (texts / "one.py").write_text("print('the sea')\n")
    for name in ("a.csv", "b.csv", "Makefile"):
        (texts / name).write_text("x")
    said = spoken(capsys, "data", "--input", texts, "--out", out, "--vocab-size", 262, "--val-fraction", 0.25)
    train, val = (TokenData.open(out).split(name) for name in ("train", "val"))
    assert said.splitlines() == [
        f"prepared data in {out}, with a vocabulary of 262",
        f"    train: 3 documents, {train.n_tokens:,} tokens, {train.n_bytes:,} bytes",
        f"    val: 1 document, {val.n_tokens:,} tokens, {val.n_bytes:,} bytes",
        "    read: 4 files (3 .txt, 1 .py)",
        "    skipped: 3 files (2 .csv, 1 without extension)",
    ]
    assert train.n_bytes + val.n_bytes == 3 * 1022 + 17


def test_data_and_train(made, capsys):
    assert TokenData.open(made / "data").vocab_size == 280
    assert main(["train", "--recipe", str(made / "run" / "recipe.yaml")]) == 0  # finished: said again
    out, err = capsys.readouterr()
    result = json.loads((made / "run" / "result.json").read_text())
    assert out == (
        f"validation loss {result['val_loss']:.4f}, perplexity {result['perplexity']:.2f}, "
        f"{result['bits_per_byte']:.4f} bits per byte; run in {made / 'run'}\n"
    )
    assert err == ""
    environment = json.loads((made / "run" / "environment.json").read_text())
    assert environment["command"] == sys.argv


def test_generate(made, capsys):
    run = ["generate", "--run", made / "run", "--prompt", "The", "--max-tokens", 12, "--device", "cpu"]
    first = spoken(capsys, *run, "--seed", 1)
    assert first.endswith("\n")
    assert spoken(capsys, *run, "--seed", 1) == first
    assert spoken(capsys, *run, "--seed", 2) != first


def by_hand(run, rows) -> tuple[float, int]:
    """Mean nats per token over rows of token ids, one row at a time."""
    trained = load_model(run, torch.device("cpu"))
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            row = torch.as_tensor(row)[None]
            total += float(
                functional.cross_entropy(trained.model(row[:, :-1])[0].double(), row[0, 1:], reduction="sum")
            )
            count += row.shape[1] - 1
    return total / count, count


def test_eval_on_text(made, tmp_path, capsys):
    texts = ["The sea is wide.\n" * 20, "東京 and a boat at night"]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    tokenizer = Tokenizer.from_file(str(made / "run" / "tokenizer.json"))
    ids = [i for text in texts for i in [*tokenizer.encode(text).ids, 0]]
    loss, count = by_hand(made / "run", [ids[i : i + 17] for i in range(0, len(ids) - 1, 16)])
    assert count == len(ids) - 1
    argv = ["eval", "--run", made / "run", "--input", tmp_path / "0.txt", tmp_path / "1.txt", "--batch-size", 3]
    found = json.loads(spoken(capsys, *argv, "--json"))
    assert found["tokens"] == count
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    n_bytes = sum(len(text.encode()) for text in texts)
    assert found["bits_per_byte"] == pytest.approx(loss * len(ids) / n_bytes / math.log(2), rel=1e-6)
    line = spoken(capsys, *argv)
    assert line == (
        f"loss {loss:.4f} nats per token, perplexity {math.exp(loss):.2f}, {found['bits_per_byte']:.4f} bits per byte, {count} tokens\n"
    )


def test_eval_on_the_validation_split(made, capsys):
    val = TokenData.open(made / "data").split("val")
    rows = [val.window(start, 17) for start in range(0, val.n_tokens - 16, 16)]
    loss, count = by_hand(made / "run", rows)
    found = json.loads(spoken(capsys, "eval", "--run", made / "run", "--json"))
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["tokens"] == count
    assert found["bits_per_byte"] == pytest.approx(loss / math.log(2) * val.n_tokens / val.n_bytes, rel=1e-6)


def test_eval_from_another_folder(made, tmp_path, monkeypatch, capsys):
    """The recipe keeps the relative path as it was written; the run knows from where."""
    shutil.copytree(made / "data", tmp_path / "project" / "data")
    monkeypatch.chdir(tmp_path / "project")
    config = small.config("runs/one", data="data", steps=3)
    assert main(["train", *small.flags(config)]) == 0
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree("runs/one", tmp_path / "elsewhere" / "runs" / "one")

    def loss(run):
        capsys.readouterr()
        return json.loads(spoken(capsys, "eval", "--run", run, "--json"))["loss"]

    expected = loss("runs/one")
    assert RunFolder("runs/one").read_recipe()["data"] == "data"
    monkeypatch.chdir(tmp_path)
    assert loss("project/runs/one") == loss("elsewhere/runs/one") == expected
    # Moved as a whole, and with a folder of the same name and another content in the way.
    (tmp_path / "project").rename(tmp_path / "moved")
    assert main(["data", "--input", str(small.corpus()), "--out", "data", "--vocab-size", "280", "--seed", "9"]) == 0
    assert loss("moved/runs/one") == expected


def test_text_and_split_agree(made, tmp_path, capsys):
    """The validation documents as text, in windows that leave nothing over, give the split's loss."""
    val = TokenData.open(made / "data").split("val")
    length = next(n for n in range(2, 2000) if (val.n_tokens - 1) % n == 0)
    ids = val.window(0, val.n_tokens).tolist()
    tokenizer = Tokenizer.from_file(str(made / "data" / "tokenizer.json"))
    ends = [-1, *(i for i, token in enumerate(ids) if token == 0)]
    files = []
    for start, end in itertools.pairwise(ends):
        files.append(tmp_path / f"{start + 1:06d}.txt")
        files[-1].write_text(tokenizer.decode(ids[start + 1 : end]))
    argv = ["eval", "--run", made / "run", "--seq-len", length, "--json"]
    text, split = (json.loads(spoken(capsys, *argv, *more)) for more in (["--input", *files], []))
    assert text == pytest.approx(split, rel=1e-9)
    assert len(files) == val.n_documents


def test_compare(made, tmp_path, capsys):
    config = small.config(tmp_path / "study", data=str(made / "data"), steps=4, warmup=1)
    compare = CompareConfig(**vars(config), arms=["residual", "attnres:block_size=2"], seeds=[1], prompt="The")
    out = spoken(capsys, "compare", *small.flags(compare))
    for word in ("residual", "attnres:block_size=2", "Report:"):
        assert word in out
    assert (tmp_path / "study" / "report.html").exists()
    assert len(list((tmp_path / "study").glob("*/seed-1/result.json"))) == 2


def test_list(capsys):
    out = spoken(capsys, "list")
    for name in list_mixers():
        assert f"{name}: " in out
        for option in mixer_class(name).options.values():
            assert f"    {option.name}: {option.describe()} (default: {option.default})\n" in out


def test_doctor(capsys):
    out = spoken(capsys, "doctor")
    for word in (depthmix.__version__, torch.__version__, "device: ", "tokenizers", "wandb", "operators: "):
        assert word in out


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion(shell, capsys, tmp_path):
    script = spoken(capsys, "completion", shell)
    for word in ("train", "--mixer-options", "--no-quiet", "--top-p", "--recipe"):
        assert word in script or shell == "tcsh"
    if shutil.which(shell) and shell != "tcsh":
        (tmp_path / "script").write_text(script)
        checked = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_bash_completes(capsys, tmp_path):
    bash = shutil.which("bash")
    if not bash:
        pytest.skip("no bash")
    (tmp_path / "script").write_text(spoken(capsys, "completion", "bash"))
    asked = {
        "generate --top": ["--top-p"],
        "train --mixer att": ["attnres"],
        "train --mixer ": list_mixers(),
        "compare --arms residual m": [name for name in list_mixers() if name.startswith("m")],
        "train --schedule ": ["cosine", "wsd", "rsqrt"],
        "compare --seeds 0 --budget t": ["tokens", "time"],
        "data --document ": ["file", "line", "blank"],
        f"eval --run {tmp_path}/scr": [],  # a folder is wanted
        f"eval --input {tmp_path}/scr": [f"{tmp_path}/script"],
    }
    lines = [f"source {tmp_path / 'script'}"]
    for line in asked:
        words = ["depthmix", *line.split(" ")]
        quoted = " ".join(f"'{word}'" for word in words)
        lines += [
            f"COMP_WORDS=({quoted}) COMP_CWORD={len(words) - 1} COMPREPLY=()",
            f"$(complete -p depthmix | sed 's/.*-F \\([^ ]*\\).*/\\1/') depthmix '{words[-1]}' '{words[-2]}'",
            'echo "${COMPREPLY[@]}"',
        ]
    done = subprocess.run([bash, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    found = [line.split() for line in done.stdout.splitlines()]
    assert [sorted(words) for words in found] == [sorted(words) for words in asked.values()], done.stderr


def test_eval_and_generate_have_one_flat_class_each():
    for config in CONFIGS.values():
        for field in dataclasses.fields(config):
            assert field.metadata["help"], field.name
    assert {
        "train": TrainConfig,
        "compare": CompareConfig,
        "plan": PlanConfig,
        "eval": EvalConfig,
        "generate": GenerateConfig,
        "inspect": InspectConfig,
        "explore": ExploreConfig,
        "data": DataConfig,
        "report": ReportConfig,
        "retrofit": RetrofitConfig,
        "accelerate": AccelerateConfig,
    } == CONFIGS
    assert values.describe(typing.get_type_hints(TrainConfig)["n_kv_heads"]) == "a whole number or none"
