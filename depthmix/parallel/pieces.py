"""Parameters of a pipeline's pieces: their names, and how they are saved and loaded.

A parameter is named by its stage and by its name in the whole: `2.sublayers.8.out_proj.weight`. In a checkpoint it has the name
alone, and the rows that pieces have of a mixer's parameter are put together: any layout goes on from a checkpoint of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from depthmix.mixers.cutting import cut_tensors
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
                mixed.setdefault(path + title, {})[stage] = whole(t).detach()
            elif title == rest:  # a tied matrix is saved where the embedding is
                found[path + title] = t
        return {**found, **self._joined(mixed)}

    def _joined(self, mixed: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Join the mixer's tensors from the parts that the pipeline's processes hold by stage, in one message."""
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
                self._rows(name, joined[name], stage).copy_(t)
        if names:
            dist.all_reduce(flat, group=self.pipe.group)  # of every number all but one process have zero
        return {n: t.clone() for n, t in joined.items()} | {n: torch.tensor(value) for n, value in numbers.items()}

    def _rows(self, name: str, of_whole: Tensor, stage: str) -> Tensor:
        """Return a view of the rows that a stage holds of a mixer's tensor."""
        title = _apart(name)[1].removeprefix(MIXER)
        return cut_tensors(self.pipe.mixer, {title: of_whole}, self.pieces[stage].mixer.held)[title]

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
                found[path + mine] = self._taken(name, t, mine, own) if title.startswith(MIXER) else t
        return {name: t for name, t in found.items() if name not in own}

    def _taken(self, name: str, of_whole: Tensor, mine: str, own: Mapping[str, Tensor]) -> Tensor:
        """Cut this process's part out of a mixer's tensor, sharded like its parameter; parameters themselves are filled
        in place.
        """
        rows = self._rows(name, of_whole, mine.partition(".")[0]) if of_whole.ndim else of_whole
        if rows.shape != own[mine].shape:  # a number of steps
            return rows
        place = own[mine].detach() if _apart(name)[0] == "" else torch.zeros_like(own[mine])
        fill(place, rows)
        return place


def _apart(name: str) -> tuple[str, str]:
    """Split `adamw/exp_avg/head.weight` into the path before a parameter's name, and the name."""
    path, slash, rest = name.rpartition("/")
    return path + slash, rest
