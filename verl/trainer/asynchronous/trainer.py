"""AsyncPPOTrainer: RayPPOTrainer for `trainer.mode` one_step_off and async. Training steps are the same; a GroupStream
generates their batches in advance."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from verl.config import names
from verl.config.layout import async_settings, old_log_prob_conflicts, shares_devices
from verl.protocol import DataProto
from verl.single_controller.base.worker_group import WorkerError
from verl.trainer.asynchronous.group_stream import GroupStream
from verl.trainer.asynchronous.utilization import AsyncSetup, tuning_advice
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

logger = logging.getLogger(__name__)


class AsyncPPOTrainer(RayPPOTrainer):
    """The modes differ only in the allowed staleness of responses and the order of groups (`async_settings`)."""

    modes = ("one_step_off", "async")

    def _create_dataloader(self, *args: Any, **kwargs: Any) -> None:
        super()._create_dataloader(*args, **kwargs)
        self.stream = GroupStream(
            self.config,
            self.rollouts,
            self.generator,
            self.state,
            self.total_training_steps,
            self._wait_phase,
            self.recovery,
        )
        self.state.stream = self.stream
        self._length_evenness: list[float] = []
        """Per step: mean response length divided by the longest one."""
        reasons = old_log_prob_conflicts(self.config)
        if reasons and not self.config.algorithm.rollout_correction.bypass_mode:
            logger.info("Every step has a separate forward pass for old log-probs: %s.", "; ".join(reasons))

    def _train(self) -> None:
        self.stream.utilization.begin()
        try:
            super()._train()
        except BaseException:
            self.stream.abandon()
            raise
        try:
            self.stream.close()
        except WorkerError as error:  # the engines are not needed any more
            logger.warning("generation did not end cleanly: %s", error)
        self._log_utilization()

    def _log_utilization(self) -> None:
        if (shares := self.stream.utilization.shares()) is None:
            return
        settings = async_settings(self.config.trainer)
        setup = AsyncSetup(
            self.config.trainer.mode,
            settings.max_staleness,
            settings.partial_rollout,
            own_devices=not shares_devices(self.config),
            trained_staleness=self.stream.max_trained_staleness,
            limited_by_loops=self.stream.limited_by_loops,
            evenness=float(np.mean(self._length_evenness or 0.0)),
        )
        logger.info("Utilization: %s.", tuning_advice(shares, setup))

    @property
    def _prompt_source(self) -> GroupStream:
        return self.stream

    def _next_prompts(self) -> DataProto:
        """Return an empty batch: the GroupStream has submitted the prompts, and `_collect_rollouts` takes finished
        groups after the weight sync."""
        return DataProto()

    def _train_step(self, batch: DataProto) -> dict[str, float]:
        self._drain_stream()
        return super()._train_step(batch)

    def _drain_stream(self) -> None:
        """Without partial rollouts, block until no trajectory is in flight. Called before the phase of the weight sync:
        its time does not include the wait."""
        if not async_settings(self.config.trainer).partial_rollout:
            self.recovery.retry_on_worker_loss(self.weight_sync.resume_generation)
            self.stream.drain()

    def _collect_rollouts(self, prompts: DataProto, metrics: dict[str, float]) -> DataProto:
        self.stream.begin_step(self.global_steps, self.policy_version)
        batch = super()._collect_rollouts(self.stream.next_batch(), metrics)
        metrics |= self.stream.metrics()
        # With tools, the number of tokens does not indicate the time.
        if self.config.actor_rollout_ref.rollout.agent.default_agent_loop == names.SINGLE_TURN:
            lengths = batch.batch["response_mask"].sum(dim=-1)
            self._length_evenness.append(float(lengths.float().mean() / lengths.max().clamp(min=1)))
        return batch

    def _generate(self, batch: DataProto) -> DataProto:
        return self.stream.responses(batch)

    def _validate(self) -> dict[str, float]:
        """Validate with the weights after the step, while the stream stays open."""
        self._drain_stream()
        metrics = super()._validate()
        self._free_generation_devices()
        return metrics

    def _utilization_metrics(self) -> dict[str, float]:
        return self.stream.utilization.step(self.phases.seconds)

    def _wait_phase(self) -> AbstractContextManager[None]:
        """Return the context of a wait for trajectories: in a step a measured phase; during validation only a phase of
        the status."""
        phase = self.phases if self.phases.is_running("step") else self.status.phase
        return phase("gen", *self.groups.generation_groups)
