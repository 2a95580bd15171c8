"""Reduction of metrics collected over micro-batches and ranks to one number per key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return one float per key: the mean of a list, or its max/min if the key ends in `max`/`min`.

    An entry may be a `(sum, count)` tuple: then the result is total sum / total count (0 if the count is 0), so that
    parts are weighted by their size. A single number is its own mean. Keys with an empty list are left out.
    """
    reduced = {}
    for key, value in metrics.items():
        entries = value if isinstance(value, list) else [value]
        if entries:
            reduced[key] = _reduce(key, entries)
    return reduced


def _reduce(key: str, entries: Sequence[Any]) -> float:
    pairs = [entry for entry in entries if isinstance(entry, tuple)]
    if pairs:
        if len(pairs) != len(entries) or any(len(pair) != 2 for pair in pairs):
            raise ValueError(
                f"{key}: (sum, count) pairs and plain numbers are mixed: {list(entries)!r}. Use one of them."
            )
        total, count = (sum(float(pair[part]) for pair in pairs) for part in (0, 1))
        return total / count if count else 0.0
    # numpy's max and min propagate NaN; with Python's, the result depends on its position.
    values = np.array([float(entry) for entry in entries])
    if key.endswith("max"):
        return float(values.max())
    if key.endswith("min"):
        return float(values.min())
    return float(values.mean())
