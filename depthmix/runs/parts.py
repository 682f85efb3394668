"""Read tensors that many processes saved in parts, in the safetensors layout of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader


class Parts:
    """A folder of parts. The constructor reads headers only, and `get` assembles one tensor at a time."""

    def __init__(self, folder: Path) -> None:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        described: Any = metadata.state_dict_metadata
        self.shapes: dict[str, torch.Size] = {name: entry.size for name, entry in described.items()}
        self.dtypes: dict[str, torch.dtype] = {name: entry.properties.dtype for name, entry in described.items()}
        self._places: dict[str, list[tuple[str, Any, Any]]] = {}
        stored: Any = metadata.storage_data
        for index, info in stored.items():
            self._places.setdefault(index.fqn, []).append((info.relative_path, index.offset, info.shape))

    def get(self, name: str) -> Tensor:
        """Assemble a tensor on the CPU. Raises ValueError if a part is missing."""
        whole = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        filled = 0
        for path, offset, shape in self._places[name]:
            with safe_open(path, framework="pt") as file:
                part = file.get_tensor(name)
            place = whole[tuple(slice(o, o + n) for o, n in zip(offset or (), shape, strict=True))]
            place.copy_(part)
            filled += part.numel()
        if filled != whole.numel():
            raise ValueError(f"{name} has only {filled} of its {whole.numel()} numbers in the parts")
        return whole
