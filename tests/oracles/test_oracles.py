"""The oracles' own checks; they need nothing of depthmix."""

from functools import cache
from itertools import product

import pytest
import torch

from oracles import DEFAULTS, MODULES, ORACLES, attnres, denseformer, grn
from oracles.cases import OPTIONS, complete, pairwise
from oracles.laurel import transfer
from oracles.mhc import birkhoff, sinkhorn_deepseek, sinkhorn_paper
from oracles.mhc import coefficients as mhc_coefficients
from oracles.shapes import initial, random_parameters, shapes
from oracles.trace import rms

DIM, BLOCKS = 8, 4


def cases(*names, **chosen):
    params = [pytest.param(name, options, id=label) for name, options, label in complete(*names, **chosen)]
    return pytest.mark.parametrize(("name", "options"), params)


def smooth_sublayer(seed, log):
    """tanh of a linear map of the scale-free reads, mixing tokens causally; appends what it returns to log."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(2 * BLOCKS, 3, DIM, DIM, generator=generator, dtype=torch.float64) / DIM**0.5

    def sublayer(site, reads):
        assert site == len(log)
        assert len(reads) in (1, 2, 3)
        three = {1: (0, 0, 0), 2: (0, 0, 1), 3: (0, 1, 2)}[len(reads)]  # which of them queries, keys and values see
        z = sum(rms(reads[r], 1e-12) @ W[site, way] for way, r in enumerate(three))
        log.append(torch.tanh(z + z.cumsum(1) / 4))
        return log[-1]

    return sublayer


def trace(name, options, p, seed=1):
    """The trace, and the sources [S+1, B, T, D]."""
    e = torch.randn(2, 3, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
    log = []
    t = ORACLES[name](p, options, BLOCKS, e, smooth_sublayer(seed, log))
    assert len(log) == 2 * BLOCKS
    return t, torch.stack([e, *log])


@pytest.mark.parametrize("name", OPTIONS)
def test_pairwise_leaves_out_combinations_but_no_pair(name):
    def met(choices, n):
        return {meeting for c in choices for meeting in product((DEFAULTS[name] | c).items(), repeat=n)}

    for n in (2, 3):
        assert met(pairwise(name, OPTIONS[name], n), n) == met(OPTIONS[name], n)
    assert name != "attnres" or len(pairwise(name, OPTIONS[name])) < len(OPTIONS[name]) / 3


@cases(pairs=True)
def test_reads_are_m_times_the_sources_and_every_parameter_is_used(name, options):
    p = random_parameters(name, options, DIM, BLOCKS)
    t, sources = trace(name, options, p)
    check_reads(name, options, p, t, sources)
    check_gradients(name, options, p, t)


def check_reads(name, options, p, t, sources):
    ways = max(len(r) for r in t.reads)
    sites = 2 * BLOCKS
    assert t.M.shape == (ways, sites + 1, sites + 1, *sources.shape[1:])
    assert not t.M.requires_grad
    assert len(t.reads) == sites + 1
    assert t.reads[-1] == (t.out,)
    for s in range(sites):
        assert (t.M[:, s, s + 1 :] == 0).all()  # exactly
    if name == "laurel":
        matrices = transfer(p, options, sites, DIM)
        expected = torch.einsum("siod,ibtd->sbto", matrices, sources)[None]
        assert (t.M[0] == matrices.diagonal(dim1=-2, dim2=-1)[:, :, None, None, :]).all()
    elif options.get("fractions") or name == "delta":
        return  # M has the diagonal of matrices, with which the oracle itself compares its reads
    else:
        expected = (t.M * sources).sum(2)
    found = torch.stack([torch.stack(reads if len(reads) > 1 else reads * ways) for reads in t.reads], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def check_gradients(name, options, p, t):
    """Zero gradients are exactly the ones docs/reference/rules.md explains."""
    grads = dict(zip(p, torch.autograd.grad(t.out.square().sum(), list(p.values())), strict=True)) if p else {}
    for key, g in grads.items():
        assert g.isfinite().all()
        if name == "attnres" and key == "gamma":
            assert (g != 0).any(1).all()
        elif name == "attnres" and not (key.startswith("logits") and options["window"]):
            row = g.reshape(len(g), -1).abs().sum(1) != 0
            assert row[1:].all()
            if options["weights"] != "sigmoid":
                assert key.endswith(("_v", "_kv")) or not row[0]
        elif key == "gamma" and name == "laurel":
            assert (g.triu() == 0).all()
            assert (g.tril(-1) != 0)[1:].any(1).all()
        elif name == "laurel" and options["variant"] == "pa":
            assert (g[0] == 0).all()
            assert (g[1:] != 0).any((1, 2)).all()
        else:
            assert g.abs().sum() > 0, key


@cache
def plain_reads():
    return [read for (read,) in trace("residual", {}, {})[0].reads]


@cases(keep=lambda name, options: MODULES[name].starts_plain(options), pairs=True)
def test_plain_at_step_0(name, options):
    start = initial(name, options, DIM, BLOCKS)
    for key, shape in shapes(name, options, DIM, BLOCKS).items():
        assert start[key] is None or start[key].shape == shape
    noise = random_parameters(name, options, DIM, BLOCKS)
    t, _ = trace(name, options, {k: noise[k] if v is None else v for k, v in start.items()})
    tol = 1e-4 if options.get("convention", "paper") != "paper" else 1e-10
    for reads, want in zip(t.reads, plain_reads(), strict=True):
        for r in reads:
            torch.testing.assert_close(rms(r, 0.0), rms(want, 0.0), rtol=tol, atol=tol)


@cases("residual", "highway", "attnres", pairs=True)
def test_rows_that_sum_to_one(name, options):
    """highway; attnres with a softmax over single sources; residual is all ones."""
    p = random_parameters(name, options, DIM, BLOCKS)
    t, _ = trace(name, options, p)
    if options.get("output_gain") is not None:
        t.M[:, :, 1:] /= p["gamma"].detach()[:, None, None]  # what was read is a scaled output
    ones = torch.ones_like(t.M[:, :, 0])
    if name == "highway":
        torch.testing.assert_close(t.M.sum(2), ones)
        assert (t.M >= 0).all()
    elif name == "attnres" and options["weights"] != "sigmoid" and not options["value_norm"]:
        size = attnres.size_of(options["block_size"])
        add = float(options["routing"] == "add")
        for s in range(1, 2 * BLOCKS) if add else range(2 * BLOCKS + 1):  # one representative per block: its first site
            representatives = [0] + [i + 1 for i in range(0, s, size)]
            M = t.M[:, s, representatives] - add
            torch.testing.assert_close(M.sum(1), ones[:, s])
            if options["window"]:
                assert (M[:, 1 : -options["window"]] == 0).all()
    elif name == "residual":
        assert (t.M[0] == torch.ones(9, 9).tril()[:, :, None, None, None]).all()


@pytest.mark.parametrize("variant", ["lr", "pa"])
def test_laurel_diagonal_by_brute_force(variant):
    """Feed one unit vector at one source through the recursion written out with matrices."""
    options = DEFAULTS["laurel"] | {"variant": variant, "rank": 2}
    p = random_parameters("laurel", options, DIM, BLOCKS)
    t, _ = trace("laurel", options, p)
    eye, zero = torch.eye(DIM, dtype=torch.float64), torch.zeros(DIM, DIM, dtype=torch.float64)
    for source in range(2 * BLOCKS + 1):
        x = [eye if source == 0 else zero]
        for s in range(2 * BLOCKS):
            low = x[s] if variant == "lr" else sum((p["gamma"][s, j] * x[j] for j in range(s)), zero)
            x.append((eye if source == s + 1 else zero) + x[s] + p["B"][s] @ p["A"][s] @ low)
        for s in range(2 * BLOCKS + 1):
            torch.testing.assert_close(t.M[0, s, source], x[s].diagonal().detach().expand(2, 3, DIM))


def test_residual_maps():
    logits = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    one = torch.ones(5, 4, dtype=torch.float64)
    torch.testing.assert_close(sinkhorn_paper(logits, 3).sum(-1), one)
    assert (sinkhorn_paper(logits, 3).sum(-2) - one).abs().max() > 1e-3
    torch.testing.assert_close(sinkhorn_deepseek(logits, 3).sum(-1), one, rtol=0, atol=1e-5)
    assert (sinkhorn_deepseek(logits, 3).sum(-2) - one).abs().max() > 1e-3
    # both converge to the same matrix, the second one transposed
    small = logits / 10
    torch.testing.assert_close(sinkhorn_paper(small, 50), sinkhorn_deepseek(small, 50).mT, rtol=0, atol=1e-4)
    H = birkhoff(torch.randn(5, 24, dtype=torch.float64), 4)
    torch.testing.assert_close(H.sum(-1), one)
    torch.testing.assert_close(H.sum(-2), one)
    P = birkhoff(torch.tensor([-1e9, -1e9, -1e9, 0.0, -1e9, -1e9], dtype=torch.float64), 3)  # (1, 2, 0)
    assert P.tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize("name", ["grn", "dca"])
def test_w_receives_a_gradient_at_zero(name):
    options = DEFAULTS[name]
    p = {k: v.requires_grad_() for k, v in initial(name, options, DIM, BLOCKS).items()}
    t, _ = trace(name, options, p)
    grads = torch.autograd.grad(t.out.square().sum(), [v for k, v in p.items() if k.startswith("w")])
    assert all((g != 0).any(-1).all() for g in grads)


def test_equal_special_cases():
    def out(name, options):
        options = DEFAULTS[name] | options
        return trace(name, options, random_parameters(name, options, DIM, BLOCKS))[0].out

    assert torch.equal(out("attnres", {}), out("attnres", {"block_size": 1}))
    assert torch.equal(out("attnres", {}), out("attnres", {"window": 2 * BLOCKS}))
    assert torch.equal(out("dca", {}), out("dca", {"window": BLOCKS}))
    assert torch.equal(out("dca", {}), out("dca", {"window": BLOCKS - 1}))  # then the middle sum is one delta
    assert not torch.equal(out("dca", {}), out("dca", {"window": BLOCKS - 2}))


def test_who_is_in_which_source():
    """By hand, from the definitions."""
    assert attnres.members(0, 3, None) == [[0]]
    assert attnres.members(2, 3, None) == [[0], [1, 2]]
    assert attnres.members(3, 3, None) == [[0], [1, 2, 3]]  # the first site of a block: no partial sum
    assert attnres.members(8, 3, None) == [[0], [1, 2, 3], [4, 5, 6], [7, 8]]
    assert attnres.members(8, 3, 2) == [[0], [4, 5, 6], [7, 8]]
    assert attnres.members(3, None, None) == [[0], [1], [2], [3]]
    assert grn.members(2, 2) == [[0], [1], [2]]
    assert grn.members(3, 2) == [[0], [1], [2], [3]]
    assert grn.members(5, 2) == [[0], [1, 2, 3], [4], [5]]
    alpha = {"alpha.4": torch.tensor([3.0, 5.0]), "alpha.6": torch.tensor([1.0, 2.0, 4.0])}
    options = {"dilation": 3, "period": 2}
    assert denseformer.weights(alpha, options, 4, torch.float64) == {1: 3.0, 4: 5.0}
    assert denseformer.weights(alpha, options, 5, torch.float64) == {5: 1.0}
    assert denseformer.weights(alpha, options, 6, torch.float64) == {0: 1.0, 3: 2.0, 6: 4.0}


def test_hyper_is_transposed():
    """A_r[0, 1] = 1 alone moves stream 0 to stream 1 and empties stream 0."""
    options = DEFAULTS["hyper"] | {"n": 2, "static": True}
    e = torch.randn(1, 2, DIM, dtype=torch.float64)
    p = {"A_m": torch.tensor([[1.0, 0.0], [1.0, 0.0]]), "A_r": torch.zeros(2, 2, 2), "B": torch.zeros(2, 2)}
    p = {k: v.double() for k, v in p.items()}
    p["A_r"][0, 0, 1] = 1.0
    p["A_r"][1] = torch.eye(2)
    t = ORACLES["hyper"](p, options, 1, e, lambda s, reads: reads[0])
    assert torch.equal(t.reads[0][0], e)
    assert (t.reads[1][0] == 0).all()
    assert torch.equal(t.out, e)


def test_single_pass_reads_one_site_late():
    options = DEFAULTS["mhc"] | {"schedule": "single_pass", "residual_map": "identity", "n": 2}
    p = random_parameters("mhc", options, DIM, 1)
    e, log = torch.randn(1, 2, DIM, dtype=torch.float64), []
    t = ORACLES["mhc"](p, options, 1, e, lambda s, reads: log.append(reads[0].cos()) or log[-1])
    x = torch.stack([e, e], 2)
    pre0, post0, _ = mhc_coefficients(p, options, 0, x)
    assert torch.equal(t.reads[0][0], e)
    x1 = x + post0[..., None] * log[0][..., None, :]
    torch.testing.assert_close(t.reads[1][0], (pre0[..., None] * x1).sum(2))
    pre1, post1, _ = mhc_coefficients(p, options, 1, x1)
    torch.testing.assert_close(t.out, (pre1[..., None] * (x1 + post1[..., None] * log[1][..., None, :])).sum(2))
