"""A stage's piece of a decoder: its blocks, a copy of the whole mixer, and the embedding or the head at the ends.

Names are those of the whole decoder: `sublayers.6.out_proj.weight` is that in every piece that has it. A piece trains and saves only
its own rows of the mixer's parameters (parallel/row_owners.py). Its copies of all other rows fall behind.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from depthmix.mixers.checks import ContractError
from depthmix.models.decoder import Decoder, mixer_input, token_positions
from depthmix.models.layers import Context
from depthmix.models.projections import own_gain, weights_take_gains
from depthmix.ops.norm import RMSNorm
from depthmix.parallel.packing import Form, pack_state, unpack_state
from depthmix.parallel.row_owners import Owners, freeze_foreign, join_rows, row_owners, rows_of_sites, select_rows

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
        # Number of parts that sequences are divided into.
        self.parts = 1
        self.mixer, self.mixer_sites = copy.deepcopy(model.mixer), range(sites.start, sites.stop + self.last)
        self.owners = row_owners(model.mixer)
        freeze_foreign(self.mixer, self.owners, self.mixer_sites)
        self.rotary = model.rotary
        self.norms = nn.ModuleDict({str(site): model.norms[site] for site in sites})
        self.sublayers = nn.ModuleDict({str(site): model.sublayers[site] for site in sites})
        if self.first:
            self.embedding, self.embedding_eps = model.embedding, model.embedding_eps
        if self.last:
            self.final_norm, self.head = model.final_norm, model.head

    def forward(self, *given: Tensor) -> Any:
        mixer = self.mixer
        if self.first:
            state = mixer.start(mixer_input(self.embedding(*given), self.embedding_eps))
        else:
            state = unpack_state(self.before, given)
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
        return self._sent(pack_state(mixer, state), self.after, x.shape[:2])

    def _sent(self, tensors: Sequence[Tensor], form: Form, tokens: Sequence[int]) -> tuple[Tensor, ...]:
        """Convert the tensors to the form that the next stage expects."""
        expected = [
            (*tokens, *s) if has_tokens else s for s, has_tokens in zip(form.shapes, form.by_token, strict=True)
        ]
        if [tuple(t.shape) for t in tensors] != expected:
            shapes = [tuple(t.shape) for t in tensors]
            raise ContractError(
                f"{self.mixer.name}: the state before site {form.site} is {shapes}, expected {expected}"
            )
        # Views, because FSDP2 puts hooks on what comes out, and a state's own tensors do not take them with kernels.
        return tuple(t.to(kind).view_as(t) for t, kind in zip(tensors, form.dtypes, strict=True))

    def rows_of(self, title: str) -> slice | None:
        """Return the rows that this piece owns of a mixer's parameter, `mixer.query`; None if it owns none."""
        return rows_of_sites(self.owners[title.removeprefix(MIXER)], self.mixer_sites)

    def repeated_parts(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return (sublayers, norms): the modules to checkpoint or compile one by one."""
        norms: list[nn.Module] = [n for n in self.norms.modules() if isinstance(n, RMSNorm)]
        return list(self.sublayers.values()), norms + ([self.final_norm] if self.last else [])


def tensors_of_piece(piece: Piece, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a piece's part of tensors named as in the whole decoder: what it trains and saves, as views."""
    names = set(piece.state_dict())
    others = {name: t for name, t in tensors.items() if name in names and not name.startswith(MIXER)}
    return {**others, **_prefixed(select_rows(piece.owners, _mixer_tensors(tensors), piece.mixer_sites))}


def join_pieces(owners: Owners, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join what `tensors_of_piece` returned for all pieces, in order, into the tensors of the whole decoder."""
    joined = {name: t for part in parts for name, t in part.items() if not name.startswith(MIXER)}
    return {**joined, **_prefixed(join_rows(owners, map(_mixer_tensors, parts)))}


def _mixer_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(MIXER): t for name, t in tensors.items() if name.startswith(MIXER)}


def _prefixed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {MIXER + name: t for name, t in tensors.items()}
