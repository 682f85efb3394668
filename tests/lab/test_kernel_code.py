"""lab/kernel_code.py compiles kernels without a GPU and tells renamed kernels from changed ones."""

import json
from pathlib import Path
from typing import Any

import pytest

import forking
from lab.kernel_code import compare
from project import ROOT

pytest.importorskip("triton")

# The key for Triton's cache is a hash of its 500 MB library, which takes 1.6 s.
COMPILED = """
import torch
import triton.runtime.cache

triton.runtime.cache.triton_key = lambda: "unused"
from lab.kernel_code import compile_only

compile_only(lambda key, code: print(key, code))
from depthmix.ops.gpu.program_sums import sum_programs
sum_programs(torch.zeros(3, 40))
"""
KEY = "depthmix.ops.a._kernel(*fp32*16, constexpr=2) {'num_warps': 1}"


@pytest.fixture
def records(tmp_path: Path) -> Any:
    """Write records with the given kernels, and return their paths."""

    def write(*kernels: dict[str, str]) -> list[Path]:
        paths = [tmp_path / f"{i}.json" for i in range(len(kernels))]
        for path, of_one in zip(paths, kernels, strict=True):
            path.write_text(json.dumps({"triton": "3", "kernels": of_one}))
        return paths

    return write


def test_a_kernel_is_compiled_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = forking.python(COMPILED, cwd=ROOT)
    if done.returncode and "is not supported on this" in done.stderr:
        pytest.skip("Triton has no compiler for this machine")
    assert done.returncode == 0, done.stderr[-2000:]
    key, _, code = done.stdout.strip().rpartition(" ")
    assert key.startswith(
        "depthmix.ops.gpu.program_sums._sum_programs_kernel(*fp32*16, *fp32*16, i64, i64, constexpr=4, "
    )
    assert "'num_warps': 8" in key
    assert len(code) == 16


def test_the_same_code_under_another_name_is_a_renamed_kernel(records: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(*records({KEY: "1"}, {KEY.replace("_kernel", "_better"): "1"})) == 0
    assert capsys.readouterr().out.splitlines() == [
        "renamed: depthmix.ops.a._kernel is depthmix.ops.a._better",
        "all 1 kernels have the same code",
    ]


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ({KEY: "2"}, "differs: "),
        ({}, "only in "),
        ({KEY: "1", KEY.replace("=2", "=3"): "1"}, "only in "),
        ({KEY.replace("'num_warps': 1", "'num_warps': 2"): "1"}, "only in "),
    ],
)
def test_changed_kernels_are_listed(
    after: dict[str, str], message: str, records: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(*records({KEY: "1"}, after)) == 1
    assert capsys.readouterr().out.startswith(message)
