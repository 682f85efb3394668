"""The kernels of weighted sums, in Triton's interpreter, against the equations in fp64.

bf16 is left to tests/gpu: the interpreter does not round to it as a GPU does.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.helpers import assert_near, rand
from small_cases import each

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")

from depthmix.ops.depth_sum.kernels.read import read  # noqa: E402
from depthmix.ops.depth_sum.kernels.read_backward import Need, read_backward  # noqa: E402
from depthmix.ops.depth_sum.kernels.scores import add_and_score, score_backward  # noqa: E402
from depthmix.ops.depth_sum.kernels.source_backward import Reader, Target, source_backward  # noqa: E402
from depthmix.ops.gpu.program_sums import sum_programs  # noqa: E402

FP32, FP16 = torch.float32, torch.float16
EPS = 0.1  # far from zero, so that no mixture is blown up
TOL = {FP32: 3e-6, FP16: 2e-3}


def numbers(*shape: int, seed: int, dtype: torch.dtype = FP32) -> Tensor:
    return rand(*shape, seed=seed, dtype=dtype)


def strided(tokens: int, ways: int, seed: int) -> Tensor:
    """[N, W] numbers that do not lie side by side."""
    return rand(ways, tokens, 3, seed=seed, dtype=FP32)[:, :, 1].t()


def weight(static: Tensor | None, dynamic: Tensor | None, relu: int) -> Any:
    """The weight of a source, from a row (or a number) and a number for each token."""
    total: Any = 0 if static is None else static
    if dynamic is not None:
        total = total + (dynamic.clamp(min=0) if relu == 1 else dynamic).unsqueeze(-1)
    return total.clamp(min=0) if relu == 2 else total


class Case:
    """What a read is given, and in fp64 what it should give."""

    def __init__(
        self,
        tokens: int,
        dim: int,
        n: int,
        ways: int,
        static: str | None,
        dynamic: bool,
        relu: int,
        norm: bool,
        dtype: torch.dtype = FP32,
    ) -> None:
        self.sources = [numbers(tokens, dim, seed=i, dtype=dtype) for i in range(n)]
        kind = {"rows": dim, "numbers": 1, None: 0}[static]
        self.static = numbers(ways, n, kind, seed=20) if kind else None
        self.dynamic = [strided(tokens, ways, seed=30 + i) for i in range(n)] if dynamic else None
        self.gain = numbers(ways, dim, seed=40) if norm else None
        self.relu, self.ways = relu, ways

    def kernel(self, add: Tensor | None = None, raw: int | None = None, keep: bool = False, **options: Any) -> Any:
        return read(
            self.sources, add, self.static, self.dynamic, self.relu, self.gain, EPS, raw, keep, **options
        )  # fmt: skip

    def exact(
        self, sources: Sequence[Tensor], static: Tensor | None, dynamic: Tensor | None, gain: Tensor | None
    ) -> Any:
        """Mixtures, normed ones and results; dynamic: [N, W, n]."""
        o = []
        for w in range(self.ways):
            total: Any = 0
            for i, v in enumerate(sources):
                own = weight(
                    None if static is None else static[w, i], None if dynamic is None else dynamic[:, w, i], self.relu
                )
                total = total + own * v
            o.append(total)
        if gain is None:
            return o, o, o
        xhat = [m * torch.rsqrt(m.square().mean(-1, keepdim=True) + EPS) for m in o]
        return o, xhat, [x * g for x, g in zip(xhat, gain, strict=True)]

    def wide(self) -> tuple[list[Tensor], Tensor | None, Tensor | None, Tensor | None]:
        dynamic = None if self.dynamic is None else torch.stack(self.dynamic, -1).double()
        static, gain = (None if x is None or isinstance(x, list) else x.double() for x in (self.static, self.gain))
        return [v.double() for v in self.sources], static, dynamic, gain


# ways, sources, static, dynamic, relu, norm, tokens, channels: every value of each at least once
CASES = [
    (1, 1, "rows", False, 0, False, 7, 20),
    (1, 3, "numbers", False, 0, False, 7, 40),
    (1, 4, "rows", True, 1, True, 7, 20),
    (2, 2, "rows", True, 2, True, 1, 20),
    (2, 3, "numbers", True, 1, True, 7, 20),
    (3, 5, "rows", True, 1, True, 7, 40),
    (3, 2, "numbers", True, 2, False, 9, 20),
    (3, 3, "rows", True, 2, True, 7, 20),
    (4, 3, None, True, 0, False, 7, 20),
    (4, 2, None, True, 2, True, 5, 20),
    (4, 1, None, True, 1, True, 0, 20),
]


@pytest.mark.covered
@each(
    ("ways", "n", "static", "dynamic", "relu", "norm", "tokens", "dim", "stages"),
    [(*case, 1 + 2 * (k % 3 == 2)) for k, case in enumerate(CASES)],
)
def test_read(
    ways: int, n: int, static: Any, dynamic: bool, relu: int, norm: bool, tokens: int, dim: int, stages: int
) -> None:
    case = Case(tokens, dim, n, ways, static, dynamic, relu, norm)
    found = case.kernel(raw=ways - 1, keep=True, stages=stages)
    o, _, y = case.exact(*case.wide())
    assert_near([*found.y, found.raw], [*y, o[-1]], TOL[FP32])
    assert found.fresh is None
    if norm:
        rms = torch.stack([torch.rsqrt(m.square().mean(-1) + EPS) for m in o])
        assert found.mixtures == 1 << (ways - 1)
        assert [id(t) for t in found.kept] == [id(t) for t in [*found.y[:-1], found.raw]]  # nothing else is written
        assert_near([found.rms], [rms], TOL[FP32])
    else:
        assert not found.kept
        assert found.rms.numel() == 0


def side_by_side(tokens: int, ways: int, seed: int) -> Tensor:
    """[N, W] numbers, those of each way one after the other, among others."""
    return numbers(ways + 2, tokens, seed=seed)[1 : ways + 1].t()


@pytest.mark.covered
@each(("ways", "n", "static", "dynamic", "relu", "norm", "tokens", "dim"), [c for c in CASES if c[3]])
def test_a_read_that_keeps_nothing(
    ways: int, n: int, static: Any, dynamic: bool, relu: int, norm: bool, tokens: int, dim: int
) -> None:
    """With weights side by side, tiles that do not divide the tokens, and the gains of norms where they lie."""
    case = Case(tokens, dim, n, ways, static, dynamic, relu, norm)
    case.dynamic = [side_by_side(tokens, ways, seed=30 + i) for i in range(n)]
    o, _, y = case.exact(*case.wide())
    if norm:
        case.gain = [numbers(2, dim, seed=40 + w)[1] for w in range(ways)]
        y = case.exact(*case.wide()[:3], torch.stack(case.gain).double())[2]
    found = case.kernel(raw=ways - 1, tile=3, stages=1)
    assert_near([*found.y, found.raw], [*y, o[-1]], TOL[FP32])
    assert not found.kept
    assert found.rms.numel() == 0


@pytest.mark.covered
@each("pairs", [False, True])
def test_a_read_of_bf16_that_keeps_nothing(pairs: bool) -> None:
    """Numbers that bf16 holds exactly, so that it does not matter how the interpreter rounds: widened one by one, or two at a time."""
    case = Case(7, 20, 3, 3, "rows", True, 1, False)
    case.sources = [torch.randint(-3, 4, (7, 20)).to(torch.bfloat16) for _ in range(3)]
    case.static = torch.randint(-2, 3, (3, 3, 20)).float()
    case.dynamic = [torch.randint(-2, 3, (3, 7)).float().t() for _ in range(3)]
    found = case.kernel(tile=3, stages=1, pairs=pairs)
    for a, e in zip(found.y, case.exact(*case.wide())[2], strict=True):
        assert torch.equal(a.double(), e)


@each(("n", "stages"), [(1, 1), (3, 1), (2, 3)])
def test_read_adds_up_the_newest_source(n: int, stages: int) -> None:
    case = Case(7, 20, n, 2, "rows", False, 0, True, FP16)
    add = numbers(7, 20, seed=60, dtype=FP16)
    found = case.kernel(add=add, stages=stages)
    fresh = (case.sources[-1].float() + add.float()).to(FP16)
    sources, *rest = case.wide()
    assert torch.equal(found.fresh, fresh)
    assert_near(found.y, case.exact([*sources[:-1], fresh.double()], *rest)[2], TOL[FP16])
    assert not found.kept  # not asked for


def test_sums_are_rounded_once() -> None:
    """Each result is the exact sum's nearest fp16 number, or beside it where fp32 cannot tell."""
    case = Case(5, 40, 4, 3, "rows", True, 0, False, FP16)
    for found, exact in zip(case.kernel().y, case.exact(*case.wide())[2], strict=True):
        assert found.dtype == FP16
        assert bool(((found.double() - exact).abs() <= 2**-11 * exact.abs() * 1.001 + 1e-6).all())


@pytest.mark.covered
@each(("ways", "n", "static", "dynamic", "relu", "norm", "tokens", "dim"), CASES)
def test_read_backward(
    ways: int, n: int, static: Any, dynamic: bool, relu: int, norm: bool, tokens: int, dim: int
) -> None:
    """All gradients but the sources', with more tiles than programs; scores are what sources and rows w give."""
    case = Case(tokens, dim, n, ways, static, dynamic, relu, norm)
    if norm:
        case.gain[0, 1] = 0.0  # where the result does not say what the mixture was
    dy = [numbers(tokens, dim, seed=80 + k) for k in range(ways)]
    draw = numbers(tokens, dim, seed=90)
    kept = case.kernel(raw=ways - 1, keep=True)
    found = read_backward(
        dy, draw, ways - 1, kept.kept, kept.rms, case.gain, case.sources, case.static, case.dynamic, relu,
        Need(static is not None, dynamic), kept.mixtures, group=2, programs=2,
    )  # fmt: skip
    sources, *wide = case.wide()
    leaves = [None if x is None else x.requires_grad_() for x in wide]
    o, _, y = case.exact(sources, *leaves)
    given = [x for x in leaves if x is not None]
    outs, cotangents = [*y, o[-1]], [*(g.double() for g in dy), draw.double()]
    grads = iter(torch.autograd.grad(outs, [*given, *({id(m): m for m in o}.values())], cotangents, allow_unused=True))
    dstatic, ddynamic, dgain = (None if x is None else next(grads) for x in leaves)
    assert_near(found.do, list(grads) if norm else [*cotangents[:-2], cotangents[-2] + cotangents[-1]], TOL[FP32])
    for a, e in ((found.dstatic, dstatic), (found.dgain, dgain), (found.ddynamic, ddynamic)):
        assert (a is None) == (e is None)
        if a is not None and e is not None:
            assert_near([a], [e], 2 * TOL[FP32])


@each("has_draw", [False, True])
def test_a_way_without_a_norm_beside_others(has_draw: bool) -> None:
    """Four ways of which three are normed: the fourth comes as it is, and its gradient is that of the raw result, or none."""
    case = Case(7, 20, 3, 4, None, True, 0, True)
    case.gain = case.gain[:3]
    found = case.kernel(raw=3, keep=True)
    assert found.mixtures == 0  # the way that is returned as it is has no norm
    sources, _, dynamic, gain = case.wide()
    gain, dynamic = gain.requires_grad_(), dynamic.requires_grad_()
    o, xhat, _ = case.exact(sources, None, dynamic, torch.ones(4, 20).double())
    y = [x * g for x, g in zip(xhat, gain, strict=False)]
    assert_near([*found.y, found.raw], [*y, o[3]], TOL[FP32])
    assert found.rms.shape == (3, 7)
    dy, draw = [numbers(7, 20, seed=80 + k) for k in range(3)], numbers(7, 20, seed=90)
    back = read_backward(
        dy, draw if has_draw else None, 3, found.kept, found.rms, case.gain, case.sources, None, case.dynamic, 0,
        Need(False, True),
    )  # fmt: skip
    outs, cotangents = [*y, o[3]], [*(g.double() for g in dy), draw.double() * has_draw]
    dgain, ddynamic, *do = torch.autograd.grad(outs, [gain, dynamic, *o], cotangents)
    assert_near([*back.do, back.dgain, back.ddynamic], [*do, dgain, ddynamic], 2 * TOL[FP32])
    assert back.do[3] is draw or not has_draw


@each("has_add", [False, True])
def test_one_source_as_it_is_is_kept_for_all_norms(has_add: bool) -> None:
    """The norms of three ways that see the same source: nothing is written for their backward but the sizes."""
    case = Case(7, 20, 1, 3, "numbers", False, 0, True)
    case.static = torch.ones_like(case.static)
    add = numbers(7, 20, seed=60) if has_add else None
    kept = case.kernel(add=add, keep=True, plain=True)
    assert kept.mixtures == 0b111
    assert all(x is (kept.fresh if has_add else case.sources[0]) for x in kept.kept)
    dy = [numbers(7, 20, seed=80 + k) for k in range(3)]
    found = read_backward(
        dy, None, None, kept.kept, kept.rms, case.gain, kept.kept[:1], case.static, None, 0, Need(False, False), kept.mixtures
    )  # fmt: skip
    sources, static, _, gain = case.wide()
    sources = [sources[0] + (0 if add is None else add.double())]
    gain = gain.requires_grad_()
    o, _, y = case.exact([sources[0].requires_grad_()], static, None, gain)
    dgain, *do = torch.autograd.grad(y, [gain, *o], [d.double() for d in dy])
    assert_near([*found.do, found.dgain], [*do, dgain], 2 * TOL[FP32])


@each("norm", [False, True])
def test_what_is_passed_is_added_to_a_copy(norm: bool) -> None:
    """In fp32, before the one rounding; do itself is without it."""
    case = Case(7, 20, 2, 1, "numbers", False, 0, norm, FP16)
    dy, passed = [numbers(7, 20, seed=80, dtype=FP16)], 1000 * numbers(7, 20, seed=81, dtype=FP16)
    kept = case.kernel(keep=True)
    given = (dy, None, None, kept.kept, kept.rms, case.gain, case.sources, case.static, None, 0, Need(False, False), 0)
    without, found = read_backward(*given), read_backward(*given, passed)
    assert without.through is None
    assert torch.equal(found.do[0], without.do[0])
    assert (found.do[0] is dy[0]) != norm
    assert_near([found.through], [without.do[0].double() + passed.double()], 1e-3)


@each("shape", [(1, 2, 20), (700, 3, 7), (130, 1100), (3, 0, 20)])
def test_total(shape: tuple[int, ...]) -> None:
    part = numbers(*shape, seed=1)
    found = sum_programs(part)
    assert found.shape == shape[1:]
    assert_near([found], [part.double().sum(0)], TOL[FP32])


def test_read_backward_does_what_is_needed() -> None:
    case = Case(7, 20, 2, 2, "rows", True, 0, False)
    dy = [numbers(7, 20, seed=80 + k) for k in range(2)]
    arguments = ([], torch.empty(0), None, case.sources, case.static, case.dynamic, 0)
    found = read_backward(dy, None, None, *arguments, Need(False, False))
    assert all(a is b for a, b in zip(found.do, dy, strict=True))
    assert found[1:] == (None, None, None, None)
    found = read_backward(dy, None, None, *arguments, Need(False, True))
    assert found.dstatic is None
    expected = torch.einsum("wtd,itd->twi", torch.stack(dy).double(), torch.stack(case.sources).double())
    assert_near([found.ddynamic], [expected], TOL[FP32])
    assert found.ddynamic.stride() == (4, 2, 1)
    found = read_backward(dy, None, None, *arguments, Need(False, True, by_source=True))
    assert_near([found.ddynamic], [expected], TOL[FP32])
    assert found.ddynamic.stride() == (4, 1, 2)


@pytest.mark.covered
@each(("rows", "tokens", "dim", "dtype"), [(1, 7, 20, FP32), (5, 1, 40, FP16), (70, 7, 20, FP32), (3, 0, 20, FP32)])
@each("has_add", [False, True])
def test_scores(rows: int, tokens: int, dim: int, dtype: torch.dtype, has_add: bool) -> None:
    """Of the source as rounded, with weights that keep more than its precision; and the gradient of those weights."""
    v, w = numbers(tokens, dim, seed=1, dtype=dtype), numbers(rows, dim, seed=2)
    add = numbers(tokens, dim, seed=3, dtype=dtype) if has_add else None
    fresh, scores = add_and_score(v, add, w)
    expected = v if add is None else (v.float() + add.float()).to(dtype)
    assert torch.equal(fresh, expected)
    assert_near([scores], [expected.double() @ w.double().T], TOL[FP32])
    again, across = add_and_score(v, add, w, across=True)
    assert torch.equal(again, fresh)
    assert torch.equal(across, scores)
    assert across.stride() == (1, tokens) or not tokens
    ds = [strided(tokens, 1, seed=4 + k)[:, 0] for k in range(rows)]
    assert_near([score_backward(v, ds).sum(0)], [torch.stack(ds).double() @ v.double()], 4 * TOL[FP32])


@pytest.mark.covered
@each(("n", "static", "dynamic", "relu", "scored", "tokens", "dim"), [
    (1, "rows", False, 0, False, 7, 20),
    (2, "rows", True, 1, True, 9, 40),
    (2, "numbers", True, 2, False, 7, 20),
    (1, "rows", True, 2, True, 3, 20),
    (2, None, True, 0, True, 7, 20),
    (2, "numbers", False, 0, False, 1, 20),
    (1, "rows", True, 1, True, 0, 20),
])  # fmt: skip
@each("same_w", [False, True])
def test_source_backward(
    n: int, static: Any, dynamic: bool, relu: int, scored: bool, tokens: int, dim: int, same_w: bool
) -> None:
    """n sources of which some have gradients already, some are finished, from three readers and one of another kind."""
    kind = {"rows": dim, "numbers": 1, None: 0}[static]
    targets = [
        Target(numbers(tokens, dim, seed=j), numbers(tokens, dim, seed=5 + j) if j != 1 else None,
               numbers(tokens, dim, seed=9 + j) if j > 0 else None, j != 2)
        for j in range(n)
    ]  # fmt: skip
    readers = []
    for r in range(3):
        w = [numbers(dim, seed=100 + r)] * n if same_w else [numbers(dim, seed=100 + 9 * r + j) for j in range(n)]
        readers.append(Reader(
            numbers(tokens, dim, seed=20 + r),
            [numbers(kind, seed=30 + 9 * r + j) for j in range(n)] if kind else None,
            [strided(tokens, 2, seed=60 + 9 * r + j)[:, 1] for j in range(n)] if dynamic else None, relu,
            [strided(tokens, 2, seed=90 + 9 * r + j)[:, 0] for j in range(n)] if scored else None, w if scored else None,
        ))  # fmt: skip
    if same_w:
        readers.append(Reader(numbers(tokens, dim, seed=99), [numbers(1, seed=j) for j in range(n)], None))
    done = source_backward(targets, readers)
    for j, (target, found) in enumerate(zip(targets, done, strict=True)):
        expected: Any = sum(x.double() for x in (target.g, target.part) if x is not None)
        for r in readers:
            b, p = (None if x is None else x[j].double() for x in (r.static, r.dynamic))
            expected = expected + weight(b, p, r.relu) * r.do.double()
            if r.ds is not None and r.w is not None:
                expected = expected + r.ds[j].double()[:, None] * r.w[j].double()
        assert found.dtype == FP32
        assert_near([found], [expected], TOL[FP32])


@each(("static", "dynamic", "relu"), [("rows", True, 1), ("rows", True, 2), ("numbers", False, 0), (None, True, 0)])
def test_readers_of_one_of_two_sources(static: Any, dynamic: bool, relu: int) -> None:
    """What a reader has for a source that it does not read is None, and nothing comes of it."""
    kind = {"rows": 20, "numbers": 1, None: 0}[static]
    readers, expected = [], [torch.zeros(5, 20, dtype=torch.float64) for _ in range(2)]
    for r, seen in enumerate([(True, False), (True, True), (False, True)]):
        own = [
            (numbers(kind, seed=3 + 9 * r + j) if kind else None, numbers(5, seed=33 + 9 * r + j), numbers(5, seed=63 + 9 * r + j))
            if there else (None, None, None)
            for j, there in enumerate(seen)
        ]  # fmt: skip
        do, u = numbers(5, 20, seed=90 + r), numbers(20, seed=95 + r)
        b, p, ds = (list(x) for x in zip(*own, strict=True))
        w = [u if there else None for there in seen]
        readers.append(
            Reader(do, b if kind else None, p if dynamic else None, relu, *((ds, w) if dynamic else (None, None)))
        )
        for j, there in enumerate(seen):
            if there:
                wide = [x[j].double() if x[j] is not None else None for x in (b, p)]
                expected[j] += weight(wide[0], wide[1] if dynamic else None, relu) * do.double()
                expected[j] += ds[j].double()[:, None] * u.double() if dynamic else 0
    like = numbers(5, 20, seed=1)
    assert_near(source_backward([Target(like), Target(like)], readers), expected, TOL[FP32])


def test_source_backward_rounds_what_is_finished() -> None:
    like, do = numbers(5, 20, seed=1, dtype=FP16), numbers(5, 20, seed=2, dtype=FP16)
    static = [numbers(20, seed=3), numbers(20, seed=4)]
    whole, part = source_backward([Target(like), Target(like, whole=False)], [Reader(do, static, None)])
    assert (whole.dtype, part.dtype) == (FP16, FP32)
    assert torch.equal(whole, (static[0] * do.float()).to(FP16))
    assert torch.equal(part, static[1] * do.float())
    assert torch.equal(source_backward([Target(like, g=do)], [])[0], do)
