"""The contract between a model and a rule for mixing over depth.

A *site* is one sublayer. Unless a model says otherwise (layout.py), attention of block i is site 2i, its MLP is site 2i + 1.
A *mixer* owns the rule and its parameters. The state is a value: `write` returns a new one, and nothing is kept on the module.

A new rule subclasses `Mixer`, implements `_start`, `_read`, `_write` and `_finish`, and is decorated with `register` (registry.py).
Where it needs to know what a site is, or where a block begins, it asks `self.layout`, never the site's number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from depthmix.mixers import checks, kept
from depthmix.mixers.checks import Norm, Read
from depthmix.mixers.fast_path import FastPath, continue_pass, load_paths
from depthmix.mixers.layout import BLOCK, Layout
from depthmix.mixers.mixing import mixing_matrix
from depthmix.mixers.options import Option
from depthmix.mixers.state import State
from depthmix.mixers.variant import NamesVariant
from depthmix.ops.precision import without_autocast


class Mixer(NamesVariant):
    """A rule for mixing over depth, with its parameters laid out by site."""

    # What a model calls.

    def start(self, x: Tensor) -> State:
        """Begin a pass with the embedding x [..., D]."""
        checks.check_start(self, x)
        with without_autocast(x):
            for path in self._paths:
                state = path.start(self, x)
                if state is not None:
                    return self._hand_out(state)
            return self._hand_out(self._start(x))

    def read(self, state: Any, site: int, norm: Norm | Sequence[Norm] | None = None) -> Read:
        """Return what a site sees.

        Args:
            state: from `start` or the last `write`.
            site: the site that the state expects.
            norm: what is applied to each mixture, one norm per way.

        Returns:
            [..., D], or a tuple of `ways(site)` of them.
        """
        site = checks.check_order(self, "read", state, site)
        kept.refuse_changed_state(f"read at site {site}", self.name, state)
        norms = checks.check_norms(self, norm, site)
        with without_autocast(state.template()):
            running = continue_pass(self, state)
            if running is not state:
                state.leave_note(running)  # the write goes on from it
            x, path = running.template(), running.path
            if norms is not None and path is not None:
                normed: Read | None = path.read(self, running, site, norms)
                if normed is not None:
                    return normed
            h = self._read(running, site) if path is None else path.read(self, running, site, None)
            mixtures = checks.check_mixtures(self, f"read at site {site}", h, self.ways(site), x)
        if norms is None:
            kept.record_returned(state, mixtures)
        else:
            mixtures = tuple(f(t) for f, t in zip(norms, mixtures, strict=True))
        return mixtures if isinstance(h, tuple) else mixtures[0]

    def write(self, state: Any, site: int, y: Tensor, scaled: bool = False) -> Any:
        """Return the state after a site produced y.

        Args:
            state: the state that the site read.
            site: the site.
            y: its output [..., D].
            scaled: y has been multiplied with the site's `output_gains`.
        """
        site = checks.check_order(self, "write", state, site)
        x = state.template()
        changed = kept.changed_before_write(self.name, state)
        checks.check_output(self, site, y, x)
        with without_autocast(x):
            state = continue_pass(self, state)
            if state.path is not None:
                after = state.path.write(self, state, site, y, scaled)
            else:
                after = self._write(state, site, y if scaled else self._scaled(site, y, x))
        checks.check_written(self, site, after, x)
        # A caller may give every output in one buffer, as long as the state has stopped using the older output.
        if changed:
            kept.refuse_changes(f"write at site {site}", self.name, kept.still_kept(changed, after, y))
        return self._hand_out(after)

    def finish(self, state: Any, norm: Norm | None = None, last: int | None = None) -> Tensor:
        """Return what the final norm sees, [..., D].

        Args:
            state: the state after the last site's write.
            norm: applied to the result.
            last: return only this many tokens at the end of [..., T, D]. Rules are local to a token.
        """
        checks.check_finish(self, state)
        with without_autocast(state.template()):
            state = continue_pass(self, state)
            if last is not None and not torch.is_grad_enabled():
                state = state.last(last)
            x, path = state.template(), state.path
            out: Tensor | None = None if norm is None or path is None else path.finish(self, state, norm)
            if out is None:
                h = self._finish(state) if path is None else path.finish(self, state, None)
                (h,) = checks.check_mixtures(self, "finish", h, 1, x)
        if out is None:
            out = h if norm is None else norm(h)
        return out if last is None else out[..., -last:, :]

    def mixing(self, sources: Sequence[Tensor], per_token: bool = False) -> Tensor:
        """Return the depth-mixing matrix M[way, site, source] of one pass.

        Args:
            sources: the embedding and the raw output of every site, S + 1 tensors [..., D].
            per_token: average over channels only, and not over tokens.

        Returns:
            [W, S+1, S+1], or [..., W, S+1, S+1] per token. Row s holds the weights with which site s reads; row S is finish.

        Raises:
            ContractError: another number of sources.
        """
        return mixing_matrix(self, sources, per_token)

    # What a rule says. It computes without autocast, in fp32 or wider, and rounds once. `weight_options` is in variant.py.

    # Parameters that weight decay applies to.
    decayed: ClassVar[frozenset[str]] = frozenset()
    # True if the entries of M are D x D matrices. `mixing` gives their mean diagonal.
    channel_mixing: bool = False
    # The number of fractions of the channels, if the entries of M are matrices of them. `mixing` gives their diagonal.
    fractions: int | None = None
    # Faster ways to run the rule, as "module:NAME" (fast_path.py). The first that can take a pass runs it.
    fast_paths: ClassVar[tuple[str | FastPath, ...]] = ()
    # The model's sites. Set before the constructor runs, which therefore need not pass them on.
    layout: Layout

    def __init__(self, dim: int, n_blocks: int) -> None:
        super().__init__()
        Option("dim", None, (int,), (), False, 1).check(self.name, dim)
        self.dim, self.n_blocks, self.n_sites = dim, n_blocks, self.layout.n_sites
        self._sites = list(range(self.n_sites))
        self._paths = load_paths(self.fast_paths)

    def reset_parameters(self) -> None:
        """Set every parameter to its initial value."""

    def ways(self, site: int) -> int:
        """Return how many mixtures `read` gives a site.

        1; for attention also 2 (queries and keys, values) or 3 (one each); for an MLP with a gate also 2 (gate, up projection).
        """
        return 1

    def _start(self, x: Tensor) -> State:
        raise NotImplementedError(f"{self.name} does not implement _start(x): the state that begins with the embedding")

    def _read(self, state: Any, site: int) -> Read:
        raise NotImplementedError(f"{self.name} does not implement _read(state, site): what the site sees")

    def _write(self, state: Any, site: int, y: Tensor) -> State:
        """Return the state after y, which has been multiplied with its output gain."""
        raise NotImplementedError(f"{self.name} does not implement _write(state, site, y): the state after it")

    def _finish(self, state: Any) -> Tensor:
        raise NotImplementedError(f"{self.name} does not implement _finish(state): what the final norm sees")

    def output_gains(self) -> Mapping[int, Tensor]:
        """Return what outputs are multiplied with, channel by channel: {site: [D]}; most rules have none.

        A model may multiply the weights of its output projections instead, and then calls write(..., scaled=True).
        """
        return {}

    # The rest is no rule's business.

    def _scaled(self, site: int, y: Tensor, x: Tensor) -> Tensor:
        # The class's method, since insight lets the instance's return nothing.
        gain = type(self).output_gains(self).get(site)
        return y if gain is None else (y * gain).to(x.dtype)

    def _hand_out(self, state: Any) -> Any:
        """Mark a state as one of this mixer, and remember the versions of its tensors."""
        if isinstance(state, State):
            state.made_for = self.signature
            kept.record_versions(state)
        return state

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # model.bfloat16() or model.to(dtype=...) moves a mixer but does not round its parameters: they stay fp32.
        def keep_precision(t: Tensor) -> Tensor:
            out = fn(t)
            return t.to(out.device) if out.dtype in (torch.bfloat16, torch.float16) else out

        return super()._apply(keep_precision, recurse)

    def extra_repr(self) -> str:
        shown = {name: value for name, value in self.chosen.items() if isinstance(value, int | float | str)}
        sizes: dict[str, Any] = {"dim": self.dim, "n_blocks": self.n_blocks}
        if set(self.layout.blocks) != {BLOCK}:
            sizes["sites"] = self.layout.short()
        return ", ".join(f"{k}={v!r}" for k, v in {**sizes, **shown}.items())
