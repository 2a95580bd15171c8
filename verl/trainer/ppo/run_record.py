"""RunRecord: what a run keeps of its steps for people to look at: batches, answers, and where the time went."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from verl.config import PPOConfig
from verl.protocol import DataProto
from verl.trainer.common.dumps import dump_batch, dump_rows
from verl.trainer.common.phases import verdict
from verl.trainer.common.setbacks import FOLDER, Setbacks
from verl.trainer.ppo.agent_metrics import TOOL_SHARE

__all__ = ["RunRecord"]

logger = logging.getLogger(__name__)


class RunRecord:
    """Files that cannot be written are setbacks, which do not end the run."""

    def __init__(self, config: PPOConfig, tokenizer: Any, setbacks: Setbacks) -> None:
        self._trainer, self._tokenizer, self._setbacks = config.trainer, tokenizer, setbacks
        self._seconds: Counter[str] = Counter()
        self._tool_shares: list[float] = []

    def dump(self, batch: DataProto, step: int, harmful: bool) -> None:
        """The step's batch, where it is asked for or its update was `harmful`; and its answers."""
        if step in self._trainer.dump_steps or harmful:
            folder = self._trainer.default_local_dir
            dumped = self._setbacks.dump(FOLDER, folder, step, lambda: dump_batch(batch, folder, step))
            if dumped is not None:
                logger.info("batch of step %d written to %s", step, dumped)
        if (answers := self._trainer.rollout_data_dir) is not None:
            key = "trainer.rollout_data_dir"
            self._setbacks.dump(key, answers, step, lambda: dump_rows(batch, self._tokenizer, answers, step))

    def add(self, seconds: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """A step: its seconds by phase, and its metrics."""
        self._seconds.update(seconds)
        if TOOL_SHARE in metrics:
            self._tool_shares.append(metrics[TOOL_SHARE])

    def verdict(self) -> str:
        """One line: which phase took most of the time, and what would help."""
        return verdict(dict(self._seconds), sum(self._tool_shares) / max(1, len(self._tool_shares)))
