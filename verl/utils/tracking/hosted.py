"""Trackers of the form init(project, name, config) → log(dict, step) → finish()."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.tracking.tracker import Generation, Run, Tracker, numbers_in


class Hosted(Tracker):
    """What they share; a subclass names its `package` and shows generations its way."""

    package: str

    def __init__(self, run: Run) -> None:
        self.module = importlib.import_module(self.package)
        self.module.init(project=run.project, name=run.experiment, config=dict(run.config), **self.resumed(run))

    def resumed(self, run: Run) -> dict[str, Any]:
        """What `init` needs to go on with an earlier run."""
        return {}

    def table(self, samples: Sequence[Generation]) -> Any:
        """Generations as the tracker shows them."""
        raise NotImplementedError

    def log(self, data: Mapping[str, Any], step: int) -> None:
        self.module.log(numbers_in(data), step=step)

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        if samples:
            self.module.log({"val/generations": self.table(samples)}, step=step)

    def close(self) -> None:
        self.module.finish()
