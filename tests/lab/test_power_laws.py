"""Power laws and advantages, on curves whose laws are known."""

import importlib
import math
import random

import pytest
import yaml

from compare import recipes
from depthmix.compare.engine import compare
from depthmix.compare.recipe import check_recipe
from depthmix.compare.records import read_records
from depthmix.compare.results import Results
from lab.power_laws import advantage, by_size, fit, over_sizes, plot_laws, section


def curve(a, b, noise=0.0, seed=0):
    rng = random.Random(seed)
    return {str(i): (c, a * c**-b * math.exp(rng.gauss(0, noise))) for i, c in enumerate((0.01, 0.03, 0.2, 1.0, 5.6))}


def test_a_law_is_found_again():
    law = fit(list(curve(1.891, 0.057).values()))
    assert (law.a, law.b) == pytest.approx((1.891, 0.057))
    assert law.compute(law.loss(3.0)) == pytest.approx(3.0)


def test_the_papers_advantage():
    """1.891 C^-0.057 and 1.870 C^-0.058 give 1.25 at C = 5.6 (Attention Residuals, Figure 4)."""
    law, found = advantage(curve(1.891, 0.057), curve(1.870, 0.058))
    assert law.a == pytest.approx(1.870)
    assert found.factor == pytest.approx(1.25, abs=0.01)
    assert found.low == pytest.approx(found.high)  # nothing is uncertain about exact laws


def test_the_interval_holds_the_truth_and_grows_with_the_noise():
    held, widths = 0, {0.0005: 0.0, 0.004: 0.0}
    for noise in widths:
        for seed in range(40):
            first, own = curve(1.891, 0.057, noise, seed), curve(1.870, 0.058, noise, 1000 + seed)
            found = advantage(first, own)[1]
            held += found.low <= 1.254 <= found.high
            widths[noise] += math.log(found.high / found.low) / 40
    assert held / 80 > 0.8
    assert widths[0.004] > 4 * widths[0.0005]


def test_what_all_have_in_common_is_no_uncertainty():
    first = curve(1.891, 0.057, 0.01)
    own = {size: (c, loss * 0.99) for size, (c, loss) in first.items()}
    found = advantage(first, own)[1]
    assert found.high / found.low < 1.5
    assert found.factor > 1


def test_the_mean_over_sizes():
    """Take the interval of logarithms: 1/2 and 2 are 1 in the mean; t = 4.303 for three sizes."""
    mean = over_sizes([0.5, 1.0, 2.0])
    half = 4.303 * math.log(2) / math.sqrt(3)
    assert [mean.factor, mean.low, mean.high] == pytest.approx([1.0, math.exp(-half), math.exp(half)], rel=1e-3)
    assert over_sizes([1.2, 1.3]) is None


def test_size_by_size():
    first = curve(1.891, 0.057)
    own = {size: (c, 1.891 * (1.25 * c) ** -0.057) for size, (c, _) in first.items() if size != "0"}
    assert by_size(first, own) == pytest.approx(dict.fromkeys("1234", 1.25))
    bent = {size: (c, loss + 0.3 * (size == "2")) for size, (c, loss) in curve(4, 0.3).items()}  # no law fits
    halves = {size: (c, fit([bent["2"], bent["3"]]).loss(2 * c)) for size, (c, _) in bent.items() if size == "2"}
    assert by_size(bent, halves) == pytest.approx({"2": 2.0})  # between its own sizes
    beyond = {"4": (bent["4"][0], fit([bent["3"], bent["4"]]).loss(3 * bent["4"][0]))}
    assert by_size(bent, beyond) == pytest.approx({"4": 3.0})
    worse = {"3": (bent["3"][0], fit([bent["2"], bent["3"]]).loss(bent["3"][0] / 2))}
    assert by_size(bent, worse) == pytest.approx({"3": 0.5})
    slower = {size: (1.1 * needed, loss) for size, (needed, loss) in own.items()}  # as in GPU time
    assert by_size(first, slower) == pytest.approx(dict.fromkeys("1234", 1.25 / 1.1))


def test_too_little_to_say():
    few = {"a": (1.0, 2.0), "b": (2.0, 1.9)}
    assert advantage(few, few) is None
    assert by_size(few, few) == {}
    rising = {"a": (1.0, 2.0), "b": (2.0, 2.1), "c": (3.0, 2.2)}
    assert advantage(curve(1, 0.1), rising) is None
    assert advantage(rising, rising) is None
    assert by_size(rising, rising) == {}


# The section and the figure.


def trained(training, monkeypatch, change):
    """Return what a training measures, changed by its configuration."""

    def train(config, data, **more):
        return change(config, training(config, data, **more))

    monkeypatch.setattr("depthmix.train.brief.train_briefly", train)


def law(training, monkeypatch):
    """Losses and step times of a power law; attnres' loss is plain's at twice the compute, dca's at half of it."""

    def change(config, result):
        compute = 6 * (result["parameters"]["total"] * config.dim) * result["tokens"] / (1e15 * 86400)
        result["parameters"] = {"total": 1000 * config.dim + 7, "embedding": 7}
        factor = {"residual": 1.0, "attnres": 2.0, "dca": 0.5}[config.mixer]
        return result | {"val_loss": 2.0 * (factor * compute) ** -0.05, "step_seconds": 0.1 * config.dim}

    trained(training, monkeypatch, change)


def laws(tmp_path, path):
    """Return {arm: its line} of the section."""
    config = recipes.config(path, tmp_path / "out")
    results = Results(check_recipe(config), read_records([tmp_path / "out" / "runs.jsonl"]))
    return {line.split(" | ")[0].strip("| "): line for line in section(results)}


def run(tmp_path, **said):
    """Run a comparison and return {arm: its line} of the section."""
    path = recipes.write(tmp_path, **said)
    (tmp_path / "out" / "runs.jsonl").unlink(missing_ok=True)
    compare(recipes.config(path, tmp_path / "out"))
    return laws(tmp_path, path)


SIZES = {f"d{dim}": {"dim": dim} for dim in (16, 32, 64)}


def test_power_laws_over_sizes(training, tmp_path, monkeypatch):
    law(training, monkeypatch)
    rows = run(tmp_path, sizes=SIZES, seeds=[0])
    assert "2.000 C^-0.0500" in rows["residual"]
    # of compute and of time, which is in proportion, by the laws and in the mean over sizes
    assert rows["attnres:block_size=2"].count("2.00 (2.00 to 2.00)") == 4
    assert "| 0.000 | 2.00" in rows["attnres:block_size=2"]  # nothing is missed
    assert rows["slow"].count("0.50 (0.50 to 0.50)") == 4
    assert rows["slow"].endswith("| d16 0.50, d32 0.50, d64 0.50; mean 0.50 (0.50 to 0.50) |")
    two = run(tmp_path, sizes={"d16": {"dim": 16}, "d32": {"dim": 32}}, seeds=[0])
    assert two["residual"].startswith("| residual | 2 | – | – | – | – |")


def test_power_laws_in_time_are_of_arms_that_were_timed(training, tmp_path, monkeypatch):
    law(training, monkeypatch)
    monkeypatch.setattr(
        "depthmix.train.step_times.measure_step_times",
        lambda configs, **_: [0.2 * c.dim * (1 if c.mixer == "residual" else 2) for c in configs],
    )
    path = recipes.write(tmp_path, sizes=SIZES, seeds=[0], step_times=True)
    compare(recipes.config(path, tmp_path / "out", only=["residual", "attnres:block_size=2"]))
    said = yaml.safe_load(path.read_text())
    for step_times in (False, True):  # the third arm is trained, and not timed
        path.write_text(yaml.safe_dump(said | {"step_times": step_times}, sort_keys=False))
        compare(recipes.config(path, tmp_path / "out", report=step_times))
    rows = laws(tmp_path, path)
    assert "| 2.00 (2.00 to 2.00) | 1.00 (1.00 to 1.00) |" in rows["attnres:block_size=2"]  # twice the time a step
    assert "| 0.50 (0.50 to 0.50) | – |" in rows["slow"]


def test_power_laws_pair_seeds(training, tmp_path, monkeypatch):
    """Seeds far apart do not move an arm against the first, also where it has fewer."""
    law(training, monkeypatch)
    train = importlib.import_module("depthmix.train.brief").train_briefly

    def apart(config, data, **more):
        result = train(config, data, **more)
        return result | {"val_loss": result["val_loss"] * (1 + 0.1 * config.seed)}

    monkeypatch.setattr("depthmix.train.brief.train_briefly", apart)
    arms = ["residual", {"mixer": "attnres:block_size=2", "seeds": [0]}, {"mixer": "dca", "seeds": [1]}]
    rows = run(tmp_path, sizes=SIZES, seeds=[0, 1], arms=arms)
    assert "2.100 C^-0.0500" in rows["residual"]
    # 2 f^-0.05 less 2 of plain's 2.1, and 1.1 times that: by the law (1 + that / 2.1)^-20
    for arm, difference in (("attnres:block_size=2", 2 * 2**-0.05 - 2), ("dca", 2.2 * 0.5**-0.05 - 2.2)):
        factor = (1 + difference / 2.1) ** -20
        assert f"| {factor:.2f} ({factor:.2f} to {factor:.2f}) |" in rows[arm]


def test_sizes_of_one_compute_have_no_law(training, tmp_path):
    rates = {f"lr {lr}": {"lr": lr} for lr in (0.1, 0.2, 0.3)}
    rows = run(tmp_path, sizes=rates, seeds=[0])
    assert rows["slow"] == "| slow | 3 | 3.950 C^+0.0000 | 0.000 | 0.000 | – | – | – | – |"


@pytest.fixture
def study(tmp_path):
    return recipes.read(recipes.write(tmp_path))


def test_power_laws_are_drawn_through_their_points(study):
    laws = {arm: {str(c): (c, a * c**-0.1) for c in (0.1, 1.0, 10.0)} for arm, a in (("residual", 2.0), ("slow", 1.9))}
    laws["slow"].pop("10.0")  # two points have no law
    axes, below = plot_laws(study, {"words": laws}).axes
    assert [line.get_marker() for line in axes.lines] == ["o", "None", "o"]
    assert list(axes.lines[1].get_ydata()) == pytest.approx([2.0 * c**-0.1 for c in (0.1, 1.0, 10.0)])
    assert list(below.lines[1].get_xdata()) == pytest.approx([0.1, 1.0])
    assert list(below.lines[1].get_ydata()) == pytest.approx([-0.1 * c**-0.1 for c in (0.1, 1.0)])
    assert [text.get_text() for text in below.texts] == ["0.1", "1.0", "10.0"]


def test_power_laws_of_two_domains_stand_side_by_side(study):
    """Gains below their own laws, at the compute of the first arm, which may lack a size."""
    books = {"residual": {"6m": (1.0, 3.0)}, "slow": {"6m": (1.1, 2.9), "15m": (5.0, 2.5)}}
    code = {"residual": {"6m": (1.0, 2.0)}, "slow": {"6m": (1.0, 1.6)}}
    upper, other, below, last = plot_laws(study, {"books": books, "code": code}).axes
    assert [upper.get_title(), other.get_title(), below.get_title()] == ["books", "code", ""]
    assert list(below.lines[1].get_xdata()) == [1.0]
    assert [axes.lines[1].get_ydata()[0] for axes in (below, last)] == pytest.approx([-0.1, -0.4])
