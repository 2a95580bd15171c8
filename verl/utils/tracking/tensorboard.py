"""Metrics for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.utils.tracking.tracker import Generation, Run, Tracker, numbers_in


class TensorBoard(Tracker):
    """A folder that `tensorboard --logdir` shows."""

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run.directory), purge_step=run.first_step)
        self._writer.add_text("config", f"```\n{json.dumps(run.config, indent=2, default=str)}\n```")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        for key, value in numbers_in(data).items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def log_generations(self, samples: Sequence[Generation], step: int) -> None:
        for index, sample in enumerate(samples):
            text = f"score {sample.score}\n\n```\n{sample.input}\n```\n\n```\n{sample.output}\n```"
            self._writer.add_text(f"val/generations/{index}", text, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    @classmethod
    def folder(cls, run: Run) -> Path | None:
        return run.directory
