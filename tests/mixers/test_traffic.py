"""The planner's costs of every rule are what kernels load, store and keep, and what states hold."""

import pytest

from depthmix import create_mixer
from depthmix.mixers.streams import StreamMixer
from depthmix.ops import use_backend
from depthmix.ops.depth_attention import precomputed_logits
from depthmix.parallel.plan.costs import Costs, Traffic, attnres, costs_of
from depthmix.parallel.plan.costs.base import measured_state_tensors
from harness import LAYOUTS, MIXERS
from mixers.counting import DIM, STREAMS, metered, units_of

pytest.importorskip("triton")
SIZES = {  # enough for pairs and groups; two blocks elsewhere
    "denseformer": {"n_blocks": 3},
    "attnres": {"n_blocks": 3},
    "hyper": {"n_blocks": 1, "n": STREAMS},
    "mhc": {"n_blocks": 1, "n": STREAMS, "iterations": 2},
    "gated_streams": {"n_blocks": 1, "rank": 3},
}
UNEVEN = {"sites": LAYOUTS["uneven"]}
# A rule without a cost file is taken for a plain sum.
COSTED = [name for name in MIXERS if type(costs_of(create_mixer(name, dim=DIM, n_blocks=1))) is not Costs]
CASES = [(name, SIZES.get(name, {"n_blocks": 2})) for name in COSTED]
CASES += [
    ("attnres", {"sites": [("attention", "mlp"), ("mlp",), ("attention", "mlp")], "block_size": 3, "ways": 2}),
    ("attnres", {"n_blocks": 2, "block_size": 2, "ways": 3}),
    ("attnres", {"n_blocks": 2, "block_size": 4, "ways": 2}),
    ("mhc", {**SIZES["mhc"], "schedule": "single_pass"}),
    ("laurel", {"n_blocks": 2, "variant": "rw"}),
    ("highway", {"n_blocks": 2, "gate": "scalar"}),
]


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_counted(name, options, monkeypatch):
    """Units forward and backward and activations kept, of kernels where there are any."""
    monkeypatch.setattr(precomputed_logits, "MIN_TOKENS", 1)
    for module in (precomputed_logits, attnres):
        monkeypatch.setattr(module, "MIN_SOURCES", 4)
    mixer = create_mixer(name, dim=DIM, **options)
    kernels = bool(mixer.fast_paths)
    with (
        use_backend("triton" if kernels else None),
        metered(monkeypatch, kernels, isinstance(mixer, StreamMixer)) as meter,
    ):
        counted = units_of(mixer, meter, monkeypatch)
    said = tuple(Traffic.total(costs_of(mixer).traffic()))[:3]
    assert said == pytest.approx(counted), f"forward, backward and kept: traffic says {said}, counted are {counted}"


@pytest.mark.parametrize("options", [{}, {"n_blocks": 16}], ids=str)
@pytest.mark.parametrize("name", MIXERS)
def test_every_read_takes_something_in_and_gives_something_out(name, options):
    """A deeper model of the same rule moves at least as much at each of its sites."""
    sizes = ({"n_blocks": 2, **o} for o in ({}, options))
    small, large = (costs_of(create_mixer(name, dim=DIM, **size)).traffic() for size in sizes)
    assert len(large) == 2 * options.get("n_blocks", 2) + 1
    for site, found in enumerate(large):
        assert found.forward >= 1, site
        assert found.backward >= 1, site
    assert Traffic.total(large).forward >= Traffic.total(small).forward


def test_groups_and_pairs_are_those_of_the_kernels():
    from depthmix.ops.depth_attention.kernels.source_backward import PAIR
    from depthmix.ops.depth_attention.kernels.tiling import GROUP

    assert (attnres.PAIR, attnres.GROUP) == (PAIR, GROUP)


STATES = [(name, {"n_blocks": 3}) for name in MIXERS]
STATES += [
    ("attnres", {"n_blocks": 4, "block_size": 3}),
    ("attnres", {"n_blocks": 3, "window": 3}),
    ("attnres", {"n_blocks": 2, "block_size": 2, "routing": "add"}),
    ("laurel", {"n_blocks": 2, "variant": "pa"}),
    ("grn", {"n_blocks": 5, "version": 1, "window": 2}),
    ("grn", {"version": 1, **UNEVEN}),
    ("denseformer", UNEVEN),
    ("denseformer", {"n_blocks": 4, "period": 2}),
    ("hyper", {"n_blocks": 2, "fractions": 2}),
    ("mhc", {"n_blocks": 2, "fractions": 2}),
]


@pytest.mark.parametrize(("name", "options"), STATES, ids=str)
def test_the_state_holds_what_its_costs_say(name, options):
    """As many activations before every site, and between any two sites as many that are the same."""
    mixer = create_mixer(name, dim=8, **options)
    said, found = costs_of(mixer).state_tensors(), measured_state_tensors(mixer)
    assert [sum(s.values()) for s in said] == [sum(s.values()) for s in found]
    sites = range(len(said))
    assert [[len(said[a].keys() & said[b]) for a in sites] for b in sites] == [
        [len(found[a].keys() & found[b]) for a in sites] for b in sites
    ]
