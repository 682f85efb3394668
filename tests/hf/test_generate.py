"""`generate` with the stock caches: the tokens that the cache-free forward gives, for every mixer and way of decoding."""

import functools

import pytest
import torch

from depthmix import list_mixers
from hf.tiny import HEAD_DIM, KV_HEADS, VOCAB, causal_lm, tokens

CACHES = ["dynamic", "static"]
NEW = 5
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@functools.cache
def model_of(mixer):
    """In fp64, where no two logits are as near as rounding, whatever the order of summation."""
    return causal_lm(mixer).double().requires_grad_(False)


def new_cache(kind, model, length=20):
    from transformers import DynamicCache, StaticCache

    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=length)


def continued(model, ids, new=NEW, **how):
    """What generate makes of full rows; without a mask it would take token 0 for padding."""
    how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, **how}
    return model.generate(ids, max_new_tokens=new, **how)


@functools.cache
def without_cache(mixer, row, padding):
    """The greedy continuation of one row of tokens(3) without its first ones, and the logits of its first step."""
    model, sequence, steps = model_of(mixer), tokens(3)[row, padding:], []
    for _ in range(NEW):
        steps.append(model(sequence[None], use_cache=False).logits[0, -1])
        sequence = torch.cat([sequence, steps[-1].argmax(-1, keepdim=True)])
    return sequence[-NEW:], steps[0]


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("mixer", list_mixers())
def test_logits_through_a_cache_are_those_of_the_whole_forward(mixer, kind):
    model, ids = model_of(mixer), tokens()
    cache, parts = new_cache(kind, model), []
    for chunk in ids.split([4, 1, 2, 1], dim=1):
        parts.append(model(chunk, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids, use_cache=False).logits, **CLOSE)


@pytest.mark.parametrize(
    ("mixer", "kind"), [*((mixer, "dynamic") for mixer in list_mixers()), ("attnres", "static"), ("mhc", "static")]
)
def test_greedy_decoding_of_unequal_lengths_padded_on_the_left_equals_each_row_alone(mixer, kind):
    model, ids = model_of(mixer), tokens(3)
    mask, paddings = torch.ones_like(ids), (0, 3, 7)
    for row, padding in enumerate(paddings):
        mask[row, :padding] = 0
    made = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        cache_implementation=None if kind == "dynamic" else "static",
        disable_compile=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    for row, padding in enumerate(paddings):
        expected, first = without_cache(mixer, row, padding)
        assert torch.equal(made.sequences[row, ids.shape[1] :], expected)
        torch.testing.assert_close(made.logits[0][row].double(), first, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("mixer", ["residual", "attnres", "dca"])
def test_a_prompt_in_chunks_gives_the_same_tokens(mixer, kind):
    """The depth state of a chunk is gone before the next one begins, and nothing of it is missed."""
    model, ids = model_of(mixer), tokens()
    how = {"cache_implementation": None if kind == "dynamic" else "static", "disable_compile": True}
    assert torch.equal(continued(model, ids, prefill_chunk_size=3, **how), continued(model, ids, **how))


def test_a_cache_is_used_and_holds_keys_and_values_alone():
    model, ids = model_of("attnres"), tokens()
    made = continued(model, ids, return_dict_in_generate=True)
    from transformers import DynamicCache

    assert type(made.past_key_values) is DynamicCache
    shapes = [tuple(layer.keys.shape) for layer in made.past_key_values.layers]
    assert shapes == [(2, KV_HEADS, ids.shape[1] + NEW - 1, HEAD_DIM)] * model.config.num_hidden_layers


@pytest.mark.parametrize("mixer", ["residual", "attnres", "mhc"])
def test_sampling_with_a_cache_draws_what_it_draws_without(mixer):
    model, ids = model_of(mixer), tokens()
    made = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        made.append(continued(model, ids, 8, do_sample=True, top_k=0, use_cache=use_cache))
    assert torch.equal(*made)
    torch.manual_seed(4)
    assert not torch.equal(made[0], continued(model, ids, 8, do_sample=True, top_k=0))


@pytest.mark.parametrize("mixer", ["residual", "attnres", "dca"])
def test_beam_search_with_a_cache_finds_what_it_finds_without(mixer):
    model, ids = model_of(mixer), tokens()
    how = {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True}
    cached, whole = (continued(model, ids, 4, use_cache=use_cache, **how) for use_cache in (True, False))
    assert torch.equal(cached.sequences, whole.sequences)
    torch.testing.assert_close(cached.sequences_scores, whole.sequences_scores, rtol=1e-5, atol=1e-5)


def test_beam_search_finds_the_likeliest_of_all_continuations():
    """With as many beams as the vocabulary, two tokens are an exhaustive search."""
    model, ids = model_of("attnres"), tokens(1)
    pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    logits = model(torch.cat([ids.expand(len(pairs), -1), pairs], dim=1), use_cache=False).logits.log_softmax(-1)
    scores = logits[:, -3].gather(1, pairs[:, :1]) + logits[:, -2].gather(1, pairs[:, 1:])
    made = continued(model, ids, 2, num_beams=VOCAB)
    assert torch.equal(made[0, -2:], pairs[scores.argmax()])


def test_assisted_decoding_gives_the_models_own_greedy_tokens():
    model, assistant, ids = model_of("attnres"), model_of("residual"), tokens(1)
    plain = continued(model, ids, 10)
    assisted = continued(model, ids, 10, assistant_model=assistant)
    assert torch.equal(assisted, plain)
    looked_up = continued(model, ids, 10, prompt_lookup_num_tokens=2)
    assert torch.equal(looked_up, plain)


# By backend: what its cache takes, and by how much of their spread logits may change. Quanto compiles for a minute or
# more at its first use. Neither is needed by anything else here: `pip install --no-deps optimum-quanto hqq ninja termcolor einops`.
QUANTIZED = {
    "fp8": ({}, 0.5),
    "hqq": ({"nbits": 8, "q_group_size": 32, "residual_length": 4, "axis_key": 1, "axis_value": 1}, 0.1),
    "quanto": ({"nbits": 4, "q_group_size": 32, "residual_length": 4}, 0.8),
}


def has_backend(backend):
    if backend == "fp8":  # of transformers' own, in newer versions
        import transformers.cache_utils

        return hasattr(transformers.cache_utils, "Fp8QuantizedLayer")
    return importable({"quanto": "optimum.quanto"}.get(backend, backend))


@pytest.mark.parametrize("mixer", ["residual", "attnres", "dca", "mhc", "hyper"])
@pytest.mark.parametrize("backend", QUANTIZED)
def test_a_quantized_cache_stays_near_the_full_one(mixer, backend):
    if not has_backend(backend):
        pytest.skip(f"the quantized cache {backend!r} is not installed")
    settings, limit = QUANTIZED[backend]
    model, ids = causal_lm(mixer, {"head_dim": 16}).requires_grad_(False), tokens(2, 16)  # heads that groups of 32 fit
    how = {"cache_implementation": "quantized", "cache_config": {"backend": backend, **settings}}
    made = continued(model, ids, 8, return_dict_in_generate=True, output_logits=True, **how)
    assert type(made.past_key_values).__name__ == "QuantizedCache"
    whole = model(made.sequences, use_cache=False).logits[:, ids.shape[1] - 1 : -1]
    change = ((torch.stack(made.logits, dim=1) - whole).abs().amax((0, 2)) / whole.std()).tolist()  # by step
    assert change[0] < 1e-4  # the prompt's own logits come before anything is rounded
    assert 1e-4 < sorted(change[1:])[3] < limit


def importable(name):
    import importlib.util

    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_generate_returns_hidden_states_of_every_step():
    model, ids = model_of("attnres"), tokens()
    made = continued(model, ids, 3, return_dict_in_generate=True, output_hidden_states=True)
    assert [len(step) for step in made.hidden_states] == [model.config.num_hidden_layers + 1] * 3
    whole = model(made.sequences, output_hidden_states=True).hidden_states
    torch.testing.assert_close(made.hidden_states[-1][-1], whole[-1][:, -2:-1], **CLOSE)
