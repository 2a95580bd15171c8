"""A trainer that logs the phases it enters, so that faults can be timed.

Loaded by `trainer.cls_path`. Every line of the log is a JSON object with the monotonic time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.trainer.ppo.ray_trainer import RayPPOTrainer

# Trainer methods that are phases, in order; from `_sync_weights` on they belong to a step.
PHASES = {
    "init_workers": "start",
    "_load_checkpoint": "resume",
    "_sync_weights": "weight sync",
    "_generate": "generation",
    "_compute_reward": "reward",
    "_compute_old_log_prob": "old log-probs",
    "_compute_advantage": "advantages",
    "_update": "update",
    "_record_step": "rollout dump",
    "_save_checkpoint": "save",
    "_validate": "validation",
    "_log_metrics": "log",
}


def _with_log(method: str, phase: str) -> Callable[..., Any]:
    def call(self: PhaseLoggingTrainer, *args: Any, **kwargs: Any) -> Any:
        if self.current_phase is not None:  # nested phases: validation also generates and syncs weights
            return getattr(RayPPOTrainer, method)(self, *args, **kwargs)
        self.current_phase = phase
        self.log_entry(phase=phase, number=list(PHASES.values()).index(phase))
        try:
            result = getattr(RayPPOTrainer, method)(self, *args, **kwargs)
        finally:
            self.current_phase = None
        self.log_results(phase)
        return result

    return call


class PhaseLoggingTrainer(RayPPOTrainer):
    """Appends to `phases.jsonl` next to `trainer.rollout_data_dir`."""

    current_phase: str | None = None
    vars().update({method: _with_log(method, phase) for method, phase in PHASES.items()})

    def log_entry(self, **fields: Any) -> None:
        line = {"time": time.monotonic(), "pid": os.getpid(), "step": self.global_steps, **fields}
        rollouts = Path(self.config.trainer.rollout_data_dir)
        with (rollouts.parent / "phases.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")

    def log_results(self, phase: str) -> None:
        if phase == "start":
            self.log_entry(actor_ranks=[process.pid for process in self.actor_wg.processes])
        elif phase == "resume":
            self.log_entry(resumed_at=self.global_steps)
        elif phase == "rollout dump":
            self.record.wait_for_files()
            path = Path(self.config.trainer.rollout_data_dir) / f"{self.global_steps}.jsonl"
            self.log_entry(rollout_digest=hashlib.sha256(path.read_bytes()).hexdigest())
