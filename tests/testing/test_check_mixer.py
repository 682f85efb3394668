"""check_mixer: the package's mixers pass, and each kind of mistake fails the check that is named after it."""

import pytest
import torch
from torch import nn

import depthmix as dm
from depthmix.errors import UserError
from depthmix.mixers import Mixer, registry
from depthmix.testing import MixerCheckError
from harness import MIXERS

NAMES = "contract states causality locality inference gradients precision parameters copies contributions pipeline"


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(registry, "_MIXERS", dict(registry._MIXERS))


@dm.register_state
class Faded(dm.State):
    x: torch.Tensor

    def template(self):
        return self.x


class Fading(Mixer):
    """The stream fades as outputs arrive; what is wrong in a test is all that differs."""

    def __init__(self, dim: int, n_blocks: int, *, init: float = 0.9):
        super().__init__(dim, n_blocks)
        self.init = init
        self.a = nn.Parameter(torch.empty(self.n_sites))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.a, self.init)

    def _start(self, x):
        return Faded(x=x)

    def _read(self, state, site):
        return state.x

    def _write(self, state, site, y):
        wide = torch.promote_types(state.x.dtype, torch.float32)
        return state.next(x=(self.a[site] * state.x.to(wide) + y.to(wide)).to(state.x.dtype))

    def _finish(self, state):
        return state.x


def own(**body):
    return dm.register("own")(type("Own", (Fading,), body))


@pytest.mark.parametrize("name", MIXERS)
def test_the_mixers_of_the_package_pass(name):
    report = dm.check_mixer(name, n_blocks=2)
    assert [result.name for result in report.results.values()] == NAMES.split()
    assert {result.status for result in report.results.values()} == {"passed"}, report
    report.raise_if_failed()


def in_place(self, state, site, y):
    return state.next(x=state.x.mul_(self.a[site].detach()) + y)


def keep_on_module(self, x):
    self.kept = x
    return Faded(x=x)


def add_kept(self, state):
    return state.x + self.kept


def look_ahead(self, state, site):
    return state.x + state.x.roll(-1, -2)


def look_back(self, state, site):
    return state.x.cumsum(-2)


def by_mode(self, state, site):
    return state.x if torch.is_grad_enabled() else 2 * state.x


def without_gradient(self, state, site, y):
    return state.next(x=self.a[site].detach() * state.x + y)


def unused(self, state, site, y):
    return state.next(x=state.x + y)


def rounding_often(self, state, site, y):
    x = self.a[site].to(y.dtype) * state.x
    for _ in range(64):
        x = x + y / 64
    return state.next(x=x)


def unset(self):
    with torch.no_grad():
        self.a[1:] = 0.9


def keep_parameters(self, state, site, y):
    if not hasattr(self, "kept"):
        self.kept = self.a.detach().clone()
    return state.next(x=(self.a - self.a.detach() + self.kept)[site] * state.x + y)


def own_coefficient(self, state, site):
    return torch.sigmoid(state.x.mean(-1, keepdim=True)) * state.x


MISTAKES = {
    "contract": ({"_read": lambda m, state, site: state.x[..., 1:]}, r"own must give tensors of shape \[2, 5, 24\]"),
    "states": ({"_write": in_place}, "states: RuntimeError: read at site 0: own keeps a tensor .* changed in place"),
    "states, kept outside the state": (
        {"_start": keep_on_module, "_finish": add_kept},
        "something is kept outside the state",
    ),
    "causality": ({"_read": look_ahead}, "what a site reads of a token depends on tokens to come"),
    "locality": ({"_read": look_back}, "the read at site 0 of tokens without a batch differs"),
    "inference": ({"_read": by_mode}, "the read at site 0 under no_grad differs from training"),
    "gradients": ({"_write": without_gradient}, "the gradient of parameter a is 0 along a random direction"),
    "gradients, unused": ({"_write": unused}, "parameter a receives no gradient and changes nothing"),
    "precision": ({"_write": rounding_often}, "the read at site . in bf16 is off by .*, more than rounding"),
    "parameters": ({"reset_parameters": unset}, r"parameter a is not set by reset_parameters\(\)"),
    "copies": ({"_write": keep_parameters}, "a copy that loads its state dict computes something else"),
    "contributions": ({"_read": own_coefficient}, "take coefficients from state.observe"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_fails_the_check_of_its_name(mistake):
    body, said = MISTAKES[mistake]
    report = dm.check_mixer(own(**body))
    failed = report[mistake.partition(",")[0]]
    assert failed.status == "failed", report
    with pytest.raises(MixerCheckError, match=said):
        report.raise_if_failed()
    assert not report.passed
    assert f"✗ {failed}"[4:] in repr(report)


def test_without_a_mistake_a_class_an_instance_and_a_name_pass_and_the_instance_is_left_alone():
    cls = own()
    mixer = dm.create_mixer("own", dim=8, n_blocks=1, init=0.5)
    before = {name: p.clone() for name, p in mixer.named_parameters()}
    for subject in (cls, mixer, "own"):
        report = dm.check_mixer(subject)
        assert report.passed, report
    assert all(torch.equal(p, before[name]) for name, p in mixer.named_parameters())
    assert mixer.a.dtype == torch.float32
    assert repr(dm.check_mixer("own", dim=8, n_blocks=2, init=0.5)).startswith("own(dim=8, n_blocks=2, init=0.5)\n  ✓ ")


def test_checks_leave_the_global_generator_alone():
    own()
    before = torch.get_rng_state()
    dm.check_mixer("own")
    assert torch.equal(torch.get_rng_state(), before)


def test_after_a_broken_contract_nothing_else_is_tried():
    report = dm.check_mixer(own(_read=lambda m, state, site: state.x[..., 1:]))
    assert {r.status for n, r in report.results.items() if n != "contract"} == {"skipped"}


def test_a_rule_that_cannot_be_divided_into_stages_is_no_failure():
    def build(self, dim: int, n_blocks: int):
        Mixer.__init__(self, dim, n_blocks)
        self.a = nn.Parameter(torch.empty(3))
        self.init = 0.9
        self.reset_parameters()

    def write(self, state, site, y):
        return state.next(x=(self.a.sum().to(torch.promote_types(y.dtype, torch.float32)) * state.x + y).to(y.dtype))

    report = dm.check_mixer(own(__init__=build, _write=write), n_blocks=2)
    assert report.passed
    assert report["pipeline"].status == "skipped"
    assert (
        "own cannot be divided into stages: one would need the rows that another trains of a"
        in report["pipeline"].detail
    )


def test_text_of_a_rule_is_escaped_in_a_notebook():
    def read(self, state, site):
        raise ValueError("<script>alert(1)</script>")

    shown = dm.check_mixer(own(_read=read))._repr_html_()
    assert "ValueError: &lt;script&gt;" in shown
    assert "<script>" not in shown


@pytest.mark.parametrize(
    ("subject", "options", "said"),
    [
        (3, {}, "check_mixer takes a mixer, its class or its name, got int"),
        (Fading, {}, r"Fading is not registered: decorate it with @register\('its_name'\)"),
        (lambda: dm.create_mixer("residual", dim=8, n_blocks=1), {"init": 1.0}, "residual is already built"),
    ],
    ids=["a number", "not registered", "options of an instance"],
)
def test_what_is_no_mixer(subject, options, said):
    subject = subject() if callable(subject) and not isinstance(subject, type) else subject
    with pytest.raises(UserError, match=said):
        dm.check_mixer(subject, **options)
