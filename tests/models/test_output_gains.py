"""A gain for outputs goes into the weights that autocast copies anyway: the same results, and nobody who looks sees another output."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from depthmix import Decoder, DecoderConfig, Vit, VitConfig
from depthmix.hf import DepthmixConfig
from depthmix.insight.intercept import intercepted, record_sources
from depthmix.models import blocks
from depthmix.models.blocks import Trace
from depthmix.parallel.packing import state_forms
from depthmix.parallel.pipeline import piece
from depthmix.parallel.pipeline.piece import Piece
from small_cases import each

SIZES = {"dim": 12, "n_blocks": 2, "n_heads": 2, "mlp_dim": 20}
RULES = ["layerscale", "rezero"]
IDS = torch.arange(10).reshape(2, 5) % 7


@pytest.fixture
def always(monkeypatch):
    """In fp64, which autocast does not have."""
    for module in (blocks, piece):
        monkeypatch.setattr(module, "weights_take_gains", lambda h: True)


def moved(model):
    torch.manual_seed(1)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model.double()


def decoder(mixer, **sizes):
    return moved(Decoder(DecoderConfig(vocab_size=7, mixer=mixer, **SIZES | sizes)))


def vit(mixer):
    return moved(Vit(VitConfig(image_size=8, patch_size=4, channels=1, n_classes=3, mixer=mixer, **SIZES)))


def result(model, given):
    """What comes out, every gradient, and how many outputs were written with their gains."""
    scaled, write = [], model.mixer.write

    def counted(state, site, y, **options):
        scaled.append(bool(options))
        return write(state, site, y, **options)

    model.mixer.write = counted
    try:
        out = model(given)
    finally:
        del model.mixer.write
    out = getattr(out, "last_hidden_state", out)
    return (out, *torch.autograd.grad(out.square().mean(), list(model.parameters()))), sum(scaled)


def by_the_rule(model, given):
    with intercepted(model.mixer):
        found, scaled = result(model, given)
    assert not scaled
    return found


@pytest.mark.usefixtures("always")
@each("rule", RULES)
@each("build", [decoder, vit])
def test_logits_and_every_gradient_are_those_of_the_rule(build, rule):
    model = build(rule)
    given = IDS if build is decoder else torch.randn(2, 1, 8, 8, dtype=torch.float64)
    found, scaled = result(model, given)
    assert scaled == 4
    torch.testing.assert_close(found, by_the_rule(model, given))


@pytest.mark.usefixtures("always")
def test_recomputed():
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
    config = DepthmixConfig(vocab_size=7, mixer="layerscale", **sizes)
    model = moved(AutoModelForCausalLM.from_config(config)).train()
    expected = by_the_rule(model.model, IDS)
    model.gradient_checkpointing_enable()
    found, scaled = result(model.model, IDS)
    assert scaled == 4
    torch.testing.assert_close(found, expected)


def hooked(sublayer):
    sublayer.register_forward_hook(lambda *_: None)


def wrapped(sublayer):
    sublayer.out_proj = torch.nn.Sequential(sublayer.out_proj)


@pytest.mark.usefixtures("always")
@each("change", [hooked, wrapped, lambda s: hooked(s.out_proj)])
def test_who_looks_at_a_sublayer_sees_its_output(change):
    model = decoder("layerscale")
    expected = by_the_rule(model, IDS)
    change(model.sublayers[1])
    found, scaled = result(model, IDS)
    assert scaled == 3
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("always")
def test_traces_and_recordings_have_outputs_as_they_are():
    model, x = decoder("layerscale"), torch.randn(2, 5, 12, dtype=torch.float64)
    with record_sources(model.mixer) as recorded:
        model(IDS)
    traced: list = []
    model.through_blocks(model.embedding(IDS), model._context(x, None, None, None), Trace(sources=traced))
    y = model.sublayers[0](
        model.mixer.read(model.mixer.start(traced[0]), 0, model.norms[0]), model._context(x, None, None, None)
    )
    torch.testing.assert_close([t.detach() for t in traced], recorded)
    torch.testing.assert_close(traced[1], y)


@each("rule", RULES)
def test_under_autocast(rule):
    """As close to fp32 as the rule's own products are, within a factor of two."""
    model = decoder(rule).float()
    exact = by_the_rule(model, IDS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, scaled = result(model, IDS)
        expected = by_the_rule(model, IDS)
    assert scaled == 4
    for a, b, c in zip(found, expected, exact, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm() + 1e-6 * c.norm()


@each("mode", [torch.no_grad, torch.enable_grad])
def test_no_copy_is_made_that_would_not_be_made_anyway(mode):
    """In decoding, and in training without autocast, the rule multiplies."""
    model = decoder("layerscale").float()
    model.mixer.output_gains = pytest.fail
    with mode(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode is torch.no_grad):
        model(IDS)


def test_half_precision_has_no_room_for_a_small_gain():
    """CaiT's 1e-6 for deep models times a weight is zero in fp16, and an output's gradient would be."""
    model = decoder("layerscale").float()
    torch.nn.init.constant_(model.mixer.gamma, 1e-6)
    with torch.autocast("cpu", dtype=torch.float16):
        (_, *grads), scaled = result(model, IDS)
    assert not scaled
    assert all(g.any() for g in grads)


def test_compiled_as_one_graph():
    model = decoder("layerscale", n_blocks=1).float()
    whole = torch.compile(model, fullgraph=True, backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(whole(IDS), model(IDS), rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("always")
@each("rule", RULES)
def test_stages_multiply_in_their_own_weights(rule):
    model = decoder(rule)
    first, second = state_forms(model.mixer, [0, 3], torch.float64)
    parts = Piece(model, range(3), first, second), Piece(model, range(3, 4), second, None)
    expected = by_the_rule(model, IDS)[0]
    between, scaled = piece_result(parts[0], IDS)
    assert scaled == 3
    out, scaled = piece_result(parts[1], *between)
    assert scaled == 1
    torch.testing.assert_close(out, expected)


def piece_result(part, *given):
    seen, write = [], part.mixer.write
    part.mixer.write = lambda *args, **options: (seen.append(bool(options)), write(*args, **options))[1]
    return part(*given), sum(seen)
