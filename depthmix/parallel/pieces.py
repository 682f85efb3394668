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
        tensors_of_whole: dict[str, Tensor] = {}
        # By the undivided model's name and by stage.
        mixed: dict[str, dict[str, Tensor]] = {}
        for name, t in tensors.items():
            path, parameter_name = _apart(name)
            stage, _, rest = parameter_name.partition(".")
            title = self.title(parameter_name)
            if title.startswith(MIXER):
                if self._rows_of(title, stage) is not None:
                    mixed.setdefault(path + title, {})[stage] = whole(t).detach()
            elif title == rest:
                # A tied matrix is saved with the embedding.
                tensors_of_whole[path + title] = t
        return {**tensors_of_whole, **self._joined(mixed)}

    def _joined(self, mixed: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Join the rows that stages own of the mixer's tensors, given by stage and whole, in one message."""
        numbers = {n: next(iter(t.values())).item() for n, t in mixed.items() if not next(iter(t.values())).ndim}
        gathered: list[Any] = [None] * self.pipe.ranks
        dist.all_gather_object(gathered, (list(mixed), numbers), group=self.pipe.group)
        # Counts of steps are equal in all stages.
        numbers = {n: value for _, numbers_of_rank in gathered for n, value in numbers_of_rank.items()}
        names = sorted({n for names_of_rank, _ in gathered for n in names_of_rank if n not in numbers})
        of_whole = dict(self.blueprint.named_parameters())
        shapes = [of_whole[_apart(name)[1]].shape for name in names]
        kind = next((p.dtype for p in self.blueprint.mixer.parameters()), None)
        flat = torch.zeros(sum(shape.numel() for shape in shapes), device=self.pipe.device, dtype=kind)
        joined = {n: t.view(s) for n, s, t in zip(names, shapes, flat.split([s.numel() for s in shapes]), strict=True)}
        for name, parts in mixed.items():
            for stage, t in parts.items() if name in joined else ():
                rows = self._rows_of(_apart(name)[1], stage)
                joined[name][rows].copy_(t[rows])
        if names:
            # All but one process have zeros there, so the sum is the number.
            dist.all_reduce(flat, group=self.pipe.group)
        return {n: t.clone() for n, t in joined.items()} | {n: torch.tensor(value) for n, value in numbers.items()}

    def _rows_of(self, title: str, stage: str) -> slice | None:
        """Return the rows that a stage owns of a mixer's parameter; None if it owns none."""
        rows: slice | None = self.pieces[stage].rows_of(title)
        return rows

    def load(
        self, read: Callable[[Mapping[str, torch.Size], Place], dict[str, Tensor]], place: Place
    ) -> dict[str, Tensor]:
        shapes = {name: p.shape for name, p in self.blueprint.named_parameters()}
        parameters = dict(self.model.named_parameters())
        # This process's names, by the undivided model's.
        local_names: dict[str, list[str]] = {}
        for name in parameters:
            local_names.setdefault(self.title(name), []).append(name)

        def put(name: str, shape: torch.Size) -> Tensor | None:
            path, title = _apart(name)
            if title not in shapes:
                return place(name, shape)
            if title.startswith(MIXER):
                return torch.zeros(shape, dtype=self.blueprint.embedding.weight.dtype)
            if title not in local_names:
                # Other processes have it.
                return torch.empty(shape, device="meta")
            parameter_name = local_names[title][0]
            return place(path + parameter_name, shape) if path else parameters[parameter_name].detach()

        tensors: dict[str, Tensor] = {}
        for name, t in read(shapes, put).items():
            path, title = _apart(name)
            for parameter_name in local_names.get(title, []) if title in shapes else [title]:
                if not title.startswith(MIXER):
                    tensors[path + parameter_name] = t
                elif not path or self._rows_of(title, parameter_name.partition(".")[0]) is not None:
                    tensors[path + parameter_name] = self._taken(name, t, parameters[parameter_name])
        return {name: t for name, t in tensors.items() if name not in parameters}

    def _taken(self, name: str, of_whole: Tensor, parameter: Tensor) -> Tensor:
        """Divide a mixer's tensor as its parameter is divided here. Parameters themselves are filled in place."""
        # A number of steps.
        if of_whole.shape != parameter.shape:
            return of_whole
        place = parameter.detach() if _apart(name)[0] == "" else torch.zeros_like(parameter)
        fill(place, of_whole)
        return place


def _apart(name: str) -> tuple[str, str]:
    """Split `adamw/exp_avg/head.weight` into the path before a parameter's name, and the name."""
    path, slash, rest = name.rpartition("/")
    return path + slash, rest
