"""Option combinations worth trying, one list per mechanism."""

from . import DEFAULTS, MODULES

OPTIONS = {name: module.OPTIONS for name, module in MODULES.items()}


def complete(*names, keep=lambda name, options: True):
    """(name, complete options, id) of every combination, of all mechanisms or of the named ones."""
    for name in names or OPTIONS:
        for choice in OPTIONS[name]:
            options = DEFAULTS[name] | choice
            if keep(name, options):
                yield name, options, "-".join([name, *(f"{k}={v}" for k, v in choice.items())])
