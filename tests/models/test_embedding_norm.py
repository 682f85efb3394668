"""A norm after the embedding: what the first block and the rule receive, everywhere that a decoder runs."""

from typing import Any

import pytest
import torch

from depthmix import Decoder, DecoderConfig
from depthmix.models.decoding import Decoding
from depthmix.parallel.pipeline.piece import Piece

SHAPE = {"vocab_size": 13, "dim": 16, "n_blocks": 3, "n_heads": 4, "mixer": "lambdas"}


def decoder(**changes):
    torch.manual_seed(0)
    return Decoder(DecoderConfig(**SHAPE, norm_eps=1e-3, embedding_std=0.3, **changes)).double()


def ids(length=7):
    return torch.randint(13, (2, length), generator=torch.Generator().manual_seed(1))


def test_the_first_block_receives_normed_embeddings():
    """Compare with a model without the norm, whose embeddings are normed by hand; every row of the table may serve."""
    normed, plain = decoder(embedding_norm=True), decoder()
    table = normed.embedding.weight
    assert torch.equal(table, plain.embedding.weight)
    by_hand = table / (table.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(normed(ids()), plain(inputs_embeds=by_hand[ids()]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(normed(inputs_embeds=table[ids()]), normed(ids()), rtol=0, atol=0)
    assert (normed(ids()) - plain(ids())).abs().max() > 1e-3
    assert list(dict(normed.named_parameters())) == list(dict(plain.named_parameters()))


def test_half_precision_is_rounded_once():
    model = decoder(embedding_norm=True).float()
    exact = decoder(embedding_norm=True).embed(ids(), None)
    with torch.autocast("cpu", torch.bfloat16):
        found = model.embed(ids(), None)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=0.51 * torch.finfo(torch.bfloat16).eps, atol=0)


def test_decoding():
    model = decoder(embedding_norm=True).requires_grad_(False)
    expected, cache = model(ids()), model.new_cache()
    outs = [model(part, cache=cache) for part in ids().split((3, 1, 3), dim=1)]
    torch.testing.assert_close(torch.cat(outs, dim=1), expected, rtol=1e-9, atol=1e-9)
    decoding = Decoding(model, batch=2, length=7, chunk=2)
    torch.testing.assert_close(decoding.prefill(ids()), expected[:, -1], rtol=1e-9, atol=1e-9)


def test_the_first_stage_of_a_pipeline_norms():
    model = decoder(embedding_norm=True)
    before: Any = None  # the first stage receives token ids
    alone = Piece(model, range(model.mixer.n_sites), before, None)
    torch.testing.assert_close(alone(ids()), model(ids()), rtol=1e-12, atol=1e-12)


def test_in_hugging_faces_model(tmp_path):
    from depthmix.hf import DepthmixConfig, DepthmixForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "initializer_range": 0.3}
    config = DepthmixConfig(vocab_size=13, mixer="lambdas", embedding_norm=True, rms_norm_eps=1e-3, **sizes)
    torch.manual_seed(0)
    model = DepthmixForCausalLM(config)
    decoder_ = decoder(embedding_norm=True).float()
    names = {name.replace("lm_head", "head").removeprefix("model."): p for name, p in model.named_parameters()}
    decoder_.load_state_dict(names, strict=False)
    torch.testing.assert_close(model(ids()).logits, decoder_(ids()), rtol=1e-5, atol=1e-6)
    model.save_pretrained(tmp_path)
    loaded = DepthmixForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.embedding_norm is True
    assert torch.equal(loaded(ids()).logits, model(ids()).logits)


def test_other_values_are_refused():
    with pytest.raises(ValueError, match="embedding_norm must be True or False, got 'yes'"):
        DecoderConfig(**SHAPE, embedding_norm="yes")
