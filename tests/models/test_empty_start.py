"""Models built without memory and filled from a state_dict, as FSDP2, Hugging Face and others build large ones."""

import copy

import torch

from depthmix import Decoder, DecoderConfig, create_mixer
from harness import DIM, EVERY_VALUE, MIXERS, Sublayers, build, embedding, run_stack
from small_cases import each

SHAPE = {"vocab_size": 11, "dim": 24, "n_blocks": 1, "n_heads": 2, "n_kv_heads": 1, "mlp_dim": 8, "qk_norm": True}
TOKENS = torch.arange(6).reshape(2, 3)


def to_empty_and_load(make, weights):
    with torch.device("meta"):
        model = make()
    model.to_empty(device="cpu")  # full of NaN: conftest.py
    model.load_state_dict(weights)
    return model


def assign(make, weights):
    with torch.device("meta"):
        model = make()
    model.load_state_dict(weights, assign=True)
    return model


FILLS = (to_empty_and_load, assign)


def weights_of(model):
    return {name: t.clone() for name, t in model.state_dict().items()}


@each(("name", "choice"), EVERY_VALUE)
def test_a_mixer_built_empty_and_loaded_gives_the_same(name, choice):
    mixer, sublayers, e = build(name, 2, choice, random=True), Sublayers(2), embedding()
    with torch.no_grad():
        expected = run_stack(mixer, sublayers, e)[0]
        for fill in FILLS:
            made = fill(lambda: create_mixer(name, dim=DIM, n_blocks=2, **choice).double(), weights_of(mixer))
            assert torch.equal(run_stack(made, sublayers, e)[0], expected)


def decoder(mixer, tied):
    return Decoder(DecoderConfig(**SHAPE, mixer=mixer, tie_embeddings=tied))


@each("mixer", MIXERS)
def test_a_model_built_empty_and_loaded_gives_the_same_logits(mixer):
    original = decoder(mixer, tied=True)
    with torch.no_grad():
        for p in original.parameters():
            p += 0.1 * torch.randn_like(p)
        expected = original(TOKENS)
        for fill in FILLS:
            made = fill(lambda: decoder(mixer, tied=True), weights_of(original))
            assert torch.equal(made(TOKENS), expected)


@each("fill", FILLS)
@each("tied", [True, False])
def test_tied_embeddings_stay_tied_and_others_apart(tied, fill):
    filled = fill(lambda: decoder("residual", tied), weights_of(decoder("residual", tied)))
    for model in (filled, copy.deepcopy(filled).double(), torch.nn.Sequential(filled).to("meta")[0]):
        assert (model.head.weight is model.embedding.weight) == tied
        assert ("head.weight" in dict(model.named_parameters())) != tied


def test_a_model_built_empty_can_be_initialised_too():
    with torch.device("meta"):
        model = Decoder(DecoderConfig(**SHAPE, mixer="mhc", mixer_options={"residual_map": "birkhoff"}))
    model.to_empty(device="cpu").reset_parameters()
    with torch.no_grad():
        assert torch.isfinite(model(TOKENS)).all()
