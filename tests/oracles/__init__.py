"""Reference implementations written from docs/mechanisms.md and the papers alone; they share no code with depthmix.

One file per mechanism: `run`, and before it what docs/mechanisms.md says in tables,

    DEFAULTS                 every option's default
    OPTIONS                  option combinations worth trying
    DEAD_ROWS                {(parameter, row)}: rows (of sites or readers) that cannot receive a gradient with the defaults
    parameters(o, D, N, S)   {name: (shape, initial value)}; the value is a number, a function of the shape, or None where it is random
    starts_plain(options)    whether the logits at step 0 are those of the plain residual
"""

import importlib
import pkgutil

SHARED = {"cases", "shapes", "tables", "test_oracles", "trace"}
MODULES = {
    m.name: importlib.import_module(f".{m.name}", __name__)
    for m in pkgutil.iter_modules(__path__)
    if m.name not in SHARED
}
ORACLES = {name: module.run for name, module in MODULES.items()}
DEFAULTS = {name: module.DEFAULTS for name, module in MODULES.items()}
