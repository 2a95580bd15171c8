"""Small helpers on plain Python containers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def append_to_dict(data: dict[str, list[Any]], new_data: Mapping[str, Any]) -> None:
    """Collect `new_data` into the lists of `data`, in place: a list extends, anything else is appended."""
    for key, value in new_data.items():
        collected = data.setdefault(key, [])
        if isinstance(value, list):
            collected.extend(value)
        else:
            collected.append(value)
