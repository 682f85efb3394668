"""List the docstrings that do not begin with a verb, and fail where more than 2% of them do not.

    python tools/docstrings.py               # all folders, as `make lint` does
    python tools/docstrings.py depthmix/ops  # any other file or folder

A function's docstring begins with a verb that says what the function does: "Return the rows …", not "The rows …". Modules,
classes and properties are things, and a noun names them. None begins with a word such as "What" or "Whether", which sets the
reader a riddle before it names the subject.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 0.02

# Folders that keep the rule.
FOLDERS = ("depthmix", "benchmarks", "examples", "lab", "tools")

# First words that name no subject.
_VAGUE = """
    as by each for how it its of one that these they this those what when where whether which who whoever whom why
"""

# First words of a function's docstring. Add a verb that is missing; a noun is a docstring to rewrite.
_VERBS = """
    abort accept accumulate adapt add adjust agree align allocate allow analyse announce answer append apply approximate arrange ask assemble assert assign attach await average
    begin bind build cache calculate call cast catch change check choose claim clean clear clip close collect combine compare compile compress
    compute configure connect consume continue convert copy count create cut deal decide decode declare decode define delete derive
    describe detach detect determine differentiate disable discard dispatch display divide do download draw drop dump embed enable encode end enforce
    ensure enter equal escape estimate evaluate exchange execute exit expand explain export extend extract fail fetch fill filter find
    finish fit flag flatten flush fold force forget format forward free freeze gather generate get give group guard guess handle hash
    hide hold identify ignore import initialise insert inspect install intercept invoke join judge keep label launch leave lend let link list
    load locate lock log look make map mark mask match measure meet memory-map merge mix move multiply name normalise note notify number offer open order
    overwrite pack pad parse pass patch pause permute pick pickle place plan plot poll post predict prefetch prepare print probe
    process produce profile project propose protect provide prune publish pull push put quote raise rank read rebuild receive recompute
    reconstruct record recover reduce refill refuse register reject release reload remember remove rename render reorder
    repeat replace replay report request require reserve reset reshape reshard resolve restart restore restrict resume retrofit return reuse
    reverse rewrite rotate round route run sample save say scale scan schedule score search seed select send serialise serve set
    settle shape shard share shift shorten show shuffle sign simulate skip slice sort spawn split spread stack stand stage start state step stop store stream
    strip sum summarise suppress suggest swap switch synchronise take tell test tie time tokenise tokenize trace track train transform translate
    treat trial trim truncate try tune turn uncompress undo unlock unpack unshard unwrap update use validate verify visit wait
    walk warm warn watch weigh widen wrap write yield zero
"""
VAGUE, VERBS = set(_VAGUE.split()), set(_VERBS.split())


def docstrings(path: Path) -> Iterator[tuple[int, str, str, bool]]:
    """Yield (line, name, docstring, whether it belongs to a function) for every docstring in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not (text := ast.get_docstring(node)):
            continue
        name = getattr(node, "name", path.stem)
        decorators = {ast.unparse(d).rpartition(".")[2] for d in getattr(node, "decorator_list", [])}
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield getattr(node, "lineno", 1), name, text, is_function and not decorators & {"property", "cached_property"}


def is_clear(text: str, is_function: bool) -> bool:
    """Tell whether a docstring begins with a verb, or, if it is not a function's, with a word that names something."""
    words = [word.strip("`.,:;()") for word in text.lower().split()[:2]]
    if words[0] in VAGUE or words == ["the", "same"]:
        return False
    return words[0] in VERBS if is_function else True


def main() -> int:
    """Check the files and folders named on the command line, or all folders."""
    places = [Path(place) for place in sys.argv[1:]] or [ROOT / folder for folder in FOLDERS]
    files = [file for place in places for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    total, unclear = 0, []
    for file in files:
        for line, name, text, is_function in docstrings(file):
            total += 1
            if not is_clear(text, is_function):
                unclear.append(f"{file}:{line}: {name}: {text.splitlines()[0]}")
    print(*unclear, sep="\n", end="\n" * bool(unclear))
    share = len(unclear) / max(1, total)
    print(f"{len(unclear)} of {total} docstrings do not begin with a verb ({share:.1%}; at most {LIMIT:.0%})")
    return share > LIMIT


if __name__ == "__main__":
    sys.exit(main())
