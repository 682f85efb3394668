"""Any options, any shape, any blocks: hypothesis draws them, the oracle says what is right."""

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from depthmix import OptionError
from depthmix.mixers import mixer_class
from harness import MIXERS, Sublayers, build, complete, run_stack
from oracles import ORACLES


def values(option, dim):
    """Values an option accepts, by its own description."""
    drawn = [st.sampled_from(option.choices)] if option.choices else []
    if int in option.kinds:
        drawn.append(st.integers(max(1, int(option.low or 1)), 4))
    if bool in option.kinds:
        drawn.append(st.booleans())
    if float in option.kinds:
        drawn.append(
            st.floats(max(-3.0, option.low if option.low is not None else -3.0), 3.0).map(lambda x: round(x, 3))
        )
    if option.optional:
        drawn.append(st.none())
    return st.one_of(drawn)


@st.composite
def cases(draw):
    name, dim = draw(st.sampled_from(MIXERS)), draw(st.sampled_from([1, 2, 6, 7, 12]))
    options = mixer_class(name).options
    chosen = draw(st.sets(st.sampled_from(sorted(options)), max_size=4)) if options else set()
    choice = {o: draw(values(options[o], dim)) for o in sorted(chosen)}
    tokens = (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    some = st.sampled_from([("attention", "mlp"), ("attention",), ("mlp",), ("attention", "cross_attention", "mlp")])
    blocks = draw(st.one_of(st.integers(1, 4), st.lists(some, min_size=1, max_size=4)))
    return name, choice, dim, blocks, tokens


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_options_and_shape_agree_with_the_oracle(case):
    name, choice, dim, blocks, tokens = case
    torch.manual_seed(0)
    try:
        mixer = build(name, blocks, choice, random=True, dim=dim)
    except OptionError:  # some options exclude each other, and some need attention: test_options.py and test_layout.py
        assume(False)
    sublayers = Sublayers(blocks, dim)
    e = torch.randn(*tokens, dim, dtype=torch.float64, requires_grad=True)
    out, _, sources = run_stack(mixer, sublayers, e)
    parameters = {k: p.detach().clone().requires_grad_() for k, p in mixer.named_parameters()}
    trace = ORACLES[name](
        parameters,
        {**complete(name, choice), **({"head": mixer.head} if name == "mhc" else {})},
        blocks,
        e,
        sublayers,
    )
    scale = max(1.0, float(trace.out.detach().abs().max()))
    torch.testing.assert_close(out, trace.out, rtol=0, atol=1e-9 * scale)
    expected = torch.autograd.grad(trace.out.sum(), [e, *parameters.values()], allow_unused=True)
    got = torch.autograd.grad(out.sum(), [e, *mixer.parameters()], allow_unused=True)
    for a, b in zip(got, expected, strict=True):
        a, b = (torch.zeros((), dtype=torch.float64) if g is None else g for g in (a, b))
        torch.testing.assert_close(
            a, b.expand_as(a) if b.ndim == 0 else b, rtol=1e-7, atol=1e-8 * max(1.0, float(b.abs().max()))
        )
    m = mixer.mixing([s.detach() for s in sources])
    assert torch.equal(m, m.tril())
