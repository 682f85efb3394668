"""`python -m benchmarks <entry>`: parse, run an entry, write CSV, table and plot. `all` runs every entry in a process of its own."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import tuned
from benchmarks.accelerated import accelerate
from benchmarks.bandwidth import bandwidth
from benchmarks.check import WrongResult
from benchmarks.cpu_step import cpu_step
from benchmarks.environment import environment
from benchmarks.errors import errors
from benchmarks.first_call import first_call
from benchmarks.host import host
from benchmarks.inference import decode, prefill, prefill_memory
from benchmarks.options import Options, add_arguments, backend, from_arguments
from benchmarks.parallel_step import parallel_step
from benchmarks.peers import mhc_ops, peer_step
from benchmarks.plain_step import plain_step
from benchmarks.precompile import tune
from benchmarks.profile import profile_step
from benchmarks.report import Report, read_rows
from benchmarks.stack_entries import block_stack, full_stack
from benchmarks.step import step
from benchmarks.streams import streams
from benchmarks.tokens import tokens
from depthmix.errors import UserError

Entry = Callable[[Options, Report], None]
ENTRIES: dict[str, Entry] = {
    "full-stack": full_stack,
    "block-stack": block_stack,
    "errors": errors,
    "bandwidth": bandwidth,
    "first-call": first_call,
    "step": step,
    "plain-step": plain_step,
    "profile": profile_step,
    "parallel-step": parallel_step,
    "peer-step": peer_step,
    "mhc-ops": mhc_ops,
    "streams": streams,
    "cpu-step": cpu_step,
    "host": host,
    "decode": decode,
    "prefill": prefill,
    "prefill-memory": prefill_memory,
    "tokens": tokens,
    "accelerate": accelerate,
}
HELP = {
    "full-stack": "a Full stack alone against flash-linear-attention",
    "block-stack": "a Block stack alone against flash-linear-attention and flash-attn-res",
    "errors": "errors in bf16 against fp64, ours and flash-linear-attention's",
    "bandwidth": "share of the copy bandwidth that each kernel achieves",
    "first-call": "seconds of each kernel's first call, with cold caches",
    "step": "training step time by mechanism against the plain residual",
    "plain-step": "training step time of the plain residual: as it is, with separate sums and norms, compiled as a whole",
    "profile": "time of a training step's kernels, the longest by name",
    "parallel-step": "training step time under DDP and FSDP2 in a world of one process against the plain loop",
    "peer-step": "training step time of DCA and Hyper-Connections against the published modules",
    "mhc-ops": "sites of mHC alone against Liger's operators",
    "streams": "each kernel of a boundary of mHC at 1, 64 and 8192 tokens beside a copy",
    "cpu-step": "training step time of a small model on the CPU, Block against the plain residual",
    "host": "what a call of an operator costs the host, in microseconds",
    "decode": "a decoding step by mechanism against the plain residual, batch 1, 8 and 64",
    "prefill": "a prompt of 8k tokens by mechanism against the plain residual",
    "prefill-memory": "the peak memory of a prompt of 128k tokens in chunks against the plain residual",
    "tokens": "tokens per second of the plain model against Hugging Face's Llama with the same weights",
    "accelerate": "models of transformers that mix over depth: eager, compiled, Liger and ours",
    "tune": "tune flash-linear-attention, compiling its kernels in parallel; keep the result with --tuned",
    "all": "run every entry, each with a limit in seconds",
}
LIMITS = {
    "full-stack": 120,
    "block-stack": 110,
    "errors": 100,
    "bandwidth": 60,
    "first-call": 90,
    "step": 300,
    "plain-step": 200,
    "profile": 60,
    "parallel-step": 240,
    "peer-step": 150,
    "mhc-ops": 60,
    "streams": 60,
    "cpu-step": 60,
    "host": 120,
    "decode": 200,
    "prefill": 150,
    "prefill-memory": 120,
    "tokens": 200,
    "accelerate": 540,
}
# Exit code if ours is wrong and was not timed.
WRONG = 3


def parser() -> argparse.ArgumentParser:
    """Return a parser with one subcommand per entry, all with the same flags."""
    top = argparse.ArgumentParser(prog="python -m benchmarks", description="Ours against the peers, in one run.")
    commands = top.add_subparsers(dest="entry", required=True, metavar="ENTRY")
    for name, text in HELP.items():
        command = commands.add_parser(name, help=text, description=text)
        add_arguments(command)
        command.add_argument(
            "--out", default="benchmarks/results", metavar="FOLDER", help="folder for CSV, table and plot"
        )
        command.add_argument("--commit", default="", help="commit to note if there is no git repository")
        command.add_argument("--tuned", metavar="FILE", help="file that keeps the rivals' tuning results")
        if name == "all":
            command.add_argument(
                "--limit", type=float, metavar="S", help="seconds for every entry instead of the built-in limits"
            )
            command.add_argument(
                "--entries", nargs="+", choices=list(ENTRIES), default=list(ENTRIES), help="entries to run"
            )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return exit code 0, 2 for wrong usage, or WRONG."""
    given = parser().parse_args(arguments)
    try:
        options = from_arguments(given)
        if given.tuned and (n := tuned.restore(Path(given.tuned))):
            print(f"{n} results of earlier tuning restored", flush=True)
        report = Report(given.entry, Path(given.out), environment(options.device, given.commit))
        if given.entry == "all":
            passed = list(sys.argv[2:] if arguments is None else arguments[1:])
            code = run_all(given.entries, given.limit, passed, report)
        else:
            code = run_entry({**ENTRIES, "tune": tune}[given.entry], options, report)
        report.close()
        if given.tuned:
            tuned.save(Path(given.tuned))
        return code
    except UserError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2


def run_entry(entry: Entry, options: Options, report: Report) -> int:
    """Run an entry. A wrong result is reported, and nothing after it is timed."""
    try:
        with backend(options.backend):
            entry(options, report)
    except WrongResult as error:
        report.add("", "ours", "refused", None, note=str(error))
        return WRONG
    return 0


def run_all(names: Sequence[str], limit: float | None, passed: Sequence[str], report: Report) -> int:
    """Run each entry in a process of its own, so that an entry that hangs or breaks the GPU's context does not stop the others."""
    worst = 0
    for name in names:
        seconds = limit or LIMITS[name]
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            # The last --out counts. Entries lack two flags of `all`.
            command = [sys.executable, "-m", "benchmarks", name, *_without_all_flags(passed), "--out", folder]
            code = _limited(command, seconds)
            part = Path(folder) / f"{name}.csv"
            for row in read_rows(part) if part.exists() else []:
                # The entry has printed the row already.
                report.append(row, quiet=True)
        took = time.perf_counter() - begun
        if code is None:
            report.add(
                "",
                "all",
                f"{name}: stopped",
                None,
                note=f"{name} was stopped after {seconds:.0f} s; its results until then are above",
            )
        elif code:
            report.add("", "all", f"{name}: failed", None, note=f"{name} ended with exit code {code}")
        print(f"{name}: {took:.0f} s", flush=True)
        worst = max(worst, code or 0)
    return worst


def _without_all_flags(passed: Sequence[str]) -> list[str]:
    flags_of_all = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags_of_all.add_argument("--limit")
    flags_of_all.add_argument("--entries", nargs="+")
    return flags_of_all.parse_known_args(list(passed))[1]


def _limited(command: Sequence[str], seconds: float) -> int | None:
    """Run a command and return its exit code, or None if it had to be stopped, with everything that it had started."""
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1], start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
