"""lab/findings.py: rank correlations between what is read and what is needed."""

from lab.findings import need, rows
from report.measured_documents import document


def test_correlations_have_the_order_of_what_was_measured():
    found = document("a", blocks=12)
    names = [f"rank correlation of {name} and need" for name in ("weight", "contribution", "projection")]
    assert [name for name, _ in rows_of(found)][-3:] == names
    changes = found["edges"]["change"]
    found["mixing"]["contribution"] = changes
    found["mixing"]["projection"] = [[[-v for v in row] for row in ways] for ways in changes]
    assert (need(found, "contribution"), need(found, "projection")) == ("1.00", "-1.00")
    del found["mixing"]["contribution"]
    assert "need" not in rows_of(found)[-1][0].split()


def test_weights_count_by_their_share_of_a_read():
    found = {"mixing": {"mean": [[[1.0]], [[-4.0, 1.0]], [[10.0, 20.0, 70.0]]]}}
    found["edges"] = {"change": [[[9.0]], [[0.8, 0.2]], [[0.1, 0.2, 0.7]]]}
    assert need(found, "mean") == "1.00"


def rows_of(found):
    by_kind = {kind: dict.fromkeys(("effective_share", "newest", "embedding"), 0.5) for kind in ("attention", "mlp")}
    found["mixing"]["by_kind"] = by_kind
    return rows([found])
