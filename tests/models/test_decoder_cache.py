"""Decoding with a Hugging Face cache, and padded batches: the same logits as the full forward of each row alone."""

import pytest
import torch

from depthmix import Decoder, DecoderConfig, list_mixers
from small_cases import each

VOCAB, LENGTH, BLOCKS, HEADS, KV_HEADS, HEAD_DIM = 13, 8, 3, 4, 2, 6
CACHES = ["dynamic", "static"]
LENGTHS = (LENGTH, 5, 1)  # of the rows of a padded batch
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def decoder(mixer="attnres", **options):
    """A decoder in fp64 whose mixer is away from its initial values."""
    shape = {"vocab_size": VOCAB, "dim": 16, "n_blocks": BLOCKS, "n_heads": HEADS, "mlp_dim": 24}
    torch.manual_seed(0)
    config = DecoderConfig(**shape, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM, mixer=mixer, mixer_options=options)
    model = Decoder(config).double().requires_grad_(False)
    for p in model.mixer.parameters():
        p += 0.3 * torch.randn_like(p)
    return model


def new_cache(kind):
    from transformers import DynamicCache, LlamaConfig, StaticCache  # which takes seconds, in every worker

    if kind == "dynamic":
        return DynamicCache()
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    return StaticCache(config=LlamaConfig(num_hidden_layers=BLOCKS, **heads), max_cache_len=LENGTH + 4)


def tokens(batch=2):
    return torch.randint(VOCAB, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def in_chunks(model, ids, cache, chunks, mask=None, **by_chunk):
    """Logits of consecutive chunks through one cache; mask grows with them, by_chunk is cut along its second axis."""
    outs, done = [], 0
    assert sum(chunks) == ids.shape[1]
    for n in chunks:
        now = slice(done, done + n)
        seen = None if mask is None else mask[:, : done + n]
        outs.append(model(ids[:, now], seen, cache=cache, **{k: v[:, now] for k, v in by_chunk.items()}))
        done += n
        assert int(cache.get_seq_length()) == done
    return torch.cat(outs, dim=1)


def padded(side):
    """(ids, mask) of rows of different lengths, with an ordinary token in the padding."""
    mask = torch.zeros(len(LENGTHS), LENGTH, dtype=torch.long)
    for row, n in zip(mask, LENGTHS, strict=True):
        row[slice(LENGTH - n, None) if side == "left" else slice(n)] = 1
    return tokens(len(LENGTHS)), mask


def rows_alone(model, ids, mask):
    """The logits of each row's own tokens, run by itself without a mask, one row after the other."""
    return torch.cat([model(row[kept.bool()][None])[0] for row, kept in zip(ids, mask, strict=True)])


def four_dimensional(mask):
    """The boolean mask [B, 1, T, keys] of a padded batch, written out query by query."""
    full = torch.zeros(len(mask), 1, LENGTH, LENGTH, dtype=torch.bool)
    for b in range(len(mask)):
        for query in range(LENGTH):
            for key in range(query + 1):
                full[b, 0, query, key] = bool(mask[b, key]) or key == query
    return full


@each("mixer", list_mixers())
def test_decoding_token_by_token_with_a_dynamic_cache_equals_the_full_forward(mixer):
    model, ids = decoder(mixer), tokens()
    torch.testing.assert_close(in_chunks(model, ids, new_cache("dynamic"), (4, 1, 1, 1, 1)), model(ids), **CLOSE)


@each("mixer", ["residual", "attnres", "mhc", "dca", "mudd"])
def test_decoding_token_by_token_with_a_static_cache_equals_the_full_forward(mixer):
    model, ids = decoder(mixer), tokens()
    torch.testing.assert_close(in_chunks(model, ids, new_cache("static"), (4, 1, 1, 1, 1)), model(ids), **CLOSE)


@each("kind", CACHES)
@each("chunks", [(LENGTH,), (3, 4, 1), (1, 5, 2), (1,) * LENGTH])
def test_prefill_in_chunks_equals_the_full_forward(kind, chunks):
    model, ids = decoder(ways=2, block_size=2), tokens()
    torch.testing.assert_close(in_chunks(model, ids, new_cache(kind), chunks), model(ids), **CLOSE)


@each("kind", CACHES)
def test_a_cache_holds_the_keys_and_values_of_every_block(kind):
    cache = new_cache(kind)
    decoder()(tokens(), cache=cache)
    slots = LENGTH if kind == "dynamic" else LENGTH + 4
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(2, KV_HEADS, slots, HEAD_DIM)] * BLOCKS
    assert [tuple(layer.values.shape) for layer in cache.layers] == [(2, KV_HEADS, slots, HEAD_DIM)] * BLOCKS


@each("mixer", list_mixers())
@each("side", ["left", "right"])
def test_padded_rows_equal_the_rows_alone(side, mixer):
    model, (ids, mask) = decoder(mixer), padded(side)
    torch.testing.assert_close(model(ids, mask)[mask.bool()], rows_alone(model, ids, mask), **CLOSE)


@each("kind", CACHES)
@each("side", ["left", "right"])
@each("chunks", [(3, 4, 1), (1,) * LENGTH])
def test_padded_rows_through_a_cache_equal_the_rows_alone(chunks, side, kind):
    model, (ids, mask) = decoder("dca"), padded(side)
    logits = in_chunks(model, ids, new_cache(kind), chunks, mask)
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[mask.bool()], rows_alone(model, ids, mask), **CLOSE)


@each("dtype", [torch.bool, torch.long, torch.float64])
def test_what_stands_in_the_padding_and_the_dtype_of_the_mask_do_not_matter(dtype):
    model, (ids, mask) = decoder(), padded("left")
    other = torch.where(mask.bool(), ids, (ids + 1) % VOCAB)
    assert torch.equal(model(other, mask.to(dtype))[mask.bool()], model(ids, mask)[mask.bool()])


@each("side", ["left", "right"])
def test_padded_positions_give_no_nan_in_logits_or_gradients(side):
    model, (ids, mask) = decoder().requires_grad_(), padded(side)
    mask[1] = 0  # a row of padding only
    logits = model(ids, mask)
    assert logits.isfinite().all()
    logits[mask.bool()].square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@each("kind", CACHES)
def test_explicit_positions_equal_the_default_ones(kind):
    model, ids = decoder(), tokens()
    positions = torch.arange(LENGTH).expand(2, -1)
    assert torch.equal(model(ids, position_ids=positions), model(ids))
    cached = in_chunks(model, ids, new_cache(kind), (5, 1, 2), position_ids=positions)
    torch.testing.assert_close(cached, model(ids), **CLOSE)


def test_explicit_positions_are_used():
    model, ids = decoder(), tokens()
    shifted = model(ids, position_ids=torch.arange(LENGTH)[None] + 5)
    torch.testing.assert_close(shifted, model(ids), rtol=1e-5, atol=1e-5)  # only distances count; angles are fp32
    assert (model(ids, position_ids=2 * torch.arange(LENGTH)[None]) - model(ids)).abs().max() > 1e-4


def test_a_padded_batch_counts_positions_without_the_padding():
    model, (ids, mask) = decoder(), padded("left")
    positions = torch.stack([torch.arange(LENGTH) - (LENGTH - n) for n in LENGTHS]).clamp(min=0)
    assert torch.equal(model(ids, mask, positions), model(ids, mask))


@each("side", ["left", "right"])
@each("additive", [False, True])
def test_a_four_dimensional_mask_equals_the_two_dimensional_one(additive, side):
    model, (ids, mask) = decoder(), padded(side)
    full = four_dimensional(mask)
    if additive:
        full = torch.zeros(full.shape, dtype=torch.float64).masked_fill(~full, -torch.inf)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    torch.testing.assert_close(model(ids, full, positions), model(ids, mask), **CLOSE)


def test_a_four_dimensional_mask_may_be_shared_by_batch_and_heads_or_differ_by_head():
    model, ids = decoder(), tokens()
    causal = torch.ones(LENGTH, LENGTH).tril().bool()
    for shape in ((1, 1), (2, 1), (1, HEADS), (2, HEADS)):
        torch.testing.assert_close(model(ids, causal.expand(*shape, LENGTH, LENGTH)), model(ids), **CLOSE)


@each("kind", CACHES)
def test_a_mask_that_does_not_cover_the_cache_is_refused(kind):
    model, ids, cache = decoder(), tokens(), new_cache(kind)
    model(ids[:, :4], cache=cache)
    with pytest.raises(ValueError, match=r"attention_mask of shape \[2, 5\] or four dimensions, got \[2, 1\]"):
        model(ids[:, 4:5], torch.ones(2, 1), cache=cache)


@each("shape", [(2, LENGTH - 1), (2, LENGTH + 1), (1, LENGTH), (LENGTH,), (2, LENGTH, LENGTH)], ids=str)
def test_a_mask_of_the_wrong_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"attention_mask of shape \[2, 8\] or four dimensions, got"):
        decoder()(tokens(), attention_mask=torch.ones(shape))
