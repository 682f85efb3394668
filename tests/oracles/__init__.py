"""Reference implementations written from docs/reference/rules.md and the papers alone; they share no code with depthmix.

One file per mechanism: `run`, and before it what docs/reference/rules.md says in tables,

    DEFAULTS                 every option's default
    OPTIONS                  option combinations worth trying
    DEAD_ROWS                {(parameter, row)}: rows (of sites or readers) that cannot receive a gradient with the defaults
    parameters(o, D, blocks) {name: (shape, initial value)}; the value is a number, a function of the shape, or None where it is random
    starts_plain(options)    whether the logits at step 0 are those of the plain residual

run(parameters, options, blocks, e, sublayer): blocks is what blocks.py says; a caller may give a number, for blocks of attention and an MLP.
"""

import importlib
import pkgutil

from .blocks import Blocks

SHARED = {"blocks", "cases", "shapes", "tables", "test_oracles", "trace"}
MODULES = {
    m.name: importlib.import_module(f".{m.name}", __name__)
    for m in pkgutil.iter_modules(__path__)
    if m.name not in SHARED
}


def of_blocks(run):
    return lambda p, options, blocks, e, sublayer: run(p, options, Blocks(blocks), e, sublayer)


ORACLES = {name: of_blocks(module.run) for name, module in MODULES.items()}
DEFAULTS = {name: module.DEFAULTS for name, module in MODULES.items()}
