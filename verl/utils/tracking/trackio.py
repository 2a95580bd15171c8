"""Metrics for Trackio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.utils.tracking.hosted import Hosted
from verl.utils.tracking.tracker import Generation


class Trackio(Hosted):
    """Generations as a table."""

    package = "trackio"

    def table(self, samples: Sequence[Generation]) -> Any:
        import pandas

        return self.module.Table(dataframe=pandas.DataFrame([sample._asdict() for sample in samples]))
