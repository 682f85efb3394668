"""The kernels of depth tiling one by one, in Triton's interpreter, against the equations in fp64."""

import pytest
import torch
from torch import Tensor

from ops.helpers import assert_near, rand
from small_cases import each

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")
EPS = 1e-3
TOKENS = 3  # of the kernels with a program each


def logits(u: Tensor, v: Tensor) -> Tensor:
    """u · RMS(v) of every query and token: [R, N]."""
    v = v.double()
    return u.double() @ (v / (v.square().mean(-1, keepdim=True) + EPS).sqrt()).T


def single(*shape: int, seed: int) -> Tensor:
    return rand(*shape, seed=seed, dtype=torch.float32).detach()


def drawn(n: int, tokens: int, dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [rand(tokens, dim, seed=i, dtype=dtype).detach() for i in range(n)]


@pytest.mark.parametrize(("tokens", "dim"), [(130, 33), (1, 7), (128, 80)])
@pytest.mark.parametrize("rows", [1, 17, 64, 65, 130])  # 64 are looked at together
def test_scores(rows: int, tokens: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from depthmix.ops.depth_attention.kernels import tiling
    from depthmix.ops.depth_attention.kernels.tiling import SplitRows, scores

    u, sources = single(rows, dim, seed=50), drawn(3, tokens, dim)
    found = scores(SplitRows.of(u, sources[0].dtype), sources, EPS)
    if rows in (17, 65):
        monkeypatch.setattr(tiling, "MANY_ROWS", 1)  # other tiles
        assert_near([scores(SplitRows.of(u, sources[0].dtype), sources, EPS)], [found], 1e-6)
    assert found.shape == (rows, 3, tokens)
    assert_near([found], [torch.stack([logits(u, v) for v in sources], 1)], 2e-6)


def test_half_precision_loses_nothing_of_a_query() -> None:
    """Queries in fp32 go through products of fp16 halves."""
    from depthmix.ops.depth_attention.kernels.tiling import SplitRows, scores

    u, sources = single(5, 64, seed=50), drawn(2, 40, 64, torch.float16)
    halves = SplitRows.of(u, sources[0].dtype)
    with torch.no_grad():
        for a, e in zip(SplitRows.of(u, sources[0].dtype), halves, strict=True):
            assert torch.equal(a, e)
    assert_near([scores(halves, sources, EPS)], [torch.stack([logits(u, v) for v in sources], 1)], 4e-6)


@each("rows", [2, 3, 4])
@pytest.mark.covered
@each("n", [4, 36])  # up to 32 are weighed at once
def test_make_bank(n: int, rows: int) -> None:
    from depthmix.ops.depth_attention.kernels.tiling import SplitRows, make_bank, scores

    u, sources = single(rows, 21, seed=50), drawn(n, TOKENS, 21)
    groups = [scores(SplitRows.of(u, sources[0].dtype), sources[i : i + 4], EPS) for i in range(0, n, 4)]
    bank, lse, _ = make_bank([s[0, k] for s in groups for k in range(4)], sources, rows)
    exact = torch.stack([logits(u, v) for v in sources])  # [n, rows, N]
    values = torch.stack(sources).double()
    mixed = torch.einsum("nrt,ntd->rtd", exact.softmax(0), values)
    assert_near([torch.stack(bank), lse], [mixed, exact.logsumexp(0)], 2e-6)


@pytest.mark.covered
@each(
    ("n", "rows", "norm", "dtype"),
    [(4, 4, True, torch.float32), (8, 2, False, torch.float32), (8, 3, True, torch.float16)],
)
def test_make_bank_and_read(n: int, rows: int, norm: bool, dtype: torch.dtype) -> None:
    """The first of the sites reads at once, with a source more."""
    from depthmix.ops.depth_attention.kernels.tiling import SplitRows, make_bank, scores

    u, (*sources, newest) = single(rows, 21, seed=50), drawn(n + 1, TOKENS, 21, dtype)
    gain = single(21, seed=70) if norm else None
    groups = [scores(SplitRows.of(u, dtype), sources[i : i + 4], EPS) for i in range(0, n, 4)]
    first = [s[0, k] for s in groups for k in range(4)]
    bank, lse, y = make_bank(first, sources, rows, 4, newest, u[0], gain, EPS, 0.1)
    exact = torch.stack([logits(u, v) for v in (*sources, newest)])  # [n + 1, rows, N]
    values = torch.stack([*sources, newest]).double()
    mixed = torch.einsum("nrt,ntd->rtd", exact[:n].softmax(0), values[:n])
    assert_near([torch.stack(bank[1:]), lse[1:]], [mixed[1:], exact[:n, 1:].logsumexp(0)], 4e-6)
    own = torch.einsum("nt,ntd->td", exact[:, 0].softmax(0), values)
    if gain is not None:
        own = own * (own.square().mean(-1, keepdim=True) + 0.1).rsqrt() * gain.double()
    assert y is not None
    assert_near([y], [own], 2e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.covered
@each("ways", [1, 2, 3])
@each("add", [False, True])
@each(("n", "norm"), [(2, True), (19, True), (19, False)])  # n: sources
def test_read_known(n: int, norm: bool, add: bool, ways: int) -> None:
    from depthmix.ops.depth_attention.kernels.tiling import SplitRows, read_known, scores

    u, sources = single(ways, 21, seed=50), drawn(n, TOKENS, 21)
    pending = single(TOKENS, 21, seed=60) if add else None
    gain = single(ways, 21, seed=70) if norm else None
    known = [scores(SplitRows.of(u, sources[0].dtype), [v], EPS).squeeze(1) for v in sources[:-1]]
    found = read_known(u, sources, known, pending, gain, EPS, 0.1, keep=2)
    rows = None if gain is None else [k.clone() for k in gain]
    for kept, alone in zip(found.y, read_known(u, sources, known, pending, rows, EPS, 0.1, keep=0).y, strict=True):
        assert torch.equal(kept, alone)
    values = [v.double() for v in sources]
    values[-1] = values[-1] if pending is None else values[-1] + pending.double()
    exact = torch.stack([logits(u, v) for v in values])  # [n, W, N]
    mixed = torch.einsum("nwt,ntd->wtd", exact.softmax(0), torch.stack(values))
    rho = (mixed.square().mean(-1) + 0.1).rsqrt()
    assert_near([found.s[:, 0], found.lse[:, 0]], [exact[-1], exact.logsumexp(0)], 2e-6)
    if gain is not None:
        assert_near([torch.stack(found.o), found.lse[:, 1]], [mixed * rho[..., None], rho], 2e-6)
        mixed = mixed * rho[..., None] * gain.double()[:, None]
    assert_near(found.y, list(mixed), 2e-6)
    assert (found.fresh is None) == (pending is None)
    if found.fresh is not None:
        assert_near([found.fresh], [values[-1]], 1e-6)
