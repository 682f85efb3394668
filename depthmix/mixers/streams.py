"""n residual streams, what Hyper-Connections and mHC have in common: the state, and a pass by kernels.

With kernels the write of a site waits for the read of the next: one step (ops/stream_mix/step.py) does both, and the state
holds the streams before the write beside what is to be written. `settled` is what they amount to.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from depthmix.mixers.base import Mixer, Norm
from depthmix.mixers.state import State, register_state
from depthmix.ops import stream_read, stream_write
from depthmix.ops.backend import choose
from depthmix.ops.norm import eps_of, is_plain_rms_norm
from depthmix.ops.precision import compute_dtype
from depthmix.ops.stream_mix.op import why_unsupported
from depthmix.ops.stream_mix.products import halves_of
from depthmix.ops.stream_mix.rules import Rule
from depthmix.ops.stream_mix.step import Inputs, Step, step


class Tape(NamedTuple):
    """What kernels pass from site to site: the embedding as long as the streams are its copies, and what each site's rule needs."""

    first: Tensor | None  # [..., D]
    rules: Sequence[tuple[Tensor, ...]]  # w, base, scale and w's halves; or pre, post and res that all tokens share
    trained: bool  # made with gradients


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

        pre is for the read of this site or, where reads have the weights of the site before, of the next."""
        raise NotImplementedError

    def _rule(self) -> Rule | None:
        """How kernels make these weights; None if they are the same for every token."""
        raise NotImplementedError

    def _for_kernels(self) -> tuple[Tensor, Tensor, Tensor]:
        """w, base and scale of the rule for all sites, [S, ...], or without a rule pre, post and res."""
        raise NotImplementedError

    def _why_no_kernels(self) -> str | None:
        return None

    def _last_read(self, state: StreamsState) -> Tensor | None:
        """The weights [..., n] or [n] of finish, where they are known before the last write."""
        return torch.ones(self.n, device=state.x.device, dtype=compute_dtype(state.x))

    def _head(self, state: StreamsState) -> Tensor:
        """The weights of finish, where they follow from the streams."""
        raise NotImplementedError

    # Whether kernels do the work.

    def _tape(self, state: StreamsState) -> Tape | None:
        """What kernels work with, made anew if the state comes from elsewhere; None where they are not used."""
        if state.frozen or torch.compiler.is_compiling():
            return None
        wide = any(p.dtype == torch.float64 for p in self.parameters())
        why = self._why_no_kernels() or why_unsupported(state.x, state.y, self.n, wide=wide)
        if choose(self.name, state.x, why) == "reference":
            return None
        trained = torch.is_grad_enabled()
        tape = state.tape
        if tape is None or tape.trained != trained:
            tape = Tape(None, self._by_site(state.x.dtype), trained)
        return tape

    def _by_site(self, kind: torch.dtype) -> Sequence[tuple[Tensor, ...]]:
        """Taken apart once a pass, so that a parameter's gradient is put together once."""
        parameters = list(self._for_kernels())
        if kind == torch.bfloat16 and self._rule() is not None:
            parameters.append(halves_of(parameters[0].detach()))
        return list(zip(*(p.unbind(0) for p in parameters), strict=True))

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
        state.tape = None if tape is None else tape._replace(first=x)
        return state

    def _first_read(self, x: Tensor) -> Tensor | None:
        """The weights of the first read where those of a read come from the site before."""
        return None

    def _plain(self, state: StreamsState) -> StreamsState:
        """The state with nothing left to write."""
        return state if state.y is None else dataclasses.replace(state, x=state.settled(), y=None, post=None, res=None)

    def _by_kernels(
        self, state: StreamsState, site: int, gain: Tensor | None = None, eps: float = 0.0
    ) -> tuple[Step, Tape] | None:
        tape = self._tape(state)
        if tape is None:
            return None
        found = self._step_at(state, tape, site, gain, eps)
        return found, tape if state.y is None else tape._replace(first=None)

    def _read(self, state: StreamsState, site: int) -> Tensor:
        found = self._by_kernels(state, site)
        if found is not None:
            state.leave_note(found)
            return found[0].h
        plain = self._plain(state)
        if plain.pre is not None:
            return stream_read(plain.x, plain.pre)
        pre, post, res = self._coefficients(plain, site)
        h = stream_read(plain.x, pre)
        state.leave_note((Step(plain.x, h, None, post, res), None))
        return h

    def _read_normed(self, state: StreamsState, site: int, norms: Sequence[Norm]) -> Tensor | None:
        norm = norms[0]
        if not is_plain_rms_norm(norm, self.dim) or norm.weight.dtype == torch.float64:
            return None
        found = self._by_kernels(state, site, norm.weight.float(), eps_of(norm, state.x))
        if found is None:
            return None
        state.leave_note(found)
        return found[0].h

    def _write(self, state: StreamsState, site: int, y: Tensor) -> StreamsState:
        found, tape = state.take_note() or self._by_kernels(state, site) or (None, None)
        if found is not None and tape is not None:
            pre = None if state.pre is None else found.pre
            return state.next(x=found.x, y=y, post=found.post, res=found.res, pre=pre, tape=tape)
        plain = self._plain(state)
        pre, post, res = self._coefficients(plain, site) if found is None else (None, found.post, found.res)
        assert post is not None
        x = stream_write(plain.x if found is None else found.x, res, post, y)
        return state.next(x=x, y=None, post=None, res=None, pre=None if state.pre is None else pre, tape=None)

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
