"""The machine code of the kernels of weighted sums, compiled for an H200 without one: wide loads, and registers that suffice."""

import re

import pytest

from ops.helpers import compiled_in_its_own_process

pytest.importorskip("triton")

CODE = """
import sys
import tempfile
import subprocess
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.backends.nvidia.compiler import get_ptxas
from depthmix.ops.depth_sum.kernels import read, read_backward, source_backward

TYPES = {"N": "i64", "n": "i32", "out_eps": "fp32"} | dict.fromkeys(("table", "targets", "readers"), "*i64")
TYPES |= dict.fromkeys(("static", "gain", "g0", "g1", "g2", "g3", "rms", "dots", "part", "dgain"), "*fp32")
for name, constants, warps in eval(sys.argv[1]):
    limit = {"maxnreg": constants.get("LIMIT", 96)} if name == "_read_kernel" else {}
    fn = next(getattr(m, name) for m in (read, read_backward, source_backward) if hasattr(m, name))
    constants = {p.name: constants[p.name] for p in fn.params if p.is_constexpr}
    types = {p.name: "constexpr" if p.name in constants else TYPES.get(p.name, "*bf16") for p in fn.params}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types.values()) if t.startswith("*")}
    source = ASTSource(fn=fn, signature=types, constexprs=constants, attrs=aligned)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 1} | limit).asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(code)
        file.flush()
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", "-o", "/dev/null", file.name]
        print(code, subprocess.run(command, capture_output=True, text=True).stderr, end="----")
"""
CONSTANTS = {
    "D": 512, "BD": 512, "BT": 2, "WAYS": 3, "STATIC": 1, "DYNAMIC": True, "RELU": 1, "ADD": 0, "NORM": 3, "RAW": 0, "KEEP": True,
    "UP": 8, "ALIGNED": True, "ROWS_ALIGNED": True, "STAGES": 1, "G": 2, "DOTS": True, "ROWS": True, "S": 2, "SCORED": True,
    "SMALL": 1e-30, "SHARED_W": True, "HAS_G": True, "HAS_PART": False, "WHOLE": 2,
    "MIXTURES": 1, "PARTIAL": False, "PASSED": False, "BY_SOURCE": True, "LEAN": False, "PAIRS": True,
}  # fmt: skip
COMPILED = [
    ("_read_kernel", CONSTANTS, 2),
    ("_read_kernel", CONSTANTS | {"KEEP": False, "LEAN": True}, 2),
    ("_read_kernel", CONSTANTS | {"KEEP": False, "LEAN": True, "BT": 3, "UP": 16, "LIMIT": 128}, 2),
    ("_read_kernel", CONSTANTS | {"ALIGNED": False, "WAYS": 1, "NORM": 1, "UP": 2}, 2),
    ("_norm_backward_kernel", CONSTANTS | {"UP": 4, "MIXTURES": 1}, 2),
    ("_weight_backward_kernel", CONSTANTS, 1),
    ("_source_backward_kernel", CONSTANTS | {"BD": 256, "BT": 4}, 1),
    ("_source_backward_kernel", CONSTANTS | {"BD": 256, "PARTIAL": True}, 1),
]


def test_rows_are_loaded_sixteen_bytes_wide_and_registers_suffice() -> None:
    for (kernel, constants, _), code in zip(COMPILED, compiled_in_its_own_process(CODE, COMPILED), strict=True):
        loads = set(re.findall(r"(?:ld\.global|cp\.async)\S*", code))
        wide = not any(load.endswith(".b16") for load in loads) and any(
            load.endswith((".v4.b32", ".cg")) for load in loads
        )
        assert wide == constants["ALIGNED"] or kernel == "_norm_backward_kernel", (
            kernel
        )  # whose slow branch is not wide
        assert int(re.findall(r"(\d+) bytes spill stores", code)[0]) <= 16, kernel
