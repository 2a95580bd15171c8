"""Trainers that start a step only when the coordinator of `rollout_modes.py` allows it. Loaded by `trainer.cls_path`.

Both classes run the unchanged `_train_step` of their base class. They are used with source trees of several commits, so
they rely only on the two trainer classes and on `_train_step`, which subclasses may override.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

from _step_gate import StepGate

import verl
from verl.trainer.asynchronous.trainer import AsyncPPOTrainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class _Gated:
    @cached_property
    def _step_gate(self) -> StepGate:
        tree, expected = Path(verl.__file__).resolve().parents[1], Path(os.environ["STEP_GATE_TREE"])
        if tree != expected:
            raise RuntimeError(f"the run imports verl from {tree} instead of {expected}, which is to be measured")
        return StepGate()

    def _train_step(self, batch: Any) -> dict[str, float]:
        self._step_gate.wait()
        metrics: dict[str, float] = super()._train_step(batch)  # type: ignore[misc]
        return metrics


class GatedSyncTrainer(_Gated, RayPPOTrainer):
    """`trainer.mode=sync`."""


class GatedAsyncTrainer(_Gated, AsyncPPOTrainer):
    """`trainer.mode=async` and `one_step_off`."""
