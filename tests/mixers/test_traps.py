"""The mistakes other implementations made, each with a test of its own (docs/reference/rules.md, shared specifications)."""

import math

import pytest
import torch
from torch import nn

from depthmix import Decoder, DecoderConfig, create_mixer
from depthmix.mixers.mhc import OFF_LOGIT
from harness import DIM, Sublayers, as_tuple, build, embedding, run_stack


def replay_to_finish(mixer, sources):
    state = mixer.start(sources[0])
    for site in range(mixer.n_sites):
        mixer.read(state, site)
        state = mixer.write(state, site, sources[site + 1])
    return mixer.finish(state)


def train(mixer, steps, lr=0.5):
    sublayers = Sublayers(mixer.n_blocks)
    optimizer = torch.optim.SGD([*mixer.parameters(), *sublayers.parameters()], lr=lr)
    e = embedding()
    for _ in range(steps):
        out, _, _ = run_stack(mixer, sublayers, e)
        optimizer.zero_grad()
        nn.functional.rms_norm(out, (DIM,)).sub(1.0).square().mean().backward()
        optimizer.step()
    return sublayers, e


@pytest.mark.parametrize("relu_on", ["dynamic", "sum"])
@pytest.mark.parametrize("name", ["grn", "dca"])
def test_dead_relu(name, relu_on):
    """w = 0 puts every score at ReLU's corner. torch.relu would keep w at zero for ever; ours trains from the first step."""
    corner = torch.zeros(1, requires_grad=True)
    assert torch.autograd.grad(torch.relu(corner).sum(), corner)[0] == 0
    mixer = build(name, 3, {"relu_on": relu_on})
    train(mixer, steps=1)
    for w in mixer.w.values():
        assert (w.grad.abs().amax(-1) > 1e-8).all()
        assert (w.abs().amax(-1) > 1e-8).all()


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("name", ["grn", "dca"])
def test_dropped_middle_in_k_dca(name, window):
    """Deltas that leave the window are summed into one entry, not dropped: the start is still the plain sum, and old blocks still matter."""
    mixer = build(name, 6, {"window": window})
    sources = [embedding() for _ in range(13)]
    torch.testing.assert_close(replay_to_finish(mixer, sources), sum(sources))
    with torch.no_grad():
        for p in mixer.parameters():
            p += 0.3 * torch.randn_like(p)
    m = mixer.mixing(sources)[0]
    assert (m.tril().abs() > 0).eq(torch.ones_like(m).tril().bool()).all()


@pytest.mark.parametrize("choice", [{"static": True}, {"static": False}])
def test_unmixed_hyper_connection_residual(choice):
    """A_r is applied, transposed, and learns: code in the wild computed it and returned the streams unmixed."""
    mixer = build("hyper", 1, {"n": 2, **choice})
    sources = [embedding() for _ in range(3)]
    with torch.no_grad():
        mixer.A_r[0] = torch.tensor([[1.0, 5.0], [0.0, 1.0]])  # stream 1 becomes 5 x stream 0 + stream 1
    e, y0, y1 = sources
    state = mixer.write(mixer.start(e), 0, y0)
    torch.testing.assert_close(state.x[..., 0, :], e + y0)
    torch.testing.assert_close(state.x[..., 1, :], 6 * e + y0)
    torch.testing.assert_close(mixer.finish(mixer.write(state, 1, y1)), 7 * e + 2 * y0 + 2 * y1)
    mixer = build("hyper", 3, choice)
    train(mixer, steps=2)
    assert (mixer.A_r.grad.abs().amax((-1, -2)) > 1e-8).all()
    assert not torch.allclose(mixer.A_r, torch.eye(4, dtype=torch.float64).expand_as(mixer.A_r))


def test_hyper_connection_streams_persist():
    """Code that expands and reduces the streams inside each block is a plain residual network: its M has rank one."""
    mixer = build("hyper", 4, {"static": True, "n": 3}, random=True)
    m = mixer.mixing([embedding() for _ in range(9)])[0]
    assert torch.linalg.matrix_rank(m[4:, :5], rtol=1e-9) == 3


def test_hyper_connection_final_sum_is_n_times_the_plain_stream():
    """Which is why no scaling of the output projections is needed for the reads, and why the final norm hides the factor."""
    mixer, sources = build("hyper", 3, {"n": 4}), [embedding() for _ in range(7)]
    torch.testing.assert_close(replay_to_finish(mixer, sources), 4 * sum(sources))


@pytest.mark.parametrize("convention", ["paper", "deepseek"])
def test_sinkhorn_orientation_and_order(convention):
    """Whatever the layout of the logits, every output stream is a convex combination of input streams (row sums of H_res are one),
    while column sums, which are not, are only approximately one; and a large logit moves the stream its convention says."""
    mixer = build("mhc", 1, {"n": 3, "convention": convention, "iterations": 2})
    with torch.no_grad():
        mixer.b[0, 6:] = 3 * torch.randn(9, dtype=torch.float64)
    h_res = mixer._coefficients(mixer.start(embedding()), mixer._parameters_of(0))[2]
    torch.testing.assert_close(h_res.sum(-1), torch.ones_like(h_res[..., 0]), rtol=0, atol=1e-5)
    assert (h_res.sum(-2) - 1).abs().max() > 1e-3
    with torch.no_grad():
        mixer.b[0, 6:] = torch.tensor([0.0, 20, 0, 0, 0, 20, 20, 0, 0])  # row-major: entries (0, 1), (1, 2), (2, 0)
    h_res = mixer._coefficients(mixer.start(embedding()), mixer._parameters_of(0))[2][0, 0]
    assert h_res[0, 1 if convention == "paper" else 2] > 0.99  # the paper's rows are outputs, DeepSeek's are inputs


def test_equal_streams_never_part_but_the_default_start_parts_them():
    """With equal read biases and phi = 0 the streams get equal gradients for ever: mHC would silently be a plain residual network."""
    symmetric = build("mhc", 3)
    with torch.no_grad():
        symmetric.b[:, :4] = -math.log(3)
    spread = {}
    for name, mixer in (("symmetric", symmetric), ("default", build("mhc", 3))):
        sublayers, e = train(mixer, steps=3)
        state = mixer.start(e)
        for site in range(5):
            state = mixer.write(state, site, sublayers(site, as_tuple(mixer.read(state, site))))
        spread[name] = float((state.x - state.x.mean(-2, keepdim=True)).detach().abs().max())
    assert spread["symmetric"] < 1e-9
    assert spread["default"] > 1e-3


@pytest.mark.parametrize("residual_map", ["sinkhorn", "birkhoff"])
def test_residual_map_of_mhc_learns(residual_map):
    """Its logits start saturated, where the map's slope is about 1e-3: small, but not zero after the streams have parted."""
    mixer = build("mhc", 3, {"residual_map": residual_map})
    train(mixer, steps=3)
    learned = mixer.b.grad[:, 8:].abs().amax(-1)
    live = (
        learned[1:-1] if residual_map == "birkhoff" else learned[1:]
    )  # see docs/reference/rules.md for the sites that cannot
    assert (live > 1e-9).all()
    assert mixer.b[0, 9] == OFF_LOGIT


def test_symmetry_start_parts_the_streams_at_the_first_write():
    mixer = build("mhc", 2, {"init": "symmetry"})
    state = mixer.write(mixer.start(embedding()), 0, embedding())
    assert (state.x[..., 0, :] - state.x[..., 1, :]).abs().max() > 0.1


def by_the_book(query, gain, sources, eps=1e-6):
    v = torch.stack(sources)
    keys = gain * v / torch.sqrt((v * v).mean(-1, keepdim=True) + eps)
    p = torch.softmax((keys * query).sum(-1), dim=0)
    return (p.unsqueeze(-1) * v).sum(0)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 6, 7, 10, "all", None])
def test_block_wiring_at_boundaries(block_size):
    """The procedure of the production models: append the running part to the list after it has been attended, then restart it."""
    mixer, sources = build("attnres", 5, {"block_size": block_size}, random=True), [embedding() for _ in range(11)]
    size = 10 if block_size == "all" else block_size or 1
    blocks, part = [], sources[0]
    state = mixer.start(sources[0])
    for site in range(10):
        seen = [*blocks, part]
        expected = by_the_book(mixer.query[site], mixer.key_gain[site], seen)
        torch.testing.assert_close(mixer.read(state, site), expected, rtol=1e-12, atol=1e-12)
        y = sources[site + 1]
        if site % size == 0:
            blocks, part = seen, y
        else:
            part = part + y
        state = mixer.write(state, site, y)
    expected = by_the_book(mixer.query[10], mixer.key_gain[10], [*blocks, part])
    torch.testing.assert_close(mixer.finish(state), expected, rtol=1e-12, atol=1e-12)


def test_block_of_one_site_is_full_and_the_first_read_is_the_embedding():
    full, block = build("attnres", 3, random=True), build("attnres", 3, {"block_size": 1})
    block.load_state_dict(full.state_dict())
    sources = [embedding() for _ in range(7)]
    assert torch.equal(replay_to_finish(full, sources), replay_to_finish(block, sources))
    assert torch.equal(full.read(full.start(sources[0]), 0), sources[0])


def test_embedding_is_a_source_of_its_own_and_outputs_of_a_block_share_a_weight():
    mixer = build("attnres", 3, {"block_size": 4}, random=True)
    m = mixer.mixing([embedding() for _ in range(7)], per_token=True)[0, 0, 0]
    finish = m[-1]
    assert torch.equal(finish[1:5], finish[1].expand(4))
    assert torch.equal(finish[5:7], finish[5].expand(2))  # the last block is partial
    assert len({round(float(x), 9) for x in (finish[0], finish[1], finish[5])}) == 3
    assert float(finish[0] + finish[1] + finish[5]) == pytest.approx(1.0)  # weights over the sources sum to one
    assert torch.equal(m[4, 5:], torch.zeros(2, dtype=m.dtype))  # the first site of a block has no partial sum
    assert float(m[4, 0] + m[4, 1]) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["denseformer", "mudd", "attnres"])
def test_no_linear_layer_hides_in_a_mixer(name):
    """A global initialisation over nn.Linear destroys DenseFormer's identity start in the authors' own package."""
    mixer = create_mixer(name, dim=DIM, n_blocks=3)
    assert not [m for m in mixer.modules() if isinstance(m, (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm))]


@pytest.mark.parametrize("block_size", [None, 3])
def test_additive_routing_begins_and_ends_on_the_plain_stream(block_size):
    """The first site reads e, not e + e, and nothing is routed once more at the end; sites between read the stream and a mixture."""
    mixer = build("attnres", 2, {"routing": "add", "block_size": block_size}, random=True)
    sources = [embedding() for _ in range(5)]
    assert torch.equal(mixer.read(mixer.start(sources[0]), 0), sources[0])
    torch.testing.assert_close(replay_to_finish(mixer, sources), sum(sources), rtol=1e-14, atol=1e-14)
    second = mixer.read(mixer.write(mixer.start(sources[0]), 0, sources[1]), 1)
    mixture = by_the_book(mixer.query[1], mixer.key_gain[1], sources[:2])
    torch.testing.assert_close(second, sources[0] + sources[1] + mixture, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("n_blocks", "hidden"), [(12, 64), (15, 128), (32, 192)])
def test_the_last_reader_of_mudd_is_as_wide_as_released_weights(n_blocks, hidden):
    """Widened fourfold and then rounded up to a multiple of 64, not the other way round."""
    mixer = build("mudd", n_blocks)
    assert mixer.W_1[str(n_blocks)].shape == (hidden, DIM)
    assert mixer.W_2[str(n_blocks)].shape == (n_blocks + 1, hidden)


@pytest.mark.parametrize("same", [True, False])
def test_norms_with_different_eps_are_not_fused_into_one(same):
    mixer, e = build("attnres", 1, {"ways": 3}), 1e-3 * embedding()
    norms = [
        nn.RMSNorm(DIM, eps=eps, dtype=torch.float64)
        for eps in (1e-3, 1e-3 if same else 1e-6, None if not same else 1e-3)
    ]
    got = mixer.read(mixer.start(e), 0, norms)
    for h, norm in zip(got, norms, strict=True):
        torch.testing.assert_close(h, norm(e))


def test_full_attnres_in_bf16_rounds_exactly_once():
    """Bit for bit what fp32 gives on the same values, rounded."""
    mixer = build("attnres", 4, random=True, dtype=torch.float32)
    sources = [embedding(torch.bfloat16) for _ in range(9)]
    wide = replay_to_finish(mixer, [s.float() for s in sources])
    assert torch.equal(replay_to_finish(mixer, sources), wide.bfloat16())


@pytest.mark.parametrize("options", [{}, {"ways": 3}, {"query": "input", "ways": 2}], ids=str)
def test_queries_start_where_query_init_says(options):
    """At zero by default, which makes a plain model of it; another start is for those who want to see why."""
    model = Decoder(
        DecoderConfig(
            vocab_size=32, dim=64, n_blocks=4, n_heads=2, mixer="attnres", mixer_options={**options, "query_init": 0.02}
        )
    )
    for name, p in model.mixer.named_parameters():
        if name.startswith("query"):
            torch.testing.assert_close(p.std(), torch.tensor(0.02), rtol=0.2, atol=0)
            assert p.mean().abs() < 0.005
        else:
            assert (p == 1).all()
    zero = create_mixer("attnres", dim=8, n_blocks=2, **options)
    assert all((p == 0).all() for name, p in zero.named_parameters() if name.startswith("query"))
