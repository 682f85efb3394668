"""Decoding in chunks and steps: the logits of the whole forward, whatever the mixer; memory that does not grow with the prompt."""

import pytest
import torch

from depthmix import Decoder, DecoderConfig, list_mixers
from depthmix.models import decoding as decoding_module
from depthmix.models.decoding import Decoding
from depthmix.ops import use_backend
from small_cases import each

VOCAB, LENGTH = 13, 9


def decoder(mixer="attnres", dtype=torch.float64, n_blocks=3, **options):
    shape = {"vocab_size": VOCAB, "dim": 16, "n_blocks": n_blocks, "n_heads": 4, "n_kv_heads": 2, "mlp_dim": 24}
    torch.manual_seed(0)
    config = DecoderConfig(**shape, qk_norm=True, mixer=mixer, mixer_options=options)
    model = Decoder(config).requires_grad_(False)
    for p in model.mixer.parameters():
        p += 0.3 * torch.randn_like(p)
    return model.to(dtype)


def tokens(batch=2):
    return torch.randint(VOCAB, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def decoded(model, ids, prompt, chunk):
    """Logits after the prompt and after every token that follows."""
    decoding = Decoding(model, len(ids), LENGTH, chunk=chunk)
    outs = [decoding.prefill(ids[:, :prompt])]
    outs += [decoding.step(ids[:, i]).clone() for i in range(prompt, LENGTH)]
    return torch.stack(outs, dim=1)


@each("mixer", list_mixers())
def test_a_prompt_in_chunks_and_steps_after_it_equal_the_whole_forward(mixer):
    model, ids = decoder(mixer), tokens()
    torch.testing.assert_close(decoded(model, ids, 5, 2), model(ids)[:, 4:], rtol=1e-9, atol=1e-9)


@each(("prompt", "chunk", "batch"), [(1, 4, 1), (6, 3, 3), (8, 100, 1)])
def test_any_chunk(prompt, chunk, batch):
    model, ids = decoder(block_size=2, ways=2), tokens(batch)
    torch.testing.assert_close(decoded(model, ids, prompt, chunk), model(ids)[:, prompt - 1 :], rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize("mixer", ["residual", "attnres", "dca"])
def test_with_kernels(mixer):
    pytest.importorskip("triton")
    model, ids = decoder(mixer, torch.float32, n_blocks=1), tokens(1)
    with use_backend("reference"):
        expected = model(ids)
    with use_backend("triton"):
        found = decoded(model, ids, 7, 4)
    torch.testing.assert_close(found, expected[:, 6:], rtol=1e-5, atol=1e-5)


def test_a_chunk_is_all_that_goes_through_the_blocks_at_once(monkeypatch):
    model, ids, seen = decoder(), tokens(), []
    right = model.through_blocks
    monkeypatch.setattr(model, "through_blocks", lambda x, *a, **k: seen.append(x.shape[1]) or right(x, *a, **k))
    heads, finished = [], []
    model.final_norm.register_forward_hook(lambda module, args, out: finished.append(out.shape[1]))
    model.head.register_forward_hook(lambda module, args, out: heads.append(tuple(out.shape)))
    Decoding(model, 2, LENGTH, chunk=4).prefill(ids)
    assert seen == [4, 4, 1]
    assert heads == [(2, VOCAB)]  # of the last token alone
    assert finished == [1, 1, 1]
    assert decoding_module.CHUNK <= 8192


def test_logits_to_keep():
    model, ids = decoder(), tokens()
    torch.testing.assert_close(model(ids, logits_to_keep=2), model(ids)[:, -2:], rtol=1e-12, atol=1e-12)
    assert model(ids, logits_to_keep=0).shape[1] == LENGTH


def test_no_more_tokens_than_there_is_room_for():
    decoding = Decoding(decoder(), 1, 5)
    with pytest.raises(ValueError, match="room for 5 more of 5; got 9"):
        decoding.prefill(tokens(1))
    decoding.prefill(tokens(1)[:, :5])
    with pytest.raises(ValueError, match="room for 0 more of 5; got 1"):
        decoding.step(torch.zeros(1, dtype=torch.int64))


def test_ids_of_another_shape_are_refused_in_words():
    model, ids = decoder(), tokens()
    with pytest.raises(
        ValueError, match=r"token ids, integers of shape \[batch, tokens\], got torch.int64 of shape \[9\]"
    ):
        model(ids[0])
    with pytest.raises(ValueError, match=r"got torch.float32 of shape \[2, 9\]"):
        model(ids.float())
    decoding = Decoding(model, 2, LENGTH)
    for wrong in (ids[0], ids[:1]):
        with pytest.raises(ValueError, match=r"decoding: expected token ids of shape \[2, T\], got \["):
            decoding.prefill(wrong)
    decoding.prefill(ids[:, :3])
    with pytest.raises(ValueError, match=r"decoding: expected one token for each of 2, got \[2, 2\]"):
        decoding.step(ids[:, 3:5])
    torch.testing.assert_close(decoding.step(ids[:, 3]), model(ids[:, :4])[:, -1], rtol=1e-9, atol=1e-9)
