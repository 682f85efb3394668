"""Run folders that `from_pretrained` reads, and folders of `save_pretrained` that the commands read."""

import json
import re
import shutil

import pytest
import torch

import depthmix
from depthmix.cli import main
from depthmix.errors import CHECKPOINT, DATA, UserError
from depthmix.runs import checkpoint
from depthmix.runs.checkpoint import list_checkpoints
from depthmix.runs.folder import RunFolder
from depthmix.train.loop import train
from train import small

PROMPT = "The sea is"


def from_hub(path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import depthmix.hf  # noqa: F401

    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The finished run, loaded and saved by Hugging Face's own tools; tests that change it copy it."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    for part in from_hub(small.run().path):
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(capsys, *words, command="generate", code=CHECKPOINT, **flags):
    """One sentence on stderr that has these words, nothing on stdout, and the exit code."""
    given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    assert main([command, *given]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("depthmix: ")
    assert err.count("\n") == 1
    for word in words:
        assert str(word) in err


def continuation(capsys, run):
    assert main(["generate", "--run", str(run), "--prompt", PROMPT, "--temperature", "0", "--max-tokens", "12"]) == 0
    return capsys.readouterr().out


def test_a_run_folder_loads_as_a_pretrained_model_with_its_tokenizer():
    model, tokenizer = from_hub(small.run().path)
    ours = depthmix.load(small.run().path, "cpu")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    assert ids[0].tolist() == ours.tokenizer.encode(PROMPT).ids
    torch.testing.assert_close(model(ids).logits, ours.model(ids), rtol=1e-6, atol=1e-6)
    assert model.config.max_position_embeddings == tokenizer.model_max_length == ours.config.seq_len
    assert tokenizer.decode(tokenizer("Café, 東京 🌊").input_ids) == "Café, 東京 🌊"


def test_a_run_folder_knows_where_a_text_ends():
    model, tokenizer = from_hub(small.run().path)
    end = depthmix.load(small.run().path, "cpu").tokenizer.token_to_id("<|endoftext|>")
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == model.generation_config.eos_token_id == end
    batch = tokenizer(["sea", PROMPT], padding=True, return_tensors="pt")
    assert batch.attention_mask[0, 0] == 0  # on the left, so that a continuation follows its prompt
    made = model.generate(**batch, max_new_tokens=6, do_sample=False)[0, batch.input_ids.shape[1] :]
    prompt = tokenizer("sea", return_tensors="pt")
    alone = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert torch.equal(made[: len(alone)], alone)


@pytest.mark.parametrize(
    ("mixer", "options"),
    [("attnres", {"ways": 2}), ("mhc", {"residual_map": "birkhoff", "n": 2})],
    ids=["tied", "constants"],
)
def test_every_checkpoint_is_described_when_it_is_saved(tmp_path, mixer, options):
    """Also with a tied head, which a checkpoint does not hold, and with constants of a mixer, which it does not either."""
    from transformers import AutoModelForCausalLM

    import depthmix.hf

    folder = train(small.config(tmp_path / "run", mixer=mixer, mixer_options=options, tie_embeddings=True, keep=1))
    loaded, problems = AutoModelForCausalLM.from_pretrained(folder.path, output_loading_info=True)
    assert not problems["missing_keys"]
    assert not problems["unexpected_keys"]
    ours = depthmix.load(folder.path, "cpu")
    ids = torch.arange(20)[None]
    torch.testing.assert_close(loaded(ids).logits, ours.model(ids), rtol=1e-6, atol=1e-6)
    assert loaded.lm_head.weight is loaded.model.embedding.weight
    # A run of an older version has none of these files: the same command adds them, and changes nothing else.
    others = {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file() and p.name != "log.txt"}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"):
        (folder.path / name).unlink()
    assert depthmix.load(folder.path, "cpu").step == ours.step
    train(small.config(tmp_path / "run", mixer=mixer, mixer_options=options, tie_embeddings=True, keep=1))
    assert {p: p.read_bytes() for p in others} == others


def test_the_index_follows_the_newest_checkpoint(tmp_path):
    folder = train(small.config(tmp_path / "run", save_every=2, keep=1))
    index = json.loads((folder.path / "model.safetensors.index.json").read_text())
    (newest,) = list_checkpoints(folder.checkpoints)
    assert set(index["weight_map"].values()) == {f"checkpoints/{newest.name}/model.safetensors"}


def test_no_checkpoint_goes_before_the_index_names_another(tmp_path, monkeypatch):
    """A kill at that moment would leave a folder that does not load."""
    run, gone = tmp_path / "run", []
    remove = checkpoint._remove

    def checked_remove(path):
        index = json.loads((run / "model.safetensors.index.json").read_text())
        assert all((run / place).is_file() for place in index["weight_map"].values())
        gone.append(path)
        remove(path)

    monkeypatch.setattr(checkpoint, "_remove", checked_remove)
    train(small.config(run, save_every=2, keep=1))
    assert gone


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("config.json", {"rms_norm_eps": 0.1}, "rms_norm_eps is 0.1 and the run was trained with 1e-06"),
        ("config.json", {"mixer": "dca"}, "mixer is 'dca' and the run was trained with 'residual'"),
        ("recipe.yaml", {"rope_theta": 1.0}, "rope_theta is 1.0 and was 10000.0"),
        ("tokenizer.json", {"version": "1.1"}, "tokenizer.json is not that of this run"),
    ],
)
def test_a_run_folder_that_was_changed_is_not_loaded(tmp_path, name, changes, words):
    path = shutil.copytree(small.run().path, tmp_path / "run")
    if name == "recipe.yaml":
        changes = {**RunFolder(path).read_recipe(), **changes}
        (path / name).write_text("{}")
    edit(path / name, **changes)
    with pytest.raises(UserError, match=re.escape(words)):
        from_hub(path)


def test_a_damaged_checkpoint_is_not_loaded(tmp_path):
    path = shutil.copytree(small.run().path, tmp_path / "run")
    weights = list_checkpoints(path / "checkpoints")[0] / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-3] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(UserError, match=r"model\.safetensors does not match its checksum"):
        from_hub(path)


def test_the_commands_take_a_saved_folder_as_they_take_the_run(saved, capsys):
    assert continuation(capsys, saved) == continuation(capsys, small.run().path)
    measured = []
    for run in (saved, small.run().path):
        assert main(["eval", "--run", str(run), "--input", str(small.corpus()), "--json"]) == 0
        measured.append(json.loads(capsys.readouterr().out))
    assert [found.pop("step") for found in measured] == [None, 60]
    assert measured[0] == pytest.approx(measured[1])


def test_the_commands_take_a_folder_in_shards_and_in_bf16(copy, tmp_path, capsys):
    model, tokenizer = from_hub(copy)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    tokenizer.save_pretrained(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    assert continuation(capsys, tmp_path / "shards") == continuation(capsys, copy)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "rounded")
    tokenizer.save_pretrained(tmp_path / "rounded")
    assert PROMPT not in continuation(capsys, tmp_path / "rounded")


def test_an_empty_prompt_starts_from_the_end_of_a_text(saved, capsys):
    assert main(["generate", "--run", str(saved), "--temperature", "0", "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.strip()


def test_folders_that_are_missing_or_foreign(tmp_path, capsys, copy):
    refused(capsys, "gone", "does not exist", run=tmp_path / "gone")
    refused(capsys, "is not a run folder", run=tmp_path)
    (copy / "model.safetensors").unlink()
    refused(capsys, "has neither model.safetensors", run=copy)
    edit(copy / "config.json", model_type="bert")
    refused(capsys, "holds a model of type 'bert'", "known are depthmix, ", run=copy)
    edit(copy / "config.json", model_type=None)
    refused(capsys, "describes no model", run=copy)
    (copy / "config.json").write_text("{")
    refused(capsys, "config.json is damaged", run=copy)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mixer": "atnres"}, ["describes no model", "attnres"]),
        ({"mixer": "rezero"}, ["lacks mixer.alpha", "another rule or size"]),
        ({"hidden_size": 64, "head_dim": 16}, ["of shape", "another size"]),
        ({"vocab_size": 100}, ["tokenizer.json has 300 entries and the model 100"]),
        ({"num_hidden_layers": "two"}, ["describes no model"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_configuration_that_does_not_fit(copy, capsys, changes, words):
    edit(copy / "config.json", **changes)
    refused(capsys, *words, run=copy)


def test_weights_or_a_tokenizer_that_cannot_be_read(copy, capsys):
    (copy / "tokenizer.json").write_text("{}")
    refused(capsys, "tokenizer.json is not a tokenizer.json", run=copy)
    (copy / "tokenizer.json").unlink()
    refused(capsys, "There is no tokenizer file", run=copy)
    (copy / "model.safetensors").write_bytes(b"\0" * 100)
    refused(capsys, "cannot be read as safetensors", run=copy)


def test_an_end_beyond_the_vocabulary(copy, capsys):
    edit(copy / "generation_config.json", eos_token_id=300)
    refused(capsys, "the token 300", "beyond the vocabulary of 300", run=copy)


def test_a_saved_folder_has_no_validation_split(saved, capsys):
    refused(
        capsys, "does not name the data that its model was trained on", "--input", command="eval", code=DATA, run=saved
    )
