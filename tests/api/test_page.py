"""docs/guides/python.md as it stands: every block, one after the other, as the cells of a notebook."""

from project import ROOT, code_blocks


def test_its_code_runs(tmp_path, monkeypatch, capsys, undrawn):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = {"__name__": "notebook"}
    for number, block in enumerate(code_blocks(ROOT / "docs" / "guides" / "python.md"), 1):
        exec(compile(block, f"docs/guides/python.md, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "mine: 0.040 nats below plain (95% interval 0.015 to 0.065 over 3 seeds)." in printed
    assert "✓ causality" in printed
    assert (tmp_path / "depth-map.png").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["depth-map.png", "runs"]
    assert len(names["losses"]) == 2 * 2 * 6
