"""A model in half precision is one to Hugging Face's tools, though its mixer stays in fp32."""

import json

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from depthmix import retrofit
from hf.test_retrofit import make, stir
from hf.tiny import causal_lm, tokens

MODELS = {"own": lambda: causal_lm("attnres"), "retrofitted": lambda: stir(retrofit(make("llama"), "dca", quiet=True))}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_the_dtype_is_the_embeddings_and_survives_saving(build, tmp_path):
    build().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert (model.dtype, model.base_model.dtype) == (torch.bfloat16, torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert [p.dtype for p in again.parameters()] == [p.dtype for p in model.parameters()]
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


# A cache of a few blocks: the default takes most of the memory.
SMALL = {"continuous_batching_config": ContinuousBatchingConfig(num_blocks=4, block_size=32, max_batch_tokens=16)}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_continuous_batching(build):
    model = build().to(torch.bfloat16)
    how = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    prompts = [[1, 2, 3], [4, 5]]
    expected = [model.generate(torch.tensor([ids]), **how)[0, len(ids) :].tolist() for ids in prompts]
    made = model.generate_batch(prompts, generation_config=GenerationConfig(**how), **SMALL)
    assert [made[f"req_{i}"].error for i in range(2)] == [None, None]
    assert [made[f"req_{i}"].generated_tokens for i in range(2)] == expected
