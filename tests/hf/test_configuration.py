"""The configuration: the decoder's fields under Hugging Face's names, checked, and the same after a round through JSON."""

import dataclasses
import json

import pytest

from depthmix import list_mixers
from hf.tiny import decoder_config, hf_config


@pytest.mark.parametrize("mixer", list_mixers())
def test_a_configuration_goes_to_a_decoders_and_back_through_a_file(tmp_path, mixer):
    from transformers import AutoConfig

    import depthmix.hf

    config = hf_config(mixer, {"qk_norm": True, "tie_embeddings": True, "mlp": "relu2", "rope_theta": 500.0})
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is depthmix.hf.DepthmixConfig
    wanted = decoder_config(mixer, qk_norm=True, tie_embeddings=True, mlp="relu2", rope_theta=500.0)
    assert dataclasses.asdict(loaded.decoder_config()) == dataclasses.asdict(wanted)


def test_tools_find_sizes_under_the_usual_names(tmp_path):
    config = hf_config(fields={"mixer_options": {"block_size": 2}}, max_position_embeddings=77)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    wanted = {"model_type": "depthmix", "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
    wanted |= {"num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 24, "vocab_size": 13}
    wanted |= {"mixer": "attnres", "mixer_options": {"block_size": 2}, "max_position_embeddings": 77}
    assert {name: saved[name] for name in wanted} == wanted


def test_sizes_that_are_left_out_are_worked_out():
    from depthmix.hf import DepthmixConfig

    config = DepthmixConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    assert (config.num_key_value_heads, config.head_dim, config.intermediate_size) == (4, 16, 192)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixer": "atnres"}, r"unknown mixer 'atnres'.*attnres"),
        ({"mixer": "attnres", "mixer_options": {"block_sise": 4}}, "block_size"),
        ({"num_attention_heads": 3}, "n_heads must divide dim"),
        ({"mlp": "gelu"}, "mlp must be 'swiglu' or 'relu2'"),
        ({"mixer": "attnres", "block_size": 4}, r"'block_size': it is an option .* mixer_options=\{'block_size': 4\}"),
        (
            {"mixer": "attnres", "block_sise": 4},
            "no field 'block_sise'; did you mean 'block_size', an option, in mixer_options",
        ),
        ({"num_hiden_layers": 4}, "no field 'num_hiden_layers'; did you mean 'num_hidden_layers'"),
        ({"n_blocks": 4}, "no field 'n_blocks'; here it is called 'num_hidden_layers'"),
        ({"colour": "red"}, "no field 'colour'$"),
    ],
)
def test_what_no_decoder_can_be_is_refused_at_once(fields, message):
    from depthmix.hf import DepthmixConfig

    with pytest.raises(ValueError, match=message):
        DepthmixConfig(**{"hidden_size": 64, "num_attention_heads": 4, **fields})


OF_TOOLS = {
    "torch_dtype": "bfloat16",
    "num_labels": 3,
    "quantization_config": None,
    "_commit_hash": "a",
    "max_length": 9,
}


def test_what_tools_put_into_a_configuration_is_taken(tmp_path):
    from transformers import AutoConfig

    config = hf_config("attnres", {"mixer_options": {"block_size": 2}}, output_depth_weights=True, **OF_TOOLS)
    config.written_by = "another tool"  # as any tool may
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path, output_attentions=True, dtype="bfloat16")
    assert (again.written_by, again.num_labels, again.output_depth_weights) == ("another tool", 3, True)
    assert again.output_attentions is True
    assert again.mixer_options == {"block_size": 2}
    again, unused = AutoConfig.from_pretrained(tmp_path, return_unused_kwargs=True, colour="red")
    assert (again.written_by, unused) == ("another tool", {"colour": "red"})


@pytest.mark.parametrize("fields", [{"block_size": 4}, {"num_hiden_layers": 4}, {"dim": 4}])
def test_a_file_or_a_call_with_an_option_or_a_misspelt_field_is_refused(tmp_path, fields):
    from transformers import AutoConfig

    hf_config("attnres").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    said = json.loads(path.read_text())
    with pytest.raises(ValueError, match=f"no field '{next(iter(fields))}'"):
        AutoConfig.from_pretrained(tmp_path, **fields)
    path.write_text(json.dumps(said | fields))
    with pytest.raises(ValueError, match=f"no field '{next(iter(fields))}'"):
        AutoConfig.from_pretrained(tmp_path)
