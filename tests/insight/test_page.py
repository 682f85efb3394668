"""The example on the page runs as it stands."""

from project import ROOT, code_blocks


def test_the_example_runs(capsys):
    (example,) = (b for b in code_blocks(ROOT / "docs" / "guides" / "inspecting.md") if "depth_map(" in b)
    exec(example, {})
    assert len(capsys.readouterr().out.splitlines()) >= 5
