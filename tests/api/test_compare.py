"""dm.compare as in a notebook: what it tells on the way, what it returns, and how it ends early."""

import csv
import gc
import re
import signal
import sys
import warnings

import pytest
import torch

import depthmix as dm
from api.small_comparison import ARMS, OPTIONS, result_and_events
from depthmix.compare.columns import to_text
from depthmix.errors import CHECKPOINT, DIVERGED, UserError
from train import small


def small_compare(arms=("residual",), **options):
    return dm.compare(small.data(), arms, **{**OPTIONS, **options})


# The result.


@pytest.fixture(scope="module")
def result():
    return result_and_events()[0]


def test_every_step_of_every_run_is_told_with_its_arm():
    result, events = result_and_events()
    steps = range(1, OPTIONS["steps"] + 1)
    assert [(e.seed, e.arm, e.step) for e in events] == [(s, a, i) for s in (0, 1) for a in ARMS for i in steps]
    assert {e.steps for e in events} == {OPTIONS["steps"]}
    for label, arm in result.items():
        ends = [e.val_loss for e in events if e.arm == label and e.step == OPTIONS["steps"]]
        assert list(arm.losses.values()) == ends


def test_the_table_has_the_numbers_of_the_command_line(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    table = result.table()
    rows = list(csv.DictReader((result.folder / "table.csv").read_text().splitlines()))
    assert table.index == ARMS
    assert len(table) == 2
    for name in table.columns:
        assert {arm: "" if value is None else str(value) for arm, value in table[name].items()} == {
            line["arm"]: "" if line[name] == "not reached" else line[name] for line in rows
        }, name
    assert {"val_loss", "difference", "difference_interval", "step_ms", "parameters"} <= set(table.columns)
    assert repr(table).startswith("arm ")
    assert "<th>val_loss</th>" in table._repr_html_()
    with pytest.raises(KeyError):
        table["val_los"]


def test_the_table_is_a_data_frame_where_pandas_is_there(result):
    pandas = pytest.importorskip("pandas")
    table = result.table()
    assert isinstance(table, pandas.DataFrame)
    assert list(table.index) == ARMS
    assert table["val_loss"].to_dict() == {row.arm: row.val_loss for row in result.rows}
    assert pandas.isna(table["difference"]["residual"])


def test_a_repr_is_the_table_of_the_command_line(result):
    assert repr(result).startswith(to_text(result.rows, 120))
    assert result.verdict[0].startswith("attnres:block_size=2: ")
    assert result.verdict[0] in repr(result)


def test_a_notebook_shows_the_table_with_text_escaped(result, monkeypatch):
    shown = result._repr_html_()
    assert shown.count("<tr>") == 3
    assert "<th>attnres:block_size=2</th>" in shown
    monkeypatch.setattr(result._comparison.recipe.config, "notes", ["<script>alert('diverged')</script>"])
    assert "<li>&lt;script&gt;alert(&#x27;diverged&#x27;)&lt;/script&gt;</li>" in result._repr_html_()


def test_an_arm_has_its_runs_losses_and_models(result):
    arm = result["attnres:block_size=2"]
    assert result["attnres: block_size = 2"] is arm
    assert list(result) == result.arms == ARMS
    assert list(arm.runs) == list(arm.losses) == list(arm.models) == [0, 1]
    assert arm.losses == {seed: run.val_loss for seed, run in arm.runs.items()}
    assert arm.row.arm == arm.label
    assert re.fullmatch(r"<arm 'attnres:block_size=2', validation loss by seed: 0: [\d.]+, 1: [\d.]+>", repr(arm))
    assert arm.models[0] is arm.model
    assert not arm.model.training
    saved = dm.load(arm.runs[1].path).model.state_dict()
    assert all(torch.equal(t, saved[name]) for name, t in arm.models[1].state_dict().items())
    assert not torch.equal(arm.model.embedding.weight, arm.models[1].embedding.weight)


def test_models_are_loaded_when_they_are_asked_for(result, monkeypatch):
    loaded = []
    load = sys.modules["depthmix.api.comparison_result"].load_model
    monkeypatch.setattr("depthmix.api.comparison_result.load_model", lambda *a: loaded.append(a[0]) or load(*a))
    fresh = type(result)(result._comparison, result.data, result._owned, "cpu")
    assert loaded == []
    assert fresh["residual"].models[1] is fresh["residual"].models[1]
    assert loaded == [fresh["residual"].runs[1].path]


def test_an_arm_that_is_not_there(result):
    with pytest.raises(KeyError, match="there are residual, attnres:block_size=2; did you mean 'attnres:block_size=2'"):
        result["attnres:block_size=3"]
    assert "dca" not in result
    assert "residual" in result


def test_its_losses_go_into_compare_runs(result):
    found = dm.compare_runs({label: arm.losses for label, arm in result.items()})
    assert found.verdict == result.verdict
    assert found["attnres:block_size=2"].difference == result["attnres:block_size=2"].row.difference


# Calling it.


def test_nothing_is_printed_unless_asked_for(undrawn, capfd):
    small_compare(steps=3)
    assert capfd.readouterr() == ("", "")
    small_compare(steps=3, progress=True)
    assert "residual, seed 0 (1 of 1)" in capfd.readouterr().err


def test_the_folder_and_the_data_live_as_long_as_what_uses_them(undrawn):
    texts = [f"{i} and the sea is deep and the sky above is wide. " * 5 for i in range(20)]
    result = dm.compare(dm.prepare(texts, vocab_size=290), ["residual"], **{**OPTIONS, "steps": 3})
    data, folder, arm = result.data.folder, result.folder, result["residual"]
    gc.collect()
    assert data.exists()
    del result
    gc.collect()
    assert not data.exists()
    assert arm.model.config.vocab_size == 290  # loaded now, from the folder
    del arm
    gc.collect()
    assert not folder.parent.exists()


def test_a_kept_folder_is_resumed_and_takes_more_arms_and_seeds(undrawn, tmp_path):
    steps = []
    first = small_compare(out=tmp_path / "out", on_step=steps.append, steps=3)
    again = small_compare(["residual", "rezero"], out=tmp_path / "out", seeds=[0, 7], on_step=steps.append, steps=3)
    assert len(steps) == 3 + 3 * 3
    assert again["residual"].losses[0] == first["residual"].losses[0]
    assert list(again["rezero"].losses) == [0, 7]
    del first, again
    gc.collect()
    assert (tmp_path / "out" / "table.md").exists()


@pytest.mark.parametrize(("error", "kept"), [(RuntimeError, True), (KeyboardInterrupt, False)])
def test_an_exception_in_the_callback_leaves_what_is_done_to_go_on_with(undrawn, tmp_path, error, kept):
    def stop(event):
        if (event.arm, event.step) == ("rezero", 3):
            raise error("enough")

    arms, options = ["residual", "rezero"], {"out": tmp_path / "out"} if kept else {}
    with pytest.raises(error, match="enough") as stopped:
        small_compare(arms, on_step=stop, **options)
    notes = getattr(stopped.value, "__notes__", [])
    del stopped  # with the frames that hold the folder
    gc.collect()
    if kept:
        assert notes == []
    else:
        (note,) = notes
        options = {"out": re.search("out='(.*)' resumes", note)[1]}
    told = []
    result = small_compare(arms, on_step=lambda event: told.append((event.arm, event.step)), **options)
    assert told == [("rezero", 4)]
    assert result["rezero"].losses == small_compare(["rezero"])["rezero"].losses


def test_an_interrupted_kernel_saves_and_raises_keyboard_interrupt(undrawn, tmp_path):
    def interrupt(event):
        if event.step == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT after step 2 of 4, and saved"):
        small_compare(out=tmp_path / "out", save_every=4, on_step=interrupt)
    steps = []
    small_compare(out=tmp_path / "out", save_every=4, on_step=lambda event: steps.append(event.step))
    assert steps == [3, 4]


def test_a_later_session_with_the_same_texts_goes_on(undrawn, tmp_path):
    texts = [f"{i} and the sea is deep and the sky above is wide. " * 5 for i in range(20)]
    steps = []
    for seeds in (1, 2):
        data = dm.prepare(texts, vocab_size=290)  # in another folder each time
        options = {**OPTIONS, "steps": 3, "out": tmp_path / "out", "on_step": lambda event: steps.append(event.seed)}
        dm.compare(data, ["residual"], seeds=seeds, **options)
        del data
        gc.collect()
    assert steps == [0, 0, 0, 1, 1, 1]
    with pytest.raises(UserError, match="prepared otherwise"):
        dm.compare(dm.prepare(texts[1:], vocab_size=290), ["residual"], **options)


def test_arms_that_diverge_are_warned_of_and_the_others_are_there(undrawn):
    @dm.register("explodes")
    class Explodes(dm.Mixer):
        """A stream that grows beyond all numbers."""

        def __init__(self, dim: int, n_blocks: int):
            super().__init__(dim, n_blocks)

        def _start(self, x):
            return dm.create_mixer("residual", dim=self.dim, n_blocks=self.n_blocks)._start(x)

        def _read(self, state, site):
            return state.x

        def _write(self, state, site, y):
            return state.next(x=state.x + y * float("inf"))

        def _finish(self, state):
            return state.x

    with pytest.warns(RuntimeWarning, match="1 of 2 runs diverged, all of explodes") as warned:
        result = small_compare(["residual", "explodes"])
    assert warned[0].filename == __file__
    assert [row.arm for row in result.rows] == ["residual"]
    assert result["explodes"].losses == {}
    assert "explodes with seed 0 diverged" in repr(result)
    with pytest.raises(UserError, match="explodes has no model: none of its runs finished") as found:
        _ = result["explodes"].model
    assert found.value.exit_code == CHECKPOINT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError, match="1 of 1 runs diverged, all of explodes") as found:
            small_compare(["explodes"])
    assert found.value.exit_code == DIVERGED


NOTEBOOK_RULE = """
import depthmix as dm

@dm.register("of_a_cell")
class Cell(dm.Mixer):
    def __init__(self, dim: int, n_blocks: int):
        super().__init__(dim, n_blocks)

    def _start(self, x):
        return dm.create_mixer("residual", dim=self.dim, n_blocks=self.n_blocks)._start(x)

    def _read(self, state, site):
        return state.x

    def _write(self, state, site, y):
        return state.next(x=state.x + y)

    def _finish(self, state):
        return state.x
"""


def test_a_rule_from_a_cell_of_a_notebook_whose_source_is_in_no_file(undrawn, monkeypatch):
    cell = {"__name__": "__main__"}
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    exec(compile(NOTEBOOK_RULE, "<ipython-input-1>", "exec"), cell)
    assert dm.check_mixer(cell["Cell"]).passed
    result = small_compare(["residual", "of_a_cell"])
    assert result["of_a_cell"].losses == result["residual"].losses


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stpes": 3}, "compare: unknown option 'stpes'; did you mean 'steps'?"),
        ({"seed": 3}, "compare: unknown option 'seed'; did you mean 'seeds'?"),
        ({"mixer": "dca"}, "compare: unknown option 'mixer'"),
        ({"progres": True}, "compare: unknown option 'progres'; did you mean 'progress'?"),
        ({"steps": "many"}, "compare: steps must be a whole number, got 'many'"),
        ({"budget": "tokns"}, "compare: budget must be tokens or time, got 'tokns'; did you mean 'tokens'?"),
        ({"seeds": 0}, "compare: seeds must be at least 1, or a list of seeds, got 0"),
        ({"seeds": True}, "compare: seeds must be at least 1, or a list of seeds, got True"),
        ({"seeds": "0"}, "compare: seeds must be a number of seeds or a list of them, got '0'"),
        ({"seeds": [1, 1]}, r"every seed counts once, got \[1, 1\]"),
        ({"arms": "residual"}, "compare: arms must be a list, got 'residual'"),
        ({"arms": ["residul"]}, "unknown mixer 'residul'.*did you mean 'residual'"),
        ({"data": ["a text"]}, "data is list: give what depthmix.prepare returns, or the folder of prepared data"),
        ({"data": "nowhere"}, "There is no folder nowhere"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_sentence(options, said, tmp_path):
    options = {"data": small.data(), "arms": ["residual"], **options}
    data, arms = options.pop("data"), options.pop("arms")
    with pytest.raises(UserError, match=said) as found:
        dm.compare(data, arms, out=tmp_path / "out", **{**OPTIONS, **options})
    assert "\n" not in str(found.value)
    assert not (tmp_path / "out").exists()
