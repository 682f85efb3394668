"""Rules with n residual streams (hyper, mhc): the write of a site waits for the read of the next.

One step of the kernels (ops/stream_mix/step.py) does both. The state holds the streams before the write beside what is to be written;
`written_streams` writes it. Where kernels cannot run, `write` writes at once, and a read is one node of autograd if the operators have one.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix.mixers.checks import Norm
from depthmix.mixers.fast_path import FastPath
from depthmix.mixers.state import register_state
from depthmix.mixers.streams import StreamsState
from depthmix.ops import stream_read, stream_write
from depthmix.ops.autograd import uses_custom_backward
from depthmix.ops.backend import choose
from depthmix.ops.norm import eps_of, is_plain_rms_norm
from depthmix.ops.stream_mix.op import stream_rule_read, why_unsupported
from depthmix.ops.stream_mix.products import halves_of
from depthmix.ops.stream_mix.rules import Rule, by_column
from depthmix.ops.stream_mix.step import Inputs, Step, step


class Tape(NamedTuple):
    """Parameters of every site and, for kernels, the embedding as long as all streams are copies of it."""

    first: Tensor | None  # [..., D]
    rules: Sequence[tuple[Tensor, ...]]  # w, base, scale and w's halves; or pre, post and res that all tokens share
    trained: bool  # made with gradients
    columns: bool = False  # w, base and scale by column, as the reference reads with them at once


class Note(NamedTuple):
    """Results of a read that the write of its site uses."""

    result: Step
    tape: Tape
    kernels: bool  # they wrote what waited, and let the write wait that comes


@register_state
class PendingStreams(StreamsState):
    """n streams and, with kernels, what the last site writes to them."""

    y: Tensor | None = None  # [..., D]
    post: Tensor | None = None  # [..., n] or [n]
    res: Tensor | None = None  # [..., n, n] or [n, n]; None: the identity
    tape: Tape | None = dataclasses.field(default=None, repr=False, metadata={"cache": True})

    def written_streams(self) -> Tensor:
        """Return the streams with nothing left to write: [..., n, D]."""
        return self.x if self.y is None or self.post is None else stream_write(self.x, self.res, self.post, self.y)


class StreamSteps(FastPath):
    """All passes whose weights are not frozen."""

    def start(self, mixer: Any, x: Tensor) -> PendingStreams:
        """Begin with n streams that are all the embedding."""
        state: PendingStreams = mixer._start(x).as_type(PendingStreams)
        tape = self._tape(mixer, state)
        state.tape = (
            self._any_tape(mixer, state, self._reads_at_once(mixer, state)) if tape is None else tape._replace(first=x)
        )
        return state

    def resume(self, mixer: Any, state: Any) -> PendingStreams | None:
        """Continue any pass whose weights are not frozen."""
        if state.frozen:
            return None
        resumed: PendingStreams = state if isinstance(state, PendingStreams) else state.as_type(PendingStreams)
        return resumed

    def to_plain(self, mixer: Any, state: PendingStreams) -> StreamsState:
        """Write what waits."""
        plain: StreamsState = state.as_type(StreamsState, x=state.written_streams())
        return plain

    def read(self, mixer: Any, state: PendingStreams, site: int, norms: Sequence[Norm] | None) -> Tensor | None:
        """Write what waits, and read a site, with its RMSNorm in the same step."""
        if norms is not None:
            return self._read_normed(mixer, state, site, norms)
        note = self._by_kernels(mixer, state, site)
        if note is None and state.pre is not None:
            return stream_read(state.written_streams(), state.pre)
        note = note or self._at_once(mixer, state, site)
        if note is None:
            note = self._without_kernels(mixer, state, site)
            assert note.result.pre is not None
            note = note._replace(result=note.result._replace(h=stream_read(note.result.x, note.result.pre)))
        state.leave_note(note)
        return note.result.h

    def _read_normed(self, mixer: Any, state: PendingStreams, site: int, norms: Sequence[Norm]) -> Tensor | None:
        norm = norms[0]
        if not is_plain_rms_norm(norm, mixer.dim):
            return None
        gain, eps = norm.weight, eps_of(norm, state.x)
        if gain.dtype == torch.float64 != state.x.dtype:  # kernels could not norm with it
            return None
        note = self._by_kernels(mixer, state, site, gain.float(), eps) or self._at_once(mixer, state, site, gain, eps)
        if note is None:
            return None
        state.leave_note(note)
        return note.result.h

    def write(self, mixer: Any, state: PendingStreams, site: int, y: Tensor, scaled: bool) -> PendingStreams:
        """Let an output wait for the next read where kernels run; write it at once elsewhere."""
        note = state.take_note() or self._by_kernels(mixer, state, site) or self._at_once(mixer, state, site)
        note = note or self._without_kernels(mixer, state, site)
        result, pre = note.result, None if state.pre is None else note.result.pre
        if note.kernels:
            return state.next(x=result.x, y=y, post=result.post, res=result.res, pre=pre, tape=note.tape)
        assert result.post is not None
        x = stream_write(result.x, result.res, result.post, y)
        return state.next(x=x, y=None, post=None, res=None, pre=pre, tape=note.tape)

    def finish(self, mixer: Any, state: PendingStreams, norm: Norm | None) -> Tensor | None:
        """Write what waits, and read for the final norm, which the caller applies."""
        if norm is not None:
            return None
        pre = mixer._last_read(state)
        tape = None if pre is None else self._tape(mixer, state)
        if tape is not None:
            return self._step(mixer, state, tape, None, pre).h
        plain = self._plain(mixer, state)
        return stream_read(plain.x, mixer._head(plain) if pre is None else pre)

    def _plain(self, mixer: Any, state: PendingStreams) -> PendingStreams:
        """Return the state with nothing left to write."""
        return (
            state
            if state.y is None
            else dataclasses.replace(state, x=state.written_streams(), y=None, post=None, res=None)
        )

    def _tape(self, mixer: Any, state: PendingStreams) -> Tape | None:
        """Return what kernels work with; None where they are not used."""
        if state.frozen or torch.compiler.is_compiling():
            return None
        wide = any(p.dtype == torch.float64 for p in itertools.islice(mixer.parameters(), 1))  # all are alike
        why = why_unsupported(state.x, state.y, mixer.n, wide=wide)
        if choose(mixer.name, state.x, why) == "reference":
            return None
        return self._any_tape(mixer, state)

    def _any_tape(self, mixer: Any, state: PendingStreams, columns: bool = False) -> Tape:
        """Return the tape of a state, or a new one for a state that comes from elsewhere."""
        tape, trained = state.tape, torch.is_grad_enabled()
        if tape is None or tape.trained != trained or tape.columns != columns:
            tape = Tape(None, self._by_site(mixer, state.x.dtype, columns), trained, columns)
        return tape

    def _by_site(self, mixer: Any, kind: torch.dtype, columns: bool) -> Sequence[tuple[Tensor, ...]]:
        """Split the parameters by site, once per pass, so that a parameter's gradient is put together once."""
        parameters, rule = list(mixer._for_all_sites()), mixer._rule()
        if columns:
            assert rule is not None
            parameters = list(by_column(rule, *parameters))
        elif kind == torch.bfloat16 and rule is not None:
            parameters.append(halves_of(parameters[0].detach()))
        return list(zip(*(p.unbind(0) for p in parameters), strict=True))

    def _reads_at_once(self, mixer: Any, state: PendingStreams) -> bool:
        """Tell whether the reference makes a site's weights and reads with them as one node of autograd."""
        rule = mixer._rule()
        return rule is not None and not rule.joint and not state.frozen and uses_custom_backward()

    def _step(
        self, mixer: Any, state: PendingStreams, tape: Tape, rule: Rule | None, pre: Tensor | None, parameters: Sequence[Tensor] = (),
        gain: Tensor | None = None, eps: float = 0.0,
    ) -> Step:  # fmt: skip
        """Run the write that waits, and a read."""
        tokens, n, dim = state.x.shape[:-2], mixer.n, mixer.dim
        x = state.x.reshape(-1, n, dim) if tape.first is None else tape.first.reshape(-1, dim)
        y = None if state.y is None else state.y.reshape(-1, dim)
        post, res = (flat(state.post, n), flat(state.res, n, n)) if state.y is not None else (None, None)
        w, base, scale, halves = (*parameters, None, None, None, None)[:4]
        inputs = Inputs(x, y, post, res, flat(pre, n), w, base, scale, gain, halves)
        result = step(rule, n, eps, inputs)

        def shaped(t: Tensor | None, *rest: int) -> Tensor | None:
            return None if t is None else t.view(*tokens, *rest)

        return Step(
            state.x if y is None else result.x.view(*tokens, n, dim),
            result.h.view(*tokens, dim),
            shaped(result.pre, n),
            shaped(result.post, n),
            shaped(result.res, n, n),
        )

    def _step_at(
        self, mixer: Any, state: PendingStreams, tape: Tape, site: int, gain: Tensor | None, eps: float
    ) -> Step:
        """Run the write that waits, and the read of a site."""
        rule, parameters = mixer._rule(), tape.rules[site]
        if rule is not None:
            return self._step(mixer, state, tape, rule, state.pre, parameters, gain, eps)
        pre, post, res = parameters
        return self._step(mixer, state, tape, None, pre, (), gain, eps)._replace(post=post, res=res)

    def _by_kernels(
        self, mixer: Any, state: PendingStreams, site: int, gain: Tensor | None = None, eps: float = 0.0
    ) -> Note | None:
        tape = self._tape(mixer, state)
        if tape is None:
            return None
        result = self._step_at(mixer, state, tape, site, gain, eps)
        return Note(result, tape if state.y is None else tape._replace(first=None), kernels=True)

    def _without_kernels(self, mixer: Any, state: PendingStreams, site: int) -> Note:
        """Run the write that waits, and compute the weights of a site."""
        tape = self._any_tape(mixer, state)
        plain = dataclasses.replace(self._plain(mixer, state), tape=tape)
        return Note(Step(plain.x, plain.x, *mixer._coefficients(plain, tape.rules[site][:3])), tape, kernels=False)

    def _at_once(
        self, mixer: Any, state: PendingStreams, site: int, gain: Tensor | None = None, eps: float = 0.0
    ) -> Note | None:
        """Run the write that waits, compute the weights of a site and read, where the reference can do the last two at once."""
        if not self._reads_at_once(mixer, state):
            return None
        rule, tape, x = mixer._rule(), self._any_tape(mixer, state, columns=True), state.written_streams()
        assert rule is not None
        columns, bases, scales = tape.rules[site]
        h, post, res = stream_rule_read(rule, x, columns, bases, scales, gain, eps)
        return Note(Step(x, h, None, post, res), tape, kernels=False)


def flat(weights: Tensor | None, *shape: int) -> Tensor | None:
    """Reshape [..., *shape] to [N, *shape]; weights that all tokens share stay as they are."""
    return weights if weights is None or weights.ndim == len(shape) else weights.reshape(-1, *shape)


STEPS = PendingStreams.path = StreamSteps()
