"""`cpu-step`: the size of the committed results, a ratio for every arm, and refusing what is wrong."""

import pytest
import torch

from benchmarks import cli, cpu_step, report, step
from benchmarks.report import read_rows
from project import ROOT


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Draw nothing, and use one thread: two of a busy machine wait for each other."""
    monkeypatch.setattr(cpu_step, "THREADS", 1)
    monkeypatch.setattr(report, "plot", lambda rows, path: None)


def run(folder, *more):
    code = cli.main(["cpu-step", "--device", "cpu", "--small", "--repeats", "1", "--out", str(folder), *more])
    return code, read_rows(folder / "cpu-step.csv")


def test_threads_are_used_and_their_number_is_left_alone():
    before = torch.get_num_threads()
    with cpu_step.threads(2):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before


def test_writes_a_ratio(tmp_path):
    code, rows = run(tmp_path)
    assert code == 0
    ratios = {r.who: r.value for r in rows if r.metric == "step / residual"}
    assert set(ratios) == set(cpu_step.SMALL) >= {"residual", "attnres:block_size=4"}
    assert ratios["residual"] == 1
    assert {"step", "spread of the rounds", "error of fp32"} <= {r.metric for r in rows}


def test_the_size_is_that_of_the_committed_results():
    config = cpu_step.small_config()
    shape = f"{config.n_blocks} blocks, D={config.dim}, {config.batch_size}x{config.seq_len} tokens"
    assert shape in (ROOT / "benchmarks" / "results" / "cpu" / "cpu-step.md").read_text()
    assert (config.mlp, config.qk_norm, config.precision, config.compile) == ("relu2", True, "fp32", "off")


def test_refuses_to_time_a_wrong_arm(tmp_path, monkeypatch):
    right = step._results
    monkeypatch.setattr(
        step,
        "_results",
        lambda model, batch, precision: {
            n: g if g.dtype == torch.float64 else 1.01 * g for n, g in right(model, batch, precision).items()
        },
    )
    code, rows = run(tmp_path)
    assert code == cli.WRONG
    assert not any(r.metric == "step" for r in rows)
