"""Column containers of a DataProto: a TensorDict and a dict that also read columns under their aliases."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensordict import TensorDict

from verl.types.schema import ALIASES, stored_name
from verl.utils.nested import object_array

__all__ = ["ObjectColumns", "TensorColumns", "aliased_value"]


class TensorColumns(TensorDict):
    """The tensor columns. Keys are the stored columns; aliases of `verl.types.schema` can be read as well.

    An alias returns a copy: `batch["old_log_probs"] += 1` must not change `rollout_log_probs`.
    """

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str) and (stored := stored_name(index, self.keys())) != index:
            return super().__getitem__(stored).clone()
        return super().__getitem__(index)

    def get(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(key, str) and (stored := stored_name(key, self.keys())) != key:
            return super().get(stored).clone()
        return super().get(key, *args, **kwargs)


class ObjectColumns(dict[str, Any]):
    """The object columns of a batch, or the objects of one row. Aliases can be read as well."""

    def __missing__(self, name: str) -> Any:
        stored = stored_name(name, self)
        if stored == name:
            raise KeyError(name)
        return aliased_value(name, self[stored])

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if stored_name(name, self) in self else default


def aliased_value(name: str, value: Any) -> Any:
    """The value of the alias `name`, from a stored column (an object array) or from one of its entries."""
    entry = ALIASES[name].entry
    if entry is None:
        return value
    if isinstance(value, np.ndarray):
        return object_array([(row or {}).get(entry) for row in value])
    return (value or {}).get(entry)
