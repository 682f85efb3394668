"""Record the losses of every rule on one commit and compare two records bit for bit.

    python lab/record_losses.py record before.json            # on one commit
    python lab/record_losses.py record after.json --cases before.json   # on another
    python lab/record_losses.py compare before.json after.json

    python lab/record_losses.py time before.json              # on a GPU, in turns on both commits, into the same two files
    python lab/record_losses.py compare before.json after.json

A change that only moves code around trains every rule to the same losses bit for bit. The script trains a small decoder with every
rule, in the option combinations of the oracles, for 50 steps on random tokens. It uses nothing but `depthmix.Decoder`, so that it runs
on commits whose other modules have other names. An option that a rule has gained changes which combinations are trained; `--cases`
trains those of another record. On a GPU it runs the kernels, in bf16 autocast, with deterministic sums.

`time` measures training steps, decoding steps and eager forward passes of a larger decoder, and appends them to the file. Run it
several times on both commits in turns; `compare` prints the ratio of the lowest times. Exit status: 1 if a loss differs or a rule
is missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
STEPS = 50
VOCABULARY, BATCH, TOKENS = 64, 4, 32
SMALL: dict[str, Any] = {"dim": 32, "n_blocks": 4, "n_heads": 2, "mlp": "relu2", "qk_norm": True}
# For times, on a GPU.
LARGE: dict[str, Any] = {"dim": 512, "n_blocks": 12, "n_heads": 8, "mlp": "relu2", "qk_norm": True}
LARGE_BATCH, LARGE_TOKENS, TIMED = 16, 512, 20
# Options that are timed besides every rule's defaults.
TIMED_RULES: dict[str, list[dict[str, Any]]] = {
    "attnres": [{"block_size": 4}, {"block_size": 4, "ways": 2}, {"block_size": 4, "ways": 3}, {"block_size": "all"}],
    "dca": [{"window": 8}],
    "grn": [{"version": 1}],
    "laurel": [{"variant": "pa"}],
}


def cases(rules: Sequence[str] = (), part: tuple[int, int] = (0, 1)) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (label, rule, options) of every rule, with so many option combinations that any two values meet.

    Args:
        rules: the rules to return; none means all.
        part: (i, n) to return every n-th case, beginning with case i, so that n processes share the work.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from oracles.cases import complete

    valid_cases = [
        (label, name, options) for name, options, label in complete(*rules, pairs=True) if is_valid(name, options)
    ]
    return valid_cases[part[0] :: part[1]]


def is_valid(name: str, options: dict[str, Any]) -> bool:
    """Tell whether a rule takes these options together; the oracles also list combinations that it refuses."""
    from depthmix import OptionError, create_mixer

    try:
        create_mixer(name, dim=SMALL["dim"], n_blocks=SMALL["n_blocks"], **options)
    except OptionError:
        return False
    return True


def build(name: str, options: dict[str, Any], shape: dict[str, Any], device: torch.device) -> torch.nn.Module:
    """Return a decoder with the rule, whose weights depend on nothing but a fixed seed."""
    from depthmix import Decoder, DecoderConfig

    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=VOCABULARY, mixer=name, mixer_options=options, **shape)
    model = Decoder(config)
    # Queries and gates that start at zero would hide what their gradients do in the first steps.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.to(device)


def losses(name: str, options: dict[str, Any], device: torch.device) -> list[str]:
    """Train for 50 steps and return every loss as a hexadecimal number, which keeps all bits."""
    model = build(name, options, SMALL, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    generator = torch.Generator().manual_seed(2)
    by_step = []
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=generator).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        by_step.append(float(loss.detach()).hex())
    return by_step


def milliseconds(name: str, options: dict[str, Any]) -> dict[str, float]:
    """Return the median times of a training step, an eager forward pass and a decoding step, at a size that fills a GPU."""
    from depthmix.models.decoding import Decoding

    device = torch.device("cuda")
    model: Any = build(name, options, LARGE, device)
    ids = torch.randint(VOCABULARY, (LARGE_BATCH, LARGE_TOKENS), device=device)

    def train() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            model(ids).float().square().mean().backward()

    @torch.no_grad()
    def read() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            model(ids)

    medians = {"training": median_milliseconds(train), "forward": median_milliseconds(read)}
    decoding = Decoding(model.bfloat16(), 8, 512)
    decoding.prefill(ids[:8, :64])
    token = ids[:8, 0]
    medians["decoding"] = median_milliseconds(lambda: decoding.step(token))
    return medians


def median_milliseconds(call: Callable[[], Any]) -> float:
    """Return the median time of a call on the GPU, after five calls that are not counted."""
    times = []
    for _ in range(TIMED + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[5:])


def recorded_cases(path: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (label, rule, options) of every case in a record."""
    return [(label, case["rule"], case["options"]) for label, case in json.loads(path.read_text())["cases"].items()]


def record(path: Path, device: torch.device, wanted: Sequence[tuple[str, str, dict[str, Any]]]) -> None:
    """Write the losses of cases.

    Args:
        path: file to write.
        device: where to train.
        wanted: (label, rule, options) of every case.
    """
    torch.use_deterministic_algorithms(device.type == "cuda", warn_only=True)
    torch.set_num_threads(1)
    by_case: dict[str, Any] = {}
    begun = time.monotonic()
    for label, name, options in wanted:
        by_case[label] = {"rule": name, "options": options, "losses": losses(name, options, device)}
        path.write_text(json.dumps({"device": str(device), "torch": torch.__version__, "cases": by_case}, indent=1))
    print(f"{len(by_case)} cases in {time.monotonic() - begun:.0f} s: {path}")


def record_times(path: Path, rules: Sequence[str]) -> None:
    """Append one round of times to a record, or begin one without losses."""
    from depthmix import list_mixers

    written: dict[str, Any] = {"device": "cuda", "torch": torch.__version__, "cases": {}}
    if path.exists():
        written = json.loads(path.read_text())
    for name in rules or list_mixers():
        for options in ({}, *TIMED_RULES.get(name, ())):
            label = "-".join([name, *(f"{option}={value}" for option, value in options.items())])
            case = written.setdefault("times", {}).setdefault(label, {})
            for kind, value in milliseconds(name, options).items():
                case.setdefault(kind, []).append(value)
        path.write_text(json.dumps(written, indent=1))


def compare(before: Path, after: Path) -> int:
    """Print what differs between two records; return the exit status."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    for key in ("device", "torch"):
        if old[key] != new[key]:
            print(f"the records cannot be compared: {key} is {old[key]} in one and {new[key]} in the other")
            return 1
    status = 0
    for label, case in old["cases"].items():
        other = new["cases"].get(label)
        if other is None:
            print(f"{label}: missing in {after}")
            status = 1
            continue
        differing = [i for i, (a, b) in enumerate(zip(case["losses"], other["losses"], strict=True)) if a != b]
        if differing:
            a, b = (float.fromhex(record["losses"][differing[0]]) for record in (case, other))
            print(f"{label}: {len(differing)} of {STEPS} losses differ, first at step {differing[0]}: {a!r} and {b!r}")
            status = 1
    for label, kinds in old.get("times", {}).items():
        for kind, times in kinds.items():
            others = new.get("times", {}).get(label, {}).get(kind)
            if others:
                a, b = min(times), min(others)
                print(f"{label}: {kind} {a:.3f} ms, then {b:.3f} ms, {b / a:.3f}")
    print("all losses are the same" if not status else "losses differ")
    return status


def main() -> int:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="train every rule and write its losses")
    recording.add_argument("path", type=Path, help="file to write")
    recording.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    recording.add_argument("--rules", nargs="+", default=(), help="rules to train; all by default")
    recording.add_argument(
        "--part", type=part_of, default=(0, 1), metavar="I/N", help="every N-th case, from case I on"
    )
    recording.add_argument(
        "--cases", type=Path, help="record whose cases to train, instead of the combinations of today"
    )
    timing = commands.add_parser("time", help="on a GPU, time every rule and append the times to a record")
    timing.add_argument("path", type=Path, help="file to write or extend")
    timing.add_argument("--rules", nargs="+", default=(), help="rules to time; all by default")
    comparing = commands.add_parser("compare", help="compare two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if options.command == "record":
        wanted = recorded_cases(options.cases) if options.cases else cases(options.rules, options.part)
        record(options.path, options.device, wanted)
    elif options.command == "time":
        record_times(options.path, options.rules)
    else:
        return compare(options.before, options.after)
    return 0


def part_of(text: str) -> tuple[int, int]:
    """Read "I/N" as two numbers."""
    first, _, count = text.partition("/")
    return int(first), int(count)


if __name__ == "__main__":
    sys.exit(main())
