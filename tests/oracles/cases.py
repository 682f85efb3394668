"""Option combinations worth trying, one list per mechanism."""

from heapq import heapify, heappop, heapreplace
from itertools import combinations

from . import DEFAULTS, MODULES

OPTIONS = {name: module.OPTIONS for name, module in MODULES.items()}


def pairwise(name, choices, n=2, matters=lambda meeting: True):
    """Return few of the combinations, in which every two (or n) options still have all values that meet in any of them.

    Meetings of which `matters` says no, tuples of (option, value), may be left out.
    """
    values = [sorted((DEFAULTS.get(name, {}) | choice).items()) for choice in choices]
    met = [{m for size in range(1, n + 1) for m in combinations(v, size) if matters(m)} for v in values]
    left, kept = set().union(*met), []
    # The best combination next. The heap holds gains as they were: they only shrink, so most need not be counted again.
    gains = [(-len(m), i) for i, m in enumerate(met)]
    heapify(gains)
    while left or not kept:
        _, best = gains[0]
        gain = (-len(met[best] & left), best)
        if heapreplace(gains, gain) == gain:
            heappop(gains)
            kept.append(best)
            left -= met[best]
    return [choices[i] for i in sorted(kept)]


def complete(*names, keep=lambda name, options: True, pairs=False):
    """(name, complete options, id) of every combination, or of those all pairs need, of all mechanisms or of the named ones."""
    for name in names or OPTIONS:
        for choice in pairwise(name, OPTIONS[name]) if pairs else OPTIONS[name]:
            options = DEFAULTS[name] | choice
            if keep(name, options):
                yield name, options, "-".join([name, *(f"{k}={v}" for k, v in choice.items())])
