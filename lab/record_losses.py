"""Record the losses of every rule on one commit and compare two records bit for bit.

    python lab/record_losses.py record before.json            # on one commit
    python lab/record_losses.py record after.json             # on another
    python lab/record_losses.py compare before.json after.json

A change that only moves code around trains every rule to the same losses bit for bit. The script trains a small decoder with every
rule, in the option combinations of the oracles, for 50 steps on random tokens. It uses nothing but `depthmix.Decoder`, so that it runs
on commits whose other modules have other names. On a GPU it runs the kernels, in bf16 autocast, with deterministic sums, and also
times the steps; `compare` prints the ratio of the times. Exit status: 1 if a loss differs or a rule is missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
STEPS = 50
VOCABULARY, BATCH, TOKENS = 64, 4, 32
SMALL: dict[str, Any] = {"dim": 32, "n_blocks": 4, "n_heads": 2, "mlp": "relu2", "qk_norm": True}
LARGE: dict[str, Any] = {
    "dim": 512,
    "n_blocks": 12,
    "n_heads": 8,
    "mlp": "relu2",
    "qk_norm": True,
}  # for step times, on a GPU
LARGE_BATCH, LARGE_TOKENS, TIMED = 16, 512, 20


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    """Return (label, rule, options) of every rule, with so many option combinations that any two values meet."""
    sys.path.insert(0, str(ROOT / "tests"))
    from oracles.cases import complete

    return [(label, name, options) for name, options, label in complete(pairs=True) if is_valid(name, options)]


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
    found = []
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=generator).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()).hex())
    return found


def step_milliseconds(name: str, options: dict[str, Any]) -> float:
    """Return the median time of a forward and backward pass at a size that fills a GPU."""
    device = torch.device("cuda")
    model = build(name, options, LARGE, device)
    ids = torch.randint(VOCABULARY, (LARGE_BATCH, LARGE_TOKENS), device=device)
    times = []
    for _ in range(TIMED + 5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        with torch.autocast("cuda", torch.bfloat16):
            model(ids).float().square().mean().backward()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[5:])


def record(path: Path, device: torch.device, timed: bool) -> None:
    """Write the losses of every case, and its step time where asked for."""
    torch.use_deterministic_algorithms(device.type == "cuda", warn_only=True)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    begun = time.monotonic()
    for label, name, options in cases():
        found[label] = {"losses": losses(name, options, device)}
        if timed:
            found[label]["milliseconds"] = step_milliseconds(name, options)
        path.write_text(json.dumps({"device": str(device), "torch": torch.__version__, "cases": found}, indent=1))
    print(f"{len(found)} cases in {time.monotonic() - begun:.0f} s: {path}")


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
        if "milliseconds" in case and "milliseconds" in other:
            ratio = other["milliseconds"] / case["milliseconds"]
            print(f"{label}: {case['milliseconds']:.2f} ms, then {other['milliseconds']:.2f} ms, {ratio:.3f}")
    print("all losses are the same" if not status else "losses differ")
    return status


def main() -> int:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="train every rule and write its losses")
    recording.add_argument("path", type=Path, help="file to write")
    recording.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", type=torch.device)
    recording.add_argument("--times", action="store_true", help="on a GPU, also time the steps of a larger model")
    comparing = commands.add_parser("compare", help="compare two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        sys.path.insert(0, str(ROOT))
        record(options.path, options.device, options.times)
        return 0
    return compare(options.before, options.after)


if __name__ == "__main__":
    sys.exit(main())
