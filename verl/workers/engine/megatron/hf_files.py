"""The safetensors files of a Hugging Face folder, of which a rank reads what it needs."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch


class HFFiles:
    """The safetensors files of a folder, of which slices are read."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._files = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]

    @cached_property
    def _names(self) -> dict[str, Any]:
        return {name: file for file in self._files for name in file.keys()}

    def name_of(self, name: str) -> str | None:
        """As it is stored: a bare model's weights have no prefix."""
        bare = name.removeprefix("model.")
        return name if name in self._names else bare if bare in self._names else None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, where: tuple[int | slice, ...]) -> torch.Tensor:
        return self._slice(name)[where]

    def _slice(self, name: str) -> Any:
        stored = self.name_of(name)
        assert stored is not None, name
        return self._names[stored].get_slice(stored)
