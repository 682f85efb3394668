"""From a run of plain residuals to a retrofitted one by the command line, and Hugging Face's models in our trainer."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from depthmix.cli import main
from depthmix.errors import CHECKPOINT, DATA, USAGE
from depthmix.mixers.defaults import all_options, chosen_options
from depthmix.runs.checkpoint import list_checkpoints
from depthmix.runs.folder import RunFolder
from hf.test_retrofit import make
from train import bad, small

fails = bad.fails
GIVEN = "--seq-len 32 --batch-size 4 --steps 4 --warmup 1 --lr 0.003 --eval-tokens 64 --save-every 2 --log-every 1"


def weights(run: str | Path) -> dict[str, torch.Tensor]:
    return load_file(list_checkpoints(Path(run) / "checkpoints")[0] / "model.safetensors")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A command that must succeed, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> None:
        train = line.startswith("train")
        more = ["--data", str(small.data()), *GIVEN.split(), "--device", "cpu", "--quiet"] if train else []
        assert main([*line.split(), *more]) == 0

    return run


def first_loss(run: str) -> float:
    return float(RunFolder(run).read_metrics()[0]["val_loss"])


def test_a_run_retrofitted_and_trained_on(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way, for a model trained with our own recipe."""
    plain = small.run().path
    command(f"retrofit --model {plain} --mixer attnres --mixer-options block_size=2 --out retrofitted")
    said = capsys.readouterr().out
    assert float(said.split("changed by ")[1].split()[0]) <= 1e-5
    ids = torch.randint(small.VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    before, after = (AutoModelForCausalLM.from_pretrained(f).eval()(ids).logits for f in (plain, "retrofitted"))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    command(f"train --init {plain} --out plain")
    command("train --init retrofitted --tune mixer --out alone")
    command("train --init retrofitted --out all")
    assert first_loss("plain") == pytest.approx(first_loss("alone"), rel=1e-6)
    assert first_loss("alone") == first_loss("all")
    old, alone, everything = weights(plain), weights("alone"), weights("all")
    assert {n for n in alone if n not in old or not torch.equal(alone[n], old[n])} == {"mixer.query", "mixer.key_gain"}
    assert [n for n in old if torch.equal(everything[n], old[n])] == []
    for run in ("alone", "all"):
        assert chosen_options("attnres", RunFolder(run).read_recipe()["mixer_options"]) == {"block_size": 2}
        assert RunFolder(run).read_recipe()["plain_eps"] is True
        command(f"generate --run {run} --prompt The --max-tokens 3 --device cpu")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama of Hugging Face's with the tokenizer of the data."""
    folder = tmp_path_factory.mktemp("foreign") / "llama"
    make("llama", vocab_size=small.VOCAB).save_pretrained(folder)
    shutil.copy(small.data() / "tokenizer.json", folder)
    return folder


def test_a_model_of_hugging_faces_retrofitted_and_trained(foreign: Path, command: Any) -> None:
    command(f"retrofit --model {foreign} --mixer dca --out retrofitted")
    command("train --init retrofitted --tune mixer --out alone")
    command("train --init alone --optimizer muon --out all")
    command(f"train --init {foreign} --mixer attnres --checkpoint-activations --out other")
    command(f"train --init {foreign} --out plain")
    losses = [first_loss(run) for run in ("alone", "other", "plain")]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    old, alone, everything = load_file(foreign / "model.safetensors"), weights("alone"), weights("all")
    changed = {n for n in alone if n not in old or not torch.equal(alone[n], old[n])}
    assert all("depth_mixer" in n or "depth_norms" in n for n in changed)
    assert any("depth_mixer" in n for n in changed)
    assert any("mlp" in n and not torch.equal(everything[n], old[n]) for n in old)
    model = AutoModelForCausalLM.from_pretrained("all")
    assert model.config.depthmix == {"mixer": "dca", "options": all_options("dca", {})}
    assert all(torch.equal(p, everything[n]) for n, p in model.named_parameters())
    assert RunFolder("all").read_result()["parameters"]["added_by_mixer"] > 0
    assert first_loss("all") == json.loads(Path("alone/metrics.jsonl").read_text().splitlines()[-1])["val_loss"]
    command("generate --run all --prompt The --max-tokens 3 --device cpu")
    command("eval --run alone --device cpu")


def test_training_one_goes_on_after_a_kill(foreign: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from depthmix.train.loop import Trainer

    command(f"train --init {foreign} --mixer attnres --tune mixer --out whole")
    step = Trainer.step

    def dies(self: Trainer, number: int) -> tuple[float, float]:
        if number == 3:
            raise RuntimeError
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", dies)
        with pytest.raises(AssertionError):
            command(f"train --init {foreign} --mixer attnres --tune mixer --out killed")
    command(f"train --init {foreign} --mixer attnres --tune mixer --out killed")
    assert Path("killed/metrics.jsonl").read_bytes() == Path("whole/metrics.jsonl").read_bytes()


TRAIN = f"train --data {{data}} --out out {GIVEN} --device cpu --init "
CASES = [
    (TRAIN + "{foreign} --mixer rezero", USAGE, "rezero", "does not begin as the plain residual"),
    (TRAIN + "{foreign} --dim 16", USAGE, "dim is 16 and that of the model in {foreign} is 32"),
    (TRAIN + "{foreign} --mixer attnres --mixer-options heads=5", USAGE, "heads must divide dim=32"),
    (TRAIN.replace("--seq-len 32", "--seq-len 4096") + "{foreign}", USAGE, "seq_len must be at most 2048"),
    (TRAIN + "{foreign} --parallel dp=1", USAGE, "that in {foreign} is Hugging Face's: train it in one process"),
    (TRAIN.replace("{data}", "{other}") + "{foreign}", DATA, "other tokens"),
    (TRAIN + "{small}", DATA, "has 300 entries", "61"),
    (TRAIN + "{unknown}", CHECKPOINT, "nobody-knows"),
    (TRAIN + "{cohere}", CHECKPOINT, "'cohere'", "known are depthmix, deepseek_v3, gemma"),
    (TRAIN + "{corrupt}", CHECKPOINT, "cannot be loaded"),
]


@bad.table(CASES)
def test_what_cannot_be_is_said_in_one_sentence(case: Any, fails: Any, foreign: Path, tmp_path: Path) -> None:
    line, code, *words = case
    names = ("small", "unknown", "cohere", "corrupt")
    places: dict[str, Path] = {"foreign": foreign, **{name: tmp_path / name for name in names if f"{{{name}}}" in line}}
    if "{small}" in line:
        make("llama").save_pretrained(places["small"])
    if "{unknown}" in line:
        places["unknown"].mkdir()
        (places["unknown"] / "config.json").write_text('{"model_type": "nobody-knows"}')
    if "{cohere}" in line:
        make("cohere").save_pretrained(places["cohere"])
    if "{corrupt}" in line:
        shutil.copytree(foreign, places["corrupt"])
        (places["corrupt"] / "model.safetensors").write_bytes(b"nothing like it")
    if "{other}" in line:
        places["other"] = small.other_data()
    fails(line, code, *words, **places)
    assert not (tmp_path / "out").exists()
