"""Give a model that was trained with the plain residual another rule, so that it computes the same function at step 0.

Where a read begins as a share c of the plain stream x, its norm sees c x. RMSNorm and LayerNorm undo the factor, except in their eps:

    norm(c x; c² eps) = norm(x; eps)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from depthmix.mixers.base import Mixer
from depthmix.mixers.initial_share import initial_shares


def is_plain(mixer: Mixer) -> bool:
    """Tell whether the rule is the plain residual and stays so, because it has nothing to learn."""
    return next(mixer.parameters(), None) is None and set(initial_shares(mixer)) == {1.0}


def why_not_plain(mixer: Mixer) -> str | None:
    """Say why a model of plain residuals would compute something else with this mixer at its start; None if it would not."""
    for site, share in enumerate(initial_shares(mixer)):
        if share is None:
            reader = "the final norm" if site == mixer.n_sites else f"site {site}"
            rule = f"{mixer.name}{' with these options' if mixer.options else ''}"
            what = f"what {reader} reads at step 0 is not a multiple of the plain stream"
            return f"{rule} does not begin as the plain residual: {what} (docs/guides/retrofit.md names the rules and options that do not)"
    return None


def eps_of_plain(mixer: Mixer, site: int, eps: float) -> float:
    """Scale a norm's eps by the square of the read's initial share of the plain stream.

    With it a retrofitted model reproduces its original logits.

    Args:
        mixer: the rule.
        site: the reader; S for finish.
        eps: of the original norm.
    """
    share = initial_shares(mixer)[site]
    return eps if share is None else eps * share**2


def read_early(mixer: Mixer, state: Any) -> Tensor:
    """Return the input of a final norm that comes after fewer sites than there are: what the next site reads, before its norm.

    A read with several ways gives its first one. It is scaled to the initial share of finish, for which the norm's eps was chosen.
    """
    h = mixer.read(state, state.site)
    h = h[0] if isinstance(h, tuple) else h
    shares = initial_shares(mixer)
    share, final_share = shares[state.site], shares[-1]
    return h if not share or not final_share or share == final_share else h * (final_share / share)
