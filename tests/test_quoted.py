"""Numbers that pages quote by hand, each held to the result it comes from. tests/test_readme.py and test_site.py have others."""

import json
import re
import statistics
import tomllib

import pytest

import depthmix
from benchmarks.report import read_rows
from depthmix.report.model_data import correlation_with_need
from lab.claims import contrast, read_results
from lab.long_study import LONG, RATES
from project import ROOT

DOCS, H200 = ROOT / "docs", ROOT / "benchmarks" / "results" / "h200"


def page(name):
    return (DOCS / name).read_text()


@pytest.fixture(autouse=True)
def root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_what_tuning_gives_the_plain_model():
    """Hold the number on the pages that advise to tune first."""
    losses = {cell: run.val_loss for cell, runs in read_results(RATES).runs.items() for run in runs}
    gain = losses["batch 32, lr 0.003"] - min(losses.values())
    assert f"lowered its loss by {gain:.3f} nats" in page("which-rule.md")


def test_what_rules_gain_in_long_trainings():
    found = read_results(LONG)
    dca, block = (-contrast(found, {arm: 1.0, found.first: -1.0}).value for arm in ("dca", "attnres:block_size=4"))
    assert f"`dca` ends {dca:.3f} nats lower and Block {block:.3f}, with two seeds each" in page("which-rule.md")


def test_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python, torch = (
        re.search(r">=([\d.]+)", text)[1] for text in (project["requires-python"], project["dependencies"][0])
    )
    assert f"Python {python} or newer" in page("install.md")
    assert f"Python {python} or newer" in (ROOT / "README.md").read_text()
    assert f"PyTorch {torch} or newer" in page("install.md")
    assert f"| depthmix {depthmix.__version__} |" in page("other-packages.md")
    extras = set(project["optional-dependencies"]) - {"dev", "lint", "docs"}
    assert set(re.findall(r"'\.\[(\w+)\]'", page("install.md"))) == extras
    others = page("other-packages.md").lower()
    for pin in project["optional-dependencies"]["bench"]:
        name, version = pin.split("==")
        assert re.search(rf"\| \[?{name}\b[^|]* {re.escape(version)} \|", others), pin


def test_a_retrofitted_model_gains_nothing():
    table = page("results/retrofit-54m/table.md")
    differences = [abs(float(x)) for x in re.findall(r"^\| [a-z].*? \| [\d.]+ ± [\d.]+ \| ([+-][\d.]+) ±", table, re.M)]
    assert len(differences) == 3
    said = re.search(r"all differences are below ([\d.]+) nats", page("guides/retrofit.md"))
    assert max(differences) < float(said[1]) < 0.001


def test_accuracy_of_images():
    found = read_results("cifar10")
    points = contrast(found, {"dca": 1.0, found.first: -1.0}, True).value
    assert f"{points:.1f} points more images right" in page("guides/images.md")


def test_steps_on_several_processes():
    rows = re.findall(
        r"\| gutenberg-54m, residual: .*? \| (DDP|FSDP2) \| .*? \| ([\d.]+) \(≤",
        (H200 / "parallel-step.md").read_text(),
    )
    ddp, fsdp = (dict(reversed(rows))[name] for name in ("DDP", "FSDP2"))
    assert f"takes {ddp} times the plain loop's under DDP, and {fsdp} under FSDP2" in page("guides/several-gpus.md")


def test_times_of_mixing_in_models_of_transformers():
    """Hold the guide's table, and the README's range, to the result files."""
    measured = {}
    for name in ("accelerate-deepseek-v4", "accelerate-families"):
        for row in read_rows(H200 / f"{name}.csv"):
            if row.metric == "forward+backward":
                measured.setdefault(row.case.partition(",")[0], {})[row.who] = row.value
    quoted = re.findall(r"^\| (\S.*?) \| \d{4} \| (.*) \|$", page("guides/accelerate.md"), re.M)
    table = {
        name.lower().replace("-", "_").replace(" ", ""): cells.split(" | ")
        for name, cells in quoted
        if "e-0" not in cells
    }
    families = {"deepseek_v4": "deepseek_v4", "glm_5_next": "glm5_next", "hunyuanv4": "hy_v4", "inkling2": "inkling2"}
    families["qwen4_exp"] = "qwen4_exp"
    assert set(table) == set(families)
    ratios = []
    for name, cells in table.items():
        times = measured[families[name]]
        eager, compiled, ours = (times[who] for who in ("eager", "compiled", "ours"))
        assert [float(c) for c in cells[:3]] == [float(f"{t:.3g}") for t in (eager, compiled, ours)]
        assert cells[3:] == [f"{eager / ours:.1f}", f"{compiled / ours:.1f}"]
        ratios.append(eager / ours)
    assert (
        f"{int(min(ratios))} to {int(max(ratios))} times faster than in transformers"
        in (ROOT / "README.md").read_text()
    )


def test_times_of_few_tokens_in_models_of_transformers():
    rows = [row for row in read_rows(H200 / "accelerate-families.csv") if row.metric == "wall of forward"]

    def of(family, tokens):
        case = re.compile(rf"{family}, .*, {tokens} tokens")
        return {row.who: f"{row.value:.2f}" for row in rows if case.fullmatch(row.case)}

    glm, hunyuan, qwen = of("glm5_next", 1), of("hy_v4", 64), of("qwen4_exp", 64)
    said = page("guides/accelerate.md")
    assert f"{glm['ours']} ms forward, compiled code {glm['compiled']}, eager code {glm['eager']}" in said
    assert f"{hunyuan['compiled']} against {hunyuan['ours']} ms, and {qwen['compiled']} against {qwen['ours']}" in said
    assert f"slower than eager code, too, which takes {qwen['eager']}" in said


def test_the_copy_that_kernels_are_held_to():
    copy = re.search(r"D=2048 \| copy \| 1 \| ([\d.]+) \|", (H200 / "kernels.md").read_text())
    assert f"about {float(copy[1]) / 1000:.1f} TB/s" in page("concepts/kernels.md")


def test_what_skipped_sublayers_cost():
    folder = ROOT / "lab" / "results" / "gutenberg-54m-inside"
    documents = [json.loads(path.read_text())["document"] for path in sorted(folder.glob("*/seed-0/insight.json"))]
    assert len(documents) == 5
    changes = [document["skips"]["change"] for document in documents]
    first = [change[1] for change in changes]
    others = [statistics.median(change[2:]) for change in changes]
    cheap = [sum(x < 0.1 for x in change) for change in changes]
    text = page("findings.md")
    assert f"costs {min(first):.1f} to {max(first):.1f} nats in every model" in text
    assert f"costs {min(others):.2f} to {max(others):.2f} in the median" in text
    assert f"{min(cheap)} to {max(cheap)} of the 24 sublayers cost less than 0.1 nats" in text


def test_weights_and_contributions_of_the_findings():
    """Contributions are approximated from mean weights and mean sizes, since these documents do not hold them."""
    names = ("in a reader's weights", "its share in what is read", "first MLP in what is read")
    rows = {name: [] for name in (*names, "weight and need", "contribution and need")}
    for name in ("residual", "attnres-block_size=4", "attnres-block_size=4-ways=2", "dca", "mhc"):
        path = ROOT / "lab" / "results" / "gutenberg-54m-inside" / name / "seed-0" / "insight.json"
        document = json.loads(path.read_text())["document"]
        sizes = [document["dynamics"]["stream_rms"][0], *document["dynamics"]["output_rms"]]
        weights = document["mixing"]["mean"]

        def shares(row, sizes=sizes):
            parts = [abs(weight) * size for weight, size in zip(row, sizes, strict=False)]
            return [part / sum(parts) for part in parts]

        contributions = [[shares(row) for row in ways] for ways in weights]
        even = [[shares(row, [1.0] * len(row)) for row in ways] for ways in weights]

        def mean_of(values, source, first):
            return statistics.mean(statistics.mean(row[source] for row in ways) for ways in values[first:])

        rows[names[0]].append(f"{mean_of(even, 0, 2):.3f}")
        rows[names[1]].append(f"{mean_of(contributions, 0, 2):.3f}")
        rows[names[2]].append(f"{mean_of(contributions, 2, 3):.2f}")
        for row, values in (("weight and need", weights), ("contribution and need", contributions)):
            rows[row].append(f"{correlation_with_need(document, values):.2f}")
    text = page("findings.md")
    for row, values in rows.items():
        assert re.search(rf"{row} \| {re.escape(' | '.join(values))} \|", text), (row, values)


def test_how_alike_streams_stay():
    path = ROOT / "lab" / "results" / "gutenberg-54m-inside" / "mhc" / "seed-0" / "insight.json"
    cosines = json.loads(path.read_text())["document"]["streams"]["similarity"][-1]
    apart = [x for i, row in enumerate(cosines) for j, x in enumerate(row) if i != j]
    assert f"cosines of {min(apart):.2f} to {max(apart):.2f}" in page("findings.md")
