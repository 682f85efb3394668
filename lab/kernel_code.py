"""Compile every kernel that small decoders launch, without a GPU, and compare the machine code of two commits.

    python lab/kernel_code.py record before.json --rules attnres dca   # on one commit
    python lab/kernel_code.py record after.json --rules attnres dca    # on another
    python lab/kernel_code.py compare before.json after.json

A change that only renames, moves or documents kernels leaves their machine code as it was. `record` trains, evaluates and decodes small
decoders with each rule on the CPU, in bf16. Nothing is launched: Triton compiles each kernel for an H100 or H200 (sm_90), and the
results are uninitialised memory. The record holds a hash of each kernel's PTX, without debug information. A kernel's key is its name,
the types and alignments of its arguments, its constants and its launch settings.

`compare` takes a kernel with another name and otherwise the same key and code for a renamed one. Exit status: 1 if a kernel's code
differs, or if a kernel was launched on one commit alone.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RULES = ("residual", "attnres", "dca", "mudd", "hyper", "mhc", "denseformer", "grn", "laurel", "highway")
# Options that are compiled besides a rule's defaults.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "attnres": [{"block_size": 4}, {"block_size": 4, "ways": 2}, {"block_size": 4, "ways": 3}, {"block_size": "all"}],
    "dca": [{"window": 8}],
    "grn": [{"version": 1}, {"version": 2}],
    "hyper": [{"static": True}],
    "mhc": [{"residual_map": "birkhoff"}],
    "laurel": [{"variant": "pa"}],
}
VOCABULARY, BLOCKS = 64, 6
# (dim, batch, tokens, dtype of the weights): tiles and launch settings depend on them. From 512 tokens on, attention over depth tiles.
SIZES = [(256, 2, 256, "bfloat16"), (256, 1, 16, "float32"), (512, 1, 16, "bfloat16")]
Size = tuple[int, int, int, str]


def record(path: Path, rules: Sequence[str], sizes: Sequence[Size] = tuple(SIZES)) -> None:
    """Compile the kernels of every rule and write their hashes.

    Args:
        path: file to write.
        rules: names of rules.
        sizes: of each decoder.
    """
    # Read when triton is first imported: the interpreter has no machine code, and line numbers change with comments.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    import torch
    import triton

    torch.manual_seed(0)
    hashes: dict[str, str] = {}
    compile_only(lambda key, ptx: hashes.update({key: ptx}))
    for rule in rules:
        for options in ({}, *OPTIONS.get(rule, ())):
            for size in sizes:
                run_decoder(rule, options, size)
        print(f"{rule}: {len(hashes)} kernels", flush=True)
        path.write_text(json.dumps({"triton": triton.__version__, "kernels": dict(sorted(hashes.items()))}, indent=1))


def run_decoder(rule: str, options: dict[str, Any], size: Size) -> None:
    """Train one step, evaluate and decode, so that every kernel for these is launched.

    Args:
        rule: name of the rule.
        options: its options.
        size: one of SIZES. Weights in float32 train under bf16 autocast.
    """
    import torch

    from depthmix import Decoder, DecoderConfig
    from depthmix.models.decoding import Decoding
    from depthmix.ops import use_backend

    dim, batch, tokens, weights = size
    config = DecoderConfig(
        vocab_size=VOCABULARY, dim=dim, n_blocks=BLOCKS, n_heads=4, mlp="relu2", mixer=rule, mixer_options=options
    )
    model: Any = Decoder(config)
    ids = torch.randint(VOCABULARY, (batch, tokens))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=weights == "float32")
    if weights == "bfloat16":
        model = model.bfloat16()
    with use_backend("triton"), autocast:
        loss = model(ids).float().square().mean()
    with use_backend("triton"):
        loss.backward()
    with use_backend("triton"), torch.no_grad(), autocast:
        model(ids)
        if weights == "bfloat16":
            decoding = Decoding(model, 1, 64)
            decoding.prefill(ids[:1, :8])
            decoding.step(ids[:1, 0])


def compile_only(report: Callable[[str, str], None]) -> None:
    """Make launches compile their kernel and do nothing else, and let every operator take its kernels on the CPU.

    Args:
        report: called with the key and the hash of every kernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    from depthmix.ops import backend

    class Driver:
        """Stand in for the driver of a GPU."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

    triton.runtime.driver.set_active(Driver())
    # The PTX is all that is compared; its assembly would take as long as all stages before.
    CUDABackend.make_cubin = lambda *_: b""

    @functools.cache
    def find_no_obstacle(device_type: str, index: int | None) -> str | None:
        """Stand in for `_why_no_kernels`, which would miss the GPU."""
        return None

    backend._why_no_kernels = find_no_obstacle
    run = triton.JITFunction.run

    def compile_kernel(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if options.get("EARLY") is False:
            # As ops/gpu/dependent_launch.py does on a GPU.
            options |= {"EARLY": True, "launch_pdl": True}
        compiled = run(kernel, *arguments, grid=grid, warmup=True, **options)
        report(key_of(kernel, compiled), hash_of(compiled))

    triton.JITFunction.run = compile_kernel


def key_of(kernel: Any, compiled: Any) -> str:
    """Return a text that tells the compiled variants of all kernels apart, whatever their arguments are called."""
    source, settings = compiled.src, compiled.metadata
    constants = source.constants
    aligned = sorted(path for path, attributes in source.attrs.items() if attributes)
    launched = {name: getattr(settings, name, None) for name in ("num_warps", "num_stages", "maxnreg", "launch_pdl")}
    types = ", ".join(
        f"{kind}={constants[(i,)]}" if (i,) in constants else f"{kind}{'*16' * ((i,) in aligned)}"
        for i, kind in enumerate(source.signature.values())
    )
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}({types}) {launched}"


def hash_of(compiled: Any) -> str:
    """Hash the PTX of a kernel without its name, comments and debug information."""
    ptx = compiled.asm["ptx"].replace(compiled.metadata.name, "kernel")
    ptx = re.sub(r"//.*", "", ptx)
    ptx = re.sub(r"^\s*\.(loc|file)\b.*$", "", ptx, flags=re.MULTILINE)
    lines = [line.strip() for line in ptx.splitlines()]
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()[:16]


def compare(before: Path, after: Path) -> int:
    """Print what differs between two records; return the exit status."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    if old["triton"] != new["triton"]:
        print(f"the records cannot be compared: triton {old['triton']} made one and {new['triton']} the other")
        return 1
    a, b = old["kernels"], new["kernels"]
    differing = [key for key in a if key in b and a[key] != b[key]]
    gone, added = [key for key in a if key not in b], [key for key in b if key not in a]
    renamed = []
    for key in list(gone):
        matching = [k for k in added if b[k] == a[key] and k.partition("(")[2] == key.partition("(")[2]]
        if matching:
            gone.remove(key)
            added.remove(matching[0])
            renamed.append((key, matching[0]))
    for key, other in renamed:
        print(f"renamed: {key.partition('(')[0]} is {other.partition('(')[0]}")
    for title, keys in (("differs", differing), (f"only in {before}", gone), (f"only in {after}", added)):
        for key in keys:
            print(f"{title}: {key}")
    if differing or gone or added:
        print(f"{len(differing)} kernels differ, {len(gone)} are gone, {len(added)} are new, of {len(a)}")
        return 1
    print(f"all {len(a)} kernels have the same code")
    return 0


def main() -> int:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="compile the kernels of rules and write their hashes")
    recording.add_argument("path", type=Path, help="file to write")
    recording.add_argument(
        "--rules", nargs="+", default=RULES, help="rules to compile; all that have kernels by default"
    )
    recording.add_argument("--small", action="store_true", help="one small decoder per rule")
    comparing = commands.add_parser("compare", help="compare two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.command == "record":
        record(options.path, options.rules, SIZES[: 1 if options.small else None])
        return 0
    return compare(options.before, options.after)


if __name__ == "__main__":
    sys.exit(main())
