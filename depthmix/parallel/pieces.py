"""Parameters of a pipeline's pieces: their names, and how they are saved and loaded.

A parameter is named by its stage and by its name in the whole: `2.sublayers.8.out_proj.weight`. In a checkpoint it has the name
alone, and the rows that pieces own of a mixer's parameter are put together: any layout goes on from a checkpoint of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from depthmix.parallel.alone import Alone, Place
from depthmix.parallel.gradients import whole
from depthmix.parallel.pipeline import Pipeline
from depthmix.parallel.pipeline.piece import MIXER
from depthmix.parallel.weights import fill


class Pieces(Alone):
    """Pieces of a model on this process, by stage."""

    pipe: Pipeline
    pieces: dict[str, Any]

    def title(self, name: str) -> str:
        title = name.partition(".")[2]
        return "embedding.weight" if title == "head.weight" and self.blueprint.config.tie_embeddings else title

    def saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this process's tensors under the undivided model's names; the mixer's tensors whole, in every process."""
        found: dict[str, Tensor] = {}
        mixed: dict[str, dict[str, Tensor]] = {}  # by the whole's name and by stage
        for name, t in tensors.items():
            path, own = _apart(name)
            stage, _, rest = own.partition(".")
            title = self.title(own)
            if title.startswith(MIXER):
                if self._own_rows(title, stage) is not None:
                    mixed.setdefault(path + title, {})[stage] = whole(t).detach()
            elif title == rest:  # a tied matrix is saved where the embedding is
                found[path + title] = t
        return {**found, **self._joined(mixed)}

    def _joined(self, mixed: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Join the rows that stages own of the mixer's tensors, given by stage and whole, in one message."""
        numbers = {n: next(iter(t.values())).item() for n, t in mixed.items() if not next(iter(t.values())).ndim}
        known: list[Any] = [None] * self.pipe.ranks
        dist.all_gather_object(known, (list(mixed), numbers), group=self.pipe.group)
        numbers = {n: value for _, there in known for n, value in there.items()}  # counts of steps are the same in all
        names = [name for name in sorted({n for there, _ in known for n in there}) if name not in numbers]
        of_whole = dict(self.blueprint.named_parameters())
        shapes = [of_whole[_apart(name)[1]].shape for name in names]
        kind = next((p.dtype for p in self.blueprint.mixer.parameters()), None)
        flat = torch.zeros(sum(shape.numel() for shape in shapes), device=self.pipe.device, dtype=kind)
        joined = {n: t.view(s) for n, s, t in zip(names, shapes, flat.split([s.numel() for s in shapes]), strict=True)}
        for name, parts in mixed.items():
            for stage, t in parts.items() if name in joined else ():
                rows = self._own_rows(_apart(name)[1], stage)
                joined[name][rows].copy_(t[rows])
        if names:
            dist.all_reduce(flat, group=self.pipe.group)  # of every number all but one process have zero
        return {n: t.clone() for n, t in joined.items()} | {n: torch.tensor(value) for n, value in numbers.items()}

    def _own_rows(self, title: str, stage: str) -> slice | None:
        """Return the rows that a stage owns of a mixer's parameter; None if it owns none."""
        rows: slice | None = self.pieces[stage].own_rows(title)
        return rows

    def load(
        self, read: Callable[[Mapping[str, torch.Size], Place], dict[str, Tensor]], place: Place
    ) -> dict[str, Tensor]:
        shapes = {name: p.shape for name, p in self.blueprint.named_parameters()}
        own = dict(self.model.named_parameters())
        mine_of: dict[str, list[str]] = {}  # this process's names by those in the whole
        for name in own:
            mine_of.setdefault(self.title(name), []).append(name)

        def put(name: str, shape: torch.Size) -> Tensor | None:
            path, title = _apart(name)
            if title not in shapes:
                return place(name, shape)
            if title.startswith(MIXER):
                return torch.zeros(shape, dtype=self.blueprint.embedding.weight.dtype)
            if title not in mine_of:
                return torch.empty(shape, device="meta")  # others have it
            mine = mine_of[title][0]
            return place(path + mine, shape) if path else own[mine].detach()

        found: dict[str, Tensor] = {}
        for name, t in read(shapes, put).items():
            path, title = _apart(name)
            for mine in mine_of.get(title, []) if title in shapes else [title]:
                if not title.startswith(MIXER):
                    found[path + mine] = t
                elif not path or self._own_rows(title, mine.partition(".")[0]) is not None:
                    found[path + mine] = self._taken(name, t, own[mine])
        return {name: t for name, t in found.items() if name not in own}

    def _taken(self, name: str, of_whole: Tensor, parameter: Tensor) -> Tensor:
        """Divide a mixer's tensor as its parameter is divided here. Parameters themselves are filled in place."""
        if of_whole.shape != parameter.shape:  # a number of steps
            return of_whole
        place = parameter.detach() if _apart(name)[0] == "" else torch.zeros_like(parameter)
        fill(place, of_whole)
        return place


def _apart(name: str) -> tuple[str, str]:
    """Split `adamw/exp_avg/head.weight` into the path before a parameter's name, and the name."""
    path, slash, rest = name.rpartition("/")
    return path + slash, rest
