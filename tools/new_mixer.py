"""Begin a rule: `make new-mixer NAME=halving` writes a rule that works and its oracle, and marks the places to change with YOURS:."""

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

from depthmix.mixers.one_stream import OneStream
from depthmix.mixers.registry import register
from depthmix.mixers.state import StreamState
from depthmix.ops.precision import compute_dtype


@register("@name@")
class @Name@(OneStream):
    """a [S] = init."""

    # YOURS: the options. They are keyword arguments, and their annotations say what is valid.
    def __init__(self, dim: int, n_blocks: int, *, init: float = 0.5) -> None:
        super().__init__(dim, n_blocks)
        self.init = init
        # YOURS: the parameters, one row per site, created empty and filled in reset_parameters.
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

YOURS: from the paper alone. M[s, 0] = a_0 ... a_{s-1};  M[s, i+1] = a_{i+1} ... a_{s-1}.
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
    # YOURS: blocks.sites has the sites of each block, blocks.attention the attention sites.
    for s in range(blocks.S):
        reads.append((x,))
        x = a[s] * x + sublayer(s, (x,))
    reads.append((x,))
    M = no_mixing(1, blocks, e)  # YOURS: M[way, reader, source] has a weight per channel
    for s in range(blocks.S + 1):
        for i in range(s + 1):
            M[:, s, i] = a[i:s].detach().prod()
    return Trace(x, reads, M)
'''


def fill(template: str, name: str) -> str:
    """Put a rule's name into a template."""
    return template.replace("@name@", name).replace("@Name@", name.title().replace("_", ""))


def main(name: str) -> None:
    """Write the two files, or exit with the reason why not."""
    mixer, oracle = ROOT / "depthmix" / "mixers" / f"{name}.py", ROOT / "tests" / "oracles" / f"{name}.py"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise SystemExit(f"new-mixer: NAME must be a lower-case Python name, as in NAME=halving, got {name!r}")
    for path in (mixer, oracle):
        if path.exists():
            raise SystemExit(f"new-mixer: {path.relative_to(ROOT)} already exists: choose another NAME")
    for path, template in ((mixer, MIXER), (oracle, ORACLE)):
        path.write_text(fill(template, name))
        print(path.relative_to(ROOT))
    print(f"{name} is a rule that works now. Change what is marked YOURS:, then run `make test`.")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
