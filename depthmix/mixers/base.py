"""The contract between a model and a rule for mixing over depth, and the registry of rules.

A *site* is one sublayer. Unless a model says otherwise (layout.py), attention of block i is site 2i, its MLP is site 2i + 1.
A *mixer* owns the rule and its parameters:

    state = mixer.start(x)                 # the embedding enters      [..., D]
    h     = mixer.read(state, site, norm)  # what this sublayer sees   [..., D], or several (see `ways`)
    state = mixer.write(state, site, y)    # what it produced          [..., D]
    out   = mixer.finish(state, norm)      # what the final norm sees  [..., D], or of the last tokens of [..., T, D] alone

The state is a value: `write` returns a new one and leaves the old one as it was; nothing is kept on the module.
A new mechanism subclasses `Mixer`, implements `_start`, `_read`, `_write` and `_finish`, and is decorated with `register`.
Where it needs to know what a site is, or where a block begins, it asks `self.layout`, never the site's number.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from depthmix.mixers.checks import (
    ContractError,
    Norm,
    Read,
    check_mixtures,
    check_norms,
    check_order,
    check_tensor,
    check_use,
    check_written,
)
from depthmix.mixers.fast_path import FastPath, load_paths
from depthmix.mixers.kept import (
    changed_after_read,
    changed_in_place,
    record_returned,
    record_versions,
    refuse_changes,
    still_kept,
)
from depthmix.mixers.layout import BLOCK, Layout, Sites
from depthmix.mixers.mixing import mixing_matrix
from depthmix.mixers.options import Option, OptionError, check_options, options_of, plain_value
from depthmix.mixers.state import State
from depthmix.mixers.variant import NamesVariant
from depthmix.names import nearest
from depthmix.ops.precision import promoted_dtype, without_autocast


class Mixer(NamesVariant):
    """One rule for mixing over depth, with its parameters laid out by site."""

    # `name`, `options` (set by `register`) and what state dicts carry: variant.py.
    decayed: ClassVar[frozenset[str]] = frozenset()  # parameters that weight decay applies to
    channel_mixing: bool = (
        False  # M's entries are D x D matrices, the same for every token; `mixing` gives their mean diagonal
    )
    fractions: int | None = (
        None  # M's entries are matrices of so many fractions of the channels; `mixing` gives their diagonal
    )

    # Faster ways to run the rule, as "module:NAME" (fast_path.py); the first that can take a pass runs it.
    fast_paths: ClassVar[tuple[str | FastPath, ...]] = ()

    # Set by `register` before the constructor runs, which therefore need not pass them on.
    layout: Layout

    def __init__(self, dim: int, n_blocks: int) -> None:
        super().__init__()
        Option("dim", None, (int,), (), False, 1).check(self.name, dim)
        self.dim, self.n_blocks, self.n_sites = dim, n_blocks, self.layout.n_sites
        self._sites = list(range(self.n_sites))
        self._paths = load_paths(self.fast_paths)

    # What a mechanism implements. It computes without autocast, in fp32 or wider, and rounds once.

    def reset_parameters(self) -> None:
        """Set every parameter to its initial value."""

    def ways(self, site: int) -> int:
        """How many mixtures `read` returns at a site: 1 or, of attention, 2 (for queries and keys, for values) or 3 (one for each).

        Of an MLP with a gate, 2: for the gate, for the up projection.
        """
        return 1

    def _start(self, x: Tensor) -> State:
        raise NotImplementedError(f"{self.name} does not implement _start(x): the state that begins with the embedding")

    def _read(self, state: Any, site: int) -> Read:
        raise NotImplementedError(f"{self.name} does not implement _read(state, site): what the site sees")

    def _write(self, state: Any, site: int, y: Tensor) -> State:
        raise NotImplementedError(f"{self.name} does not implement _write(state, site, y): the state after it")

    def _finish(self, state: Any) -> Tensor:
        raise NotImplementedError(f"{self.name} does not implement _finish(state): what the final norm sees")

    def _write_scaled(self, state: Any, site: int, y: Tensor) -> State:
        """`_write` of an output that has been multiplied with its gain."""
        return self._write(state, site, y)

    def _read_normed(self, state: Any, site: int, norms: Sequence[Norm]) -> Read | None:
        """The read with its norms applied, for rules that can do both at once; None leaves the norms to `read`."""
        return None

    def _finish_normed(self, state: Any, norm: Norm) -> Tensor | None:
        """The same of finish."""
        return None

    # The contract.

    def start(self, x: Tensor) -> State:
        """Begin a pass with the embedding x [..., D]."""
        check_tensor(self, "start", x)
        for p in self.parameters():
            if p.device != x.device:
                raise ContractError(
                    f"start: {self.name}'s parameters are on {p.device}, but the embedding is on {x.device}"
                )
            break
        with without_autocast(x):
            for path in self._paths:
                state = path.start(self, x)
                if state is not None:
                    return self._hand_out(state)
            return self._hand_out(self._start(x))

    def read(self, state: Any, site: int, norm: Norm | Sequence[Norm] | None = None) -> Read:
        """What site sees: [..., D], or a tuple of `ways(site)` of them. norm, one per way, is applied to it."""
        site = check_order(self, "read", state, site)
        if changed := changed_in_place(state):
            refuse_changes(f"read at site {site}", self.name, changed)
        given, norms = state, check_norms(self, norm, site)
        with without_autocast(state.template()):
            state = self._continued(state)
            x, path = state.template(), state.path
            if state is not given:
                given.leave_note(state)  # which the write goes on from
            if norms is not None:
                normed = self._read_normed(state, site, norms) if path is None else path.read(self, state, site, norms)
                if normed is not None:
                    return normed
            h = self._read(state, site) if path is None else path.read(self, state, site, None)
            check_mixtures(self, f"read at site {site}", h, self.ways(site), x)
            h = tuple(t.to(x.dtype) for t in h) if isinstance(h, tuple) else h.to(x.dtype)
        if norms is None:
            record_returned(given, h if isinstance(h, tuple) else (h,))
            return h
        return tuple(f(t) for f, t in zip(norms, h, strict=True)) if isinstance(h, tuple) else norms[0](h)

    def output_gains(self) -> Mapping[int, Tensor]:
        """What `write` multiplies outputs with, channel by channel: {site: [D]}; most rules have none.

        A model may do that itself where it costs less, in the weights of its output projections, and says so: write(..., scaled=True).
        """
        return {}

    def write(self, state: Any, site: int, y: Tensor, scaled: bool = False) -> Any:
        """The state after site produced y [..., D]. scaled: y has been multiplied with the site's `output_gains`."""
        site = check_order(self, "write", state, site)
        changed = changed_in_place(state)
        if changed and not state.was_read():
            refuse_changes(f"write at site {site}", self.name, changed)
        changed += changed_after_read(state)
        x = state.template()
        check_tensor(self, "write", y)
        if y.shape != x.shape:
            raise ContractError(f"write at site {site}: expected shape {list(x.shape)}, got {list(y.shape)}")
        if y.device != x.device:
            raise ContractError(f"write at site {site}: expected a tensor on {x.device}, got one on {y.device}")
        if promoted_dtype((x, y)) != x.dtype:
            raise ContractError(
                f"write at site {site}: expected {x.dtype}, the embedding's dtype, or a narrower one, got {y.dtype}"
            )
        with without_autocast(x):
            state = self._continued(state)
            if state.path is not None:
                after = state.path.write(self, state, site, y, scaled)
            else:
                after = self._write_scaled(state, site, y) if scaled else self._write(state, site, y)
        check_written(self, site, after, x)
        if changed:  # what the read has used up may change: a caller may give every output in one buffer
            refuse_changes(f"write at site {site}", self.name, still_kept(changed, after, y))
        return self._hand_out(after)

    def finish(self, state: Any, norm: Norm | None = None, last: int | None = None) -> Tensor:
        """What the final norm sees: [..., D]. norm is applied to it. last: of so many tokens at the end of [..., T, D] alone."""
        check_use(self, "finish", state)
        if state.site != self.n_sites:
            raise ContractError(f"finish is out of order: site {state.site} of {self.n_sites} has not been written yet")
        with without_autocast(state.template()):
            state = self._continued(state)
        if last is not None:  # rules are local to a token
            state = state if torch.is_grad_enabled() else state.last(last)
            return self._finish_all(state, norm)[..., -last:, :]
        return self._finish_all(state, norm)

    def _finish_all(self, state: Any, norm: Norm | None) -> Tensor:
        x, path = state.template(), state.path
        with without_autocast(x):
            normed: Tensor | None = None
            if norm is not None:
                normed = self._finish_normed(state, norm) if path is None else path.finish(self, state, norm)
            if normed is not None:
                return normed
            h = self._finish(state) if path is None else path.finish(self, state, None)
            check_mixtures(self, "finish", h, 1, x)
            h = h.to(x.dtype)
        return h if norm is None else norm(h)

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

    def _hand_out(self, state: Any) -> Any:
        """Mark a state as one of this mixer, and remember what it keeps."""
        if isinstance(state, State):
            state.made_for = self.signature
            record_versions(state)
        return state

    def _continued(self, state: Any) -> Any:
        """Return the state in the form with which the pass continues: that of its path, of another path, or the rule's own."""
        if state.note is not None and isinstance(state.note[1], State):  # a read has converted it
            converted = state.take_note()
            if converted is not None:
                return converted
        if state.path is not None:
            same = state.path.resume(self, state)
            if same is not None:
                return same
            state = state.path.to_plain(self, state)
        for path in self._paths:
            taken = path.resume(self, state)
            if taken is not None:
                return taken
        return state

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # model.bfloat16() or model.to(dtype=...) moves a mixer but does not round its parameters: they stay fp32.
        def keep_precision(t: Tensor) -> Tensor:
            out = fn(t)
            return t.to(out.device) if out.dtype in (torch.bfloat16, torch.float16) else out

        return super()._apply(keep_precision, recurse)

    def extra_repr(self) -> str:
        given = {n: value for n, value in self.chosen.items() if isinstance(value, int | float | str)}
        sizes: dict[str, Any] = {"dim": self.dim, "n_blocks": self.n_blocks}
        if set(self.layout.blocks) != {BLOCK}:
            sizes["sites"] = self.layout.short()
        return ", ".join(f"{k}={v!r}" for k, v in {**sizes, **given}.items())


# The registry.

MixerType = TypeVar("MixerType", bound=type[Mixer])
_MIXERS: dict[str, type[Mixer]] = {}


def register(name: str) -> Callable[[MixerType], MixerType]:
    """Class decorator: make a mixer known under a name, with its options checked whenever one is built."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        said = "a mixer's name is of letters, digits, _, - and ., and is given when it is registered"
        raise OptionError(f"{said}, as in @register('my_rule'), got {name!r}")

    def decorate(cls: MixerType) -> MixerType:
        there = _MIXERS.get(name)
        if there is not None and (there.__module__, there.__qualname__) != (cls.__module__, cls.__qualname__):
            raise OptionError(f"there is a mixer {name!r} already, {there.__module__}.{there.__qualname__}")
        cls.name, cls.options = name, options_of(name, cls.__init__)
        build = cls.__init__

        @functools.wraps(build)
        def checked(
            self: Mixer, dim: int, n_blocks: int | None = None, *, sites: Sites | None = None, **options: Any
        ) -> None:
            dim, n_blocks = plain_value(dim), plain_value(n_blocks)
            options = {option: plain_value(value) for option, value in options.items()}
            check_options(name, cls.options, options)
            layout = self.__dict__.get("layout")  # there already if this is the constructor of a base class
            outermost = layout is None
            if layout is None:
                layout = Layout.of(name, n_blocks, sites)
                object.__setattr__(self, "layout", layout)  # nn.Module is not there yet
                object.__setattr__(self, "chosen", {n: options.get(n, o.default) for n, o in cls.options.items()})
            default = torch.get_default_dtype()  # a bf16 default must not reach a mixer's parameters
            torch.set_default_dtype(torch.promote_types(default, torch.float32))
            try:
                build(self, dim, layout.n_blocks, **options)
            finally:
                torch.set_default_dtype(default)
            if outermost:
                _check_built(self)
                self.signature = f"{name}({self.extra_repr()})"

        cls.__init__ = checked  # type: ignore[method-assign]
        _MIXERS[name] = cls
        return cls

    return decorate


def _check_built(mixer: Mixer) -> None:
    """That no option hides a method, and that models know what to do with the ways of each site."""
    for option in mixer.options:
        if option in mixer.__dict__ and callable(getattr(Mixer, option, None)):
            hides = f"option {option!r} is kept as self.{option}, which hides the method of that name"
            raise OptionError(f"{mixer.name}: {hides}; keep it under another")
    for site in range(mixer.n_sites):
        if mixer.ways(site) not in (1, 2, 3):
            raise OptionError(f"{mixer.name}: a site has 1, 2 or 3 ways, site {site} has {mixer.ways(site)}")


def list_mixers() -> list[str]:
    """The names of all mixers."""
    return sorted(_MIXERS)


def mixer_class(name: str) -> type[Mixer]:
    """The class registered under a name."""
    if name not in _MIXERS:
        rule, colon, _ = str(name).partition(":")
        if colon and rule in _MIXERS:  # as tables and comparisons write it
            said = f"mixer {name!r} is a rule with its options, which are given apart here"
            raise OptionError(f"{said}: mixer {rule!r}, and each option by its name")
        hint = (
            nearest(str(name), _MIXERS)
            or "; one of your own is known once its file is imported, in a command with --modules FILE"
        )
        raise OptionError(f"unknown mixer {name!r}; there are {', '.join(list_mixers())}{hint}")
    return _MIXERS[name]


def create_mixer(
    name: str, *, dim: int, n_blocks: int | None = None, sites: Sites | None = None, **options: Any
) -> Mixer:
    """Build a mixer: dim channels, n_blocks Transformer blocks, and the mechanism's own options.

    A block has two sites, attention and an MLP, unless `sites` names others: those of every block, as in
    ("attention", "cross_attention", "mlp"), or a list of blocks, each with its own, which then says how many there are.
    """
    build: Any = mixer_class(name)
    return build(dim=dim, n_blocks=n_blocks, sites=sites, **options)
