"""What a tracker is told and what it does; each is a file here and a row in `verl.config.names`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Run(NamedTuple):
    """What a tracker is told about the run."""

    project: str
    experiment: str
    config: Mapping[str, Any]
    first_step: int | None = None
    """The first step it will log: records from there on are of steps done again, or of another run. None: unknown."""

    tracking_dir: str | None = None
    """`trainer.tracking_dir`; None: ./runs/<project>/<experiment>."""

    @property
    def directory(self) -> Path:
        """The folder of local backends. By default `tensorboard --logdir ./runs/` shows every run."""
        return Path("runs") / self.project / self.experiment if self.tracking_dir is None else Path(self.tracking_dir)


class Generation(NamedTuple):
    """One answer to a validation prompt."""

    input: str
    output: str
    score: Any


class Tracker:
    """One open tracker. Values of `data` are plain Python; what a tracker cannot show it leaves out."""

    def __init__(self, run: Run) -> None:
        raise NotImplementedError

    def log(self, data: Mapping[str, Any], step: int) -> None:
        raise NotImplementedError

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    @classmethod
    def check(cls) -> None:
        """Raise ValueError, before training, where it could not be opened."""

    @classmethod
    def folder(cls, run: Run) -> Path | None:
        """Where on this machine it writes, if it does."""
        return None


def numbers_in(data: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in data.items() if isinstance(value, int | float)}
