"""The recipe's line `parallel`: what it means, and what is refused before anything starts, with the reason."""

import dataclasses

import pytest

from depthmix.cli import build_config
from depthmix.config import CompareConfig, TrainConfig
from depthmix.errors import USAGE, UserError
from depthmix.models import VitConfig
from depthmix.parallel.layout import Layout
from depthmix.runs.restore import model_config
from depthmix.train.loop import train
from small_cases import each
from train.refused import refused

CONFIG = TrainConfig(dim=64, n_blocks=8, n_heads=8, n_kv_heads=4, mlp_dim=96, seq_len=32, batch_size=24)


@each(
    ("given", "size", "data"),
    [
        ({}, 1, 1),
        ({"dp": 3}, 3, 3),
        ({"shard": 4}, 4, 4),
        ({"dp": 2, "shard": 4, "tp": 2}, 16, 8),
        ({"tp": 4}, 4, 1),
        ({"shard": 2, "cp": 4}, 8, 2),
        ({"pp": 4, "virtual": 2}, 4, 1),
        ({"pp": 2, "shard": 3, "tp": 2}, 12, 3),
    ],
)
def test_sizes(given, size, data):
    layout = Layout.of(given)
    assert (layout.size, layout.data) == (size, data)
    places = [layout.place(rank) for rank in range(size)]
    assert len(set(places)) == size
    assert {place[1] for place in places} == set(range(data))
    assert places == sorted(places)  # neighbours share sequences, the farthest are in another stage


def test_flag_and_recipe_say_the_same(tmp_path):
    (tmp_path / "recipe.yaml").write_text("parallel: {dp: 2, tp: 4}\n")
    by_recipe = build_config("train", TrainConfig, {"recipe": str(tmp_path / "recipe.yaml")})
    by_flag = build_config("train", TrainConfig, {"parallel": ["dp=2", "tp=4"]})
    assert Layout.of(by_recipe.parallel) == Layout.of(by_flag.parallel) == Layout(dp=2, tp=4)
    staged = build_config("train", TrainConfig, {"parallel": ["pp=2", "schedule=1F1B"]}).parallel
    assert Layout.of(staged) == Layout(pp=2, schedule="1F1B")


@each(
    ("given", "words"),
    [
        ({"sharded": 2}, "not 'sharded'; did you mean 'shard'?"),
        ({"ppp": 2}, "not 'ppp'; did you mean 'pp'?"),
        ({"virtual": 2}, "virtual is for pipelines, and pp is 1"),
        ({"dp": 2, "schedule": "1F1B"}, "schedule is for pipelines, and pp is 1"),
        ({"pp": 2, "schedule": 1}, "schedule must be a name, such as 1F1B, got 1"),
        ({"pp": 2, "microbatches": 0}, "microbatches must be a whole number of at least 1, got 0"),
        ({"dp": 0}, "dp must be a whole number of at least 1, got 0"),
        ({"shard": 1.5}, "shard must be a whole number"),
        ({"tp": True}, "tp must be a whole number"),
    ],
)
def test_lines_that_are_none(given, words):
    assert words in refused(lambda: Layout.of(given), code=USAGE)


@each(
    ("given", "changes", "words"),
    [
        ({"dp": 5}, {}, "batch_size=24 must be a multiple of 5"),
        ({"dp": 2, "shard": 2}, {"micro_batch_size": 4}, "micro_batch_size=4 must divide 6"),
        ({"tp": 3}, {}, "tp=3 must divide n_heads=8"),
        ({"tp": 8}, {}, "tp=8 must divide n_kv_heads=4"),
        ({"tp": 4}, {"mlp_dim": 98}, "tp=4 must divide mlp_dim=98"),
        ({"tp": 4}, {"seq_len": 30}, "tp=4 must divide seq_len=30"),
        ({"shard": 2}, {"optimizer": "muon"}, "muon needs whole matrices"),
        ({"shard": 2}, {"compile": "model"}, "use compile=sublayers"),
        ({"dp": 2}, {"cuda_graph": True}, "cuda_graph records the step of one process"),
        ({"tp": 2}, {"dynamics_every": 1}, "dynamics_every looks at whole sequences, of which tp leaves a part"),
        ({"cp": 2}, {"dynamics_every": 1}, "dynamics_every looks at whole sequences, of which cp leaves a part"),
        ({"cp": 2}, {"seq_len": 30}, "seq_len=30 must be a multiple of 4"),
        ({"cp": 2, "tp": 2}, {}, "cp and tp both divide sequences"),
        ({"cp": 2, "pp": 2}, {}, "the stages of a pipeline take whole sequences"),
        ({"cp": 2}, {"compile": "model"}, "use compile=sublayers"),
        ({"cp": 2}, {"cuda_graph": True}, "cuda_graph records the step of one process"),
        ({"tp": 2}, {"dynamics_every": 1}, "dynamics_every looks at whole sequences"),
        ({"pp": 9}, {}, "9 stages (pp=9 x virtual=1) are more than the 8 blocks"),
        ({"pp": 2, "virtual": 5}, {}, "10 stages (pp=2 x virtual=5) are more than the 8 blocks"),
        ({"pp": 8, "dp": 4}, {}, "schedule=1F1B needs a micro-batch for each of 8 stages, got 6"),
        ({"pp": 2, "microbatches": 7}, {}, "24 sequences cannot be divided into 7 equal micro-batches"),
        ({"pp": 2, "microbatches": 6}, {"micro_batch_size": 2}, "make 12 sequences, and a pipeline has 24 in a step"),
        ({"pp": 4, "virtual": 2}, {"micro_batch_size": 4}, "a multiple of pp=4 micro-batches, got 6"),
        ({"pp": 2, "schedule": "1F1b1"}, {}, "unknown schedule '1F1b1'"),
        ({"pp": 2, "schedule": "DualPipeV"}, {}, "puts neighbouring stages on one rank"),
        ({"pp": 2}, {"dynamics_every": 1}, "dynamics_every looks at the whole depth"),
        ({"pp": 2}, {"compile": "model"}, "compile=model needs the model in one piece"),
        ({"pp": 2}, {"cuda_graph": True}, "cuda_graph records the step of one process"),
        ({"pp": 2, "tp": 2}, {"optimizer": "muon"}, "use adamw, or dp or pp alone"),
        ({"pp": 2}, {"mixer": "attnres", "n_blocks": 128}, "has 129 activations a token, at most 64 travel"),
    ],
)
def test_recipes_that_a_layout_cannot_run(given, changes, words):
    config = dataclasses.replace(CONFIG, **changes)
    assert words in refused(lambda: Layout.of(given).check(config, model_config(config, 300)), code=USAGE)
    Layout.of({"dp": 2}).check(CONFIG, model_config(CONFIG, 300))


@each("name", ["tp", "cp"])
def test_text_alone_has_sequences_to_divide(name):
    vit = VitConfig(image_size=8, patch_size=4, n_classes=2, dim=64, n_blocks=1, n_heads=8)
    assert "use dp or shard for images" in refused(lambda: Layout.of({name: 2}).check(CONFIG, vit), code=USAGE)
    assert "pp divides models of text" in refused(lambda: Layout.of({"pp": 2}).check(CONFIG, vit), code=USAGE)
    Layout.of({"dp": 2, "shard": 2}).check(CONFIG, vit)


@each(
    ("given", "changes", "order", "micro"),
    [
        ({"pp": 2}, {}, "1F1B", 1),
        ({"pp": 2, "virtual": 2, "dp": 2}, {"micro_batch_size": 3}, "Interleaved1F1B", 3),
        ({"pp": 2, "schedule": "GPipe", "microbatches": 6}, {}, "GPipe", 4),
        ({"pp": 2, "microbatches": 8}, {"micro_batch_size": 3}, "1F1B", 3),
        ({"dp": 2}, {}, "1F1B", None),
    ],
)
def test_what_a_pipeline_is_given(given, changes, order, micro):
    config, layout = dataclasses.replace(CONFIG, **changes), Layout.of(given)
    layout.check(config, model_config(config, 300))
    assert (layout.order, layout.micro_batch_size(config)) == (order, micro)


def test_another_number_of_processes(monkeypatch, tmp_path):
    config = dataclasses.replace(CONFIG, out=str(tmp_path / "run"), parallel={"shard": 4})
    message = refused(lambda: train(config), code=USAGE)
    assert "shard 4" in message
    assert "needs 4 processes and 1 is here; start `torchrun --nproc-per-node 4 -m depthmix train" in message
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "needs 4 processes and torchrun has started 2" in refused(lambda: train(config), code=USAGE)
    message = refused(lambda: train(dataclasses.replace(config, parallel={})), code=USAGE)
    assert "torchrun has started 2 processes and the recipe has no line `parallel`" in message
    assert not (tmp_path / "run").exists()


def test_compare_runs_in_one_process(tmp_path):
    from depthmix.compare.recipe import check_recipe

    config = CompareConfig(out=str(tmp_path), arms=["residual"], parallel={"dp": 2})
    with pytest.raises(UserError, match="compare runs in one process"):
        check_recipe(config)
