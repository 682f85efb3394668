"""A stage's piece of a decoder: its blocks, its part of the mixer, and the embedding or the head at the ends.

Names are those of the whole decoder: `sublayers.6.out_proj.weight` is that in every piece that has it. Of a mixer's parameter a
piece has its own rows under the parameter's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from depthmix.mixers.base import ContractError, Mixer
from depthmix.mixers.cutting import Form, cut, cut_tensors, join_tensors
from depthmix.models.blocks import as_autocast
from depthmix.models.decoder import Decoder, token_positions
from depthmix.models.layers import Context
from depthmix.models.projections import own_gain, weights_take_gains
from depthmix.ops.norm import RMSNorm

MIXER = "mixer."


class Piece(nn.Module):
    """A range of a decoder's sites. Takes token ids [B, T] or a state's tensors; returns a state's tensors or logits."""

    def __init__(self, model: Decoder, sites: range, before: Form, after: Form | None) -> None:
        """Take the modules of `sites` from a decoder. `before`, `after`: the states at the ends; None after the last
        piece.
        """
        super().__init__()
        self.config, self.sites, self.before, self.after = model.config, sites, before, after
        self.first, self.last = sites.start == 0, after is None
        self.parts = 1  # that sequences are in; a piece's states are of one
        self.mixer = cut(model.mixer, range(sites.start, sites.stop + self.last))
        self.rotary = model.rotary
        self.norms = nn.ModuleDict({str(site): model.norms[site] for site in sites})
        self.sublayers = nn.ModuleDict({str(site): model.sublayers[site] for site in sites})
        if self.first:
            self.embedding = model.embedding
        if self.last:
            self.final_norm, self.head = model.final_norm, model.head

    def forward(self, *given: Tensor) -> Any:
        mixer = self.mixer
        state = mixer.start(as_autocast(self.embedding(*given))) if self.first else mixer.unpack(self.before, given)
        x = state.template()
        cos, sin = self.rotary(token_positions(None, 0, self.parts * x.shape[1], x.device))
        context = Context(cos, sin, None, None)
        gains = mixer.output_gains() if weights_take_gains(x) else {}
        for site in self.sites:
            norm: Any = self.norms[str(site)]
            sublayer = self.sublayers[str(site)]
            gain = own_gain(gains, site, sublayer)
            y = sublayer(mixer.read(state, site, norm), context, gain)
            state = mixer.write(state, site, y) if gain is None else mixer.write(state, site, y, scaled=True)
        if self.after is None:
            return self.head(mixer.finish(state, self.final_norm))
        return self._sent(mixer.pack(state), self.after, x.shape[:2])

    def _sent(self, tensors: Sequence[Tensor], form: Form, tokens: Sequence[int]) -> tuple[Tensor, ...]:
        """Convert the tensors to the form that the next stage expects."""
        expected = [(*tokens, *s) if own else s for s, own in zip(form.shapes, form.by_token, strict=True)]
        if [tuple(t.shape) for t in tensors] != expected:
            found = [tuple(t.shape) for t in tensors]
            raise ContractError(f"{self.mixer.name}: the state before site {form.site} is {found}, expected {expected}")
        # Views, because FSDP2 puts hooks on what comes out, and a state's own tensors do not take them with kernels.
        return tuple(t.to(kind).view_as(t) for t, kind in zip(tensors, form.dtypes, strict=True))

    def repeated_parts(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return (sublayers, norms): the modules to checkpoint or compile one by one."""
        norms: list[nn.Module] = [n for n in self.norms.modules() if isinstance(n, RMSNorm)]
        return list(self.sublayers.values()), norms + ([self.final_norm] if self.last else [])


def cut_state(mixer: Mixer, whole: Mapping[str, Tensor], piece: Piece) -> dict[str, Tensor]:
    """Cut a piece's part out of a whole decoder's state dict, or of other tensors by its names. `mixer`: the whole one;
    its values do not matter.
    """
    names = set(piece.state_dict())
    mixed = {name.removeprefix(MIXER): t for name, t in whole.items() if name.startswith(MIXER)}
    own = cut_tensors(mixer, mixed, piece.mixer.held)
    kept = {name: t for name, t in whole.items() if name in names and not name.startswith(MIXER)}
    return {**kept, **{MIXER + name: t for name, t in own.items()}}


def join_states(mixer: Mixer, pieces: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the state dicts of all pieces, in order, into a whole decoder's."""
    joined = {name: t for piece in pieces for name, t in piece.items() if not name.startswith(MIXER)}
    mixed = [{n.removeprefix(MIXER): t for n, t in piece.items() if n.startswith(MIXER)} for piece in pieces]
    return {**joined, **{MIXER + name: t for name, t in join_tensors(mixer, mixed).items()}}
