"""Reads of decoding against their specification, and two phases against one: fp32 and fp16, odd shapes, no tokens."""

import pytest
import torch
from torch import Tensor

from depthmix.ops.slots import op, reference
from ops.helpers import compiled_in_its_own_process, rand
from small_cases import each

pytest.importorskip("triton")
pytestmark = [pytest.mark.usefixtures("quick_interpreter"), pytest.mark.covered]
FLOATS = {torch.float32: 3e-6, torch.float16: 2e-3}


def near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=FLOATS[expected.dtype], atol=FLOATS[expected.dtype])


def rows(n: int, dim: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return list(rand(n, dim, seed=seed, dtype=dtype))


def slots_of(n: int, tokens: tuple[int, ...], dim: int, dtype: torch.dtype, filled: int) -> Tensor:
    """Slots of which the first are filled; what nobody has written is not a number."""
    slots = torch.full((n, *tokens, dim), float("nan"), dtype=dtype)
    slots[:filled] = rand(filled, *tokens, dim, seed=1, dtype=dtype)
    return slots


ATTEND = [  # tokens, D, ways, block size, site, dtype, norm
    ((1,), 16, 1, 1, 0, torch.float32, True),
    ((2, 1), 24, 2, 1, 5, torch.float32, True),
    ((3,), 7, 3, 2, 5, torch.float32, True),
    ((1, 1), 48, 1, 3, 6, torch.float16, True),
    ((2,), 20, 2, 3, 8, torch.float16, False),
    ((0,), 16, 2, 1, 3, torch.float32, True),
]


@each(("tokens", "dim", "ways", "size", "site", "dtype", "norm"), ATTEND)
def test_attend(tokens, dim, ways, size, site, dtype, norm):
    slots, y = slots_of(site + 2, tokens, dim, dtype, site), rand(*tokens, dim, seed=2, dtype=dtype)
    query, key_gain = rows(ways, dim, 3), rows(ways, dim, 4)
    gain = rows(ways, dim, 5, dtype) if norm else []
    before = -1 if site == 0 or (site - 1) % size == 0 else site - 1
    place = (site, size, 1, 0, -(-site // size))
    expected_slots = slots.clone()
    partial = None if before < 0 else expected_slots[before].clone()
    more = (query, key_gain, gain, 1e-6, 1e-5, None, None, rand(dim, seed=6, dtype=torch.float32) if site > 5 else None)
    expected = reference.attend(expected_slots, y, partial, *place, *more)
    found = op.attend(slots, y, before, *place, *more)
    near(found, expected)
    assert torch.equal(slots[: site + 1], expected_slots[: site + 1])
    assert slots[site + 1 :].isnan().all()


PASS = [  # tokens, D, ways, attention sites, readers, slot, stride, readers that are brought up to date, dtype, norm
    ((1,), 16, 1, 0, 4, 0, 0, (1, 4), torch.float32, True),
    ((2, 1), 24, 2, 3, 6, 2, 0, (3, 6), torch.float32, True),
    ((2, 1), 24, 2, 3, 6, 4, 2, (5, 6), torch.float32, True),
    ((3,), 7, 3, 2, 5, 3, 3, (4, 5), torch.float32, True),
    ((3,), 7, 1, 0, 9, 4, 4, (5, 9), torch.float32, False),
    ((1, 1), 48, 1, 2, 4, 3, 3, (4, 4), torch.float16, True),
    ((2,), 20, 2, 2, 5, 2, 1, (3, 5), torch.float16, False),
    ((0,), 16, 2, 2, 5, 1, 1, (2, 5), torch.float32, True),
]


@each(("tokens", "dim", "ways", "sites", "readers", "slot", "stride", "ahead", "dtype", "norm"), PASS)
def test_pass_on(tokens, dim, ways, sites, readers, slot, stride, ahead, dtype, norm):
    n, more = y_count(tokens), max(1, ways - 1)
    slots, y = slots_of(slot + 1, tokens, dim, dtype, slot), rand(*tokens, dim, seed=2, dtype=dtype)
    before = slot - 1 if slot and len(range(*ahead)) < 2 else -1
    own = tuple(rand(sites * more, dim, seed=seed, dtype=torch.float32) for seed in (6, 7)) if sites else None
    own_at, *own_ahead = (min(s, sites) * more for s in (min(slot, sites - 1), *ahead)) if sites else (0, 0, 0)
    to_come = [*range(*ahead), *(readers + i for i in range(*own_ahead))]
    acc = rand(readers + sites * more, n, dim, seed=8, dtype=torch.float32)
    stats = torch.stack([acc[..., 0].clone(), 1 + acc[..., 1].abs()])
    if slot == 0 or stride:  # nothing may be read there
        empty = [*to_come, *([0] if slot == 0 else [])]
        acc[empty] = stats[:, empty] = float("nan")
    query, key_gain = (rand(readers, dim, seed=seed, dtype=torch.float32) for seed in (3, 4))
    gain = rows(ways, dim, 5, dtype) if norm else []
    made = [[t.clone() for t in (slots, acc, stats)] for _ in range(2)]
    partial = None if before < 0 else slots[before].clone()
    scale = rand(dim, seed=9, dtype=torch.float32) if slot in (2, 3) else None
    expected = reference.pass_on(
        *made[0], y, partial, slot, stride, *ahead, query, key_gain, *(own or (None, None)), own_at, *own_ahead, ways, gain, 1e-6, 1e-5, scale
    )  # fmt: skip
    found = op.pass_on(
        made[1][0], tuple(made[1][1:]), y, before, slot, stride, range(*ahead), query, key_gain, own, own_at, range(*own_ahead), ways, gain, 1e-6, 1e-5, scale
    )  # fmt: skip
    near(found, expected)
    for a, e in zip(made[1], made[0], strict=True):
        assert torch.equal(a.isnan(), e.isnan())
        near(a.nan_to_num(), e.nan_to_num())
    changed = (made[1][1].nan_to_num() != acc.nan_to_num()).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == (to_come if n else [])


def y_count(tokens: tuple[int, ...]) -> int:
    return int(torch.Size(tokens).numel())


def test_the_specification_is_depth_attention():
    """Written with slots, it is the softmax of the operator that training uses."""
    from depthmix.ops import depth_attention

    slots, y = slots_of(7, (3,), 12, torch.float32, 5), rand(3, 12, seed=2, dtype=torch.float32)
    query, key_gain, gain = rows(2, 12, 3), rows(2, 12, 4), rows(2, 12, 5)
    found = reference.attend(slots, y, slots[4].clone(), 5, 2, 1, 0, 3, query, key_gain, gain, 1e-6, 1e-5, None, None)
    sources = [slots[0], slots[2], slots[4], slots[4] + y]
    expected = depth_attention(
        torch.stack(query), sources, torch.stack(key_gain), out_gain=torch.stack(gain), out_eps=1e-5
    )
    near(found, torch.stack(expected))


def test_a_window_skips_sources_after_the_first():
    slots, y = slots_of(9, (2,), 8, torch.float32, 8), rand(2, 8, seed=2, dtype=torch.float32)
    query, key_gain = rows(1, 8, 3), rows(1, 8, 4)
    found = op.attend(slots.clone(), y, -1, 8, 1, 1, 4, 4, query, key_gain, [], 1e-6, 0.0)
    few = torch.cat([slots[:1], slots[5:8], torch.full_like(slots[:1], float("nan"))])
    near(found, op.attend(few, y, -1, 4, 1, 1, 0, 4, query, key_gain, [], 1e-6, 0.0))


@each("dtype", FLOATS)
@each(("group", "site"), [(4, 7), (4, 4), (3, 8)])
def test_two_phases_are_one_softmax(group, site, dtype):
    """What look_back found for a group of sites and a site's own sources, merged, against the direct read."""
    slots, y = slots_of(site + 1, (2,), 20, dtype, site), rand(2, 20, seed=2, dtype=dtype)
    query, key_gain, gain = (rand(site + 1, 20, seed=s, dtype=torch.float32) for s in (3, 4, 5))
    first = site - site % group
    own = ([query[site]], [key_gain[site]], [gain[site]], 1e-6, 1e-5)
    direct = op.attend(slots.clone(), y, -1, site, 1, 1, 0, site, *own)
    rows = query[first : first + group], key_gain[first : first + group]
    bank, lse = op.look_back(slots, first, *rows, 1e-6)
    expected = reference.look_back(slots, first, *rows, 1e-6)
    near(bank, expected[0])
    near(lse, expected[1])
    row = site - first
    near(op.attend(slots, y, -1, site, 1, 0, first, site - first, *own, bank[row], lse[row]), direct)


def test_more_sources_than_a_tile_holds(monkeypatch):
    from depthmix.ops.slots import kernels

    slots, y = slots_of(12, (2,), 8, torch.float32, 11), rand(2, 8, seed=2, dtype=torch.float32)
    query, key_gain, gain = rows(1, 8, 3), rows(1, 8, 4), rows(1, 8, 5)
    arguments = (y, 10, 11, 1, 1, 0, 11, query, key_gain, gain, 1e-6, 1e-5)
    whole = op.attend(slots.clone(), *arguments)
    monkeypatch.setattr(kernels, "LANE", 1)
    near(op.attend(slots, *arguments), whole)


SUMS = [  # tokens, D, ways, slot, static, scores, relu, dtype
    ((1,), 16, 3, 0, 0, False, 0, torch.float32),
    ((2, 1), 7, 3, 5, 1, True, 1, torch.float32),
    ((3,), 24, 1, 4, 1, True, 2, torch.float16),
    ((2,), 12, 2, 3, 2, False, 0, torch.float32),
    ((1,), 8, 2, 6, 1, "each", 1, torch.float32),
    ((0,), 8, 3, 2, 1, True, 1, torch.float32),
]


@each(("tokens", "dim", "ways", "slot", "static", "scores", "relu", "dtype"), SUMS)
def test_add_up(tokens, dim, ways, slot, static, scores, relu, dtype):
    slots = slots_of(slot + 2, tokens, dim, dtype, slot)
    y, before = (rand(*tokens, dim, seed=s, dtype=dtype) for s in (2, 3))
    b = rand(ways, slot + 1, dim if static == 1 else 1, seed=4, dtype=torch.float32) if static else None
    w = rand(ways, slot + 1 if scores == "each" else 1, dim, seed=5, dtype=torch.float32) / dim if scores else None
    arguments = (y, before if slot else None, slot, ways, b, w, relu, rows(ways, dim, 6, dtype), 1e-5, ways - 1)
    expected_slots = slots.clone()
    expected = reference.add_up(expected_slots, *arguments)
    for a, e in zip(op.add_up(slots, *arguments), expected, strict=True):
        near(a, e)
    assert torch.equal(slots[: slot + 1], expected_slots[: slot + 1])


@each("dtype", FLOATS)
@each("shape", [(1, 16), (3, 1, 7), (0, 8)])
def test_add_norm(shape, dtype):
    x, y, gain = rand(*shape, seed=1, dtype=dtype), rand(*shape, seed=2, dtype=dtype), rand(shape[-1], dtype=dtype)
    for other in (y, None):
        total, out = reference.add_norm(x, other, gain, 1e-5)
        found = op.add_norm(x, other, gain, 1e-5)
        assert torch.equal(found[0], x if total is None else total)
        near(found[1], out)
        nothing, out = op.add_norm(x, other, gain, 1e-5, keep=False)
        assert nothing is None
        near(out, reference.add_norm(x, other, gain, 1e-5, keep=False)[1])


def test_a_sum_that_nobody_else_sees_is_not_rounded():
    x, y, gain = (rand(*shape, seed=i, dtype=torch.float16) for i, shape in enumerate([(4, 64), (4, 64), (64,)]))
    exact = reference.add_norm(x.float(), y.float(), gain, 0.0)[1].half()
    kept, alone = (op.add_norm(x, y, gain, 0.0, keep)[1] for keep in (True, False))
    assert (alone == exact).float().mean() > 0.98
    assert (kept == exact).float().mean() < 0.9


@pytest.mark.uncovered  # tracing the compiler itself takes minutes
def test_the_operators_compile():
    """As the compiler sees them: shapes of fakes are those of results, and what changes in place is known to."""
    query, key_gain, gain = rows(2, 8, 3), rows(2, 8, 4), rows(2, 8, 5)
    y, b = rand(3, 8, seed=2, dtype=torch.float32), rand(2, 3, 8, seed=4, dtype=torch.float32)

    def step(slots: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = op.attend(slots, y, -1, 2, 1, 1, 0, 2, query, key_gain, gain, 1e-6, 1e-5)
        bank, lse = op.look_back(slots, 2, torch.stack(query), torch.stack(key_gain), 1e-6)
        sums, raw = op.add_up(slots, first[0], y, 2, 2, b, None, 0, gain, 1e-5, 0)
        norm = op.add_norm(raw, y, gain[0], 1e-5, keep=False)[1]
        running = (torch.zeros(4, 3, 8), torch.ones(2, 4, 3))
        main = torch.stack(query), torch.stack(key_gain)
        passed = op.pass_on(
            slots, running, first[0], -1, 1, 0, range(2, 2), *main, main, 0, range(2), 2, gain, 1e-6, 1e-5
        )
        return passed, *running, first, bank, lse, sums, raw, norm, *op.add_norm(raw, y, gain[0], 1e-5)

    made = [slots_of(3, (3,), 8, torch.float32, 2) for _ in range(2)]
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for a, e in zip(compiled(made[0], y), step(made[1], y), strict=True):
            near(a, e)
    near(made[0], made[1])


PTX = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from depthmix.ops.slots import kernels as slots, running_softmax
from depthmix.ops.sublayer import kernels as sublayer

OTHERS = dict.fromkeys(("slot", "stride", "head", "skip", "n", "T", "cos_row"), "i32") | {"N": "i64", "slots": "*bf16"}
OTHERS |= dict.fromkeys(("eps", "out_eps"), "fp32") | {"position": "*i64"}
OTHERS |= dict.fromkeys(("begin", "n_later", "further_at", "further_begin", "readers"), "i32") | {"rows": "i64"}
names = ("q0", "q1", "q2", "k0", "k1", "k2", "q", "k", "further_q", "further_k", "acc", "stats", "bank", "bank_lse", "query", "key_gain", "lse", "static", "w", "cos", "sin", "scale")
OTHERS |= dict.fromkeys(names, "*fp32")
for name, constants in eval(sys.argv[1]):
    fn = next(getattr(m, name) for m in (slots, running_softmax, sublayer) if hasattr(m, name))
    mine = OTHERS | (dict.fromkeys(("q", "k"), "*bf16") if name == "_turn_kernel" else {}) | ({"slots": "i64"} if name == "_turn_kernel" else {}) | ({"n": "i64"} if name == "_activate_kernel" else {})
    constants = {p.name: constants[p.name] for p in fn.params if p.is_constexpr}
    types = {p.name: "constexpr" if p.name in constants else mine.get(p.name, "*bf16") for p in fn.params}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types.values()) if t.startswith("*")}
    source = ASTSource(fn=fn, signature=types, constexprs=constants, attrs=aligned)
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2}).asm["ptx"], end="----")
"""
CONSTANTS = {
    "D": 512, "BD": 512, "NS": 2, "MANY": False, "WAYS": 2, "SCALE": True, "BEFORE": True, "BANK": True, "NORM": True, "ALIGNED": True,
    "STATIC": 1, "SCORES": True, "PER_ENTRY": False, "RELU": 1, "RAW": 0, "ADD": True, "KEEP": False, "UNIT": 8, "BLOCK": 1024, "GATED": True, "EARLY": True,
    "HAS_FURTHER": True, "FIRST": False, "ANEW": True,
}  # fmt: skip
HEADS = {"H": 6, "BH": 8, "KV": 3, "BKV": 4, "HALF": 32, "BHALF": 32}
COMPILED = [
    *(
        (name, CONSTANTS)
        for name in ("_attend_kernel", "_look_back_kernel", "_add_up_kernel", "_add_norm_kernel", "_pass_on_kernel")
    ),
    ("_attend_kernel", CONSTANTS | {"MANY": True}),
    ("_turn_kernel", CONSTANTS | HEADS),
    ("_activate_kernel", CONSTANTS),
]


@pytest.mark.uncovered
def test_rows_are_loaded_sixteen_bytes_wide():
    """Compiled for an H100, without one."""
    for (kernel, _), code in zip(COMPILED, compiled_in_its_own_process(PTX, COMPILED), strict=True):
        assert "ld.global.v4.b32" in code, kernel
        assert "ld.global.b16" not in code, kernel
        assert ("griddepcontrol.wait" in code) == (kernel != "_look_back_kernel"), kernel
