"""Ranks of M as in the papers' unified view (Attention Residuals, section 6.2): one stream, n streams, dense."""

import pytest
import torch

from depthmix import list_mixers
from depthmix.insight.mixing import sources_of
from depthmix.insight.ranks import ranks, structure
from insight.small_decoder import decoder, tokens

DENSE = 6  # (S + 2) // 2 of 5 blocks
UNIFIED = [
    ("residual", {}, 1),
    ("rezero", {}, 1),
    ("layerscale", {}, 1),
    ("highway", {}, 1),
    ("highway", {"gate": "scalar"}, 1),
    ("laurel", {}, 1),
    ("laurel", {"variant": "rw"}, 1),
    *(("hyper", {"n": n}, n) for n in (1, 2, 3, 4)),
    ("hyper", {"n": 2, "static": True}, 2),
    ("hyper", {"fractions": 2}, 1),
    ("delta", {}, 1),
    ("delta", {"values": 2}, 2),
    ("lambdas", {}, 2),  # the stream and the embedding
    ("mhc", {"n": 2}, 2),
    ("mhc", {"fractions": 2}, 1),
    ("mhc", {"n": 3, "schedule": "single_pass"}, 3),
    ("attnres", {}, DENSE),
    ("attnres", {"heads": 2, "weights": "sigmoid"}, DENSE),
]


def of(mixer, options, dtype=torch.float64, **kwargs):
    model = decoder(mixer, options, n_blocks=5, dtype=dtype, **kwargs)
    with torch.no_grad():
        model.embedding.weight.mul_(50)  # tokens that differ from each other, and from what comes after them
    return structure(model.mixer, sources_of(model, model.mixer, tokens()))


@pytest.mark.parametrize(("mixer", "options", "rank"), UNIFIED, ids=str)
def test_semiseparable_ranks_are_the_numbers_of_streams(mixer, options, rank):
    (found,) = of(mixer, options, torch.float32)
    assert found.semiseparable == rank
    assert found.most == DENSE


@pytest.mark.parametrize("mixer", ["residual", "attnres"])
def test_where_every_reader_sees_the_newest_source_no_row_depends_on_those_before(mixer):
    (found,) = of(mixer, {})
    assert found.rank == 11


def test_at_step_0_rezero_reads_one_source_and_attention_residuals_are_plain():
    (rezero,) = of("rezero", {}, random=False)
    assert (rezero.rank, rezero.semiseparable) == (1, 1)
    (attnres,) = of("attnres", {}, random=False)
    assert attnres.semiseparable == 1


def test_a_sum_of_a_block_counts_as_one_source():
    """One block of all sites: every reader weighs e and one sum, which is two streams."""
    (found,) = of("attnres", {"block_size": 10})
    assert found.semiseparable == 2


@pytest.mark.parametrize("mixer", list_mixers())
def test_there_is_one_structure_per_way(mixer):
    model = decoder(mixer, n_blocks=2)
    found = structure(model.mixer, sources_of(model, model.mixer, tokens()))
    assert len(found) == max(model.mixer.ways(s) for s in range(4))
    assert all(1 <= f.semiseparable <= f.most == 3 and f.rank <= 5 for f in found)


def test_matrices_too_large_to_look_into_are_left_out(monkeypatch):
    monkeypatch.setattr("depthmix.insight.ranks.LARGEST", 100)
    assert of("laurel", {}) is None
    assert of("residual", {}) is not None


def test_numerical_ranks():
    a = torch.randn(7, 3).double() @ torch.randn(3, 7).double()
    assert ranks(torch.stack([a, torch.eye(7).double(), 0 * a]), 1e-16).tolist() == [3, 7, 0]
    assert ranks(a + 1e-7 * torch.randn(7, 7), 1e-7) == 3
