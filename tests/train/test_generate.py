"""Sampling, streaming and the cache."""

import itertools

import pytest
import torch

from depthmix.errors import DIVERGED, UserError
from depthmix.models import Decoder, DecoderConfig
from depthmix.models.cache import KVCache
from depthmix.runs.restore import load_model
from depthmix.train.generate import generate_stream, generate_text, generate_tokens, sample, stream_text
from train import small

CPU = torch.device("cpu")


@pytest.fixture
def trained():
    return load_model(small.run().path, CPU)


def tokens(model, prompt, count, temperature=0.0, top_p=1.0, seed=0, end=None):
    return list(generate_tokens(model, prompt, count, temperature, top_p, seed, end))


# Sampling.

P = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])


def drawn(temperature=1.0, top_p=1.0, n=2000, logits=None):
    """Shares of the tokens over n draws."""
    logits = P.log() if logits is None else logits
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(len(logits))
    for _ in range(n):
        counts[sample(logits, temperature, top_p, generator)] += 1
    return counts / n


def test_sampling_follows_the_distribution():
    assert (drawn() - P).abs().max() < 0.04
    assert (drawn(temperature=0.5) - P**2 / (P**2).sum()).abs().max() < 0.04


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, [1]), (0.39, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 3, 4]), (0.9, [0, 1, 3, 4]), (1.0, range(5))],
)
def test_nucleus(top_p, kept):
    """The likeliest tokens up to and with the one that reaches top_p, with their own proportions."""
    expected = torch.zeros(5)
    expected[list(kept)] = P[list(kept)]
    expected /= expected.sum()
    found = drawn(top_p=top_p)
    assert set(found.nonzero().flatten().tolist()) == set(kept)
    assert (found - expected).abs().max() < 0.04


def test_equal_tokens_and_extreme_temperatures():
    assert drawn(top_p=0.5, logits=torch.zeros(4)).nonzero().flatten().tolist() == [0, 1]
    assert sample(P.log(), 0, 1.0, torch.Generator()) == 1
    for temperature in (1e-5, 1e-300, 5e-324):
        assert drawn(temperature=temperature, n=5)[1] == 1
    assert (drawn(temperature=1e300) - 0.2).abs().max() < 0.04


# The model.


def test_temperature_zero_is_the_argmax_of_a_whole_pass(trained):
    prompt = trained.tokenizer.encode("The sea").ids
    found = tokens(trained.model, prompt, 25)
    ids = list(prompt)
    with torch.no_grad():
        for token in found:
            assert token == int(trained.model(torch.tensor([ids]))[0, -1].argmax())
            ids.append(token)


def test_one_seed_one_text(trained):
    prompt = trained.tokenizer.encode("The").ids
    texts = [tokens(trained.model, prompt, 30, 1.0, 0.95, seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    torch.manual_seed(123)  # somebody else's generator has no part in it
    assert tokens(trained.model, prompt, 30, 1.0, 0.95, 0) == texts[0]


def test_the_end_of_text_ends_it(trained):
    free = tokens(trained.model, [5, 6], 40)
    assert len(free) == 40
    end = free[7]
    stopped = tokens(trained.model, [5, 6], 40, end=end)
    assert stopped == free[: free.index(end)]


def test_a_model_that_diverged_says_so(trained):
    with torch.no_grad():
        trained.model.head.weight.fill_(float("nan"))
    for temperature in (0.0, 1.0):
        with pytest.raises(UserError, match="not a number") as caught:
            tokens(trained.model, [1], 3, temperature)
        assert caught.value.exit_code == DIVERGED


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_cache_is_a_dynamic_cache(kv_heads):
    transformers = pytest.importorskip("transformers")
    config = DecoderConfig(30, dim=16, n_blocks=3, n_heads=2, n_kv_heads=kv_heads, mixer="attnres")
    model, ids = Decoder(config).eval(), torch.randint(0, 30, (2, 11))
    ours, theirs = KVCache(), transformers.DynamicCache()
    with torch.no_grad():
        whole = model(ids)
        for part in ids.split([4, 1, 3, 1, 2], dim=1):
            logits = model(part, cache=ours)
            assert torch.equal(logits, model(part, cache=theirs))
            seen = ours.get_seq_length()
            assert seen == theirs.get_seq_length()
            assert ours.get_mask_sizes(3, 1) == theirs.get_mask_sizes(3, 1) == (seen + 3, 0)
            torch.testing.assert_close(logits, whole[:, seen - part.shape[1] : seen])
    for layer in range(3):
        assert torch.equal(ours.keys[layer], theirs.layers[layer].keys)
        assert torch.equal(ours.values[layer], theirs.layers[layer].values)
    assert KVCache().get_seq_length() == 0


# Text.


def test_characters_of_several_bytes_come_whole(trained):
    text = "naïve 東京 🌊🌊 🇫🇷 e\u0301 end"
    ids = trained.tokenizer.encode(text).ids
    assert len(ids) > len(text)  # single bytes, most of them
    pieces = list(stream_text(trained.tokenizer, iter(ids)))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    for count in range(len(ids)):  # cut anywhere, all that is complete has been shown before the end
        pieces = list(stream_text(trained.tokenizer, iter(ids[:count])))
        assert "".join(pieces) == trained.tokenizer.decode(ids[:count])


def test_pieces_come_as_they_are_made(trained):
    ids = trained.tokenizer.encode("The sea is deep").ids
    stream = stream_text(trained.tokenizer, itertools.cycle(ids))
    assert len([next(stream) for _ in range(20)]) == 20  # from a text without an end
    assert list(stream_text(trained.tokenizer, iter([]))) == []


def test_broken_bytes_do_not_stop_the_text(trained):
    broken = trained.tokenizer.encode("東").ids[:1]
    ids = [*broken, *trained.tokenizer.encode(" sea").ids]
    assert "".join(stream_text(trained.tokenizer, iter(ids))) == "\ufffd sea"
    assert "".join(stream_text(trained.tokenizer, iter(broken))) == "\ufffd"


def test_a_run_continues_a_prompt():
    run = small.run()
    text = generate_text(run.path, "The sea", 20, temperature=0)
    assert text.startswith(" is deep")  # it has read little else
    assert text == "".join(generate_stream(str(run.path), "The sea", 20, 0, 1.0, 0))
    newest = max(run.checkpoints.iterdir())
    assert text == generate_text(newest, "The sea", 20, temperature=0)
    older = min(run.checkpoints.iterdir())
    assert older != newest
    assert load_model(older, CPU).step < load_model(run.path, CPU).step == 60
    assert generate_text(run.path, "", 20, seed=1) == generate_text(run.path, "", 20, seed=1)  # from nothing


def test_a_checkpoint_is_found_from_where_one_stands(monkeypatch):
    monkeypatch.chdir(small.run().checkpoints)
    assert load_model("step-00000060", CPU).step == 60
    monkeypatch.chdir("step-00000060")
    assert load_model(".", CPU).step == 60


def test_the_end_of_text_written_out_is_text():
    trained = load_model(small.run().path, CPU)
    end = trained.tokenizer.token_to_id("<|endoftext|>")
    assert end == 0
    assert end not in trained.tokenizer.encode("a <|endoftext|> b").ids
