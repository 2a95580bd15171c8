"""RunRecord: dumps of batches and responses, and the share of time per phase."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from verl.config import PPOConfig
from verl.protocol import DataProto
from verl.trainer.common.dumps import dump_batch, dump_rows
from verl.trainer.common.failures import FOLDER, NonFatalFailures
from verl.trainer.common.phases import verdict
from verl.trainer.ppo.agent_metrics import TOOL_SHARE

__all__ = ["RunRecord"]

logger = logging.getLogger(__name__)


class RunRecord:
    """Writes the dumps of a run and adds up its times. A file that cannot be written is a non-fatal failure."""

    def __init__(self, config: PPOConfig, tokenizer: Any, failures: NonFatalFailures) -> None:
        self._trainer, self._tokenizer, self._failures = config.trainer, tokenizer, failures
        self._seconds: Counter[str] = Counter()
        self._tool_shares: list[float] = []

    def dump(self, batch: DataProto, step: int, harmful: bool) -> None:
        """Write the batch if `trainer.dump_steps` has the step or its update was `harmful`, and the responses if
        `trainer.rollout_data_dir` is set."""
        if step in self._trainer.dump_steps or harmful:
            folder = self._trainer.default_local_dir
            dumped = self._failures.dump(FOLDER, folder, step, lambda: dump_batch(batch, folder, step))
            if dumped is not None:
                logger.info("batch of step %d written to %s", step, dumped)
        if (answers := self._trainer.rollout_data_dir) is not None:
            key = "trainer.rollout_data_dir"
            self._failures.dump(key, answers, step, lambda: dump_rows(batch, self._tokenizer, answers, step))

    def add(self, seconds: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Add the seconds per phase and the metrics of a step."""
        self._seconds.update(seconds)
        if TOOL_SHARE in metrics:
            self._tool_shares.append(metrics[TOOL_SHARE])

    def verdict(self) -> str:
        """Return one line: the phase that took most of the time, and remedies."""
        return verdict(dict(self._seconds), sum(self._tool_shares) / max(1, len(self._tool_shares)))
