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
    "_after_step": "answers",
    "_save_checkpoint": "save",
    "_validate": "validation",
    "_log_metrics": "log",
}


def _logged(method: str, phase: str) -> Callable[..., Any]:
    def call(self: PhaseLoggingTrainer, *args: Any, **kwargs: Any) -> Any:
        if self.inside is not None:  # nested phases: validation also generates and syncs weights
            return getattr(RayPPOTrainer, method)(self, *args, **kwargs)
        self.inside = phase
        self.note(phase=phase, number=list(PHASES.values()).index(phase))
        try:
            result = getattr(RayPPOTrainer, method)(self, *args, **kwargs)
        finally:
            self.inside = None
        self.after(phase)
        return result

    return call


class PhaseLoggingTrainer(RayPPOTrainer):
    """Appends to `notes.jsonl` next to `trainer.rollout_data_dir`."""

    inside: str | None = None
    vars().update({method: _logged(method, phase) for method, phase in PHASES.items()})

    def note(self, **fields: Any) -> None:
        line = {"time": time.monotonic(), "pid": os.getpid(), "step": self.global_steps, **fields}
        answers = Path(self.config.trainer.rollout_data_dir)
        with (answers.parent / "notes.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")

    def after(self, phase: str) -> None:
        if phase == "start":
            self.note(actor_ranks=[process.pid for process in self.actor_wg.processes])
        elif phase == "resume":
            self.note(resumed_at=self.global_steps)
        elif phase == "answers":
            path = Path(self.config.trainer.rollout_data_dir) / f"{self.global_steps}.jsonl"
            self.note(answers=hashlib.sha256(path.read_bytes()).hexdigest())
