"""Checks of the contract: what a model passes to a mixer, and what a rule returns.

Every error names the call and says what was expected and what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from depthmix.mixers.kept import refuse_changed_state
from depthmix.mixers.state import State
from depthmix.ops.precision import promoted_dtype

if TYPE_CHECKING:
    from depthmix.mixers.base import Mixer

Norm = Callable[[Tensor], Tensor]
Read = Tensor | tuple[Tensor, ...]


class ContractError(ValueError):
    """Raised when the contract is used out of order, or with a tensor that does not fit."""


# What a model passes.


def check_tensor(mixer: Mixer, call: str, x: Tensor) -> None:
    """Raise ContractError unless x is a floating-point tensor [..., D]."""
    if not isinstance(x, Tensor):
        raise ContractError(f"{call}: expected a tensor, got {type(x).__name__}")
    if x.ndim < 1 or x.shape[-1] != mixer.dim:
        raise ContractError(f"{call}: expected shape [..., {mixer.dim}], got {list(x.shape)}")
    if not x.is_floating_point():
        raise ContractError(f"{call}: expected a floating-point tensor, got {x.dtype}")


def check_state(mixer: Mixer, call: str, state: Any) -> None:
    """Raise ContractError unless the state is one that this mixer, or one built alike, returned."""
    if not isinstance(state, State):
        raise ContractError(f"{call}: expected the state that start or write returned, got {type(state).__name__}")
    if state.made_for is not None and state.made_for != mixer.signature:
        raise ContractError(f"{call}: the state is one of {state.made_for}, and this mixer is {mixer.signature}")


def check_start(mixer: Mixer, x: Any) -> None:
    """Raise ContractError unless x can be the embedding of a pass."""
    check_tensor(mixer, "start", x)
    parameter = next(mixer.parameters(), None)
    if parameter is not None and parameter.device != x.device:
        where = f"{mixer.name}'s parameters are on {parameter.device}, but the embedding is on {x.device}"
        raise ContractError(f"start: {where}")


def check_output(mixer: Mixer, site: int, y: Any, x: Tensor) -> None:
    """Raise ContractError unless y can be a site's output in a pass whose embedding is like x."""
    check_tensor(mixer, "write", y)
    if y.shape != x.shape:
        raise ContractError(f"write at site {site}: expected shape {list(x.shape)}, got {list(y.shape)}")
    if y.device != x.device:
        raise ContractError(f"write at site {site}: expected a tensor on {x.device}, got one on {y.device}")
    if promoted_dtype((x, y)) != x.dtype:
        expected = f"{x.dtype}, the embedding's dtype, or a narrower one"
        raise ContractError(f"write at site {site}: expected {expected}, got {y.dtype}")


def check_use(mixer: Mixer, call: str, state: Any) -> None:
    """Raise unless the state is this mixer's and nobody has changed its tensors in place."""
    check_state(mixer, call, state)
    refuse_changed_state(call, mixer.name, state)


def check_finish(mixer: Mixer, state: Any) -> None:
    """Raise unless the state is fit for use and every site has been written."""
    check_use(mixer, "finish", state)
    if state.site != mixer.n_sites:
        raise ContractError(f"finish is out of order: site {state.site} of {mixer.n_sites} has not been written yet")


def check_order(mixer: Mixer, call: str, state: Any, site: int) -> int:
    """Raise ContractError unless `site` is the one that the state expects, and return it as a plain number."""
    check_state(mixer, call, state)
    if not 0 <= site < mixer.n_sites:
        have = "1 block has" if mixer.n_blocks == 1 else f"{mixer.n_blocks} blocks have"
        raise ContractError(f"{call}: there is no site {site}; {have} sites 0 to {mixer.n_sites - 1}")
    if site != state.site:
        expected = f"site {state.site}" if state.site < mixer.n_sites else "finish, since every site is written"
        raise ContractError(f"{call} at site {site} is out of order: this state expects {expected}")
    # A site is a place in the program, not a size: taken from a list, torch.compile(dynamic=True) sees a plain number.
    return mixer._sites[site]


def check_norms(mixer: Mixer, norm: Norm | Sequence[Norm] | None, site: int) -> Sequence[Norm] | None:
    """Return the norms of a read as a sequence. Raise ContractError unless there is one per way."""
    if norm is None:
        return None
    norms: Any = norm if isinstance(norm, (list, tuple, nn.ModuleList)) else (norm,)
    ways = mixer.ways(site)
    if len(norms) != ways:
        expected = f"{ways} norm{'s' * (ways > 1)}, one per way"
        raise ContractError(f"read at site {site}: expected {expected}, got {len(norms)}")
    return norms


# What a rule returns. Authors of a rule meet these first.


def check_mixtures(mixer: Mixer, call: str, h: Any, ways: int, x: Tensor) -> tuple[Tensor, ...]:
    """Return a rule's mixtures as a tuple, rounded to the embedding's dtype.

    Raises:
        ContractError: the rule did not return `ways` tensors of the embedding's shape.
    """
    mixtures = h if isinstance(h, tuple) else (h,)
    if len(mixtures) != ways:
        raise ContractError(f"{call}: {mixer.name} has {ways} way{'s' * (ways > 1)} there, got {len(mixtures)}")
    for t in mixtures:
        if not isinstance(t, Tensor) or t.shape != x.shape:
            got = list(t.shape) if isinstance(t, Tensor) else type(t).__name__
            raise ContractError(f"{call}: {mixer.name} must give tensors of shape {list(x.shape)}, got {got}")
    return tuple(t.to(x.dtype) for t in mixtures)


def check_written(mixer: Mixer, site: int, state: Any, x: Tensor) -> None:
    """Raise ContractError unless a rule returned the state of the next site, in the embedding's dtype and shape."""
    call = f"write at site {site}: {mixer.name}"
    if not isinstance(state, State):
        raise ContractError(f"{call} must return a state, got {type(state).__name__}")
    if state.site != site + 1:
        raise ContractError(f"{call} must return the state of site {site + 1}, which state.next(...) makes")
    new = state.template()
    if new.dtype != x.dtype or new.shape != x.shape:
        change = f"{new.dtype} of shape {list(new.shape)}, where it was {x.dtype} of {list(x.shape)}"
        raise ContractError(f"{call} put {change}, into the state; what a rule keeps it rounds itself")
