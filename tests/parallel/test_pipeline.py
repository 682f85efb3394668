"""In the stages of a pipeline a model is the model in one piece, and hops carry what the formulas say."""

import pytest
import torch

from depthmix import DecoderConfig, create_mixer, list_mixers
from depthmix.errors import UserError
from depthmix.ops import use_backend
from depthmix.parallel.packing import state_forms
from depthmix.parallel.pipeline import check_pipeline
from depthmix.parallel.pipeline.hops import plan_hops
from depthmix.parallel.pipeline.piece import Piece
from depthmix.parallel.plan.costs import costs_of
from depthmix.parallel.plan.hops import cuts, hop_sizes
from depthmix.parallel.plan.layout import Layout
from parallel.example import bank_states
from parallel.pipeline_jobs import LENGTH, SHAPE, decoder
from small_cases import each

MIXERS = list_mixers()
TWO, FOUR = {"n_blocks": 2}, {"n_blocks": 4}
QUICK = {"mhc": {"n": 2, "iterations": 2}, "hyper": {"n": 2}}
# Options under which states are made of other things, or parameters cut otherwise, than with the defaults.
OTHERS = [
    ("attnres", {"ways": 2, "block_size": 3}, {**FOUR, "tie_embeddings": True}),
    ("attnres", {"ways": 3, "routing": "add"}, FOUR),
    ("mhc", {**QUICK["mhc"], "schedule": "single_pass"}, FOUR),
    ("mhc", {**QUICK["mhc"], "convention": "deepseek", "head": "learned"}, FOUR),
    ("laurel", {"variant": "pa"}, FOUR),
    ("grn", {"window": 1, "w_per_entry": True}, FOUR),
]
BLOCKS = ("attnres", {"block_size": 2}, {"n_blocks": 8})  # a stage of P = 4, V = 2 is a block


def every(names, changes):
    return [(name, QUICK.get(name, {}), changes) for name in names]


def run(workers, sizes, *args, job="same_training"):
    return workers.run(sizes["pp"], f"parallel.pipeline_jobs:{job}", sizes, *args)


@pytest.mark.parametrize(
    ("schedule", "sizes", "cases", "micros"),
    [
        ("GPipe", {"pp": 2}, every(MIXERS[::2], TWO), 2),
        ("1F1B", {"pp": 2}, every(MIXERS[1::2], TWO), 2),
        ("Interleaved1F1B", {"pp": 2, "virtual": 2}, every(MIXERS, FOUR) + OTHERS, 2),
        (
            "InterleavedZeroBubble",
            {"pp": 2, "virtual": 2},
            [("attnres", {"block_size": 3}, FOUR), ("dca", {}, FOUR)],
            2,
        ),
        ("LoopedBFS", {"pp": 2, "virtual": 2}, [("attnres", {"block_size": 3}, {"n_blocks": 5})], 3),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_losses_and_gradients_are_those_of_one_process(workers, schedule, sizes, cases, micros):
    run(workers, sizes, schedule, cases, micros)


def test_sublayers_can_be_recomputed_and_their_products_left(workers):
    """That they can be recomputed under other schedules is in test_training_in_stages.py."""
    cases = [("attnres", {"block_size": 3}, FOUR)]
    run(workers, {"pp": 2, "virtual": 2}, "InterleavedZeroBubble", cases, 2, "all", True)


@pytest.mark.parametrize(("cache", "units"), [("none", 28), ("received", 22), ("all", 18)])
def test_hops_carry_as_many_bytes_as_the_formulas_say(workers, cache, units):
    """P = 4, V = 2: 28 blocks naively, 6 fewer with cross-stage caching, and 10 if a rank keeps what it makes, too.

    Besides the blocks, which the formulas count, the embedding goes with every hop, or once to every rank but the first.
    """
    found = run(workers, {"pp": 4, "virtual": 2}, "Interleaved1F1B", [BLOCKS], 4, cache)
    sent = {stage: bytes_sent for rank in found for stage, bytes_sent in rank.items()}
    unit = 2 * LENGTH * SHAPE["dim"] * 4
    forward, backward = ([sent[stage][way] / unit for stage in range(8)] for way in (0, 1))
    carried = {
        "none": [2, 3, 4, 5, 6, 7, 8],
        "received": [2, 3, 4, 4, 4, 4, 4],
        "all": [2, 3, 4, 3, 3, 3, 3],
    }[cache]
    assert (forward[:-1], forward[-1]) == (carried, 0)
    assert (backward[1:], backward[0]) == (carried, 0)  # a stage returns what came with its hop
    embeddings = 7 if cache == "none" else 3
    assert sum(forward) == units + embeddings
    if cache != "all":  # what the planner says
        states = costs_of(create_mixer(BLOCKS[0], dim=16, n_blocks=8, **BLOCKS[1])).state_tensors()
        assert forward[:-1] == hop_sizes(states, cuts(8, 8), 4, cached=cache == "received")


@each("name", MIXERS)
def test_the_planner_counts_what_hops_carry(name):
    with torch.device("meta"):
        mixer = create_mixer(name, dim=16, n_blocks=8, **QUICK.get(name, {}))
    found = state_forms(mixer, cuts(8, 8))
    for cache in ("none", "received"):
        sizes = [hop.bytes(3) / (3 * 16 * 4) for hop in plan_hops(found, 4, cache)]
        assert sizes == [0, *hop_sizes(costs_of(mixer).state_tensors(), cuts(8, 8), 4, cached=cache == "received")]


@each(("ranks", "virtual"), [(2, 1), (2, 4), (4, 2), (16, 8)])
def test_what_ranks_make_need_not_come_back(ranks, virtual):
    """P (P - 1) / 2 + (V - 1) P (P - 1) units."""

    class Bank:
        def __init__(self, labels):
            self.labels = tuple(labels)

    states = [Bank(state) for state in bank_states(ranks * virtual)]
    carried = sum(len(hop.carries) for hop in plan_hops(states[:-1], ranks, "all"))
    assert carried == ranks * (ranks - 1) / 2 + (virtual - 1) * ranks * (ranks - 1)


def test_under_autocast_what_travels_is_narrow(workers):
    found = run(workers, {"pp": 2}, ("attnres", {"block_size": 2}, TWO), 2, job="narrow")
    assert [sent for rank in found for sent in rank.values()] == [2 * 2 * LENGTH * SHAPE["dim"] * 2, 0]


ZERO_BUBBLE = {"virtual": 2, "schedule": "InterleavedZeroBubble"}
HEADS = {"n_kv_heads": 2}


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        ({"pp": 2, "shard": 2}, [("mhc", QUICK["mhc"], TWO)]),
        ({"pp": 2, "shard": 2, **ZERO_BUBBLE}, [("dca", {}, FOUR)]),
        ({"pp": 2, "dp": 2, "schedule": "GPipe"}, [("highway", {}, TWO)]),
        ({"pp": 2, "tp": 2, **ZERO_BUBBLE}, [("attnres", {"ways": 3}, {**FOUR, **HEADS, "tie_embeddings": True})]),
    ],
    ids=str,
)
def test_stages_can_be_sharded_and_divided(workers, sizes, cases):
    """FSDP2 x PP and TP x PP, as the recipe has them, on four processes; the other schedules train in test_training_in_stages.py."""
    found = workers.run(4, "parallel.pipeline_jobs:in_stages", sizes, cases, 2)
    if "tp" in sizes:  # a hop carries the process's part of every sequence: bytes divide by tp
        ((mixer, options, _),) = cases
        with torch.device("meta"):
            hops = plan_hops(
                state_forms(create_mixer(mixer, dim=SHAPE["dim"], n_blocks=4, **options), cuts(4, 4)), 2, "all"
            )
        sent = {stage: bytes_sent for rank in found for stage, bytes_sent in rank.items()}
        assert sent == {
            0: hops[1].bytes(2 * LENGTH) / 2,
            1: hops[2].bytes(2 * LENGTH) / 2,
            2: hops[3].bytes(2 * LENGTH) / 2,
            3: 0,
        }


def test_three_dimensions(workers):
    """FSDP2 x TP x PP, on eight processes, in fp64."""
    case = ("grn", {"version": 3}, {**TWO, **HEADS})
    workers.run(8, "parallel.pipeline_jobs:in_stages", {"pp": 2, "shard": 2, "tp": 2}, [case], 2, torch.float64)


@pytest.mark.usefixtures("quick_interpreter")
def test_what_kernels_leave_can_have_hooks():
    """FSDP2 sets them on a module's outputs; a state's tensors by themselves refuse them."""
    model = decoder("attnres", {"block_size": 2}, TWO)
    before, after = state_forms(model.mixer, [0, 2])
    with use_backend("triton"):
        out = Piece(model, range(2), before, after)(torch.tensor([[1, 2]]))
    seen = []
    for t in out:
        t.register_hook(seen.append)
    torch.autograd.backward(out, [torch.ones_like(t) for t in out])
    assert len(seen) == len(out) == 2
    assert model.embedding.weight.grad.any()


def test_stages_load_a_state_dict_and_save_their_rows_of_it(workers):
    found = run(workers, {"pp": 2}, "1F1B", ("attnres", {"ways": 2}, FOUR), 2, job="loads")
    assert [tuple(rows["query"]) for rows in found] == [(4, 16), (5, 16)]  # sites 0 to 3; 4 to 7 and finish
    assert [tuple(rows["query_v"]) for rows in found] == [(2, 16), (2, 16)]


@each(
    ("sizes", "schedule", "micros", "changes", "said"),
    [
        ({"pp": 4, "virtual": 2}, "Interleaved1F1B", 4, {"n_blocks": 7}, "8 stages .* more than the 7 blocks"),
        ({"pp": 4}, "1F1B", 3, {}, "a micro-batch for each of 4 stages, got 3"),
        ({"pp": 4, "virtual": 2}, "Interleaved1F1B", 6, {}, "a multiple of pp=4 micro-batches, got 6"),
        ({"pp": 4, "virtual": 2}, "1F1B", 8, {}, "one stage a rank; virtual=2 is for LoopedBFS"),
        ({"pp": 4}, "Interleaved1F1B", 4, {}, "virtual of at least 2"),
        ({"pp": 1}, "GPipe", 4, {}, "at least 2, got 1"),
        ({"pp": 4}, "GPipes", 4, {}, "unknown schedule 'GPipes'.*did you mean 'GPipe'"),
        ({"pp": 4}, "ZBVZeroBubble", 4, {}, "neighbouring stages on one rank"),
        ({"pp": 4}, "GPipe", 5, {}, "16 sequences cannot be divided into 5"),
        ({"pp": 4}, "GPipe", 4, {"mixer": "attnres", "n_blocks": 64}, "65 activations a token, at most 64.*block_size"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_impossible_pipelines_are_refused_with_the_reason(sizes, schedule, micros, changes, said):
    config = DecoderConfig(**{**SHAPE, "n_blocks": 8, **changes})
    with pytest.raises(UserError, match=f"^parallel: .*{said}"):
        check_pipeline(config, Layout(**sizes), schedule, micros, batch_size=16)


def test_other_processes_and_caches_are_refused():
    config = DecoderConfig(**SHAPE, n_blocks=8)
    with pytest.raises(UserError, match="pp=4 needs 4 processes, and 2 are here"):
        check_pipeline(config, Layout(pp=4), "GPipe", 4, processes=2)
    with pytest.raises(UserError, match="cache must be one of none, received, all, got 'recieved'; did you mean"):
        check_pipeline(config, Layout(pp=4), "GPipe", 4, cache="recieved")
