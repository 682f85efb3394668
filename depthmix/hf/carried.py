"""Saved folders with code that imports their model's classes, for tools that do not import depthmix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthmix.models.exchange import CODE, auto_map, code


class CarriesCode:
    """A configuration whose folder holds two lines of code that import its classes, which `trust_remote_code=True` runs."""

    def classes(self) -> tuple[Mapping[str, str], str]:
        """Return the class names by Auto class, and the module they are imported from."""
        raise NotImplementedError

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save as usual, with the modeling file. It is written first, since saving may end in an upload of the folder."""
        classes, module = self.classes()
        folder = Path(save_directory)
        if not folder.is_file():  # which is refused below
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CODE).write_text(code(classes, module))
        self.auto_map = auto_map(classes)
        return super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]

    @classmethod
    def register_for_auto_class(cls, *args: Any, **kwargs: Any) -> None:
        """Do nothing: registering would make `save_pretrained` copy this package's source into the folder."""
