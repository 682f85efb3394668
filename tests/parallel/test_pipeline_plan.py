"""The simulated pipeline waits as long as theory says, and hops carry what the paper counts."""

import re
import shlex

import pytest

from depthmix.cli import main
from depthmix.mixers import create_mixer
from depthmix.parallel.plan.costs import costs_of
from depthmix.parallel.plan.hops import cuts, hop_sizes
from depthmix.parallel.plan.schedule import orders, play, simulate
from parallel.example import bank_states
from project import ROOT
from small_cases import each


@each(("ranks", "virtual"), [(2, 1), (4, 1), (16, 1), (4, 2), (4, 4), (16, 8)])
def test_the_bubble_is_that_of_theory(ranks, virtual):
    """(P - 1) (f + b) of a whole rank's time, divided by V with virtual stages (Narayanan et al. 2021, arXiv 2104.04473)."""
    micros = 2 * ranks
    step = simulate(ranks, virtual, micros, 1 / virtual, 2 / virtual)
    assert step.seconds == pytest.approx(3 * micros + 3 * (ranks - 1) / virtual)
    assert step.bubble == pytest.approx((ranks - 1) / (virtual * micros + ranks - 1))
    if virtual == 1:
        assert step.in_flight == [ranks - r for r in range(ranks)]


def test_every_rank_does_all_its_work_once():
    for rank, order in enumerate(orders(4, 2, 8)):
        assert len(set(order)) == len(order) == 2 * 2 * 8
        assert {task.stage for task in order} == {rank, rank + 4}


def test_more_micro_batches_than_it_takes_to_run_evenly_are_not_played():
    for virtual in (1, 2):
        whole, some = simulate(4, virtual, 32, 1.0, 2.0), play(4, virtual, 32, 1.0, 2.0)
        assert (some.seconds, some.in_flight) == (pytest.approx(whole.seconds), whole.in_flight)
        assert some.bubble == pytest.approx(whole.bubble)


def test_hops_take_their_time():
    assert simulate(4, 1, 8, 1.0, 2.0, hop=0.5).seconds > simulate(4, 1, 8, 1.0, 2.0).seconds + 6 * 0.5 - 1e-9


@each("ranks", [2, 4, 16])
@each("virtual", [1, 2, 8])
def test_communication_is_the_papers(ranks, virtual):
    """arXiv 2603.15031, section 4.1, with C = P V: C (C - 1) / 2 units, and with caching P (P - 1) / 2 + (V - 1) P²."""
    chunks, states = ranks * virtual, bank_states(ranks * virtual)
    naive, cached = (sum(hop_sizes(states, range(chunks), ranks, kept)) for kept in (False, True))
    assert naive == chunks * (chunks - 1) / 2
    assert cached == ranks * (ranks - 1) / 2 + (virtual - 1) * ranks**2
    if (ranks, virtual) == (4, 2):
        assert (naive, naive - cached) == (28, 6)


def test_hops_of_mixers():
    """Streams go whole at every hop, caching or not; of sources that stay, a rank gets each once."""
    starts = cuts(16, 8)
    assert starts == list(range(0, 32, 4))
    streams = costs_of(create_mixer("mhc", dim=8, n_blocks=16)).state_tensors()
    assert hop_sizes(streams, starts, 4, cached=True) == hop_sizes(streams, starts, 4, cached=False) == [4] * 7
    full = costs_of(create_mixer("attnres", dim=8, n_blocks=16)).state_tensors()
    assert hop_sizes(full, starts, 4, cached=False) == [1 + s for s in starts[1:]]
    assert hop_sizes(full, starts, 4, cached=True) == [5, 9, 13, 16, 16, 16, 16]


def test_the_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
    """All but their arms are as the page has them; what they draw goes elsewhere."""
    page = (ROOT / "docs" / "guides" / "planning.md").read_text()
    commands = re.findall(r"^    (depthmix plan .*)$", page, re.M)
    assert len(commands) >= 4
    monkeypatch.chdir(ROOT)
    for command in commands:
        argv = shlex.split(command.replace("docs/results/", f"{tmp_path}/"))[1:]
        assert main(argv) == 0, capsys.readouterr().err
        shown = capsys.readouterr().out
        assert "Memory of the fullest rank" in shown
        if "residual mhc attnres" in command:  # the page's table
            told = [line.split() for line in shown.split("Traffic")[1].splitlines()[2:]]
            rows = [
                line.strip("| ").split(" | ")
                for line in page.split("| 128 sites")[1].split("|---|\n")[1].splitlines()[:4]
            ]
            assert [[*row[:4], *row[5:]] for row in told] == rows
    assert (tmp_path / "pipelines.png").stat().st_size > 10_000
