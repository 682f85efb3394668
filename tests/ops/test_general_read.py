"""Kernels of the reads with heads, sigmoid, keys without a norm or a query for each token, in Triton's interpreter.

Outputs and every gradient against the independent fp64 implementation, and whole stacks against the reference and the oracle.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from depthmix.fast.slots import SlotState
from depthmix.ops import BackendError, depth_attention, use_backend
from depthmix.ops.depth_attention.op import why_unsupported
from ops.helpers import (
    LAYOUTS,
    assert_inputs_untouched,
    assert_near,
    combinations,
    compiled_in_its_own_process,
    few,
    name,
    rand,
    run,
    saved_storages,
    stacked_sizes,
)
from ops.test_depth_attention import QUERIES, W, case
from ops.test_depth_attention_kernels import TOL, Fn, assert_exact, assert_second_derivatives
from ops.test_depth_attention_order import (
    Stack,
    assert_as_oracle,
    assert_as_reference,
    backward,
    middle_outputs,
    plain,
    second_backward,
    tokens,
)
from small_cases import each

pytest.importorskip("triton")
kernels_module = pytest.importorskip("depthmix.ops.depth_attention.kernels.general_read")
pytestmark = pytest.mark.usefixtures("quick_interpreter")
FP32, FP16 = torch.float32, torch.float16


def kernels(
    shape: Sequence[int] = (1, 2, 24), n: int = 3, dtype: torch.dtype = FP32, **options: Any
) -> tuple[Fn, Fn, list[Tensor]]:
    """The kernels and the naive implementation as functions of the same leaves; logits of about 2."""
    op, expected, leaves = case(shape, n, dtype=dtype, with_weights=False, **options)
    query = leaves[n]
    query = query[:1] if options.get("layout") == "expanded" and query.ndim > 1 else query
    query *= 2 / max(4, shape[-1] // options.get("heads", 1)) ** 0.5

    def by_kernels(*t: Tensor) -> tuple[Tensor, ...]:
        with use_backend("triton"):
            return op(*t)

    return by_kernels, expected, leaves


EVERY = combinations(kind=QUERIES, heads=(1, 3), activation=("softmax", "sigmoid"), key_norm=(True, False))
EVERY += combinations(
    kind=QUERIES, heads=(1, 3), activation=("softmax", "sigmoid"), key_norm=(True, False), value_norm=(True,)
)


def unusual(o: dict[str, Any]) -> bool:
    return (
        "token" in o["kind"] or o["heads"] > 1 or o["activation"] == "sigmoid" or not o["key_norm"] or "value_norm" in o
    )


@pytest.mark.covered
@each("options", few([o | {"gains": gains} for o in EVERY if unusual(o) for gains in (False, True)], 3))
def test_every_option(options: dict[str, Any]) -> None:
    """Two different eps, large enough to be missed if they are mixed up; three heads of 24 channels, and one."""
    options = dict(options)
    size = ("WD" if "ways" in options["kind"] else "D") if options.pop("gains") else None
    key_gain = size if options["key_norm"] else None
    assert_exact(*kernels(eps=1e-2, out_eps=0.3, key_gain=key_gain, out_gain=size, **options))


@each(
    ("shape", "n", "options"),
    [
        ((1, 1, 24), 1, {"kind": "token", "heads": 2}),  # one token, one source
        ((24,), 3, {"heads": 24}),  # a head for each channel
        ((3, 1), 3, {"activation": "sigmoid"}),  # one channel
        ((2, 1, 17), 4, {"kind": "token_ways"}),  # neither even nor a power of two
        ((2, 15), 5, {"heads": 5}),  # nor the heads
        ((1, 257), 2, {"activation": "sigmoid", "key_norm": False}),
        ((7, 8), 2, {"heads": 2, "kind": "ways"}),
        ((1, 8), 33, {"heads": 2, "activation": "sigmoid"}),
    ],
)
def test_shapes(shape: tuple[int, ...], n: int, options: dict[str, Any]) -> None:
    """One token and many, odd numbers of channels and heads, 1 to 33 sources, with every gain and the default eps."""
    gains = {"out_gain": "D"} | ({"key_gain": "D"} if options.get("key_norm", True) else {})
    assert_exact(*kernels(shape, n, **gains, **options))


@pytest.mark.parametrize("kind", ["ways", "token"])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_programs_take_several_tokens(kind: str, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with more tokens than programs: what a program adds up it adds up over all of its own."""
    monkeypatch.setattr(kernels_module, "_programs", lambda *_: 3)
    assert_exact(*kernels((2, 4, 8), kind=kind, heads=2, activation=activation, key_gain="D", out_gain="D"))


@pytest.mark.parametrize("kind", ["static", "token_ways"])
def test_no_tokens(kind: str) -> None:
    """Nothing in, nothing out, and gradients of zero for what all tokens share."""
    op, _, leaves = kernels((2, 0, 8), kind=kind, heads=2, key_gain="D", out_gain="D")
    outs, grads, _ = run(op, leaves)
    assert {o.shape for o in outs} == {torch.Size((2, 0, 8))}
    assert [g.shape for g in grads] == [t.shape for t in leaves]
    assert all(not g.any() for g in grads)


@each("kind", ["ways", "token"])
@each("layout", LAYOUTS)
def test_layouts(layout: str, kind: str) -> None:
    """Transposed, strided and expanded sources, queries and gains."""
    gain = "WD" if kind == "ways" else "D"
    assert_exact(*kernels((2, 2, 6), 3, kind=kind, layout=layout, heads=2, key_gain=gain, out_gain=gain))


def test_layouts_of_gradients() -> None:
    """Gradients of the outputs come as they come: strided, transposed, and expanded from a sum."""
    op, expected, leaves = kernels((2, 2, 6), kind="ways", heads=3, out_gain="D")
    for layout in ("strided", "channels_first", "expanded"):
        cotangents = [rand(2, 2, 6, seed=70 + i, layout=layout, dtype=FP32) for i in range(W)]
        _, grads, _ = run(op, leaves, cotangents)
        _, exact, _ = run(expected, [t.double() for t in leaves], cotangents)
        assert_near(grads, exact, TOL)


@each("options", [{"heads": 3}, {"kind": "token", "activation": "sigmoid"}])
@each("gain", [None, "D"])
def test_half_precision(options: dict[str, Any], gain: str | None) -> None:
    """fp16 sources with fp32 parameters: outputs and gradients are the exact ones, rounded once."""
    op, expected, leaves = kernels((2, 2, 24), 4, FP16, key_gain="D", out_gain=gain, eps=1e-2, **options)
    outs, grads, cotangents = run(op, leaves)
    exact_outs, exact_grads, _ = run(expected, [t.double() for t in leaves], cotangents)
    assert [t.dtype for t in (*outs, *grads)] == [*[FP16] * len(outs), *[t.dtype for t in leaves]]
    for got, exact in zip((*outs, *grads), (*exact_outs, *exact_grads), strict=True):
        rounding = torch.finfo(got.dtype).eps / 2 * exact.abs()
        noise = TOL * max(1.0, exact.abs().max().item())
        assert bool(((got.double() - exact).abs() <= rounding * 1.001 + noise).all())


def test_half_precision_gradients_are_summed_before_they_are_rounded() -> None:
    """Three ways' gradients of one source are rounded together: 0.375 of each would be lost beside 1024 in fp16."""
    for order in itertools.permutations((1024.0, 0.375, 0.375)):
        v = torch.zeros(1, 16, dtype=FP16, requires_grad=True)
        outs = depth_attention(torch.zeros(3, 16), [v], heads=2, backend="triton")
        (dv,) = torch.autograd.grad(outs, v, [torch.full((1, 16), g, dtype=FP16) for g in order])
        assert torch.equal(dv, torch.full_like(dv, 1025.0))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in a sigmoid's exp(-s)
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_large_logits_do_not_overflow(activation: str) -> None:
    """With logits of 1e4 outputs and gradients are finite and right."""
    op, _, leaves = kernels((2, 24), 4, heads=3, key_gain="D", activation=activation)
    exact, _, _ = case((2, 24), 4, heads=3, key_gain="D", activation=activation, with_weights=False)
    leaves[4] = leaves[4] * 1e4
    assert_exact(op, exact, leaves, 1e-4)  # near zero a sigmoid sees what fp32 rounds of them


def test_zeros_are_sources_too() -> None:
    """A row of zeros has a norm of its own (eps) and a finite gradient."""
    op, expected, leaves = kernels((2, 24), heads=2, eps=1e-2)
    leaves[1] = torch.zeros_like(leaves[1])
    assert_exact(op, expected, leaves)


def test_the_weight_of_an_only_source_has_no_gradient() -> None:
    """It is 1 whatever the query, exactly; a sigmoid's is not."""
    for activation, moves in (("softmax", False), ("sigmoid", True)):
        op, _, leaves = kernels((5, 24), 1, heads=3, activation=activation)
        _, (_, dq), _ = run(op, leaves)
        assert bool(dq.any()) == moves


def test_a_source_given_twice() -> None:
    """It counts twice, in the output and in its gradient."""
    op, expected, leaves = kernels((2, 24), 4, heads=2)
    assert_exact(lambda a, b, q: op(a, b, a, b, q), lambda a, b, q: expected(a, b, a, b, q), [*leaves[:2], leaves[4]])


@each("wanted", [(3,), (4,), (5,), (0,), (1, 2), (1, 4)])
@each("kind", ["static", "token"])
def test_some_inputs_are_constants(wanted: tuple[int, ...], kind: str) -> None:
    """Any part of the inputs may be without a gradient; the others' is the same."""
    op, expected, leaves = kernels(n=3, kind=kind, heads=2, key_gain="D", out_gain="D")
    cotangents = [rand(1, 2, 24, seed=80, dtype=FP32)]
    _, exact, _ = run(expected, [t.double() for t in leaves], cotangents)
    given = [t.requires_grad_(i in wanted) for i, t in enumerate(leaves)]
    grads = torch.autograd.grad(op(*given), [given[i] for i in wanted], cotangents)
    assert_near(grads, [exact[i] for i in wanted], TOL)


def test_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """no_grad and inference_mode give the bits that training gives, and no graph; nothing is written to or stacked."""
    op, _, leaves = kernels(kind="ways", heads=2, out_gain="WD")
    kept, read = [], kernels_module.read
    monkeypatch.setattr(
        kernels_module, "read", lambda *args, **named: (kept.append(named["keep"]), read(*args, **named))[1]
    )
    outs, _, _ = run(op, leaves)
    assert kept == [True] * W
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            again = op(*[t.requires_grad_() for t in leaves])
        assert all(torch.equal(a, b) and not b.requires_grad for a, b in zip(outs, again, strict=True))
    assert kept[W:] == [False] * 2 * W  # then logits are not written
    assert_inputs_untouched(op, [t.detach() for t in leaves])
    op, _, leaves = kernels((5, 24), heads=2, key_gain="D", out_gain="D")
    assert max(stacked_sizes(lambda: run(op, leaves)), default=0) < 5 * 24


def test_a_read_keeps_numbers_for_each_source_token_and_head() -> None:
    """Beside references to what it was given: the logits, their log-sum-exp, and nothing of the size of a source."""
    op, _, leaves = kernels((2, 3, 24), 4, heads=3, out_gain="D")
    leaves = [t.requires_grad_() for t in leaves]
    with torch.no_grad(), saved_storages(1) as kept:
        op(*leaves)
    assert not kept
    with saved_storages(1) as kept:
        out = op(*leaves)
    given = {t.untyped_storage().data_ptr() for t in leaves}
    assert sorted(size for at, size in kept.items() if at not in given) == [4 * 6 * 3, 4 * 4 * 6 * 3]
    assert out[0].requires_grad


def test_autocast_changes_nothing() -> None:
    """Neither around the forward nor around the backward."""
    op, _, leaves = kernels(kind="token", heads=3, key_gain="D", out_gain="D")
    outs, grads, cotangents = run(op, leaves)
    with torch.autocast("cpu", dtype=FP16):
        cast_outs, cast_grads, _ = run(op, leaves, cotangents)
    assert all(torch.equal(a, b) for a, b in zip((*outs, *grads), (*cast_outs, *cast_grads), strict=True))


@pytest.mark.covered
@pytest.mark.parametrize("options", [{"heads": 2}, {"kind": "token_ways", "activation": "sigmoid"}], ids=name)
def test_second_derivatives(options: dict[str, Any]) -> None:
    assert_second_derivatives(*kernels((1, 1, 8), eps=1e-2, key_gain="D", out_gain="D", **options))


def test_second_derivatives_in_half_precision() -> None:
    assert_second_derivatives(*kernels((1, 1, 8), dtype=FP16, eps=1e-2, heads=2), tol=5e-3)


def test_compiled_autograd_is_refused_in_one_sentence() -> None:
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    op, _, leaves = kernels(heads=2)
    out = op(*[t.requires_grad_() for t in leaves])[0].sum()
    with (
        pytest.raises(RuntimeError, match="depth_attention: compiled autograd does not keep the order"),
        compiled_autograd._enable(torch.compile(backend="eager")),
    ):
        out.backward()


def test_source_changed_in_place_is_noticed() -> None:
    """Sources are kept by reference, so writing to one before the backward is an error, not a wrong gradient."""
    op, _, leaves = kernels(heads=2)
    hidden = [t.requires_grad_() * 1 for t in leaves]
    loss = op(*hidden)[0].sum()
    hidden[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_they_do_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for, they say why not; otherwise the reference steps in."""
    op, expected, leaves = kernels((2, 24), heads=2)
    wide = [torch.zeros(1, 3 * 5000, device="meta")]
    assert why_unsupported(wide, wide=False) is None
    assert "15000 channels do not fit" in str(why_unsupported(wide, wide=False, heads=3))  # 4 rows of 8192
    compiled = torch.compile(lambda *t: depth_attention(t[3], t[:3], heads=2), backend="eager", fullgraph=True)
    assert_near([compiled(*leaves)], expected(*[t.double() for t in leaves]), TOL)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(BackendError, match=r"torch\.compile makes its own"):
        op(*leaves)


# Of a stack: the paper's ablations, and all of them at once.
ABLATIONS: list[dict[str, Any]] = [
    {"query": "input"},
    {"weights": "sigmoid", "block_size": 2},
    {"key_norm": False, "ways": 2},
    {"heads": 3, "block_size": 4, "ways": 3},
    {"heads": 2, "window": 2, "routing": "add"},
    {"query": "input", "weights": "sigmoid", "key_norm": False, "heads": 4, "ways": 3, "block_size": 3},
    {"weights": "static", "block_size": 2},
]


@pytest.mark.parametrize("options", ABLATIONS, ids=str)
def test_every_gradient_of_a_stack(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read with kernels, none where the reference is asked for; static weights have those of sums."""
    calls, read = [], kernels_module.read
    monkeypatch.setattr(kernels_module, "read", lambda *args, **named: (calls.append(1), read(*args, **named))[1])
    assert_as_reference(plain, tokens(shape=(2, 24)), tol=4e-6, norm=True, **options)
    mixer = Stack(norm=True, **options).mixer
    reads = sum(mixer.ways(site) for site in range(4)) + (mixer.routing == "replace")  # finish
    assert len(calls) == (0 if mixer.weights == "static" else reads)


@each("options", [{"block_size": 4}, *ABLATIONS])
def test_decoding_with_slots_is_for_what_its_kernels_know(options: dict[str, Any]) -> None:
    """Few tokens without gradients: only the rule itself, and the ablations give what the reference gives."""
    stack, x = Stack(norm=True, **options), tokens().detach()
    with torch.no_grad(), use_backend("triton"):
        assert isinstance(stack.mixer.start(x), SlotState) == (options == {"block_size": 4})
        out = stack(x)
    with torch.no_grad(), use_backend("reference"):
        assert_near([out], [stack(x)], 4e-6)


@pytest.mark.covered
@pytest.mark.parametrize("options", [*ABLATIONS[1:4], {"heads": 2, "query_init": 0.5}], ids=str)
def test_a_stack_against_the_oracle(options: dict[str, Any]) -> None:
    assert_as_oracle(options, 4e-6)


@pytest.mark.parametrize("options", [{}, {"heads": 2}], ids=str)
def test_outputs_in_another_dtype_go_through_the_reference(options: dict[str, Any]) -> None:
    """Also where kernels are asked for: sources of two dtypes no kernel reads."""
    stack, (x, y) = Stack(**options), (tokens(), tokens(1, dtype=FP16))
    found = []
    for backend in ("triton", "reference"):
        with use_backend(backend):
            found.append(stack.read(stack.mixer.write(stack.mixer.start(x), 0, y), 1))
    assert torch.equal(*found)


def checkpointed(stack: Stack, x: Tensor) -> list[Tensor | None]:
    state = stack.mixer.start(x)
    for site in range(stack.mixer.n_sites):
        state = checkpoint(stack.step, state, site, use_reentrant=False)
    return backward(stack, x, stack.mixer.finish(state))


@pytest.mark.parametrize("scenario", [middle_outputs, second_backward, checkpointed])
def test_what_people_do_with_a_graph(scenario: Callable[..., Any]) -> None:
    assert_as_reference(scenario, tokens(), tol=4e-6, norm=True, heads=2, block_size=3)


PTX = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from depthmix.ops.depth_attention.kernels import general_read

OTHERS = {"N": "i64", "n": "i32", "eps": "fp32", "out_eps": "fp32", "table": "*i64"}
OTHERS |= dict.fromkeys(("u", "gain", "s", "lse", "du", "part"), "*fp32")
for name, constants in eval(sys.argv[1]):
    fn = getattr(general_read, name)
    constants = {p.name: constants[p.name] for p in fn.params if p.is_constexpr}
    types = {p.name: "constexpr" if p.is_constexpr else OTHERS.get(p.name, "*bf16") for p in fn.params}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types.values()) if t.startswith("*")}
    source = ASTSource(fn=fn, signature=types, constexprs=constants, attrs=aligned)
    warps = max(1, constants["BH"] * constants["BC"] // 512)
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"], end="----")
"""
ALL = {"NORM": True, "KEEP": True, "STAGES": 1, "BEFORE": True, "LAST": True}
COMPILED = [
    (kernel, ALL | {"D": 256, "H": h, "BH": h, "BC": 256 // h, "BY_TOKEN": t, "KEY_NORM": k, "VALUE_NORM": k, "SOFTMAX": s, "ALIGNED": a})
    for kernel in ("_read_kernel", "_backward_kernel")
    for h, t, k, s, a in ((1, True, True, True, True), (16, False, True, True, True), (4, False, False, False, False))
]  # fmt: skip


def test_rows_are_loaded_and_stored_sixteen_bytes_wide() -> None:
    """Compiled for an H100, without one: rows of bf16 travel 16 bytes at a time, unless nothing is known of their alignment."""
    for (kernel, constants), code in zip(COMPILED, compiled_in_its_own_process(PTX, COMPILED), strict=True):
        narrow = any(f"{way}.global.{width}" in code for way in ("ld", "st") for width in ("b16", "v2.b16", "v2.b32"))
        assert narrow != constants["ALIGNED"], (kernel, constants)
