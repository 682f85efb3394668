"""Runs whose files are damaged, foreign or of another run. Each ends in one clear sentence."""

import dataclasses
import json
import pickle
import shlex
import shutil

import pytest
import torch
import yaml

from depthmix.cli import main
from depthmix.config import TrainConfig
from depthmix.errors import CHECKPOINT, DATA, DISK
from depthmix.runs.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from test_bad_input_recipes import bomb
from train import bad, small
from train.bad import cut, meta, remove, table, write
from train.checkpoints import match_run

fails = bad.fails


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


def forged(change):
    """The mutation of a run whose checkpoints are made to agree with it."""

    def with_checkpoints(folder):
        change(folder)
        match_run(folder)

    return with_checkpoints


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


def swapped(folder):
    """As many entries, other text behind them."""
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    vocabulary = found["model"]["vocab"]
    a, b = [token for token in vocabulary if token.isalpha() and len(token) == 1][:2]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    path.write_text(json.dumps(found))


BROKEN_RUNS = [
    ("nothing in it", foreign, "is not a run folder: it has no recipe.yaml"),
    ("no recipe", remove("recipe.yaml"), "is not a run folder: it has no recipe.yaml"),
    ("empty recipe", cut("recipe.yaml", 0), "recipe.yaml is missing or empty"),
    ("binary recipe", write("recipe.yaml", b"\x80\xff"), "recipe.yaml is damaged"),
    ("recipe cut", write("recipe.yaml", b"data: {x"), "recipe.yaml is damaged: it is not YAML"),
    ("recipe a list", write("recipe.yaml", b"- a\n"), "recipe.yaml is damaged: it does not map names"),
    ("text in the recipe", recipe(dim="wide"), "dim is 'wide' and was 32"),
    ("text in the recipe, forged", forged(recipe(dim="wide")), "recipe.yaml is damaged: dim is 'wide'"),
    ("null in the recipe", recipe(rope_theta=None), "rope_theta is None and was 10000.0"),
    ("null in the recipe, forged", forged(recipe(rope_theta=None)), "recipe.yaml is damaged: rope_theta is None"),
    (
        "wrong options in the recipe",
        recipe(mixer_options={"ways": 3}),
        "recipe.yaml was changed since the run was trained: mixer_options is {{'ways': 3}} and was {{}}",
    ),
    (
        "wrong options in the recipe, forged",
        forged(recipe(mixer_options={"ways": 3})),
        "describes no model",
        "unknown option 'ways'",
    ),
    ("no such mixer", recipe(mixer="resnet"), "mixer is 'resnet' and was 'residual'; put the recipe back"),
    ("no such mixer, forged", forged(recipe(mixer="resnet")), "describes no model", "unknown mixer 'resnet'"),
    ("another mixer", recipe(mixer="mhc"), "mixer is 'mhc' and was 'residual'"),
    ("another mixer, forged", forged(recipe(mixer="mhc")), "lacks mixer.", "another rule or size than mhc"),
    ("another size", recipe(dim=64), "dim is 64 and was 32"),
    ("another size, forged", forged(recipe(dim=64)), "another size", "embedding.weight"),
    ("more blocks", recipe(n_blocks=3), "n_blocks is 3 and was 2"),
    ("more blocks, forged", forged(recipe(n_blocks=3)), "lacks", "another rule or size"),
    ("fewer blocks", recipe(n_blocks=1), "n_blocks is 1 and was 2"),
    ("fewer blocks, forged", forged(recipe(n_blocks=1)), "has norms.2", "another rule or size"),
    ("impossible size", recipe(n_heads=5), "n_heads is 5 and was 2"),
    ("impossible size, forged", forged(recipe(n_heads=5)), "describes no model", "n_heads must divide dim=32"),
    ("no tokenizer", remove("tokenizer.json"), "There is no tokenizer file"),
    ("tokenizer cut", cut("tokenizer.json", 200), "tokenizer.json is not that of this run: its SHA-256 was"),
    ("tokenizer cut, forged", forged(cut("tokenizer.json", 200)), "is not a tokenizer.json"),
    ("tokenizer of somebody else", write("tokenizer.json", b"{}"), "tokenizer.json is not that of this run"),
    ("tokenizer of somebody else, forged", forged(write("tokenizer.json", b"{}")), "is not a tokenizer.json"),
    ("unknown option in the recipe", recipe(width=5), "or of a later version of depthmix: there is no option 'width'"),
    ("a document in the recipe", write("recipe.yaml", b'{"schema": 1, "run": "r"}'), "there is no option 'schema'"),
    ("aliases in the recipe", write("recipe.yaml", bomb(8)), "recipe.yaml is damaged: it is not YAML (its aliases"),
    ("another tokenizer", swapped, "tokenizer.json is not that of this run"),
    ("another tokenizer, forged", forged(swapped), "is not the tokenizer that the run was trained with", "put it back"),
    ("no checkpoints", remove("checkpoints"), "has no checkpoint yet"),
    ("no checkpoint", every(lambda p: shutil.rmtree(p)), "has no checkpoint yet"),
    ("no model", every(remove("model.safetensors")), "model.safetensors is missing; there is no older good one"),
    ("model cut", every(cut("model.safetensors", 1000)), "model.safetensors has 1000 bytes where manifest.json says"),
    ("model empty", every(cut("model.safetensors", 0)), "model.safetensors has 0 bytes"),
    ("pickle for a model", every(write("model.safetensors", pickled)), "model.safetensors has", "manifest.json says"),
    ("not safetensors", every(unclosed), "model.safetensors has 108 bytes"),
    ("a foreign checkpoint", every(foreign), "it has no manifest.json"),
    ("no manifest", every(remove("manifest.json")), "it has no manifest.json"),
    ("manifest cut", every(cut("manifest.json", 60)), "manifest.json is damaged"),
    ("manifest of somebody else", every(write("manifest.json", b"{}")), "manifest.json was not written by depthmix"),
    ("of a later version", every(manifest(version=3)), "has format version 3, this depthmix reads up to 2"),
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


def test_readers_do_not_take_an_older_checkpoint_for_a_broken_newest(fails, copied):
    """Its numbers would be those of another model. Only a training goes on from an older one."""
    newest, older = list_checkpoints(copied / "checkpoints")
    flip(newest / "optimizer.safetensors")
    words = f"Cannot use the checkpoint {newest}: optimizer.safetensors does not match", f"older good one is {older}"
    for command in ("eval --json", "generate --max-tokens 2", "inspect"):
        fails(f"{command} --run {{run}} --device cpu", CHECKPOINT, *words, run=copied)


def test_eval_says_of_which_step_its_numbers_are(copied, capsys):
    for run, step in ((copied, 60), (copied / "checkpoints" / "step-00000040", 40)):
        assert main(["eval", "--run", str(run), "--device", "cpu", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step"] == step


def test_the_data_of_a_run_has_gone_or_changed(fails, copied, tmp_path):
    environment = json.loads((copied / "environment.json").read_text())
    (copied / "environment.json").write_text(json.dumps({**environment, "data": "/gone/data"}))
    recipe(data="data/of then")(copied)
    here = tmp_path / "data" / "of then"
    words = f"is not there any more: tried /gone/data and {here}, and data/of then above the run; use --input"
    fails("eval --run {run}", DATA, words, run=copied)
    shutil.copytree(small.data(), here)
    meta(vocab_size=400)(here)
    words = f"The data in {here} is not what {copied} was trained on: it had 300 entries in its vocabulary and has 400"
    fails("eval --run {run}", DATA, words, "prepare it as then", "--input", run=copied)


def test_data_that_was_replaced_is_not_measured(fails, copied, tmp_path):
    """Prepared again from another corpus, with as many entries: the loss would be that of other text."""
    (tmp_path / "corpus").mkdir()
    for i in range(12):
        (tmp_path / "corpus" / f"{i}.txt").write_text("\n".join(small.LINES[: 1 + i % 3]) * (5 + i))
    data = shutil.copytree(small.data(), tmp_path / "data")
    environment = json.loads((copied / "environment.json").read_text())
    (copied / "environment.json").write_text(json.dumps({**environment, "data": str(data)}))
    assert main(["eval", "--run", str(copied), "--device", "cpu"]) == 0
    recipe(data=str(data))(copied)  # the place of then is not there any more
    tokenizer = shlex.quote(str(small.data() / "tokenizer.json"))
    made = f"data --input {tmp_path / 'corpus'} --out {data} --tokenizer {tokenizer} --overwrite"
    assert main(shlex.split(made)) == 0
    for command in ("eval", "inspect --tokens 64 --causal-tokens 0"):
        words = f"The data in {data} is not what {copied} was trained on", "its training split is another"
        fails(f"{command} --run {{run}} --device cpu", DATA, *words, run=copied)
    write("data.json", b"{")(copied)
    fails("eval --run {run} --device cpu", CHECKPOINT, "data.json is not that of this run", run=copied)
    match_run(copied)
    fails("eval --run {run} --device cpu", DATA, "data.json is damaged", run=copied)


def test_data_that_was_damaged_is_not_measured(fails, copied, tmp_path):
    data = shutil.copytree(small.data(), tmp_path / "data")
    environment = json.loads((copied / "environment.json").read_text())
    (copied / "environment.json").write_text(json.dumps({**environment, "data": str(data)}))
    flip(data / "val-00000.bin")
    for command in ("eval", "inspect --tokens 64 --causal-tokens 0"):
        fails(f"{command} --run {{run}} --device cpu", DATA, f"{data}/val-00000.bin is damaged", run=copied)


def test_another_tokenizer_is_no_model_to_start_from(fails, copied):
    swapped(copied)
    train = f"train --data {{data}} --out new --init {copied} --steps 3 --warmup 1 --device cpu"
    fails(train, CHECKPOINT, "is not the tokenizer that the run was trained with")


def test_a_comparisons_folder_names_its_runs(fails, copied, tmp_path):
    study = tmp_path / "study"
    for arm in ("attnres-ways=3", "residual"):
        shutil.copytree(copied, study / arm / "seed-0")
    names = f"the runs in it are {study}/attnres-ways=3/seed-0, {study}/residual/seed-0: give one of them"
    for command in ("eval", "generate"):
        fails(f"{command} --run {study}", CHECKPOINT, "is not a run folder", names)
    fails(f"eval --run {study / 'residual'}", CHECKPOINT, f"the runs in it are {study}/residual/seed-0: give")
    for seed in range(1, 9):
        shutil.copytree(copied, study / "residual" / f"seed-{seed}")
    fails(f"eval --run {study / 'residual'}", CHECKPOINT, "seed-7 and 1 more: give one of them")


RESUMED = [
    ("recipe empty", cut("recipe.yaml", 0), CHECKPOINT, "recipe.yaml is missing or empty"),
    ("recipe binary", write("recipe.yaml", b"\xff\xff"), CHECKPOINT, "recipe.yaml is damaged"),
    ("unknown option", recipe(width=5), CHECKPOINT, "there is no option 'width'"),
    ("recipe changed", recipe(lr=1.0), CHECKPOINT, "another recipe: lr was 1.0 and is 0.01"),
    ("metrics cut", write("metrics.jsonl", b"loss 5\n"), CHECKPOINT, "metrics.jsonl has 7 bytes and had", "at step 60"),
    ("speed damaged", write("speed.jsonl", b"loss 5\n"), CHECKPOINT, "speed.jsonl:1 is damaged"),
    ("all models broken", every(cut("model.safetensors", 9)), CHECKPOINT, "No checkpoint in", "move that folder away"),
    ("optimizer gone", every(remove("optimizer.safetensors")), CHECKPOINT, "optimizer.safetensors is missing"),
    ("another model", resave(**{"head.weight": torch.zeros(2, 2)}), CHECKPOINT, "of shape [2, 2]"),
    ("another tokenizer", write("tokenizer.json", b"{}"), DATA, "not the tokenizer this run began with"),
    ("other data", write("data.json", b"{}"), DATA, "not that of the data this run began with", "use the data of then"),
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
    return TrainConfig(**small.run().read_recipe())


def test_a_result_that_is_damaged(fails, copied):
    config = dataclasses.replace(small_recipe(), out=str(copied))
    for content, words in ((b"{", "is damaged: it is not JSON"), (b"[]", "is damaged: it is not a JSON object")):
        (copied / "result.json").write_bytes(content)
        fails(shlex.join(["train", *small.flags(config)]), CHECKPOINT, "result.json", words)
