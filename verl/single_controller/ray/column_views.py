"""A BatchRef's columns as mappings: what `batch.batch` and `batch.non_tensor_batch` are."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from verl.single_controller.ray.batch_ref import BatchRef

__all__ = ["ObjectColumns", "TensorColumns"]


class _Columns(MutableMapping[str, Any]):
    """A BatchRef's columns of one kind as a mapping."""

    def __init__(self, owner: BatchRef) -> None:
        self._owner = owner

    def _names(self) -> list[str]:
        raise NotImplementedError

    def __getitem__(self, name: str) -> Any:
        if name not in self._names():
            raise KeyError(f"BatchRef: no column {name!r}; there is {sorted(self._names())}.")
        return self._owner._get_column(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._owner._set_column(name, value)

    def __delitem__(self, name: str) -> None:
        if name not in self._names():
            raise KeyError(name)
        self._owner._drop(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __contains__(self, name: object) -> bool:
        return name in self._names()

    def __len__(self) -> int:
        return len(self._names())


class ObjectColumns(_Columns):
    def _names(self) -> list[str]:
        return self._owner._object_keys()


class TensorColumns(_Columns):
    """Looks like the TensorDict of a DataProto. What is not a mapping operation works on all columns, fetched."""

    def _names(self) -> list[str]:
        return self._owner._tensor_keys()

    @property
    def batch_size(self) -> torch.Size:
        return torch.Size([len(self._owner)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner.fetch(non_tensor_batch_keys=[]).batch, name)
