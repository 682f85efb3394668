"""The pieces the entries are made of: the reference, the contenders' calls, timing, tables."""

import sys
import types

import pytest
import torch

from benchmarks import check, reference, rivals, stacks, timing
from benchmarks.environment import COLUMNS, environment
from benchmarks.report import CSV_COLUMNS, Report, Row, markdown, read_rows
from benchmarks.step import steps_of
from depthmix.ops import depth_attention

CPU = torch.device("cpu")
SETTING = dict.fromkeys(COLUMNS, "") | {"hardware": "Some GPU", "commit": "abc"}


@pytest.mark.parametrize(("sites", "block_size"), [(6, None), (6, 2), (8, 3), (4, 8)])
def test_reference_and_ours_are_the_same_function(sites, block_size, monkeypatch):
    """In fp32 to its rounding, the last block full or not; however the tokens are cut."""
    problem = stacks.Problem.make(sites, 10, 16, block_size, torch.float32, CPU)
    expected = reference.results(problem)
    assert set(expected) == {"output", "d x", "d query", "d key_gain"}
    found = check.errors(stacks.results(problem, stacks.ours), expected)
    assert max(found.values()) < 2e-6
    monkeypatch.setitem(reference.MEMORY, "cpu", 3 * 32 * 16 * reference._pairs(problem))
    assert len(reference._parts(10, 16, reference._pairs(problem), CPU)) == 4
    assert max(check.errors(reference.results(problem), expected).values()) < 1e-12


def test_every_gradient_that_is_compared_is_large():
    """A gradient that is nearly zero would compare rounding with rounding."""
    problem = stacks.Problem.make(8, 64, 32, None, torch.float32, CPU)
    expected = reference.results(problem)
    assert all(float(g.norm()) > 1 for g in expected.values())


def plain_fla(query, residuals, rms_weight, output_rms_weight=None, rms_eps=1e-6, scale=1.0, checkpoint_level=1):
    """The documented meaning of fla's fused_attnres."""
    v = torch.stack(list(residuals))
    k = torch.nn.functional.rms_norm(v, v.shape[-1:], rms_weight, rms_eps)
    p = torch.softmax(scale * (k @ query), dim=0)
    o = (p.unsqueeze(-1) * v).sum(0)
    return o if output_rms_weight is None else torch.nn.functional.rms_norm(o, o.shape[-1:], output_rms_weight, rms_eps)


@pytest.fixture
def _fake_fla(monkeypatch):
    module = types.ModuleType("fla.ops.attnres")
    module.fused_attnres = plain_fla
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.attnres", module)


@pytest.mark.usefixtures("_fake_fla")
@pytest.mark.parametrize("block_size", [None, 2])
def test_fla_is_called_for_the_same_function(block_size):
    problem = stacks.Problem.make(6, 5, 16, block_size, torch.float32, CPU)
    found = check.errors(stacks.results(problem, rivals.fla), reference.results(problem))
    assert max(found.values()) < 2e-6


@pytest.mark.usefixtures("_fake_fla")
@pytest.mark.parametrize("normed", [False, True])
def test_one_read_is_the_same_function(normed):
    query, gain, out_gain = torch.randn(16), torch.rand(16) + 0.5, torch.rand(16) if normed else None
    sources, grad = [torch.randn(5, 16) for _ in range(3)], torch.randn(5, 16)
    expected = reference.operator_results(query, sources, gain, out_gain, grad)["output"].float()
    torch.testing.assert_close(rivals.fla_read(query, sources, gain, out_gain), expected)
    torch.testing.assert_close(depth_attention(query, sources, gain, out_gain=out_gain), expected)


def test_a_rival_says_why_it_cannot_run(monkeypatch):
    assert rivals.why_not("fla", CPU) == "skipped: its kernels need a GPU"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install '.[bench]'" in rivals.why_not("flash-attn-res", torch.device("cuda"))


def test_contenders_take_turns():
    order = []

    def contender(name):
        def run(mark):
            order.append(name)
            mark()
            mark()

        return run

    found = timing.interleaved({"a": contender("a"), "b": contender("b")}, rounds=3, warmup=1, device=CPU)
    assert order == ["a", "b", *["a", "b"] * 3]
    assert all(len(t.phases) == 2 and t.total >= 0 for t in found.values())
    assert timing.extra_memory(contender("a"), CPU) is None


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_step_is_launched_and_never_waited_for(fused):
    calls = []
    trainer = types.SimpleNamespace(fused=fused)
    trainer.launch = lambda step: calls.append(("launch", step))
    trainer.step = lambda step: calls.append(("step", step))
    run = steps_of(trainer)
    for _ in range(2):
        run(lambda: calls.append("mark"))
    name = "launch" if fused else "step"
    assert calls == [(name, 0), "mark", (name, 1), "mark"]


def test_medians():
    found = timing._summary([[1.0, 10.0], [2.0, 20.0], [9.0, 90.0]])
    assert (found.phases, found.total) == ((2.0, 20.0), 22.0)


def test_errors_are_relative_and_strict():
    one = torch.ones(4)
    assert check.relative_error(one * 1.5, one) == pytest.approx(0.5)
    assert check.relative_error(one * float("nan"), one) == float("inf")
    assert check.relative_error(torch.zeros(4), torch.zeros(4)) == 0
    with pytest.raises(check.WrongResult, match="shape"):
        check.relative_error(torch.ones(3), one)
    with pytest.raises(check.WrongResult, match="no d x"):
        check.errors({"output": one}, {"output": one, "d x": one})
    with pytest.raises(check.WrongResult, match=r"ours is wrong and is not timed: relative error of d x 0.5"):
        check.require("ours", {"output": 0.0, "d x": 0.5}, 0.1)
    with pytest.raises(check.WrongResult):
        check.require("ours", {"output": float("nan")}, 0.1)


ROWS = [
    Row("full-stack", "L=4", "ours", "forward+backward", 12.345678, "ms"),
    Row("full-stack", "L=4", "ours", "error of d x", 0.004),
    Row("full-stack", "L=4", "fla", "forward+backward", 50.0, "ms"),
    Row("full-stack", "L=4", "ours", "time / fla", 0.2469, target="<= 0.27"),
    Row("full-stack", "L=4", "other", "forward+backward", None, "ms", note="skipped: no GPU"),
    Row("bandwidth", "N=1", "gather", "share of copy bandwidth", 0.7, target=">= 0.8"),
]


def test_markdown_table():
    assert (
        markdown(ROWS, SETTING)
        == """\
| full-stack |  | forward+backward, ms | time / fla |
|---|---|---|---|
| L=4 | ours | 12.346 | 0.247 (≤ 0.27: met) |
| L=4 | fla | 50 |  |

* L=4, other: skipped: no GPU

| bandwidth |  | share of copy bandwidth |
|---|---|---|
| N=1 | gather | 0.7 (≥ 0.8: missed) |

Measured on Some GPU, commit abc.
"""
    )


def test_csv_and_table_are_complete_at_every_moment(tmp_path):
    report = Report("full-stack", tmp_path, SETTING)
    for i, row in enumerate(ROWS, 1):
        report.append(row)
        assert read_rows(report.csv) == ROWS[:i]
        assert (tmp_path / "full-stack.md").read_text() == markdown(ROWS[:i], SETTING)
    with report.csv.open("a") as f:
        f.write("full-stack,L=4,ou")  # stopped in the middle of a line
    assert read_rows(report.csv) == ROWS
    assert report.csv.read_text().splitlines()[0] == ",".join(CSV_COLUMNS)


def test_without_matplotlib_the_plot_is_skipped_and_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report = Report("full-stack", tmp_path, SETTING)
    report.append(ROWS[0])
    report.close()
    assert "no plot: matplotlib is not installed" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full-stack.csv", "full-stack.md"]


def test_environment_names_what_a_number_depends_on():
    found = environment(CPU)
    assert tuple(found) == COLUMNS
    assert found["torch"] == torch.__version__
    assert found["commit"]
    assert not any("/" in value for value in found.values())
