"""Option combinations worth trying, one list per mechanism."""

from itertools import combinations

from . import DEFAULTS, MODULES

OPTIONS = {name: module.OPTIONS for name, module in MODULES.items()}


def pairwise(name, choices, n=2):
    """Few of the combinations, among which every two (or n) options still have every two values that meet in any of them."""
    values = [sorted((DEFAULTS.get(name, {}) | choice).items()) for choice in choices]
    met = [{meeting for size in range(1, n + 1) for meeting in combinations(v, size)} for v in values]
    left, kept = set().union(*met), set()
    while left or not kept:
        best = max(range(len(met)), key=lambda i: len(met[i] & left))
        kept.add(best)
        left -= met[best]
    return [choices[i] for i in sorted(kept)]


def complete(*names, keep=lambda name, options: True, pairs=False):
    """(name, complete options, id) of every combination, or of those all pairs need, of all mechanisms or of the named ones."""
    for name in names or OPTIONS:
        for choice in pairwise(name, OPTIONS[name]) if pairs else OPTIONS[name]:
            options = DEFAULTS[name] | choice
            if keep(name, options):
                yield name, options, "-".join([name, *(f"{k}={v}" for k, v in choice.items())])
