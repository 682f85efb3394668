"""Begin a mechanism: `make new-mixer NAME=halving` writes the files of a working rule. Places to change are marked YOURS:."""

import keyword
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

MIXER = '''"""@Name@ (YOURS: authors, year, arXiv number): the stream fades as outputs arrive.

x_{s+1} = a_s x_s + y_s
"""

import torch
from torch import Tensor, nn

from depthmix.mixers.base import register
from depthmix.mixers.one_stream import OneStream
from depthmix.mixers.state import StreamState
from depthmix.ops.precision import compute_dtype


@register("@name@")
class @Name@(OneStream):
    """a [S] = init."""

    # YOURS: the options are keyword arguments, their annotations say what is valid.
    def __init__(self, dim: int, n_blocks: int, *, init: float = 0.5) -> None:
        super().__init__(dim, n_blocks)
        self.init = init
        # YOURS: the parameters, by site, created empty and filled in reset_parameters.
        self.a = nn.Parameter(torch.empty(self.n_sites))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.a, self.init)

    # YOURS: how a site's output joins the stream, in fp32 or wider.
    def _join(self, state: StreamState, site: int, y: Tensor) -> Tensor:
        wide = compute_dtype(state.x)
        return self.a[site].to(wide) * state.x.to(wide) + y.to(wide)
'''

ORACLE = '''"""@name@: x_0 = e;  h_s = x_s;  x_{s+1} = a_s x_s + y_s;  h_S = x_S.

YOURS: from the paper and docs/mechanisms.md alone. M[s, 0] = a_0 ... a_{s-1};  M[s, i+1] = a_{i+1} ... a_{s-1}.
"""

from .trace import Trace, no_mixing

DEFAULTS = {"init": 0.5}  # YOURS: every option's default
OPTIONS = [{}, {"init": 0.9}]  # YOURS: combinations of options worth trying
DEAD_ROWS = set()  # YOURS: {(parameter, row)} that cannot receive a gradient with the defaults, and why


def parameters(o, D, blocks):
    return {"a": ((blocks.S,), o["init"])}  # YOURS: {name: (shape, initial value)}; the value None where it is random


def starts_plain(options):
    return options["init"] == 1  # YOURS: whether the logits at step 0 are the plain residual's


def run(p, options, blocks, e, sublayer) -> Trace:
    a = p["a"]
    x, reads = e, []
    for s in range(blocks.S):  # YOURS: blocks.sites has the sites of each block, blocks.attention those that are attention
        reads.append((x,))
        x = a[s] * x + sublayer(s, (x,))
    reads.append((x,))
    M = no_mixing(1, blocks, e)
    for s in range(blocks.S + 1):
        for i in range(s + 1):
            M[:, s, i] = a[i:s].detach().prod()
    return Trace(x, reads, M)
'''

SECTION = """
## @name@  (YOURS: authors, year, arXiv number)

    x_0 = e;   h_s = x_s;   x_{s+1} = a_s · x_s + y_s;   h_S = x_S

| option | values | default |
|---|---|---|
| `init` | initial a | 0.5 |

`a` [S]; `init`. Not plain at step 0. No weight decay. YOURS: what was decided where the sources are silent or disagree.
"""

ROW = "| `@name@` | YOURS: the rule in a few words | `init` |\n"


def fill(template: str, name: str) -> str:
    return template.replace("@name@", name).replace("@Name@", name.title().replace("_", ""))


def with_row(readme: str, row: str) -> str:
    """Return the README with one more row at the end of its table of mixers."""
    table = re.search(r"^\| mixer \|.*\n(?:\|.*\n)+", readme, re.M)
    if table is None:
        raise SystemExit("new-mixer: README.md has no table of mixers")
    return readme[: table.end()] + row + readme[table.end() :]


def main(name: str) -> None:
    mixer, oracle = ROOT / "depthmix" / "mixers" / f"{name}.py", ROOT / "tests" / "oracles" / f"{name}.py"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise SystemExit(f"new-mixer: NAME must be a lower-case Python name, as in NAME=halving, got {name!r}")
    for path in (mixer, oracle):
        if path.exists():
            raise SystemExit(f"new-mixer: {path.relative_to(ROOT)} already exists: choose another NAME")
    page, readme = ROOT / "docs" / "mechanisms.md", ROOT / "README.md"
    texts = {
        mixer: fill(MIXER, name),
        oracle: fill(ORACLE, name),
        page: page.read_text() + fill(SECTION, name),
        readme: with_row(readme.read_text(), fill(ROW, name)),
    }
    for path, text in texts.items():
        path.write_text(text)
        print(path.relative_to(ROOT))
    print(f"{name} is a working mixer now. Change the places that are marked YOURS:, then run `make test`.")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
