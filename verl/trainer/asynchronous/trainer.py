"""AsyncPPOTrainer: RayPPOTrainer for `trainer.mode` one_step_off and async. The step is the same; its batch comes from
a GroupStream, which generates ahead."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from verl.config import names
from verl.config.asynchronous import ahead_of
from verl.config.layout import shares_devices
from verl.protocol import DataProto
from verl.single_controller.base.errors import WorkerError
from verl.trainer.asynchronous.group_stream import GroupStream
from verl.trainer.asynchronous.utilization import Setup, tuning_advice
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

__all__ = ["AsyncPPOTrainer"]

logger = logging.getLogger(__name__)


class AsyncPPOTrainer(RayPPOTrainer):
    """The modes differ only in how far generation may be ahead of training (`ahead_of`)."""

    modes = ("one_step_off", "async")

    def _create_dataloader(self, *args: Any, **kwargs: Any) -> None:
        super()._create_dataloader(*args, **kwargs)
        self.stream = GroupStream(
            self.config,
            self.rollouts,
            self.generator,
            lambda: self.prompts,
            self.total_training_steps,
            self._waits_for_answers,
            self.recovery,
        )
        self.state.answers = self.stream
        self._evenness: list[float] = []

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
        if (shares := self.stream.utilization.shares()) is not None:
            ahead, own = ahead_of(self.config.trainer), not shares_devices(self.config)
            limits = (self.stream.reached, self.stream.loops_limit, float(np.mean(self._evenness or 0.0)))
            setup = Setup(self.config.trainer.mode, ahead.max_staleness, ahead.partial, own, *limits)
            logger.info("Who waited for whom: %s.", tuning_advice(shares, setup))

    @property
    def _prompt_source(self) -> GroupStream:
        return self.stream

    def _next_prompts(self) -> DataProto:
        """Empty: the GroupStream has submitted the prompts, and the step takes finished groups after its weight
        sync."""
        return DataProto()

    def _train_step(self, batch: DataProto) -> dict[str, float]:
        self._finish_answers()
        return super()._train_step(batch)

    def _finish_answers(self) -> None:
        """Without partial rollouts, block until no response is in flight. Called before a weight sync, so that the wait
        is not measured as its time."""
        if not ahead_of(self.config.trainer).partial:
            self.recovery.retry_on_worker_loss(self.weight_sync.resume_generation)
            self.stream.drain()

    def _collect_rollouts(self, prompts: DataProto, metrics: dict[str, float]) -> DataProto:
        self.stream.begin_step(self.global_steps, self.policy_version)
        batch = super()._collect_rollouts(self.stream.take(self.config.data.train_batch_size), metrics)
        metrics |= self.stream.metrics()
        # With tools, the number of tokens does not indicate the time.
        if self.config.actor_rollout_ref.rollout.agent.default_agent_loop == names.SINGLE_TURN:
            lengths = batch.batch["response_mask"].sum(dim=-1)
            self._evenness.append(float(lengths.float().mean() / lengths.max().clamp(min=1)))
        return batch

    def _generate(self, batch: DataProto) -> DataProto:
        return self.stream.responses(batch)

    def _validate(self) -> dict[str, float]:
        """Validate with the weights after the step, while the stream stays open."""
        self._finish_answers()
        metrics = super()._validate()
        self._release_weights()
        return metrics

    def _flow_metrics(self) -> dict[str, float]:
        return self.stream.utilization.step(self.phases.seconds)

    def _waits_for_answers(self) -> AbstractContextManager[None]:
        """The phase of a wait for trajectories: of the step, or, outside of a step, of the validation that it
        precedes."""
        phase = self.phases if self.phases.within("step") else self.status.phase
        return phase("gen", *self.groups.answering)
