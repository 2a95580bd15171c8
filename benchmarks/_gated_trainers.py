"""Trainers that start a step only when the coordinator of `rollout_modes.py` allows it. Loaded by `trainer.cls_path`.

Both classes run the unchanged `_train_step` of their base class. They are used with source trees of several commits, so
they rely only on the two trainer classes and on `_train_step`, which subclasses may override.
"""

from __future__ import annotations

import os
import socket
from functools import cached_property
from typing import Any

from verl.trainer.asynchronous.trainer import AsyncPPOTrainer
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class StepGate:
    """The run's end of the connection to the coordinator, at the socket STEP_GATE."""

    def __init__(self) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.environ["STEP_GATE"])
        self._stream = self._connection.makefile("rw", encoding="utf-8")

    def wait(self) -> None:
        """Report that the previous step has ended, and block until the next one may start."""
        self._stream.write(os.environ["STEP_GATE_NAME"] + "\n")
        self._stream.flush()
        if not self._stream.readline():
            raise ConnectionError("the coordinator of the benchmark has closed the connection")


class _Gated:
    @cached_property
    def _step_gate(self) -> StepGate:
        return StepGate()

    def _train_step(self, batch: Any) -> dict[str, float]:
        self._step_gate.wait()
        metrics: dict[str, float] = super()._train_step(batch)  # type: ignore[misc]
        return metrics


class GatedSyncTrainer(_Gated, RayPPOTrainer):
    """`trainer.mode=sync`."""


class GatedAsyncTrainer(_Gated, AsyncPPOTrainer):
    """`trainer.mode=async` and `one_step_off`."""
