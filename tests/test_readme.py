"""The README: its links, code, commands, and every number that a committed result can confirm."""

import re
import shlex
import shutil

import pytest

import depthmix
import forking
from depthmix.cli import main
from depthmix.compare.arms import parse_arm
from depthmix.mixers import list_mixers
from lab.readme_table import MARKERS, updated
from project import ROOT, code_blocks
from train.small import overriding

README = (ROOT / "README.md").read_text()
H200 = ROOT / "benchmarks" / "results" / "h200"


def test_headline_and_table_are_what_the_committed_results_give(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert updated(README) == README


def written_by_hand():
    """The text outside the two generated parts."""
    text = README
    for name in ("headline", "table"):
        begin, end = (re.escape(marker.format(name=name)) for marker in MARKERS)
        text = re.sub(f"{begin}.*?{end}", "", text, flags=re.S)
    return text


def test_no_gain_is_written_by_hand():
    """A gain in nats comes from the generator, or it would outlive its runs."""
    assert not re.findall(r"\d\.\d+ nats", written_by_hand())


def test_code_runs():
    (block,) = code_blocks(ROOT / "README.md")
    assert forking.python(block).stdout == "torch.Size([2, 16, 64])\n"


def test_rules_with_their_options_exist():
    named = set(re.findall(rf"`((?:{'|'.join(list_mixers())})(?::[\w=.,]+)?)`", README))
    assert {"dca", "attnres:block_size=4"} <= named
    for rule in named:
        arm = parse_arm(rule)
        depthmix.create_mixer(arm.name, dim=16, n_blocks=2, **arm.options)


def test_both_commands_for_your_own_text_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-texts").mkdir()
    for path in sorted((ROOT / "corpora" / "sotu").glob("*.txt"))[:4]:
        (tmp_path / "my-texts" / path.name).write_text(path.read_text())
    data, compare = re.findall(r"^depthmix (?:data|compare) .*$", README, re.M)
    assert main([*shlex.split(data)[1:], "--vocab-size", "300"]) == 0, capsys.readouterr().err
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    small = "--device cpu --compile off --no-cuda-graph --n-blocks 1 --dim 16 --n-heads 2 --seq-len 32 --batch-size 2 --steps 4 --warmup 1 --eval-every 4"
    small += " --eval-tokens 100 --quiet --sample-tokens 8 --seeds 0"
    assert main(overriding(shlex.split(compare)[1:], shlex.split(small))) == 0, capsys.readouterr().err
    table = (tmp_path / "runs" / "mine" / "table.md").read_text()
    assert all(arm in table for arm in ("residual", "attnres:block_size=4", "dca"))


@pytest.mark.parametrize(("number", "path"), re.findall(r"\[(\d+\.\d+)\]\((benchmarks/[^)]+)\)", README))
def test_linked_numbers_are_in_the_linked_results(number, path):
    measured = re.findall(r"\| (\d+\.\d+)\b", (ROOT / path).read_text())
    digits = len(number.partition(".")[2])
    assert number in {f"{float(value):.{digits}f}" for value in measured}


def test_speed_against_other_packages_is_what_was_measured():
    """The published time over ours: over all stacks, and of mHC's operators."""
    stacks = (H200 / "all.md").read_text()
    ours_over_fla = [float(x) for x in re.findall(r"^\| L=.* \| ours \|.*? (0\.\d+) \(≤ [\d.]+: \w+\)", stacks, re.M)]
    assert len(ours_over_fla) == 4
    low, high = 1 / max(ours_over_fla), 1 / min(ours_over_fla)
    assert f"{low:.1f} to {high:.0f} times faster than with flash-linear-attention 0.6.0" in README
    assert "fla 0.6.0" in stacks
    ours, liger = (
        float(re.search(rf"\| {who} \| ([\d.]+) \|", (H200 / "peers.md").read_text())[1]) for who in ("ours", "liger")
    )
    assert f"run {liger / ours:.0f} times faster than Liger's" in README


def test_versions_that_were_run_are_those_of_the_results():
    cpu, gpu = re.findall(r"^\| (?:all tests|GPU tests).*$", README, re.M)
    pinned = re.search(r"torch==([\d.]+)", (ROOT / "constraints.txt").read_text())[1]
    assert f"| {pinned} |" in cpu
    environment = re.search(r"torch ([\d.]+)\+cu130, cuda 13.0, triton ([\d.]+)", (H200 / "all.md").read_text())
    assert all(f"| {version} |" in gpu for version in environment.groups())
