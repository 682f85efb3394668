"""Folders that tools load which never heard of depthmix: with `trust_remote_code=True`, and with the package's own classes."""

import json
import os
import pickle
import shutil

import pytest
import torch

import depthmix
import forking
from hf.test_retrofit import make
from hf.tiny import causal_lm
from train import small

LOADED = """
import json, sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

result = {}
for folder in json.loads(sys.argv[1]):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    plain = AutoModel.from_pretrained(folder, trust_remote_code=True)
    name = f"{type(model).__module__}.{type(model).__name__}"
    result[folder] = [name, type(plain).__name__, model(torch.tensor([[1, 2, 3, 4]])).logits.tolist()]
    model.save_pretrained(folder + "-again")
    result[folder].append("depthmix.hf" in sys.modules)
    result[folder].append("transformers.models.llama.modeling_llama" in sys.modules)
print(json.dumps(result))
"""


def saved_again(folder):
    """What a folder says of its model, and the names of the code in it."""
    saved = json.loads((folder / "config.json").read_text())
    return saved["auto_map"], [path.name for path in folder.glob("*.py")]


def test_a_process_without_depthmix_finds_the_model_in_a_run_a_saved_and_a_retrofitted_folder(tmp_path):
    run = shutil.copytree(small.run().path, tmp_path / "run")
    ours = causal_lm("dca")
    ours.save_pretrained(tmp_path / "own")
    retrofitted = make("llama")
    depthmix.retrofit(retrofitted, "attnres", quiet=True)
    retrofitted.save_pretrained(tmp_path / "retrofitted")
    ids = torch.tensor([[1, 2, 3, 4]])
    wanted = {
        "run": depthmix.load(run, "cpu").model(ids),
        "own": ours(ids).logits,
        "retrofitted": retrofitted.eval()(ids).logits,
    }
    folders = [str(tmp_path / name) for name in wanted]
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = forking.python(LOADED, json.dumps(folders), env=environment)
    assert done.returncode == 0, done.stderr
    for folder, (name, base, logits, known, llamas) in json.loads(done.stdout.splitlines()[-1]).items():
        kind = os.path.basename(folder)
        llama = "Llama" if kind == "retrofitted" else ""
        assert known  # the code of the folder imported it,
        assert llamas == bool(llama)  # and of the code of architectures, which takes long to import, what is needed
        assert name == f"depthmix.hf.{'retrofitted' if llama else 'modeling'}.Depthmix{llama}ForCausalLM"
        assert base == f"Depthmix{llama}Model"
        torch.testing.assert_close(torch.tensor(logits), wanted[kind], rtol=1e-5, atol=1e-6)
        # Saved by that process: the two lines again, and no copy of this package's source.
        assert saved_again(tmp_path / f"{kind}-again") == saved_again(tmp_path / kind)
        assert saved_again(tmp_path / kind)[1] == ["modeling_depthmix.py"]


def test_where_depthmix_is_imported_no_code_of_a_folder_runs(tmp_path):
    from transformers import AutoModelForCausalLM

    import depthmix.hf

    causal_lm().save_pretrained(tmp_path)
    (tmp_path / "modeling_depthmix.py").write_text("raise SystemExit('the code of the folder ran')")
    for trust in (None, True):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust)
        assert type(loaded) is depthmix.hf.DepthmixForCausalLM


def test_a_restored_model_is_saved_without_code(tmp_path):
    model = make("qwen3")
    depthmix.retrofit(model, "dca", quiet=True)
    model.save_pretrained(tmp_path / "retrofitted")
    depthmix.restore(model).save_pretrained(tmp_path / "plain")
    assert "auto_map" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert list((tmp_path / "plain").glob("*.py")) == []


def test_a_retrofitted_model_can_be_pickled():
    model = make("llama")
    depthmix.retrofit(model, "attnres", quiet=True, block_size=2, ways=2)
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    assert type(again.config) is type(model.config)
    assert again.config.depthmix == model.config.depthmix
    ids = torch.tensor([[1, 2, 3, 4]])
    before = model(ids).logits
    assert torch.equal(again(ids).logits, before)
    with torch.no_grad():
        for p in again.model.depth_mixer.parameters():
            p += 0.5
    assert not torch.equal(again(ids).logits, before)  # its layers have its own mixer
    assert torch.equal(model(ids).logits, before)
    depthmix.restore(again)
    assert type(again.model.layers[0]) is type(make("llama").model.layers[0])


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        *((kind, f"{of}Classification") for kind in ("llama", "gpt2") for of in ("Sequence", "Token")),
        ("llama", "QuestionAnswering"),
        ("gemma3_text", "SequenceClassification"),  # which has neither of the others
    ],
)
def test_other_heads_are_found_by_their_auto_classes(kind, head, tmp_path):
    import transformers

    auto = getattr(transformers, f"AutoModelFor{head}")
    config = make(kind).config
    config.pad_token_id = 0
    model = auto.from_config(config).eval()
    depthmix.retrofit(model, "attnres", quiet=True, ways=2)
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[1, 2, 3, 4]])
    for trust in (False, True):
        again = auto.from_pretrained(tmp_path, trust_remote_code=trust).eval()
        assert type(again) is type(model)
        assert torch.equal(again(ids)[0], model(ids)[0])


def test_the_configuration_of_a_model_just_retrofitted_makes_another():
    from transformers import AutoModelForCausalLM

    from depthmix.hf.retrofitted import DepthmixQwen2Config, register_models

    register_models.cache_clear()
    model = make("qwen2")
    AutoModelForCausalLM._model_mapping._extra_content.pop(DepthmixQwen2Config, None)  # as in a new process
    depthmix.retrofit(model, "attnres", quiet=True)
    assert type(AutoModelForCausalLM.from_config(model.config)) is type(model)


def test_names_that_are_no_class_of_a_retrofitted_model():
    from depthmix.hf import retrofitted

    assert retrofitted.DepthmixLlamaForCausalLM.__name__ == "DepthmixLlamaForCausalLM"
    for name in ("DepthmixNothing", "DepthmixBertModel", "LlamaModel", "DepthmixAutoModel"):
        with pytest.raises(AttributeError, match=name):
            getattr(retrofitted, name)
