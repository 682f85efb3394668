"""Find which pipeline stage trains and saves which rows of a mixer's parameters.

Every stage holds the whole mixer, so that the rule's code need not know of stages. A stage runs only its own sites: gradients of
rows for other sites are zero, and their values are left behind. What counts, and what checkpoints hold, are a stage's own rows:

    query [S+1, D]     stage 0: rows 0 … 3     stage 1: rows 4 … 7     stage 2: rows 8 … S (finish)
    b["3"]             the stage that has the first site of block 3

A rule does not say which rows are for which site. Its parameters are compared with those of a model of twice as many blocks: rows
that double are one per site, per block or per attention site, and a parameter that stays as it is belongs to finish.
`why_not_divided` shows by a small run that no stage depends on the rows of another.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.mixers.base import Mixer
from depthmix.mixers.initial_share import fresh_narrow_copy, rule_of
from depthmix.mixers.trial import stir
from depthmix.ops.backend import use_backend
from depthmix.parallel.packing import TOKENS, PackingError, pack_state, state_forms, unpack_state

# By parameter name: the site of each row, or one site for the whole parameter. Site S is finish.
Owners = Mapping[str, Sequence[int] | int]


class OwnersError(ValueError):
    """A mixer's parameters cannot be divided among pipeline stages."""


def row_owners(mixer: Mixer) -> Owners:
    """Return the site that each row of each parameter is for, or one site for a parameter in one piece.

    Raises:
        OwnersError: a parameter's rows are for no known sites.
    """
    for name, module in mixer.named_children():
        if not isinstance(module, nn.ParameterDict):
            raise OwnersError(
                f"{mixer.name} cannot be divided into stages: {name} is a module, whose sites are not known"
            )
    layout = mixer.layout
    with torch.device("meta"):
        doubled: Mixer = rule_of(mixer)(mixer.dim, sites=layout.blocks * 2, **mixer.chosen)
    n_sites, n_blocks, n_attention = mixer.n_sites, mixer.n_blocks, len(layout.attention)
    # By the number of rows here and in the doubled model. Where numbers are equal, so are the stages, which are whole blocks.
    sites_of_rows: dict[tuple[int, int], Sequence[int]] = {
        (n_blocks, 2 * n_blocks): [site for site in range(n_sites) if layout.begins[site]],
        (n_attention, 2 * n_attention): layout.attention,
        (n_sites, 2 * n_sites): range(n_sites),
        (n_sites + 1, 2 * n_sites + 1): range(n_sites + 1),
    }
    shapes = {name: p.shape for name, p in doubled.named_parameters()}
    owners: dict[str, Sequence[int] | int] = {}
    for name, p in mixer.named_parameters():
        key, shape = name.rpartition(".")[2], shapes.get(name)
        if key.isdecimal() and int(key) in layout.block:
            owners[name] = layout.block.index(int(key))
        elif shape == p.shape:
            owners[name] = n_sites
        elif shape and p.ndim and (p.shape[0], shape[0]) in sites_of_rows:
            owners[name] = sites_of_rows[p.shape[0], shape[0]]
        else:
            grown = f"shape {list(p.shape)}, and in a model of twice as many blocks {None if shape is None else list(shape)}"
            raise OwnersError(
                f"{mixer.name} cannot be divided into stages: {name} has {grown}; its rows are for no known sites"
            )
    return owners


def rows_of_sites(owner: Sequence[int] | int, sites: range) -> slice | None:
    """Return the rows that belong to some sites: everything for a parameter in one piece, None where no row does."""
    if isinstance(owner, int):
        return slice(None) if owner in sites else None
    rows = [row for row, site in enumerate(owner) if site in sites]
    if rows and rows != list(range(rows[0], rows[-1] + 1)):
        raise OwnersError(f"the rows for sites {sites.start} to {sites.stop - 1} are not neighbours: {rows}")
    return slice(rows[0], rows[-1] + 1) if rows else None


def select_rows(owners: Owners, tensors: Mapping[str, Tensor], sites: range) -> dict[str, Tensor]:
    """Return views of the rows that belong to some sites. Tensors without owners, such as buffers, stay whole."""
    selected = {}
    for name, t in tensors.items():
        rows = rows_of_sites(owners[name], sites) if name in owners else slice(None)
        if rows is not None:
            selected[name] = t if rows == slice(None) else t[rows]
    return selected


def join_rows(owners: Owners, parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join what `select_rows` returned for each stage, in the order of the stages, into whole tensors."""
    pieces: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, t in part.items():
            pieces.setdefault(name, []).append(t)
    in_one = {name for name in pieces if isinstance(owners.get(name, 0), int)}
    return {name: ts[0] if name in in_one else torch.cat(ts) for name, ts in pieces.items()}


def freeze_foreign(mixer: Mixer, owners: Owners, sites: range) -> None:
    """Freeze the parameters of which no row belongs to these sites. They need neither gradients nor optimizer state."""
    for name, p in mixer.named_parameters():
        if rows_of_sites(owners[name], sites) is None:
            p.requires_grad_(False)


@torch.no_grad()
def blank_foreign(mixer: Mixer, owners: Owners, sites: range) -> None:
    """Set the rows of all other sites to NaN, for tests: what runs these sites must not depend on them."""
    for name, p in mixer.named_parameters():
        saved = select_rows(owners, {name: p.clone()}, sites)
        p.fill_(math.nan)
        for rows, values in zip(select_rows(owners, {name: p}, sites).values(), saved.values(), strict=True):
            rows.copy_(values)


def why_not_divided(mixer: Mixer) -> str | None:
    """Say why a mixer cannot be divided into pipeline stages; None if it can.

    A narrow copy runs in two stages. In each, all rows that belong to the other are NaN, and no read may become NaN.
    """
    half = mixer.n_sites // 2
    try:
        owners, whole = row_owners(mixer), fresh_narrow_copy(mixer)
        random = torch.Generator("cpu").manual_seed(0)
        stir(whole, random)
        (form,) = state_forms(whole, [half], torch.float64)
    except (OwnersError, PackingError) as error:
        return str(error)
    x = torch.randn(*TOKENS, whole.dim, dtype=torch.float64, device="cpu", generator=random)

    def is_independent(names: Iterable[str]) -> bool:
        stages = [copy.deepcopy(whole), copy.deepcopy(whole)]
        for stage, sites in zip(stages, (range(half), range(half, whole.n_sites + 1)), strict=True):
            blank_foreign(stage, {name: owners[name] for name in names}, sites)
        state: Any = stages[0].start(x)
        for site in range(whole.n_sites):
            if site == half:
                state = unpack_state(form, pack_state(stages[0], state))
            stage = stages[site >= half]
            h: Any = stage.read(state, site)
            # An output that depends on all ways of the read carries a NaN of any of them on to finish.
            state = stage.write(state, site, torch.sin(torch.stack(h).sum(0) if isinstance(h, tuple) else h))
        return bool(stages[1].finish(state).isfinite().all())

    with torch.no_grad(), use_backend("reference"):
        if is_independent(owners):
            return None
        shared = [name for name in owners if not is_independent([name])]
    return f"{mixer.name} cannot be divided into stages: one would need the rows that another trains of {', '.join(shared)}"
