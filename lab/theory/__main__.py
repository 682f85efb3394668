"""`python -m lab.theory --out FOLDER`: the figures and numbers of lab/theory/README.md, on a CPU in under a minute."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from depthmix.errors import UserError
from depthmix.files import check_above, write_text
from lab.theory.figures import draw
from lab.theory.results import compute, tables


def main(argv: Sequence[str] | None = None) -> int:
    """Compute, draw and write. A user's error ends in one sentence and an exit code, as in `depthmix`."""
    parser = argparse.ArgumentParser(prog="python -m lab.theory", description=__doc__)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    out = Path(parser.parse_args(argv).out)
    try:
        check_above(out / "numbers.md")
        results = compute(lambda sentence: print(sentence, file=sys.stderr))
        write_text(out / "numbers.md", tables(results))
        for path in (out / "numbers.md", *draw(results, out)):
            print(path)
    except UserError as error:
        print(f"depthmix: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
