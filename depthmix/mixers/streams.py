"""n residual streams, what Hyper-Connections and mHC have in common: the state, and a pass by kernels.

With kernels the write of a site waits for the read of the next: one step (ops/stream_mix/step.py) does both, and the state
holds the streams before the write beside what is to be written. `settled` is what they amount to.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from depthmix.mixers.base import Mixer, Norm
from depthmix.mixers.cutting import BySite
from depthmix.mixers.state import State, register_state
from depthmix.ops import stream_read, stream_write
from depthmix.ops.autograd import own_backward
from depthmix.ops.backend import choose
from depthmix.ops.norm import eps_of, is_plain_rms_norm
from depthmix.ops.precision import compute_dtype, without_autocast
from depthmix.ops.stream_mix.op import stream_rule_read, why_unsupported
from depthmix.ops.stream_mix.products import halves_of
from depthmix.ops.stream_mix.rules import Rule, by_column
from depthmix.ops.stream_mix.step import Inputs, Step, step


class Tape(NamedTuple):
    """What passes from site to site: what each site's rule needs and, for kernels, the embedding as long as the streams are its copies."""

    first: Tensor | None  # [..., D]
    rules: Sequence[tuple[Tensor, ...]]  # w, base, scale and w's halves; or pre, post and res that all tokens share
    trained: bool  # made with gradients
    columns: bool = False  # w, base and scale by column, as the reference reads with them at once


class Note(NamedTuple):
    """What a read leaves for the write of its site."""

    found: Step
    tape: Tape
    kernels: bool  # they wrote what waited, and let the write wait that comes


@register_state
class StreamsState(State):
    """n streams; with kernels, and what the last site writes to them."""

    x: Tensor  # [..., n, D]
    y: Tensor | None = None  # [..., D]
    post: Tensor | None = None  # [..., n] or [n]
    res: Tensor | None = None  # [..., n, n] or [n, n]; None: the identity
    pre: Tensor | None = None  # [..., n], for a read with the weights that the site before predicted
    tape: Tape | None = dataclasses.field(default=None, repr=False, metadata={"cache": True})

    def template(self) -> Tensor:
        return self.x.select(-2, 0)

    def settled(self) -> Tensor:
        """The streams, with nothing left to write: [..., n, D]."""
        return self.x if self.y is None or self.post is None else stream_write(self.x, self.res, self.post, self.y)


def copies(x: Tensor, n: int) -> Tensor:
    """n streams that are all the embedding: [..., D] -> [..., n, D]."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], n, x.shape[-1])


class StreamMixer(Mixer):
    """A rule over n streams: subclasses say what its weights are, for kernels and without them."""

    n: int

    # What a rule implements.

    def _coefficients(self, state: StreamsState, site: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """pre and post [..., n] and res [..., n, n] (output stream first; None for the identity) of streams with nothing left to write.

        pre is for the read of this site or, where reads have the weights of the site before, of the next. The site's
        parameters are those of `_any_tape`."""
        raise NotImplementedError

    def _rule(self) -> Rule | None:
        """How kernels make these weights; None if they are the same for every token."""
        raise NotImplementedError

    def _for_all_sites(self) -> tuple[Tensor, Tensor, Tensor]:
        """w, base and scale of the rule for all sites that are here, [S, ...], or without a rule pre, post and res."""
        raise NotImplementedError

    def _last_read(self, state: StreamsState) -> Tensor | None:
        """The weights [..., n] or [n] of finish, where they are known before the last write."""
        return torch.ones(self.n, device=state.x.device, dtype=compute_dtype(state.x))

    def _head(self, state: StreamsState) -> Tensor:
        """The weights of finish, where they follow from the streams."""
        raise NotImplementedError

    # What those who look ask for.

    def streams(self, state: StreamsState) -> Tensor:
        return state.settled()

    def stream_map(self, state: StreamsState) -> Tensor:
        with without_autocast(state.x):
            res = self._without_kernels(state, self._sites[state.site]).found.res
        if res is None:
            res = torch.eye(self.n, device=state.x.device, dtype=compute_dtype(state.x))
        return res.expand(*state.x.shape[:-2], self.n, self.n)

    def _settled(self, state: StreamsState) -> StreamsState:
        return dataclasses.replace(self._plain(state), tape=None, note=None)

    # Whether kernels do the work.

    def _tape(self, state: StreamsState) -> Tape | None:
        """What kernels work with; None where they are not used."""
        if state.frozen or torch.compiler.is_compiling():
            return None
        wide = any(p.dtype == torch.float64 for p in itertools.islice(self.parameters(), 1))  # all are alike
        why = why_unsupported(state.x, state.y, self.n, wide=wide)
        if choose(self.name, state.x, why) == "reference":
            return None
        return self._any_tape(state)

    def _any_tape(self, state: StreamsState, columns: bool = False) -> Tape:
        """The tape of a state, made anew if it comes from elsewhere."""
        tape, trained = state.tape, torch.is_grad_enabled()
        if tape is None or tape.trained != trained or tape.columns != columns:
            tape = Tape(None, self._by_site(state.x.dtype, columns), trained, columns)
        return tape

    def _by_site(self, kind: torch.dtype, columns: bool) -> Sequence[tuple[Tensor, ...]]:
        """Taken apart once a pass, so that a parameter's gradient is put together once."""
        parameters, rule = list(self._for_all_sites()), self._rule()
        if columns:
            assert rule is not None
            parameters = list(by_column(rule, *parameters))
        elif kind == torch.bfloat16 and rule is not None:
            parameters.append(halves_of(parameters[0].detach()))
        rules = list(zip(*(p.unbind(0) for p in parameters), strict=True))
        return BySite(rules, self.held.start) if self.held.start else rules

    def _reads_at_once(self, state: StreamsState) -> bool:
        """Whether the reference makes a site's weights and reads with them as one node of autograd."""
        rule = self._rule()
        return rule is not None and not rule.joint and not state.frozen and own_backward()

    def _step(
        self, state: StreamsState, tape: Tape, rule: Rule | None, pre: Tensor | None, parameters: Sequence[Tensor] = (),
        gain: Tensor | None = None, eps: float = 0.0,
    ) -> Step:  # fmt: skip
        """The write that waits, and a read."""
        tokens, n, dim = state.x.shape[:-2], self.n, self.dim
        x = state.x.reshape(-1, n, dim) if tape.first is None else tape.first.reshape(-1, dim)
        y = None if state.y is None else state.y.reshape(-1, dim)
        post, res = (flat(state.post, n), flat(state.res, n, n)) if state.y is not None else (None, None)
        w, base, scale, halves = (*parameters, None, None, None, None)[:4]
        given = Inputs(x, y, post, res, flat(pre, n), w, base, scale, gain, halves)
        found = step(rule, n, eps, given)

        def shaped(t: Tensor | None, *rest: int) -> Tensor | None:
            return None if t is None else t.view(*tokens, *rest)

        return Step(
            state.x if y is None else found.x.view(*tokens, n, dim),
            found.h.view(*tokens, dim),
            shaped(found.pre, n),
            shaped(found.post, n),
            shaped(found.res, n, n),
        )

    def _step_at(self, state: StreamsState, tape: Tape, site: int, gain: Tensor | None, eps: float) -> Step:
        """The write that waits, and the read of a site."""
        rule, parameters = self._rule(), tape.rules[site]
        if rule is not None:
            return self._step(state, tape, rule, state.pre, parameters, gain, eps)
        pre, post, res = parameters
        return self._step(state, tape, None, pre, (), gain, eps)._replace(post=post, res=res)

    # The contract.

    def _start(self, x: Tensor) -> StreamsState:
        state = StreamsState(x=copies(x, self.n), pre=self._first_read(x))
        tape = self._tape(state)
        state.tape = self._any_tape(state, self._reads_at_once(state)) if tape is None else tape._replace(first=x)
        return state

    def _first_read(self, x: Tensor) -> Tensor | None:
        """The weights of the first read where those of a read come from the site before."""
        return None

    def _plain(self, state: StreamsState) -> StreamsState:
        """The state with nothing left to write."""
        return state if state.y is None else dataclasses.replace(state, x=state.settled(), y=None, post=None, res=None)

    def _by_kernels(self, state: StreamsState, site: int, gain: Tensor | None = None, eps: float = 0.0) -> Note | None:
        tape = self._tape(state)
        if tape is None:
            return None
        found = self._step_at(state, tape, site, gain, eps)
        return Note(found, tape if state.y is None else tape._replace(first=None), kernels=True)

    def _without_kernels(self, state: StreamsState, site: int) -> Note:
        """The write that waits, and the weights of a site."""
        tape = self._any_tape(state)
        plain = dataclasses.replace(self._plain(state), tape=tape)
        return Note(Step(plain.x, plain.x, *self._coefficients(plain, site)), tape, kernels=False)

    def _at_once(self, state: StreamsState, site: int, gain: Tensor | None = None, eps: float = 0.0) -> Note | None:
        """The write that waits, the weights of a site and its read, where the reference can do the last two at once."""
        if not self._reads_at_once(state):
            return None
        rule, tape, x = self._rule(), self._any_tape(state, columns=True), state.settled()
        assert rule is not None
        columns, bases, scales = tape.rules[site]
        h, post, res = stream_rule_read(rule, x, columns, bases, scales, gain, eps)
        return Note(Step(x, h, None, post, res), tape, kernels=False)

    def _read(self, state: StreamsState, site: int) -> Tensor:
        note = self._by_kernels(state, site)
        if note is None and state.pre is not None:
            return stream_read(state.settled(), state.pre)
        note = note or self._at_once(state, site)
        if note is None:
            note = self._without_kernels(state, site)
            assert note.found.pre is not None
            note = note._replace(found=note.found._replace(h=stream_read(note.found.x, note.found.pre)))
        state.leave_note(note)
        return note.found.h

    def _read_normed(self, state: StreamsState, site: int, norms: Sequence[Norm]) -> Tensor | None:
        norm = norms[0]
        if not is_plain_rms_norm(norm, self.dim):
            return None
        gain, eps = norm.weight, eps_of(norm, state.x)
        if gain.dtype == torch.float64 != state.x.dtype:  # kernels could not norm with it
            return None
        note = self._by_kernels(state, site, gain.float(), eps) or self._at_once(state, site, gain, eps)
        if note is None:
            return None
        state.leave_note(note)
        return note.found.h

    def _write(self, state: StreamsState, site: int, y: Tensor) -> StreamsState:
        note = state.take_note() or self._by_kernels(state, site) or self._at_once(state, site)
        note = note or self._without_kernels(state, site)
        found, pre = note.found, None if state.pre is None else note.found.pre
        if note.kernels:
            return state.next(x=found.x, y=y, post=found.post, res=found.res, pre=pre, tape=note.tape)
        assert found.post is not None
        x = stream_write(found.x, found.res, found.post, y)
        return state.next(x=x, y=None, post=None, res=None, pre=pre, tape=note.tape)

    def _finish(self, state: StreamsState) -> Tensor:
        pre = self._last_read(state)
        tape = None if pre is None else self._tape(state)
        if tape is not None:
            return self._step(state, tape, None, pre).h
        plain = self._plain(state)
        return stream_read(plain.x, self._head(plain) if pre is None else pre)


def flat(weights: Tensor | None, *shape: int) -> Tensor | None:
    """[..., *shape] -> [N, *shape]; weights that all tokens share stay as they are."""
    return weights if weights is None or weights.ndim == len(shape) else weights.reshape(-1, *shape)
