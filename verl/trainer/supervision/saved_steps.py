"""What a command has saved so far, and where its next attempt goes on, whatever `trainer.resume_mode` said."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, TypeVar

from verl.utils.checkpoint.manifest import MANIFEST
from verl.utils.checkpoint.steps import has_expected_sizes, newest_first, step_of
from verl.utils.fs import expand_path

C = TypeVar("C")


class SavedSteps:
    """The steps in `trainer.default_local_dir` that were not there when the command began."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._root = Path(expand_path(trainer.default_local_dir)).absolute()
        self._before = {_identity(folder) for folder in newest_first(self._root)}

    def newest(self) -> Path | None:
        """The newest whole one."""
        mine = (folder for folder in newest_first(self._root) if _identity(folder) not in self._before)
        return next(filter(has_expected_sizes, mine), None)

    def name_of_newest(self) -> str | None:
        """Another one for every step that is saved, also for a step that is saved again."""
        newest = self.newest()
        return None if newest is None else f"{newest} {_identity(newest)}"

    def config_of_next(self, config: C) -> C:
        """The configuration of an attempt that goes on from them: `disable` and `resume_path` are for the first alone.

        `auto` finds them by itself, and copies at a remote too.
        """
        newest = self.newest()
        if newest is None or self._trainer.resume_mode == "auto":
            return config
        changed: Any = copy.deepcopy(config)
        changed.trainer.resume_mode, changed.trainer.resume_from_path = "resume_path", str(newest)
        return changed

    def what_is_lost(self, under_way: int | None) -> str:
        """Where the next attempt goes on and which steps it makes again; `under_way` is the step that died, if any."""
        newest, mode = self.newest(), self._trainer.resume_mode
        if newest is None and mode == "auto":
            newest = next(filter(has_expected_sizes, newest_first(self._root)), None)
        elif newest is None and mode == "resume_path":
            newest = Path(str(self._trainer.resume_from_path))
        step = 0 if newest is None else step_of(newest.name)
        text = "starts from the beginning" if newest is None else f"goes on at step {step} ({newest})"
        if step is None or under_way is None or under_way <= step:
            return text
        again = f"step {under_way} is" if under_way == step + 1 else f"steps {step + 1}-{under_way} are"
        return f"{text}, {again} made again"


def _identity(folder: Path) -> tuple[int, int] | None:
    """Of a step, wherever it is moved; None where it has no manifest."""
    try:
        stat = (folder / MANIFEST).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns
