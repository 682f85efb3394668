"""check_rule: right implementations in plain PyTorch pass, and each mistake is called by its name.

The implementations are written here from the papers. They share no code with the oracles of the package.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import conformance
from depthmix.errors import UserError
from depthmix.testing import RuleCheckError, check_rule, rule_parameters

# Inputs that tell the mistakes below apart.
FP32 = {"dtypes": (torch.float32,), "only": ("random", "at its initial values", "closed gates", "tiny activations")}


def rms(x, eps):
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def attention_residuals(mistake="", size=1, eps=1e-6):
    """Attention Residuals with blocks of `size` sublayers."""

    def read(sources, query, gain):
        v = torch.stack(sources).float()
        if mistake == "eps outside":
            keys = v / (v.square().mean(-1, keepdim=True).sqrt() + eps)
        else:
            keys = v if mistake == "keys not normed" else rms(v, eps)
        logits = (keys * gain) @ query
        if mistake == "clamped":
            logits = logits.clamp(-5, 5)
        if mistake == "scaled":
            logits = logits / v.shape[-1] ** 0.5
        return (logits.softmax(0)[..., None] * v).sum(0).to(sources[0].dtype)

    def call(p, e, sublayer):
        if mistake == "clamped gradients":
            e.register_hook(lambda g: g.clamp(-0.1, 0.1))
        blocks, partial = [e], None
        if mistake == "embedding in the first sum":
            blocks, partial = [], e
        for count, (query, gain) in enumerate(zip(p["query"][:-1], p["key_gain"][:-1], strict=True)):
            sources = blocks if partial is None else [*blocks, partial]
            if mistake == "no embedding" and len(sources) > 1:
                sources = sources[1:]
            if mistake == "partial twice" and partial is None and count:
                sources = [*sources, sources[-1]]
            y = sublayer(read(sources, query, gain))
            partial = y if partial is None else partial + y
            if (count + 1) % size == 0:
                blocks, partial = [*blocks, partial], None
        sources = blocks if partial is None else [*blocks, partial]
        if mistake == "no embedding":
            sources = sources[1:]
        if mistake == "partial twice" and partial is None:
            sources = [*sources, sources[-1]]
        return read(sources, p["query"][-1], p["key_gain"][-1])

    return call


def hyper_connections_constrained(mistake="", convention="deepseek", n=4, iterations=4):
    """mHC with a sum at the end."""
    norm_eps = 1e-6 if convention == "deepseek" else 1e-20
    eps = 1e-6 if convention == "deepseek" else 0.0

    def sinkhorn(logits):
        """Return the map from streams in to streams out, [..., out, in]."""
        rows, columns = (-1, -2) if mistake != "order" else (-2, -1)
        if convention == "deepseek":
            m = logits.softmax(rows) + (0.0 if mistake == "no sinkhorn eps" else eps)
            small = 0.0 if mistake == "no sinkhorn eps" else eps
            m = m / (m.sum(columns, keepdim=True) + small)
            for _ in range(iterations - 1):
                m = m / (m.sum(rows, keepdim=True) + small)
                m = m / (m.sum(columns, keepdim=True) + small)
            return m.transpose(-1, -2)
        m = (logits - logits.amax((-1, -2), keepdim=True)).exp()
        for _ in range(iterations):
            m = m / m.sum(columns, keepdim=True)
            m = m / m.sum(rows, keepdim=True)
        return m

    def coefficients(x, phi, b, alpha):
        flat = x.flatten(-2).float()
        if mistake == "norm after":
            z = rms(flat @ phi, norm_eps)
        elif mistake == "norm per stream":
            z = rms(x.float(), norm_eps).flatten(-2) @ phi
        elif mistake == "eps outside":
            z = flat / (flat.square().mean(-1, keepdim=True).sqrt() + norm_eps) @ phi
        else:
            z = rms(flat, norm_eps) @ phi
        scale = torch.cat([alpha[:1].expand(n), alpha[1:2].expand(n), alpha[2:].expand(n * n)])
        h = scale * (z + b) if mistake == "scaled bias" else scale * z + b
        if mistake == "tanh":
            h = scale * z.tanh() + b
        pre, post, res = h.split([n, n, n * n], dim=-1)
        if mistake == "clamped":
            res = res.clamp(-2, 2)
        pre = pre.sigmoid() + (0.0 if mistake == "no pre eps" else eps)
        post = post.sigmoid() * (1.0 if mistake == "post" else 2.0)
        return pre, post, sinkhorn(res.unflatten(-1, (n, n)))

    def call(p, e, sublayer):
        x = torch.stack([e] * n, dim=-2)
        for site, (phi, b, alpha) in enumerate(zip(p["phi"], p["b"], p["alpha"], strict=True)):
            if mistake == "restart" and site and site % 2 == 0:
                x = torch.stack([x.sum(-2)] * n, dim=-2)
            pre, post, res = coefficients(x, phi, b, alpha)
            y = sublayer((pre[..., None] * x).sum(-2).to(e.dtype))
            if mistake == "transposed":
                res = res.transpose(-1, -2)
            kept = x.float() if mistake == "not applied" else res @ x.float()
            x = (kept + post[..., None] * y[..., None, :]).to(e.dtype)
        return x.float().mean(-2).to(e.dtype) if mistake == "mean" else x.sum(-2)

    return call


def hyper_connections(mistake="", n=4):
    """Dynamic Hyper-Connections with a LayerNorm."""

    def call(p, e, sublayer):
        x = torch.stack([e] * n, dim=-2)
        for site in range(len(p["B"])):
            h = F.layer_norm(x.float(), x.shape[-1:], eps=1e-5)
            if mistake == "rmsnorm":
                h = rms(x.float(), 1e-5)
            if mistake == "no norm":
                h = x.float()
            squash = (lambda z: z) if mistake == "no tanh" else torch.tanh
            read = p["s_alpha"][site] * squash(h @ p["W_m"][site]) + p["A_m"][site]
            mix = p["s_alpha"][site] * squash(h @ p["W_r"][site]) + p["A_r"][site]
            write = p["s_beta"][site] * squash(h @ p["W_beta"][site]) + p["B"][site]
            y = sublayer((read[..., None] * x).sum(-2).to(e.dtype))
            kept = mix @ x.float() if mistake == "transposed" else mix.transpose(-1, -2) @ x.float()
            if mistake == "not applied":
                kept = x.float()
            x = (kept + write[..., None] * y[..., None, :]).to(e.dtype)
        return x.sum(-2)

    return call


def denseformer(mistake=""):
    def call(p, e, sublayer):
        states, y = [e], e
        for i in range(1, len(p) + 1):
            x = y + sublayer(y)
            x = x + sublayer(x)
            states.append(x - y if mistake == "outputs" else x)
            alpha = p[f"alpha.{i}"].softmax(0) if mistake == "softmax" else p[f"alpha.{i}"]
            first = 1 if mistake == "no embedding" else 0
            y = sum(a * s.float() for a, s in zip(alpha[first:], states[first:], strict=True)).to(e.dtype)
            if mistake == "averages":
                states[-1] = y
        return y

    return call


def deep_cross_attention(mistake=""):
    def mix(b, w, stack):
        out = []
        for j, entry in enumerate(stack):
            keys = rms(entry.float(), torch.finfo(torch.float32).eps) if mistake == "normed" else entry.float()
            product = keys @ w[0]
            # clamp passes a gradient at zero, relu does not.
            dynamic = product.relu() if mistake == "dead" else product.clamp(min=0)
            weight = (b[j] + product[..., None]).relu() if mistake == "sum" else b[j] + dynamic[..., None]
            out.append(weight * entry.float())
        return sum(out[1:] if mistake == "no embedding" else out).to(stack[0].dtype)

    def call(p, e, sublayer):
        stack, n_blocks = [e], len(p) // 2
        for i in range(n_blocks):
            ways = [mix(p[f"b.{i}"][way], p[f"w.{i}"][way], stack) for way in range(3)] if i else [e] * 3
            if mistake == "one":
                ways = ways[:1] * 3
            y = sublayer(*ways)
            z = sublayer(ways[0] + y)
            stack.append(ways[0] + y + z if mistake == "states" else y + z)
        return mix(p[f"b.{n_blocks}"][0], p[f"w.{n_blocks}"][0], stack)

    return call


RIGHT = [
    ("attnres", None, {}, attention_residuals()),
    ("attnres", None, {"block_size": 3}, attention_residuals(size=3)),
    ("mhc", "deepseek", {"iterations": 4}, hyper_connections_constrained()),
    ("mhc", "paper", {"iterations": 4}, hyper_connections_constrained(convention="paper")),
    ("hyper", None, {}, hyper_connections()),
    ("denseformer", None, {}, denseformer()),
    ("dca", None, {}, deep_cross_attention()),
]


@pytest.mark.parametrize(("rule", "convention", "options", "call"), RIGHT)
def test_right_implementations_pass(rule, convention, options, call):
    report = check_rule(call, rule, convention, **options)
    assert report.passed, report
    assert {result.status for result in report.results} == {"right"}
    report.raise_if_failed()


ATTNRES = [
    ("no embedding", 1, "embedding not among the sources (it is left out)"),
    ("embedding in the first sum", 2, "embedding not among the sources (it is in the first sum)"),
    ("partial twice", 2, "partial sum read twice"),
    ("eps outside", 1, "eps outside the square root"),
    ("keys not normed", 1, "keys not normed"),
    ("scaled", 1, "logits divided by sqrt(D)"),
    ("clamped", 1, "clamped gradients (logits are clamped at 5)"),
    ("clamped gradients", 1, "clamped gradients (of the embedding)"),
]


@pytest.mark.parametrize(("mistake", "size", "name"), ATTNRES)
def test_mistakes_in_attention_residuals_are_named(mistake, size, name):
    report = check_rule(attention_residuals(mistake, size), "attnres", **FP32, block_size=size)
    assert report.mistakes == [name], report


MHC = [
    ("transposed", "transposed residual map"),
    ("order", "row/column order of Sinkhorn"),
    ("not applied", "residual map not applied"),
    ("no sinkhorn eps", "eps of Sinkhorn missing"),
    ("no pre eps", "eps of pre missing"),
    ("eps outside", "eps outside the square root"),
    ("norm after", "norm after the projection instead of before"),
    ("norm per stream", "norm per stream instead of over all streams"),
    ("scaled bias", "alpha multiplies the bias too"),
    ("tanh", "tanh in the coefficients"),
    ("post", "post without its factor of 2"),
    ("clamped", "clamped gradients (residual logits are clamped at 2)"),
    ("restart", "streams do not persist from block to block"),
    ("mean", "streams averaged at the end (the head is sum)"),
]


@pytest.mark.parametrize(("mistake", "name"), MHC)
def test_mistakes_in_mhc_are_named(mistake, name):
    call = hyper_connections_constrained(mistake, iterations=2)
    report = check_rule(call, "mhc", "deepseek", **FP32, n_blocks=2, iterations=2)
    assert report.mistakes == [name], report


def test_another_convention_of_mhc_is_named():
    call = hyper_connections_constrained(convention="paper", iterations=2)
    report = check_rule(call, "mhc", "deepseek", **FP32, n_blocks=2, iterations=2)
    assert report.mistakes == ["the convention of paper instead of deepseek"]


def test_two_mistakes_at_once_are_named():
    def call(p, e, sublayer):
        return hyper_connections_constrained("transposed", iterations=2)(p, e, sublayer) / 4

    report = check_rule(call, "mhc", "deepseek", **FP32, n_blocks=2, iterations=2)
    assert report.mistakes == ["transposed residual map + streams averaged at the end (the head is sum)"]


HYPER = [
    ("transposed", "transposed residual map"),
    ("not applied", "residual map not applied"),
    ("rmsnorm", "RMSNorm instead of LayerNorm"),
    ("no norm", "norm missing"),
    ("no tanh", "tanh missing"),
]


@pytest.mark.parametrize(("mistake", "name"), HYPER)
def test_mistakes_in_hyper_connections_are_named(mistake, name):
    report = check_rule(hyper_connections(mistake), "hyper", **FP32, n_blocks=2)
    assert report.mistakes == [name], report


BLOCKS = [
    (denseformer("no embedding"), "denseformer", "embedding not among the sources"),
    (denseformer("outputs"), "denseformer", "outputs of blocks instead of states"),
    (denseformer("softmax"), "denseformer", "weights normed by a softmax"),
    (denseformer("averages"), "denseformer", "averages of averages"),
    (deep_cross_attention("no embedding"), "dca", "embedding not among the sources"),
    (deep_cross_attention("dead"), "dca", "relu without a gradient at zero (a w that begins at zero never trains)"),
    (deep_cross_attention("sum"), "dca", "relu of the sum instead of the dynamic part"),
    (deep_cross_attention("normed"), "dca", "norm before the dynamic weights"),
    (deep_cross_attention("one"), "dca", "one mixture for queries, keys and values"),
    (deep_cross_attention("states"), "dca", "states instead of outputs on the stack"),
]


@pytest.mark.parametrize(("call", "rule", "name"), BLOCKS, ids=[name for _, _, name in BLOCKS])
def test_mistakes_in_rules_of_blocks_are_named(call, rule, name):
    report = check_rule(call, rule, **FP32)
    assert report.mistakes == [name], report


class Module(nn.Module):
    """Attention Residuals as a module whose queries begin at random values."""

    def __init__(self, std):
        super().__init__()
        self.query = nn.Parameter(std * torch.randn(7, 32))
        self.key_gain = nn.Parameter(torch.ones(7, 32))

    def forward(self, e, sublayer):
        return attention_residuals()({"query": self.query, "key_gain": self.key_gain}, e, sublayer)


def test_a_module_is_checked_with_its_initial_values():
    torch.manual_seed(0)
    assert check_rule(Module(0.0), "attnres").passed
    report = check_rule(Module(0.02), "attnres")
    assert not report.passed
    assert report.mistakes == ["queries not at zero"]


@pytest.mark.parametrize(
    ("rule", "convention", "options"),
    [
        ("attnres", None, {"block_size": 2}),
        ("dca", None, {"window": 1}),
        ("denseformer", None, {}),
        ("hyper", None, {"norm": "rmsnorm"}),
        ("mhc", "deepseek", {"head": "learned"}),
        ("mhc", "paper", {"head": "mean"}),
    ],
)
def test_mixers_of_the_package_are_right(rule, convention, options):
    own = {"convention": convention} if convention else {}
    report = check_rule(conformance.mixer(rule, **own, **options), rule, convention, only=["random"], **options)
    assert report.passed, report


def test_wrong_forms_and_refusals_are_reported():
    def too_few(p, e, sublayer):
        return sublayer(e)

    report = check_rule(too_few, "attnres")
    assert not report.passed
    assert "calls 1 sublayers instead of 6" in report.diagnosis

    def picky(p, e, sublayer):
        if e.shape[-1] % 2:
            raise ValueError("odd widths are not supported")
        return attention_residuals()(p, e, sublayer)

    report = check_rule(picky, "attnres")
    assert report.passed
    assert "not run: one token, D=21" in report.diagnosis
    with pytest.raises(RuleCheckError, match="partial sum read twice"):
        check_rule(attention_residuals("partial twice", 2), "attnres", block_size=2).raise_if_failed()


def test_rounding_of_intermediate_results_is_told_from_a_mistake():
    def rough(p, e, sublayer):
        return attention_residuals()(
            p,
            e,
            lambda h: (
                sublayer((h * 16).to(torch.float8_e5m2).to(e.dtype) / 16) if e.dtype == torch.bfloat16 else sublayer(h)
            ),
        )

    report = check_rule(rough, "attnres")
    assert report.mistakes == ["intermediate results rounded to bfloat16"]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("unet",), {}, "no oracle for 'unet'"),
        (("mhc", "megatron"), {}, "no convention 'megatron'"),
        (("attnres",), {"window": 2}, "no option 'window' here"),
    ],
)
def test_unknown_rules_and_options_are_refused(arguments, options, message):
    with pytest.raises(UserError, match=message):
        check_rule(attention_residuals(), *arguments, **options)


def test_parameters_are_listed():
    assert rule_parameters("attnres", dim=64) == {"query": (7, 64), "key_gain": (7, 64)}
