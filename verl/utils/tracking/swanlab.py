"""Metrics for SwanLab."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.utils.tracking.hosted import Hosted
from verl.utils.tracking.tracker import Generation


class SwanLab(Hosted):
    """Generations as texts."""

    package = "swanlab"

    def table(self, samples: Sequence[Generation]) -> Any:
        return [self.module.Text(f"{one.input}\n---\n{one.output}\n--- score {one.score}") for one in samples]
