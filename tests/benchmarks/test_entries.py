"""Every entry at tiny sizes on the CPU: what it writes, and that it refuses to time what is wrong."""

import csv
import gc
import json
from pathlib import Path

import pytest
import torch

import forking
from benchmarks import (
    accelerated,
    bandwidth,
    check,
    cli,
    first_call,
    inference,
    kernels,
    plain_step,
    profile,
    report,
    rivals,
    stack_entries,
    stacks,
    step,
    tuned,
)
from benchmarks.report import CSV_COLUMNS, read_rows
from depthmix import create_mixer
from depthmix.fast import one_stream
from depthmix.models import layers
from depthmix.ops import use_backend
from project import ROOT

MEASURED = {
    "full-stack": {"forward+backward", "forward", "backward", "largest error in fp32", "error of d query"},
    "block-stack": {"forward+backward", "forward", "backward", "largest error in bf16", "error of d key_gain"},
    "errors": {"error of output", "error of d x", "error of d sources", "error of d out_gain"},
    "bandwidth": {"share of copy bandwidth", "bandwidth", "time"},
    "first-call": {"first call"},
    "streams": {"time", "bandwidth"},
    "step": {"step", "step / residual", "first step", "error of fp32"},
    "parallel-step": {"step", "wall", "step / plain", "error of losses", "error of gradient norms"},
    "decode": {"time / residual", "time", "error of fp32, prompt", "error of fp32, steps"},
    "prefill": {"time / residual", "time of residual beside it", "error of fp32, steps"},
    "prefill-memory": {"prompt"},
    "tokens": {"tokens per second", "tokens / transformers'", "difference of logits in fp32"},
    "accelerate": {"forward+backward / eager", "wall of forward", "training", "prefill", "decode latency"},
    "host": {"host"},
    "tune": set(),
}

LESS = {
    "first-call": ("--cases", "kernel"),
    "step": ("--arms", "residual", "attnres:block_size=2,ways=2"),
    "parallel-step": ("--arms", "attnres:block_size=2"),
    "accelerate": ("--cases", "hy_v4"),
    "streams": ("--cases", "N=3,"),
}


TWICE = ("full-stack", "step", "decode")  # then there is a spread
PLOTTED = ("full-stack", "errors", "step")


@pytest.fixture(autouse=True)
def drawn(request, monkeypatch):
    """Whether the test's results are drawn: seconds in all. What was imported so far the benchmarks' own collections need not visit."""
    gc.freeze()
    found = request.node.name in [f"test_entry_runs_on_the_cpu[{entry}]" for entry in PLOTTED]
    if not found:
        monkeypatch.setattr(report, "plot", lambda rows, path: None)
    return found


def run(entry, folder, *more):
    repeats = "2" if entry in TWICE else "1"
    code = cli.main([entry, "--device", "cpu", "--small", "--repeats", repeats, "--out", str(folder), *more])
    return code, read_rows(folder / f"{entry}.csv")


def forked(command, *, env, cwd, **_):
    """What subprocess.run gives of `python -m module argument`, with torch imported already."""
    _, how, module, argument = command
    assert how == "-m"
    return forking.python(
        f"import runpy; runpy.run_module({module!r}, run_name='__main__')", argument, env=env, cwd=cwd
    )


@pytest.mark.parametrize("entry", MEASURED)
def test_entry_runs_on_the_cpu(entry, tmp_path, capsys, drawn, monkeypatch):
    monkeypatch.setattr(first_call.subprocess, "run", forked)
    code, rows = run(entry, tmp_path, "--commit", "abc123", *LESS.get(entry, ()))
    assert code == 0
    assert {r.metric for r in rows if r.value is not None} >= MEASURED[entry]
    with (tmp_path / f"{entry}.csv").open(newline="") as f:
        lines = list(csv.DictReader(f))
    assert tuple(lines[0]) == CSV_COLUMNS
    assert all(x["commit"] == "abc123" and x["torch"] == torch.__version__ and "CPU" in x["hardware"] for x in lines)
    printed = capsys.readouterr().out
    table = (tmp_path / f"{entry}.md").read_text()
    assert "Measured on CPU" in table
    for text in (printed, table, (tmp_path / f"{entry}.csv").read_text()):
        assert not any(str(place) in text for place in (ROOT, tmp_path, Path.home()))
    assert (tmp_path / f"{entry}.png").exists() == drawn
    if entry in ("full-stack", "block-stack", "errors", "tune"):
        skipped = {r.who for r in rows if r.note == "skipped: its kernels need a GPU"}
        assert skipped == ({"fla", "flash-attn-res"} if entry == "block-stack" else {"fla"})
        assert "skipped: its kernels need a GPU" in printed


def wrong_output(built):
    return lambda sublayer: built.forward(sublayer) * 1.5


def wrong_gradient(built):
    """Right output; the gradient of x is a tenth too large."""

    def forward(sublayer):
        out = built.forward(sublayer)
        return out + 0.1 * (built.leaves["x"] - built.leaves["x"].detach())

    return forward


def no_gradient(built):
    """Right output; nothing reaches the query."""
    return lambda sublayer: (
        built.forward(sublayer) * 1.0 if built.leaves.pop("query", None) is None else built.forward(sublayer)
    )


def nan(built):
    return lambda sublayer: built.forward(sublayer) * float("nan")


@pytest.mark.parametrize(
    ("entry", "fault"),
    [("full-stack", fault) for fault in (wrong_output, wrong_gradient, no_gradient, nan)]
    + [("block-stack", wrong_gradient), ("errors", wrong_output), ("errors", no_gradient)],
)
def test_refuses_to_time_a_wrong_implementation(entry, fault, tmp_path, monkeypatch, capsys):
    right = stacks.ours
    monkeypatch.setattr(stacks, "ours", lambda p: stacks.Built((b := right(p)).leaves, fault(b)))
    code, rows = run(entry, tmp_path)
    assert code == cli.WRONG
    assert not any(r.metric == "forward+backward" and r.value is not None for r in rows)
    assert rows[-1].metric == "refused"
    assert rows[-1].note
    assert rows[-1].note in capsys.readouterr().out


def test_refuses_to_time_a_wrong_kernel(tmp_path, monkeypatch):
    def broken(tokens, dim, device):
        return kernels.Work(lambda: None, 1, lambda: {"out": 0.5})

    listed = [*kernels.registry(), kernels.Kernel("broken", broken)]
    monkeypatch.setattr(bandwidth, "registry", lambda: listed)
    code, rows = run("bandwidth", tmp_path)
    assert code == cli.WRONG
    assert {r.who for r in rows if r.value is not None} == {"copy"}


def test_refuses_to_time_a_step_of_decoding_that_is_wrong(tmp_path, monkeypatch):
    right = inference.Decoding.step
    monkeypatch.setattr(inference.Decoding, "step", lambda self, ids: 1.01 * right(self, ids))
    code, rows = run("decode", tmp_path, "--arms", "residual", "dca")
    assert code == cli.WRONG
    assert not any(r.metric == "time" for r in rows)


def test_refuses_to_time_a_wrong_arm_and_keeps_the_times_before_it(tmp_path, monkeypatch):
    right = step._results

    def off(model, batch, precision):
        found = right(model, batch, precision)
        is_reference = next(model.parameters()).dtype == torch.float64
        wrong = {} if is_reference or "d mixer.query" not in found else {"d mixer.query": 1.01 * found["d mixer.query"]}
        return {**found, **wrong}

    monkeypatch.setattr(step, "_results", off)
    code, rows = run("step", tmp_path, "--arms", "residual", "layerscale", "attnres")
    assert code == cli.WRONG
    assert [r.who for r in rows if r.metric == "step"] == ["layerscale"]
    assert not any(r.who == "attnres" and r.unit in ("s", "ms") for r in rows)


@pytest.mark.parametrize("what", ["kernels", "full", "block"])
def test_what_the_process_with_cold_caches_runs(what, capsys):
    first_call._child(what, 4, 8, 16, "cpu", "default")
    lines = [json.loads(x) for x in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == (["copy"] if what == "kernels" else ["ours"])
    assert all(seconds > 0 for _, seconds in lines)


@pytest.mark.parametrize("entry", ["errors", "full-stack", "block-stack"])
def test_a_rival_that_fails_is_noted_and_ours_goes_on(entry, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("out of shared memory")

    for name in ("fla", "fla_read", "flash_attn_res"):
        monkeypatch.setattr(rivals, name, broken)
    monkeypatch.setattr(rivals, "why_not", lambda *_: "")
    monkeypatch.setattr(rivals, "tune_flash_attn_res", lambda *_: rivals.Tuning(False, 45.0))
    code, rows = run(entry, tmp_path)
    assert code == 0
    assert any(r.who == "fla" and r.note == "failed: RuntimeError: out of shared memory" for r in rows)
    assert any(r.who == "ours" and r.value is not None for r in rows)
    if entry == "block-stack":
        assert any(r.metric == "tuning" and "stopped after 45 s" in r.note for r in rows)


def test_ratios_against_the_better_rival(tmp_path, monkeypatch):
    """With ourselves in a rival's place the call, the check, the turns and the ratio are those of a GPU."""
    for name in ("fla", "flash_attn_res"):
        monkeypatch.setattr(rivals, name, stacks.ours)
    monkeypatch.setattr(rivals, "why_not", lambda *_: "")
    monkeypatch.setattr(rivals, "tune_flash_attn_res", lambda *_: rivals.Tuning(True, 12.0))
    monkeypatch.setattr(stack_entries, "SMALL", (((4, 8, 16), "<= 0.45", ""),))
    code, rows = run("block-stack", tmp_path)
    ratios = {r.metric: r for r in rows if r.metric.startswith("time / ")}
    assert code == 0
    assert set(ratios) == {"time / fla", "time / flash-attn-res"}
    best = max(ratios.values(), key=lambda r: r.value)
    assert [r.target for r in ratios.values() if r is not best] == [""]
    assert best.target == "<= 0.45"
    assert "time / fla" in (tmp_path / "block-stack.md").read_text()


def test_step_takes_other_arms_and_compares_with_the_first(tmp_path):
    _, rows = run("step", tmp_path, "--arms", "attnres", "residual")
    ratios = {r.who: r for r in rows if r.metric == "step / attnres"}
    times = {r.metric: r.value for r in rows if r.who == "residual" and r.unit == "ms"}
    assert list(ratios) == ["residual"]
    assert ratios["residual"].value == pytest.approx(times["step"] / times["step of attnres beside it"])
    assert cli.main(["step", "--device", "cpu", "--small", "--out", str(tmp_path), "--arms", "nothing"]) == 2


def test_recipe_gives_the_sizes_of_step(monkeypatch):
    seen = {}
    monkeypatch.setattr(step, "_case", lambda case, config, arms, *rest: seen.update({case: (config, arms)}))
    options = cli.from_arguments(
        cli.parser().parse_args(["step", "--device", "cpu", "--recipe", str(ROOT / "recipes/gutenberg-54m.yaml")])
    )
    step.step(options, None)
    (first, (config, arms)), (second, (wide, _)) = seen.items()
    assert first == "gutenberg-54m: 12 blocks, D=512, 32768 tokens"
    assert second == "wide: 16 blocks, D=2048, 16384 tokens"
    assert config.compile == wide.compile == "sublayers"
    ways = [f"attnres:block_size=4{ways}" for ways in ("", ",ways=2", ",ways=3")]
    assert [a.label for a in arms][:5] == ["residual", "attnres", *ways]
    assert {a.name for a in arms} >= {"dca", "grn", "denseformer", "mudd", "hyper", "mhc"}


def test_cases_and_rivals_can_be_chosen(tmp_path):
    _, rows = run("errors", tmp_path, "--rivals", "none", "--cases", "Block")
    assert {r.case for r in rows} == {"Block stack, L=6, N=32, D=48"}
    assert {r.who for r in rows} == {"ours"}
    with pytest.raises(SystemExit, match="unknown rival"):
        run("errors", tmp_path, "--rivals", "liger")


def test_all_gathers_every_entry_and_goes_on_after_one_that_is_stopped(tmp_path):
    code, rows = run("all", tmp_path, "--entries", "bandwidth", "--limit", "200")
    assert code == 0
    assert {r.entry for r in rows} == {"bandwidth"}
    code, rows = run("all", tmp_path, "--entries", "bandwidth", "errors", "--limit", "0.01")
    assert [r.metric for r in rows] == ["bandwidth: stopped", "errors: stopped"]
    assert "was stopped after" in (tmp_path / "all.md").read_text()


def test_findings_of_tuning_travel_in_one_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "a"))
    (tmp_path / "a" / "key").mkdir(parents=True)
    (tmp_path / "a" / "key" / "kernel.autotune.json").write_text("{}")
    (tmp_path / "a" / "key" / "kernel.cubin").write_bytes(b"1")
    assert tuned.save(tmp_path / "tuned.json") == 1
    assert json.loads((tmp_path / "tuned.json").read_text()) == {"key/kernel.autotune.json": "{}"}
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "b"))
    assert not tuned.holds("ker")
    assert tuned.restore(tmp_path / "tuned.json") == 1
    assert tuned.holds("ker")
    assert tuned.restore(tmp_path / "missing.json") == 0


def test_the_plain_step_is_held_against_itself_apart(tmp_path):
    code, rows = run("plain-step", tmp_path)
    assert code == 0
    found = {(row.who, row.metric): row.value for row in rows}
    for other in ("sums and norms apart", "projections apart"):
        assert found[other, "step"] > 0
        assert found[other, "step / residual"] > 0
    assert found["residual", "error of fp32"] < step.TIGHT  # before anything is timed

    mixer = create_mixer("residual", dim=8, n_blocks=1)
    x, seen = torch.zeros(3, 8), []
    sums, projections = plain_step.APART.values()
    with use_backend("triton"):
        plain_step._changed(lambda mark: seen.append(one_stream.kernels_can_add(mixer, x, x)), sums)(lambda: None)
        assert seen == [False]
        assert one_stream.kernels_can_add(mixer, x, x)
    linear = torch.nn.Linear(8, 8, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layers.project(x, linear, linear)[0]._base is not None
        with projections():
            assert layers.project(x, linear, linear)[0]._base is None  # a product of its own


def test_profile_has_the_longest_kernels_of_an_arm(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "STEPS", 1)
    code, rows = run("profile", tmp_path, "--arms", "dca")
    assert code == 0
    assert all(row.case.endswith(" dca") for row in rows)
    own = {row.who: row.value for row in rows}
    whole = own.pop("all kernels")
    assert len(own) == 20
    assert sum(own.values()) <= whole
    assert any("mm" in who for who in own)  # a Linear's product


def test_a_wrong_family_is_not_timed_and_the_others_are(tmp_path, monkeypatch):
    calls = []

    def boundaries(family, dim, options, report):
        calls.append(family)
        if family == "glm5_next":
            raise check.WrongResult("ours is wrong")

    monkeypatch.setattr(accelerated, "boundaries", boundaries)
    monkeypatch.setattr(accelerated, "whole_model", lambda family, options, report: calls.append(f"{family} whole"))
    code, rows = run("accelerate", tmp_path)
    assert code == cli.WRONG
    assert {"deepseek_v4", "glm5_next", "hy_v4", "hy_v4 whole"} <= set(calls)
    assert [row.case for row in rows if row.metric == "refused"] == ["glm5_next, D=32", ""]
