"""A step of residual streams by kernels, in Triton's interpreter: against its equations in fp64, with every gradient."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix.ops.sinkhorn.op import sinkhorn
from depthmix.ops.stream_mix.rules import Rule
from depthmix.ops.stream_mix.step import Inputs, Step, step, write_step
from ops.helpers import assert_near, rand

pytest.importorskip("triton")

from depthmix.ops.stream_mix.kernels import rows, split_product, write

pytestmark = pytest.mark.usefixtures("quick_interpreter")
EPS = 1e-5


def by_the_book(rule: Rule | None, n: int, a: Inputs) -> Step:
    """From the papers, with einsum."""
    x = a.x.unsqueeze(1).expand(-1, n, -1) if a.x.ndim == 2 else a.x
    tokens, dim = len(x), x.shape[-1]
    if a.y is not None:
        res = torch.eye(n, dtype=x.dtype) if a.res is None else a.res
        post, res = a.post.expand(tokens, n), res.expand(tokens, n, n)
        x = torch.einsum("toi,tid->tod", res, x) + torch.einsum("to,td->tod", post, a.y)
    pre, post, res = None, None, None
    if rule is not None and rule.joint:
        flat = x.reshape(tokens, n * dim)
        z = flat / (flat.square().mean(-1, keepdim=True) + rule.eps).sqrt() @ a.w
        pre = torch.sigmoid(a.scale[0] * z[:, :n] + a.base[:n]) + rule.pre_eps
        post = rule.post_scale * torch.sigmoid(a.scale[1] * z[:, n : 2 * n] + a.base[n : 2 * n]) + rule.post_eps
        if rule.residual_map == "birkhoff":
            a_k = torch.softmax(a.scale[2] * z[:, 2 * n :] + a.base[2 * n :], -1)
            eye = torch.eye(n, dtype=x.dtype)
            res = sum(a_k[:, k, None, None] * eye[list(p)] for k, p in enumerate(itertools.permutations(range(n))))
        elif rule.residual_map == "sinkhorn":
            logits = (a.scale[2] * z[:, 2 * n :] + a.base[2 * n :]).view(tokens, n, n)
            res = sinkhorn(logits, rule.iterations, rule.convention, backend="reference")
            res = res.mT if rule.convention == "deepseek" else res
    elif rule is not None:
        norm = x - x.mean(-1, keepdim=True) if rule.centred else x
        norm = norm / (norm.square().mean(-1, keepdim=True) + rule.eps).sqrt()
        z = norm @ a.w
        z = torch.tanh(z) if rule.tanh else z
        pre, post = a.scale[0] * z[..., 0] + a.base[:n], a.scale[1] * z[..., 1] + a.base[n : 2 * n]
        res = (a.scale[0] * z[..., 2:] + a.base[2 * n :].view(n, n)).mT
    weights = pre if a.pre is None else a.pre.expand(tokens, n)
    h = torch.einsum("ti,tid->td", weights, x)
    if a.gain is not None:
        h = h / (h.square().mean(-1, keepdim=True) + EPS).sqrt() * a.gain
    return Step(x, h, pre, post, res)


def inputs(rule: Rule | None, n: int, dim: int, tokens: int, **given: Any) -> Inputs:
    """All of them, as `given` says: first ("copies", "nothing"), static, res, pre, norm and zero (one of the gains)."""
    lead = () if given.get("static") else (tokens,)
    first = given.get("first")
    writes = first != "nothing"
    a = Inputs(
        x=rand(tokens, dim) if first == "copies" else rand(tokens, n, dim),
        y=rand(tokens, dim, seed=1, layout=given.get("layout", "contiguous")) if writes else None,
        post=rand(*lead, n, seed=2) if writes else None,
        res=rand(*lead, n, n, seed=3) if writes and given.get("res", True) else None,
        pre=rand(*lead, n, seed=4) if given.get("pre") or rule is None else None,
        gain=rand(dim, seed=5) if given.get("norm", True) else None,
    )
    if given.get("zero"):
        a.gain[1] = 0.0
    if rule is None:
        return a
    logits = {"sinkhorn": n * n, "birkhoff": math.factorial(n), "identity": 0}[rule.residual_map]
    columns = 2 * n + logits if rule.joint else n + 2
    w = 0.3 * rand(n * dim if rule.joint else dim, columns, seed=6)
    base = rand(columns if rule.joint else 2 * n + n * n, seed=7)
    return a._replace(w=w, base=base, scale=rand(3 if rule.joint and logits else 2, seed=8))


def leaves_of(a: Inputs, kind: torch.dtype | None = None) -> Inputs:
    return Inputs(*(None if t is None else t.detach().to(kind or t.dtype).requires_grad_() for t in a))


def outputs(found: Step) -> list[Tensor]:
    return [o for o in found if o is not None and o.requires_grad]


def taken(rule: Rule | None, n: int, a: Inputs) -> Step:
    """The step, with W as its caller makes it."""
    centred = rule is not None and rule.centred
    return step(rule, n, EPS, a._replace(w=a.w - a.w.mean(0)) if centred else a)


def compare(rule: Rule | None, n: int, dim: int, tokens: int, tol: float = 6e-6, **given: Any) -> None:
    exact = inputs(rule, n, dim, tokens, **given)
    narrow, wide = leaves_of(exact, torch.float32), leaves_of(exact)
    found, expected = outputs(taken(rule, n, narrow)), outputs(by_the_book(rule, n, wide))
    cotangents = [rand(*o.shape, seed=50 + i) for i, o in enumerate(expected)]
    wanted = [[t for t in a if t is not None] for a in (narrow, wide)]
    grads = torch.autograd.grad(found, wanted[0], [c.float() for c in cotangents])
    assert_near(found, expected, tol)
    assert_near(grads, torch.autograd.grad(expected, wanted[1], cotangents), tol)


MHC = Rule(2, joint=True, eps=1e-6, iterations=3)
HYPER = Rule(2, joint=False, eps=1e-5, centred=True, tanh=True)


@pytest.mark.covered
@pytest.mark.parametrize(
    ("rule", "dim", "tokens", "given"),
    [
        (MHC._replace(n=4), 24, 5, {}),
        (MHC._replace(n=3, convention="deepseek", pre_eps=1e-6), 40, 3, {"pre": True}),
        (MHC, 24, 5, {"pre": True, "zero": True}),
        (MHC, 24, 70, {"first": "copies"}),
        (MHC, 7, 2, {"first": "nothing", "norm": False}),
        (MHC._replace(residual_map="identity"), 24, 1, {"res": False}),
        (MHC._replace(residual_map="birkhoff"), 24, 70, {"first": "copies"}),
        (MHC._replace(n=3, residual_map="birkhoff"), 40, 3, {"pre": True}),
        (MHC._replace(n=3, residual_map="identity", post_scale=1.5, post_eps=0.25), 40, 3, {"res": False}),
        (MHC._replace(n=4, residual_map="birkhoff"), 24, 5, {}),
        (MHC._replace(n=3), 8, 3, {"static": True, "layout": "strided"}),
        (HYPER, 24, 5, {}),
        (HYPER._replace(n=1), 40, 3, {"first": "copies"}),
        (HYPER._replace(n=3, tanh=False), 130, 2, {"first": "nothing"}),
        (HYPER._replace(n=4, centred=False), 24, 2, {"pre": True, "norm": False}),
        (None, 24, 3, {"static": True}),
        (None, 40, 3, {"first": "copies", "norm": False}),
    ],
)
def test_outputs_and_every_gradient(rule: Rule | None, dim: int, tokens: int, given: dict[str, Any]) -> None:
    compare(rule, rule.n if rule is not None else 2, dim, tokens, **given)


@pytest.mark.covered
@pytest.mark.parametrize("first", [None, "copies", "nothing"])
@pytest.mark.parametrize("rule", [MHC._replace(n=4), MHC._replace(residual_map="birkhoff"), HYPER], ids=str)
@pytest.mark.parametrize("least", [128, 16])
def test_channels_split_among_programs(
    rule: Rule, first: str | None, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into few and into many parts, with products by the kernel, as on a GPU, and rows written in parts."""
    slices: list[int] = []

    def split(x: Tensor, w: Tensor, halves: Tensor | None, joint: bool) -> Tensor:
        z = split_product.split_product(x, x.shape[1], w, halves, joint=joint)[0]
        slices.append(len(z))
        return z

    monkeypatch.setattr(split_product, "MIN_CHANNELS", least)
    monkeypatch.setattr(split_product, "plan", split_product.plan.__wrapped__)
    monkeypatch.setattr(write, "product", split)
    monkeypatch.setattr(rows, "MAX_ROW", 64)
    monkeypatch.setattr(rows, "PART", 64)
    compare(rule, rule.n, 264, 11, tol=6e-6, first=first)
    a = leaves_of(inputs(rule, rule.n, 264, 11, first=first), torch.float32)
    with torch.no_grad():
        alone = step(rule, rule.n, EPS, a)
    assert all(torch.equal(found, kept) for found, kept in zip(alone, step(rule, rule.n, EPS, a), strict=True))
    assert slices or first == "nothing"
    assert all(1 < count <= 8 if least == 128 else count > 8 for count in slices)


@pytest.mark.covered
@pytest.mark.parametrize("res", [True, False])
def test_write_alone(res: bool) -> None:
    exact = inputs(None, 2, 24, 3, res=res)[:4]
    narrow, wide = (leaves_of(Inputs(*exact), kind)[:4] for kind in (torch.float32, torch.float64))
    eye = torch.eye(2, dtype=torch.float64).expand(3, 2, 2)
    x, y, post, mix = wide
    expected = torch.einsum("toi,tid->tod", eye if mix is None else mix, x) + torch.einsum("to,td->tod", post, y)
    found = write_step(*narrow)
    cotangent = rand(*expected.shape, seed=50)
    wanted = [[t for t in a if t is not None] for a in (narrow, wide)]
    grads = torch.autograd.grad(found, wanted[0], cotangent.float())
    assert_near([found], [expected], 6e-6)
    assert_near(grads, torch.autograd.grad(expected, wanted[1], cotangent), 6e-6)


def test_half_precision_rounds_once() -> None:
    """fp16 streams: every output is the exact one, of the streams as they were rounded, rounded once."""
    a = inputs(MHC, 2, 24, 4)
    narrow = Inputs(*(None if t is None else t.half() if i < 2 else t.float() for i, t in enumerate(a)))
    exact = Inputs(*(None if t is None else t.double() for t in narrow))
    found = step(MHC, 2, EPS, narrow)
    assert_near([found.x], [by_the_book(MHC, 2, exact).x], 2**-11 + 1e-6)
    after = exact._replace(x=found.x.double(), y=None)
    for got, expected in zip(found[1:], by_the_book(MHC, 2, after)[1:], strict=True):
        assert_near([got], [expected], 2**-11 + 1e-6 if got.dtype == torch.float16 else 3e-6)


def test_frozen_inputs_and_outputs_that_nobody_uses() -> None:
    """Only what is asked for comes, and what reaches no output has no gradient."""
    a = leaves_of(inputs(MHC, 2, 24, 3), torch.float32)
    b = leaves_of(inputs(MHC, 2, 24, 3))
    frozen = a._replace(x=a.x.detach(), w=a.w.detach(), gain=a.gain.detach())
    for pick in ("h", "x", "post"):
        out = getattr(step(MHC, 2, EPS, frozen), pick)
        exact = getattr(by_the_book(MHC, 2, b), pick)
        wanted = ("y", "post", "res", "base", "scale")
        got = torch.autograd.grad(out.square().sum(), [getattr(a, k) for k in wanted], allow_unused=True)
        expected = torch.autograd.grad(exact.square().sum(), [getattr(b, k) for k in wanted], allow_unused=True)
        for g, e in zip(got, expected, strict=True):
            assert_near([torch.zeros_like(e) if g is None else g], [e], 1e-5) if e is not None else None
            assert e is not None or g is None or not g.any()


def test_a_graph_that_is_kept_gives_the_same_twice() -> None:
    a = leaves_of(inputs(HYPER, 2, 24, 3), torch.float32)
    out = step(HYPER, 2, EPS, a).h.square().sum()
    wanted = [t for t in a if t is not None]
    first, second = (torch.autograd.grad(out, wanted, retain_graph=True, allow_unused=True) for _ in range(2))
    assert all(torch.equal(g, h) for g, h in zip(first, second, strict=True) if g is not None)


@pytest.mark.parametrize("rule", [HYPER, MHC, MHC._replace(n=3, residual_map="birkhoff")], ids=str)
def test_second_derivatives(rule: Rule) -> None:
    """Through the reference, whichever outputs are used."""
    results = []
    for f, kind in ((taken, torch.float32), (by_the_book, torch.float64)):
        a = leaves_of(inputs(rule, rule.n, 8, 2), kind)
        found = f(rule, rule.n, a)
        loss = found.h.square().sum() + found.x.pow(3).sum() + found.res.square().sum()
        g = torch.autograd.grad(loss, [a.x, a.w], create_graph=True)
        results.append(torch.autograd.grad(sum(t.square().sum() for t in g), [a.x, a.y, a.w, a.gain]))
    assert_near(*results, 1e-4)


def test_zero_tokens() -> None:
    for rule in (MHC, HYPER, None):
        a = leaves_of(inputs(rule, 2, 24, 0, static=rule is None), torch.float32)
        found = outputs(step(rule, 2, EPS, a))
        grads = torch.autograd.grad([o.sum() for o in found], [t for t in a if t is not None])
        assert all(not g.any() for g in grads)
