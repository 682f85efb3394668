"""depth_mixing: the matrix of a model on a batch, for every mixer, and what it must leave alone."""

import pytest
import torch
from torch import nn

import depthmix
from depthmix import Decoder, DecoderConfig, create_mixer, depth_mixing, list_mixers
from depthmix.insight import record_sources

B, T, DIM = 2, 4, 16


def decoder(mixer, options=None, n_blocks=3, random=True):
    """A decoder in fp64; random=True moves the mixer off its initial values."""
    torch.manual_seed(0)
    shape = {"vocab_size": 13, "dim": DIM, "n_blocks": n_blocks, "n_heads": 2, "mlp_dim": 24}
    model = Decoder(DecoderConfig(**shape, mixer=mixer, mixer_options=options or {})).double()
    if random:
        with torch.no_grad():
            for p in model.mixer.parameters():
                p += 0.3 * torch.randn_like(p)
    return model


def tokens():
    return torch.randint(13, (B, T), generator=torch.Generator().manual_seed(1))


def cases(*pairs):
    return pytest.mark.parametrize(("mixer", "options"), pairs, ids=str)


class OwnModel(nn.Module):
    """A user's model: no tokens, no norms, a Linear per site, and a mixer (or several)."""

    def __init__(self, *mixers):
        super().__init__()
        self.mixers = nn.ModuleList(mixers)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4)).double()

    def forward(self, x, fail_at=None):
        mixer = self.mixers[0]
        state = mixer.start(x)
        for site, layer in enumerate(self.layers):
            if site == fail_at:
                raise RuntimeError("no further")
            h = mixer.read(state, site)
            state = mixer.write(state, site, layer(h if isinstance(h, torch.Tensor) else sum(h)).tanh())
        return mixer.finish(state)


def own(mixer="attnres", **options):
    torch.manual_seed(0)
    return OwnModel(create_mixer(mixer, dim=DIM, n_blocks=2, **options).double())


# The matrix.


@pytest.mark.parametrize("mixer", list_mixers())
def test_shape_is_ways_by_readers_by_sources_and_the_average_is_over_tokens(mixer):
    model = decoder(mixer)
    m, per_token = depth_mixing(model, tokens()), depth_mixing(model, tokens(), per_token=True)
    n_ways, readers = max(model.mixer.ways(s) for s in range(6)), 7
    assert m.shape == (n_ways, readers, readers)
    assert per_token.shape == (B, T, n_ways, readers, readers)
    assert m.dtype == per_token.dtype == torch.float64
    torch.testing.assert_close(per_token.mean((0, 1)), m, rtol=1e-12, atol=1e-12)
    assert (per_token.triu(1) == 0).all(), "a reader sees its own output or a later one"
    assert (per_token[..., 0, 0] != 0).all()


def test_residual_is_all_ones():
    m = depth_mixing(decoder("residual"), tokens(), per_token=True)
    assert torch.equal(m, torch.ones_like(m).tril())


def test_at_step_0_rezero_reads_the_embedding_alone_and_full_attnres_averages():
    rezero = depth_mixing(decoder("rezero", random=False), tokens())[0]
    assert torch.equal(rezero, torch.eye(7)[0].double().expand(7, 7))
    average = torch.ones(7, 7).double().tril() / torch.arange(1, 8)[:, None]
    torch.testing.assert_close(depth_mixing(decoder("attnres", random=False), tokens())[0], average)


@cases(
    ("attnres", {}),
    *(("attnres", {"block_size": b}) for b in (2, 3, 5)),
    ("attnres", {"block_size": 3, "ways": 2}),
    ("attnres", {"ways": 3}),
    ("attnres", {"query": "input"}),
    ("attnres", {"weights": "static"}),
    ("highway", {}),
    ("highway", {"gate": "scalar"}),
)
def test_rows_of_averages_sum_to_one(mixer, options):
    if (
        "block_size" in options
    ):  # a block of outputs shares one weight: the sum is over the sources as the reader has them
        size, sources = options["block_size"], [0]
        for site in range(6):
            sources += [site + 1] * (site % size == 0)
        m = depth_mixing(decoder(mixer, options), tokens(), per_token=True)[..., sources]
    else:
        m = depth_mixing(decoder(mixer, options), tokens(), per_token=True)
    assert (m >= 0).all()
    torch.testing.assert_close(m.sum(-1), torch.ones_like(m[..., 0]))


STREAMS = [
    *(("hyper", {"n": n}) for n in (1, 2, 3)),
    ("hyper", {"n": 2, "static": True}),
    *(("mhc", {"n": n}) for n in (2, 3)),
    ("mhc", {"n": 2, "residual_map": "birkhoff"}),
    ("mhc", {"n": 2, "head": "learned", "convention": "deepseek"}),
    ("mhc", {"n": 2, "schedule": "single_pass"}),
]


@cases(*STREAMS)
def test_n_streams_make_an_n_semiseparable_matrix(mixer, options):
    """Readers from s on see everything before s through n streams: M[s:, :s+1] has rank n at most, and n somewhere."""
    m = depth_mixing(decoder(mixer, options, n_blocks=5), tokens(), per_token=True)[:, :, 0]
    ranks = []
    for s in range(m.shape[-1]):
        values = torch.linalg.svdvals(m[..., s:, : s + 1])
        ranks.append((values > 1e-10 * values[..., :1]).sum(-1))
    ranks = torch.stack(ranks)
    assert ranks.max() <= options["n"]
    assert (ranks.amax(0) == options["n"]).all()  # for every token


SCALAR = [
    *((name, {}) for name in ("residual", "rezero", "denseformer", "hyper", "mhc", "mudd", "attnres")),
    ("denseformer", {"dilation": 2, "period": 2}),
    ("mhc", {"head": "learned", "convention": "deepseek"}),
    ("mhc", {"schedule": "single_pass"}),
    ("attnres", {"block_size": 4}),
    ("attnres", {"ways": 2, "query": "input"}),
    ("attnres", {"window": 2, "weights": "sigmoid"}),
    ("attnres", {"routing": "add", "weights": "static"}),
    ("grn", {"version": 1}),
    ("highway", {"gate": "scalar"}),
    ("laurel", {"variant": "rw"}),
]


@cases(*SCALAR)
def test_the_matrix_times_the_sources_is_what_every_norm_was_given(mixer, options):
    model, sources, reads = decoder(mixer, options), [], []
    model.embedding.register_forward_hook(lambda module, args, out: sources.append(out))
    for norms, sublayer in zip(model.norms, model.sublayers, strict=True):
        sublayer.register_forward_hook(lambda module, args, out: sources.append(out))
        reads.append([])
        for norm in norms:
            norm.register_forward_pre_hook(lambda module, args, to=reads[-1]: to.append(args[0]))
    reads.append([])
    model.final_norm.register_forward_pre_hook(lambda module, args: reads[-1].append(args[0]))
    m = depth_mixing(model, tokens(), per_token=True)
    rebuilt = torch.einsum("btwsi,ibtd->swbtd", m, torch.stack(sources))
    for site, given in enumerate(reads):
        for way in range(m.shape[2]):
            torch.testing.assert_close(rebuilt[site, way], given[way % len(given)], rtol=1e-9, atol=1e-9)


# What it runs on and what it leaves alone.


@pytest.mark.parametrize("mixer", list_mixers())
def test_train_eval_and_no_grad_give_the_same_matrix(mixer):
    model = decoder(mixer)
    expected = depth_mixing(model, tokens())
    assert torch.equal(depth_mixing(model.eval(), tokens()), expected)
    assert not model.training
    with torch.no_grad():
        assert torch.equal(depth_mixing(model, tokens()), expected)
        assert not torch.is_grad_enabled()
    assert not expected.requires_grad


def test_inference_mode_gives_the_same_matrix():
    model = decoder("attnres")
    expected = depth_mixing(model, tokens())
    with torch.inference_mode():
        assert torch.equal(depth_mixing(model, tokens()), expected)


@pytest.mark.parametrize("mixer", list_mixers())
def test_weights_gradients_and_the_mixers_methods_stay_as_they_were(mixer):
    model = decoder(mixer)
    model(tokens()).square().sum().backward()
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    attributes, required = set(vars(model.mixer)), [p.requires_grad for p in model.parameters()]
    depth_mixing(model, tokens())
    assert set(vars(model.mixer)) == attributes
    assert [p.requires_grad for p in model.parameters()] == required
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    for name, p in model.named_parameters():
        assert (p.grad is None) == (gradients[name] is None), name
        assert p.grad is None or torch.equal(p.grad, gradients[name]), name


def test_a_pass_that_fails_leaves_the_mixer_as_it_was_and_the_next_one_works():
    model, x = own(), torch.randn(B, T, DIM).double()
    expected = depth_mixing(model, x)
    with pytest.raises(RuntimeError, match="no further"):
        depth_mixing(model, x, fail_at=2)
    assert not {"start", "write"} & set(vars(model.mixers[0]))
    assert torch.equal(depth_mixing(model, x), expected)


def test_one_recording_inside_another_leaves_the_outer_one_working():
    model, x = own(), torch.randn(B, T, DIM).double()
    with record_sources(model.mixers[0]) as sources:
        depth_mixing(model, x)
        sources.clear()
        model(x)
        assert len(sources) == 5
    assert not {"start", "write"} & set(vars(model.mixers[0]))


@pytest.mark.parametrize("n_mixers", [0, 2])
def test_a_model_without_a_mixer_or_with_two_is_refused(n_mixers):
    model = OwnModel(*(create_mixer("residual", dim=DIM, n_blocks=2) for _ in range(n_mixers)))
    with pytest.raises(ValueError, match=f"one mixer, found {n_mixers}"):
        depth_mixing(model, torch.zeros(1, DIM))


class Two(nn.Module):
    """Two stacks of their own, such as an encoder and a decoder."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.spare = own("attnres"), own("rezero"), own("residual")

    def forward(self, x):
        return self.decoder(self.encoder(x))


def test_of_two_mixers_one_is_chosen_by_name_or_by_itself():
    model, x = Two(), torch.randn(B, T, DIM).double()
    for name in ("encoder", "decoder"):
        inner = getattr(model, name)
        expected = depth_mixing(inner, x if name == "encoder" else model.encoder(x))
        assert torch.equal(depth_mixing(model, x, mixer=f"{name}.mixers.0"), expected)
        assert torch.equal(depth_mixing(model, x, mixer=inner.mixers[0]), expected)


@pytest.mark.parametrize(
    ("mixer", "said"),
    [
        (None, "found 3; say which with mixer=, one of 'encoder.mixers.0', 'decoder.mixers.0', 'spare.mixers.0'"),
        ("encodr.mixers.0", "'encodr.mixers.0' is no mixer of the model; .* did you mean 'encoder.mixers.0'"),
        ("encoder", "'encoder' is no mixer of the model; its mixers are 'encoder.mixers.0', "),
        (create_mixer("residual", dim=DIM, n_blocks=2), "this module is no mixer of the model"),
        ("spare.mixers.0", "the model did not use this mixer on this batch"),
    ],
    ids=str,
)
def test_which_mixer_is_meant_must_be_clear(mixer, said):
    with pytest.raises(ValueError, match=said):
        depth_mixing(Two(), torch.randn(B, T, DIM).double(), mixer=mixer)


@pytest.mark.parametrize("mixer", list_mixers())
@pytest.mark.parametrize("batch", [(), (2, 3, 2)], ids=str)
def test_a_users_own_module_with_any_leading_dimensions(mixer, batch):
    model, x = own(mixer), torch.randn(*batch, DIM).double()
    m = depth_mixing(model, x, per_token=True)
    assert m.shape == (*batch, max(model.mixers[0].ways(s) for s in range(4)), 5, 5)
    assert m.isfinite().all()
    torch.testing.assert_close(depth_mixing(model, x), m.reshape(-1, *m.shape[-3:]).mean(0))


def test_tokens_may_be_passed_by_keyword_and_bfloat16_models_give_fp32():
    model = decoder("attnres")
    assert torch.equal(depth_mixing(model, input_ids=tokens()), depth_mixing(model, tokens()))
    low = depth_mixing(model.bfloat16(), tokens())
    assert low.dtype == torch.float32
    torch.testing.assert_close(low.sum(-1), torch.ones(1, 7), rtol=1e-5, atol=1e-5)


def test_it_is_exported():
    assert depthmix.depth_mixing is depth_mixing
