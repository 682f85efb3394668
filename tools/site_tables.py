"""Tables that the documentation takes from the program and from committed results.

A page has a line `<!-- table: NAME ARGUMENTS -->`; tools/site_hooks.py puts the table there when the site is built.

    recipes              the files in recipes/, with the first sentence of each
    steps 54m            training steps, from benchmarks/results; also `steps wide` and `steps cpu`
    stacks               reads of a whole stack beside other packages' kernels
    peers                whole rules beside other packages
    decoding             decoding steps, prompts and memory beside the plain residual's
    bandwidth            share of a copy's bandwidth that each kernel reaches
    readme limits        a part of the README: `headline`, `versions` or `limits`, for pages in docs/ itself

On the page of rules, tables with the head `| option | meaning |` get two columns more: what a rule's options accept, and their
defaults. `command_line()` is a page of its own, from the argument parsers.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARK = re.compile(r"^<!-- table: ([\w =:,.-]+) -->$", re.M)
SECTION = re.compile(r"^## (\w+).*?(?=^## |\Z)", re.M | re.S)
OPTIONS = re.compile(r"^\| option \| meaning \|\n\|---\|---\|\n((?:\|.*\n)+)", re.M)
Row = dict[str, str]

# Files of steps, oldest first: a rule's row is of the newest file that has the rule.
STEPS = {
    "54m": ("step", "step-attnres", "step-one-block", "step-gains", "step-rule"),
    "wide": ("all", "step", "wide"),
}
SHAPES = {"54m": "gutenberg-54m", "wide": "wide"}
# (entry, case, how the page calls it)
STACKS = (
    ("full-stack", "L=32, N=16384, D=2048", "Full, 32 sites, 16,384 tokens, width 2048"),
    ("full-stack", "L=24, N=32768, D=512", "Full, 24 sites, 32,768 tokens, width 512"),
    ("full-stack", "L=64, N=8192, D=2048", "Full, 64 sites, 8,192 tokens, width 2048"),
    (
        "block-stack",
        "L=32, N=16384, D=2048, 8 sites a block",
        "Block, 32 sites, 8 per block, 16,384 tokens, width 2048",
    ),
)
# (case, metric, the package in the results, how the page calls what was timed, and the package)
PEERS = (
    (
        "8 sites, n=4, N=16384, D=2048",
        "forward+backward",
        "liger",
        "mHC's operators, 8 sites, 4 streams, 16,384 tokens, width 2048",
        "Liger-Kernel",
    ),
    (
        "dca: 12 blocks, D=512, 8192 tokens",
        "step",
        "deep_cross_attention",
        "`dca`, compiled training step, 12 blocks, 8,192 tokens, width 512",
        "deep-cross-attention",
    ),
    (
        "hyper:norm=rmsnorm: 12 blocks, D=512, 8192 tokens",
        "step",
        "hyper_connections",
        "`hyper`, compiled training step, 12 blocks, 8,192 tokens, width 512",
        "hyper-connections",
    ),
)
# Parts of the README that pages show, and the pages that answer for its sections.
README_PARTS = {
    "headline": r"^<!-- headline:[^\n]*\n(.*?)^<!-- end of headline -->",
    "versions": r"^(\| what was run \|.*?)\n\n",
    "limits": r"^## Limits\n(.*?)^## ",
}
README_SECTIONS = {"#does-it-help": "results.md"}


def fill(markdown: str) -> str:
    """Replace each mark of a page by its table, and complete tables of options."""
    return SECTION.sub(complete_options, MARK.sub(lambda match: make(*match[1].split()), markdown))


def make(kind: str, *words: str) -> str:
    """Return the table that a mark names."""
    makers = {
        "recipes": recipes,
        "steps": steps,
        "stacks": stacks,
        "peers": peers,
        "bandwidth": bandwidth,
        "decoding": decoding,
        "readme": readme,
    }
    return makers[kind](*words)


def readme(part: str) -> str:
    """Return a part of the README, so that both say the same. Its links lead from a page in docs/ itself."""
    found = re.search(README_PARTS[part], (ROOT / "README.md").read_text(), re.M | re.S)
    if found is None:
        raise ValueError(f"the README has no {part}")

    def relink(link: re.Match[str]) -> str:
        target = link[1]
        if target.startswith("#"):
            return f"]({README_SECTIONS[target]})"
        return f"]({target.removeprefix('docs/') if target.startswith('docs/') else f'../{target}'})"

    return re.sub(r"\]\((?!\w+:)([^)]+)\)", relink, found[1].strip())


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int | None = None) -> str:
    """Return a Markdown table. Columns from `numbers` on are aligned to the right."""
    first = len(head) if numbers is None else numbers
    rule = ["---" if i < first else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


# The program


def complete_options(section: re.Match[str]) -> str:
    """Return a rule's section, its table of options with what each accepts and its default, from the registry."""
    from depthmix.mixers import mixer_class

    def complete(found: re.Match[str]) -> str:
        known = mixer_class(section[1]).options
        meanings = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", found[1], re.M))
        if list(meanings) != list(known):
            raise ValueError(f"{section[1]}: the page has the options {list(meanings)}, the rule {list(known)}")
        rows = ((f"`{o.name}`", words(o.describe()), f"`{o.default}`", meanings[o.name]) for o in known.values())
        return table(("option", "values", "default", "meaning"), rows) + "\n"

    return OPTIONS.sub(complete, section[0])


def words(text: str) -> str:
    """Return what an option accepts, with its words as code."""
    return re.sub(r"'([^']*)'", r"`\1`", text.replace("None", "`None`").replace("True or False", "`True` or `False`"))


def command_line() -> str:
    """Return the page on commands: each with its arguments, which are also the lines of a recipe."""
    from depthmix.cli import EXIT_CODES, build_parser

    parser = build_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    summary = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    page = [
        "# Command line",
        "Every option is a flag and a line of a YAML recipe: `--batch-size 32` is `batch_size: 32`. Flags override the recipe that `--recipe` names. "
        "This page is made from the program's own help.",
        table(("command", "purpose"), ((f"[`{name}`](#{name})", plain(text)) for name, text in summary.items())),
        exit_codes(EXIT_CODES),
        "## Recipes\n\nEach file in `recipes/` can be run again as it is.\n\n" + recipes(),
    ]
    train = {action.dest: action.help for action in commands.choices["train"]._actions}
    for name, command in commands.choices.items():
        own = [action for action in command._actions if action.dest not in ("help", "debug")]
        shared = name != "train" and set(train) <= {a.dest for a in command._actions}
        if shared:
            own = [action for action in own if train.get(action.dest) != action.help]
        usage = f"    depthmix {name} {' '.join(a.metavar or a.dest for a in own if not a.option_strings)}".rstrip()
        page.append(f"## {name}\n\n{plain(command.description or summary[name])}\n\n{usage}")
        if shared:
            page.append("All options of [`train`](#train), and these:")
        rows = [row for action in own if (row := argument(action))] + recipe_only(name)
        if rows:
            page.append(table(("option", "meaning", "default"), rows))
    return "\n\n".join(page) + "\n"


def recipe_only(name: str) -> list[tuple[str, str, str]]:
    """Return the rows of a command's options that stand in a recipe and have no flag."""
    from depthmix.cli import COMMANDS

    config = COMMANDS[name][0] if name in COMMANDS else None
    fields = [f for f in dataclasses.fields(config) if not f.metadata["flag"]] if config else []
    return [(f"`{field.name}` (recipe)", plain(field.metadata["help"]), "") for field in fields]


def argument(action: argparse.Action) -> tuple[str, str, str] | None:
    """Return the row of one argument; None for a word that repeats a flag."""
    text = (action.help or "").replace("%%", "%")
    if text.startswith("Same as"):
        return None
    default = re.search(r" \(default: (.*)\)$", text)
    text = plain(text[: default.start()] if default else text)
    name = action.option_strings[0] if action.option_strings else action.dest
    metavar = str(action.metavar or "")
    if metavar.startswith("{"):
        text += " (" + ", ".join(f"`{choice}`" for choice in metavar.strip("{}").split(",")) + ")"
    return f"`{name}`", text, f"`{default[1]}`" if default else ""


def plain(text: str) -> str:
    """Return a help text as Markdown for a table: one sentence, without signs that would end a cell."""
    text = text.strip().replace("|", "\\|")
    return text[:1].upper() + text[1:] if text else ""


def exit_codes(line: str) -> str:
    """Return the program's exit codes as a table."""
    codes = [part.strip().split(" ", 1) for part in line.removeprefix("Exit codes: ").rstrip(".").split(";")]
    return table(("exit code", "meaning"), codes)


def recipes() -> str:
    """Return the files in recipes/ with the first sentence of their first comment."""
    rows = []
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        comment = re.match(r"(?:#.*\n)*", path.read_text())[0]
        first = re.match(r".*?[.?](?=\s|$)", " ".join(line.lstrip("# ") for line in comment.splitlines()) + " ")
        question = re.search(r"^question: *>?\s*([^\n]+)", path.read_text(), re.M)
        shown = question[1] if question else first[0] if first else ""
        name = path.relative_to(ROOT)
        rows.append((f"[{name}](../../{name})", plain(shown)))
    return table(("recipe", "contents"), rows)


# Committed results


def read(name: str, machine: str = "h200") -> list[Row]:
    with (RESULTS / machine / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def value(rows: Iterable[Row], case: str, who: str, metric: str) -> float | None:
    """Return the newest value of a metric; None where it was not measured."""
    found = [r["value"] for r in rows if (r["case"], r["who"], r["metric"]) == (case, who, metric)]
    return float(found[-1]) if found and found[-1] else None


def steps(size: str) -> str:
    """Return training steps of one size, each rule from the newest run that has it."""
    if size == "cpu":
        rows = read("cpu-step", "cpu")
        arms = {r["who"]: float(r["value"]) for r in rows if r["metric"] == "step / residual"}
        ms = {r["who"]: float(r["value"]) for r in rows if r["metric"] == "step"}
        return table(
            ("rule", "step / plain", "step, ms"),
            ((f"`{arm}`", f"{ratio:.2f}", f"{ms[arm]:.0f}") for arm, ratio in arms.items()),
            1,
        )
    newest: dict[str, tuple[str, ...]] = {}
    for name in STEPS[size]:
        for who, found in measured_steps(read(name), SHAPES[size]).items():
            who = who.replace("block_size=24", "block_size=all")
            newest.pop(who, None)
            newest[who] = found
        if plain := plain_step(read(name), SHAPES[size]):
            newest["residual"] = plain
    order = sorted(newest, key=lambda who: float(newest[who][0]))
    return table(
        ("rule", "step / plain", "step, ms", "plain step beside it, ms", "memory, GiB", "measured"),
        ((f"`{who}`", *newest[who]) for who in order),
        1,
    )


def measured_steps(rows: list[Row], shape: str) -> dict[str, tuple[str, ...]]:
    """Return {rule: cells} of one file of results."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["entry"] == "step" and row["case"].startswith(shape + ":"):
            found.setdefault(row["who"], {"date": row["date"]})[row["metric"]] = row["value"]
    return {
        who: (
            f"{float(x['step / residual']):.2f}",
            f"{float(x['step']):.1f}",
            f"{float(x['step of residual beside it']):.1f}",
            f"{float(x['memory of a step']):.1f}",
            shown_date(x["date"]),
        )
        for who, x in found.items()
        if x.get("step / residual")
    }


def plain_step(rows: list[Row], shape: str) -> tuple[str, ...] | None:
    """Return the plain model's cells in one file of results. Its time is the one beside the first rule."""
    own = [row for row in rows if row["entry"] == "step" and row["case"].startswith(shape + ":")]
    memory = [row for row in own if (row["who"], row["metric"]) == ("residual", "memory of a step")]
    beside = [float(row["value"]) for row in own if row["metric"] == "step of residual beside it"]
    if not memory or not beside:
        return None
    ms = f"{beside[0]:.1f}"
    return ("1.00", ms, ms, f"{float(memory[-1]['value']):.1f}", shown_date(memory[-1]["date"]))


def shown_date(date: str) -> str:
    """Return a date with hyphens at which a narrow column does not break."""
    return date.replace("-", "\N{NON-BREAKING HYPHEN}")


def stacks() -> str:
    """Return times of a whole stack of reads beside the published kernels."""
    rows = read("all")
    lines = []
    for entry, case, what in STACKS:
        own = [row for row in rows if row["entry"] == entry]
        ours, fla, other = (value(own, case, who, "forward+backward") for who in ("ours", "fla", "flash-attn-res"))
        memory = value(own, case, "ours", "memory / fla")
        best = min(x for x in (fla, other) if x)
        lines.append(
            (
                what,
                f"{ours:.1f}",
                f"{fla:.1f}",
                f"{other:.1f}" if other else "–",
                f"{best / ours:.1f}×",
                f"{memory:.2f}×",
            )
        )
    return table(
        ("stack", "depthmix, ms", "flash-linear-attention, ms", "flash-attn-res, ms", "faster by", "memory"), lines, 1
    )


def peers() -> str:
    """Return times of whole rules beside other packages."""
    rows = read("peers")
    lines = []
    for case, metric, who, what, package in PEERS:
        ours, theirs = (value(rows, case, name, metric) for name in ("ours", who))
        lines.append((what, package, f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.1f}×"))
    return table(("what", "package", "depthmix, ms", "package, ms", "faster by"), lines, 2)


def bandwidth() -> str:
    """Return each kernel's share of a copy's bandwidth at width 2048."""
    rows = [r for r in read("bandwidth-2048") if r["metric"] == "share of copy bandwidth" and r["who"] != "copy"]
    return table(("kernel", "share"), ((r["who"], f"{float(r['value']):.2f}") for r in rows), 1)


def decoding() -> str:
    """Return times and memory of decoding steps and prompts, relative to the plain residual."""
    lines = []
    for entry, what, metric in (
        ("decode", "a decoding step", "time / residual"),
        ("prefill", "a prompt of 8,192 tokens", "time / residual"),
        ("prefill-memory", "peak memory, 131,072 tokens in chunks of 2,048", "peak memory / residual"),
    ):
        rows = [row for row in read(entry) if row["metric"] == metric and row["who"] != "residual"]
        for case in dict.fromkeys(row["case"] for row in rows):
            size, batch = re.findall(r" (54m|1b):", case)[0], re.findall(r"batch \d+", case)
            cells = {row["who"]: f"{float(row['value']):.2f}×" for row in rows if row["case"] == case}
            block = "attnres:block_size=" + ("4" if size == "54m" else "8")
            arms = (block, "attnres", f"{block},ways=2", "dca")
            title = ", ".join([what, size.upper(), *batch])
            lines.append((title, *(cells[arm] for arm in arms)))
    return table(("", "Block", "Full", "Block, two ways", "`dca`"), lines, 1)
