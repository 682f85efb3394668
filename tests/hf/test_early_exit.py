"""Leaving a model after some of its blocks, as transformers' self-speculative decoding asks for."""

import pytest
import torch

pytest.importorskip("transformers")
from depthmix import retrofit
from depthmix.hf import DepthmixConfig, DepthmixForCausalLM
from hf.test_retrofit import ids, make
from hf.tiny import BLOCKS, causal_lm, tokens

HOW = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("mixer", ["residual", "attnres", "dca", "mhc"])
def test_drafts_from_fewer_blocks_leave_the_answer_and_the_model_as_they_were(mixer):
    model, row = causal_lm(mixer).double(), tokens(1)
    expected = model.generate(row, **HOW)
    for blocks in range(1, BLOCKS + 1):
        assert torch.equal(model.generate(row, assistant_early_exit=blocks, **HOW), expected)
        assert model.config.num_hidden_layers == BLOCKS
    assert torch.equal(model.generate(row, **HOW), expected)


def test_what_is_left_early_is_what_the_next_block_reads():
    model, row = causal_lm("attnres"), tokens(1)
    reads = model(row, output_hidden_states=True).hidden_states
    model.config.num_hidden_layers = 2
    out = model(row, output_depth_weights=True)
    torch.testing.assert_close(out.logits, model.lm_head(model.model.final_norm(reads[2])), rtol=0, atol=1e-3)
    assert out.depth_weights is None
    assert len(out.past_key_values.layers) == 2


def test_a_retrofitted_model_leaves_early_as_the_plain_one():
    """At step 0; the mean of attnres reads a smaller share of the stream the later a block is, which its norms' eps would show."""
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-2,
    }
    torch.manual_seed(0)
    own = DepthmixForCausalLM(DepthmixConfig(**sizes)).eval()
    for model in (own, make("llama", rms_norm_eps=1e-2)):
        model.config.num_hidden_layers = 2
        expected = model(ids()).logits
        model.config.num_hidden_layers = 3
        retrofit(model, "attnres", quiet=True)
        model.config.num_hidden_layers = 2
        torch.testing.assert_close(model(ids()).logits, expected, rtol=1e-4, atol=1e-5)
        model.config.num_hidden_layers = 3
