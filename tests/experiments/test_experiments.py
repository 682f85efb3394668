"""Every experiment: its equations, its start, the battery that every mixer passes, kernels, and a study that trains it."""

import inspect
import re
import runpy

import pytest
import torch

from depthmix import Decoder, DecoderConfig, create_mixer
from depthmix.compare.arms import parse_arm
from depthmix.compare.modules import load_modules
from depthmix.insight import contributions
from depthmix.mixers import mixer_class, registry
from depthmix.mixers.decay import decays
from depthmix.ops import use_backend
from depthmix.ops.norm import RMSNorm
from depthmix.parallel.plan.costs import costs_of
from depthmix.runs.code_checksums import KERNELS, code_of
from experiments import references
from harness import DIM, LAYOUTS, Sublayers, as_tuple, build, embedding, label, run_stack
from mixers import test_battery as battery
from oracles.blocks import Blocks
from project import ROOT

FILES = [
    "attention_reads",
    "attnres_on_streams",
    "embedding_again",
    "gate_apart",
    "low_rank_query",
    "softmax_dca",
]
CASES = [
    ("attention_reads", {"block_size": 3}),
    ("attention_reads", {"only": "values"}),
    ("embedding_again", {}),
    ("embedding_again", {"into": "stream"}),
    ("gate_apart", {"block_size": 3}),
    ("gate_apart", {"values": True}),
    ("low_rank_query", {}),
    ("low_rank_query", {"block_size": 3, "rank": 3}),
    ("attnres_on_streams", {"block_size": 2, "n": 2}),
    ("attnres_on_streams", {"static": True}),
    ("softmax_dca", {}),
    ("softmax_dca", {"window": 1}),
]
every_case = pytest.mark.parametrize(("name", "choice"), CASES, ids=[label(*case) for case in CASES])
every_experiment = pytest.mark.parametrize("name", FILES)
# Site 0 has a single source; of an inner mixer the battery looks at whole tensors.
SITE_0 = {
    "attention_reads": {("query", 0), ("key_gain", 0)},
    "embedding_again": set(),
    "gate_apart": {("query", 0), ("key_gain", 0)},
    "low_rank_query": {("query", 0), ("key_gain", 0), ("U", 0), ("V", 0)},
    "attnres_on_streams": set(),
    "softmax_dca": set(),
}


class Gated(Sublayers):
    """MLPs that read both of their mixtures."""

    def forward(self, site, reads):
        if self.names[site] != "mlp" or len(reads) == 1:
            return super().forward(site, reads)
        w = self.weight[site]
        return torch.tanh(reads[0] @ w[0]) * (reads[1] @ w[2]) @ w[1]


class Facts:
    """What the battery asks of a mixer's oracle."""

    def __init__(self, name):
        self.DEAD_ROWS, self.OPTIONS = SITE_0[name], [choice for other, choice in CASES if other == name]


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    """The experiments are mixers here, and gone afterwards."""
    monkeypatch.setattr(registry, "_MIXERS", dict(registry._MIXERS))
    study = ROOT / "recipes" / "studies" / "beyond.yaml"
    assert [file.stem for file in load_modules(study.parent, ["../../examples/experiments"], "modules")] == FILES
    monkeypatch.setattr(battery, "Sublayers", Gated)
    for name in FILES:
        monkeypatch.setitem(battery.MODULES, name, Facts(name))


@pytest.mark.parametrize("blocks", [4, LAYOUTS["uneven"]], ids=["usual", "uneven"])
@every_case
def test_output_reads_and_every_gradient_are_those_of_the_equations(name, choice, blocks):
    mixer = build(name, blocks, choice, random=True)
    sublayers, e = Gated(blocks), embedding().requires_grad_()
    direction = torch.randn_like(e)
    p = {k: v.detach().clone().requires_grad_() for k, v in mixer.named_parameters()}
    out, reads, sources = run_stack(mixer, sublayers, e)
    expected, theirs = getattr(references, name)(p, choice, Blocks(blocks), e, sublayers)
    for ours, other in zip([*reads, (out,)], [*theirs, (expected,)], strict=True):
        for a, b in zip(ours, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    got = torch.autograd.grad((out * direction).sum(), [e, sublayers.weight, *mixer.parameters()])
    wanted = torch.autograd.grad((expected * direction).sum(), [e, sublayers.weight, *p.values()])
    for k, a, b in zip(["e", "sublayers", *p], got, wanted, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-7, atol=1e-9 * max(1.0, float(b.abs().max())), msg=lambda m, k=k: k + m
        )
    for k in (3, mixer.n_sites + 1):  # what M is made of adds up to the read
        found = contributions(mixer, [s.detach() for s in sources[:k]])
        for part, h in zip(found, [*reads, (out,)][k - 1], strict=True):
            torch.testing.assert_close(part.parts.sum(0), h, rtol=1e-9, atol=1e-9)


STARTS = [
    ("attention_reads", {"block_size": 3}, "attnres", {"block_size": 3}),
    ("embedding_again", {}, "residual", {}),
    ("embedding_again", {"into": "stream"}, "residual", {}),
    ("gate_apart", {"block_size": 3}, "attnres", {"block_size": 3}),
    ("low_rank_query", {"block_size": 3}, "attnres", {"block_size": 3}),
    ("attnres_on_streams", {"block_size": 3}, "attnres", {"block_size": 3, "routing": "add"}),
    ("softmax_dca", {}, "dca", {}),
]


@pytest.mark.parametrize(("name", "choice", "other", "its"), STARTS, ids=[label(*case[:2]) for case in STARTS])
def test_it_starts_as_the_mechanism_that_it_extends(name, choice, other, its):
    sources = [embedding() for _ in range(7)]
    *ours, out = battery.replay(build(name, 3, choice), sources)
    *theirs, expected = battery.replay(build(other, 3, its), sources)
    for reads, read in zip(ours, theirs, strict=True):
        for h in as_tuple(reads):
            torch.testing.assert_close(h, as_tuple(read)[0], rtol=0, atol=1e-6)
    out, expected = (torch.nn.functional.rms_norm(h, (DIM,), eps=0.0) for h in (out, expected))  # four streams add up
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_a_query_of_low_rank_begins_with_numbers_of_size_one():
    """z = V x / √D, whatever the width; U starts at zero."""
    mixer = create_mixer("low_rank_query", dim=256, n_blocks=4, block_size=4)
    assert mixer.V.std().item() == pytest.approx(1.0, abs=0.03)


def checks():
    """The battery's tests of a name, or of a name and a choice, but those of operators' kernels and of the compiler."""
    for key, test in vars(battery).items():
        wanted = set(inspect.signature(test).parameters) if key.startswith("test_") else set()
        if "name" in wanted and wanted <= {"name", "choice", "blocks"} and "compile" not in key:
            yield key.removeprefix("test_"), wanted


CHECKS = dict(checks())


@pytest.mark.parametrize("check", CHECKS)
@every_experiment
def test_it_passes_the_battery(name, check):
    options = {"choice": {}, "blocks": LAYOUTS["uneven"]}
    given = {key: value for key, value in options.items() if key in CHECKS[check]}
    getattr(battery, f"test_{check}")(name=name, **given)


@every_experiment
def test_a_norm_inside_a_read_is_the_norm_after_it(name):
    battery.check_a_norm_inside_a_read(name, torch.float32, 2)
    battery.check_a_norm_inside_a_read(name, torch.bfloat16, 1)


def trained(mixer, norms, e, w, backend):
    """Output and gradients of a pass with norms inside the reads."""
    e = e.clone().requires_grad_()
    with use_backend(backend):
        state = mixer.start(e)
        for site in range(mixer.n_sites):
            own = norms[: mixer.ways(site)]
            reads = as_tuple(mixer.read(state, site, own if len(own) > 1 else own[0]))
            state = mixer.write(state, site, torch.tanh(sum((i + 1) * h for i, h in enumerate(reads)) @ w[site]))
        out = mixer.finish(state)
        wanted = [e, *mixer.parameters(), *(n.weight for n in norms)]
        return [out, *torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)]


@every_experiment
def test_kernels_give_the_same_with_every_gradient(name, quick_interpreter):
    choice, blocks = {  # as small as shows what is an experiment's own
        "attention_reads": ({"block_size": 3}, 1),
        "embedding_again": ({}, 1),
        "gate_apart": ({"block_size": 3}, 2),
        "low_rank_query": ({"block_size": 3}, 1),
        "attnres_on_streams": ({"n": 2}, 1),
        "softmax_dca": ({}, 2),
    }[name]
    exact = build(name, blocks, choice, random=True, dim=19)
    mixer = build(name, blocks, choice, dim=19, dtype=torch.float32)
    mixer.load_state_dict(exact.state_dict())
    e, w = torch.randn(3, 19, dtype=torch.float64), torch.randn(4, 19, 19, dtype=torch.float64) / 19**0.5
    norms = [torch.nn.ModuleList(RMSNorm(19, dtype=d) for _ in range(3)) for d in (torch.float64, torch.float32)]
    expected = trained(exact, norms[0], e, w, "reference")
    for got, b in zip(trained(mixer, norms[1], e.float(), w.float(), "triton"), expected, strict=True):
        assert (got is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(got.double(), b, rtol=0, atol=3e-5 * max(1.0, float(b.detach().abs().max())))


def test_its_own_file_and_those_it_builds_on_are_its_code():
    table = code_of("attnres_on_streams")
    files = {"attnres_on_streams.py", "mixers/attnres.py", "mixers/hyper.py", "mixers/streams.py", "models/layers.py"}
    assert {*files, KERNELS + "attnres_on_streams"} <= set(table)
    assert not {"mixers/dca.py", "softmax_dca.py"} & set(table)


def moved(name, options):
    """Activations of a mixer of 12 blocks, forward and backward, as the page writes them."""
    with torch.device("meta"):
        found = costs_of(create_mixer(name, dim=512, n_blocks=12, **options)).traffic()
    return " and ".join(f"{sum(getattr(t, way) for t in found):g}" for way in ("forward", "backward"))


def test_the_page_says_what_they_move():
    runpy.run_path(str(ROOT / "examples/experiments/_costs.py"))
    page = (ROOT / "examples" / "experiments" / "README.md").read_text()
    lines = {name: next(line for line in page.splitlines() if f"`{name}.py`" in line) for name in FILES}
    for name, choice in [(name, {}) for name in FILES] + [
        ("gate_apart", {"values": True}),
        ("embedding_again", {"into": "stream"}),
    ]:
        options = {"block_size": 4} if "block_size" in mixer_class(name).options else {}
        assert f" {moved(name, {**options, **choice})}" in lines[name]
    beside = next(line for line in page.splitlines() if line.startswith("As the planner counts"))
    named = re.findall(r"`(\w+(?::[\w=,]+)?)` (\d+ and \d+)", beside)
    assert len(named) == 7
    for text, numbers in named:
        arm = parse_arm(text)
        assert moved(arm.name, arm.options) == numbers, text


def test_weight_decay_is_for_matrices_of_the_input():
    decayed = {
        name: {k for k, decay in decays(mixer).items() if decay}
        for name, mixer in ((name, create_mixer(name, dim=8, n_blocks=1)) for name in FILES)
    }
    below = {f"below.{k}" for k in mixer_class("hyper").decayed}
    assert decayed == {
        "attention_reads": set(),
        "embedding_again": set(),
        "gate_apart": set(),
        "softmax_dca": set(),
        "low_rank_query": {"U", "V"},
        "attnres_on_streams": below,
    }


def test_a_gate_and_an_up_projection_see_what_was_read_for_them():
    config = {"vocab_size": 16, "dim": 8, "n_blocks": 1, "n_heads": 2, "mixer": "gate_apart"}
    model = Decoder(DecoderConfig(**config))
    assert [len(norms) for norms in model.norms] == [1, 2]
    mlp, seen = model.sublayers[1], []
    for part in (mlp.gate_proj, mlp.up_proj):
        part.register_forward_hook(lambda _, args, out: seen.append(args[0]))
    h = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    y = mlp(h, None)
    assert all(map(torch.equal, seen, h))
    torch.testing.assert_close(y, mlp.out_proj(torch.nn.functional.silu(mlp.gate_proj(h[0])) * mlp.up_proj(h[1])))
    with pytest.raises(ValueError, match="gate_apart reads 2 mixtures at an MLP; relu2 takes one"):
        Decoder(DecoderConfig(**config, mlp="relu2"))
