"""AsyncPPOTrainer: training that does not wait. The same step and collaborators; its prompts are answered already."""

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
    """`trainer.mode` one_step_off or async: how far answers may be ahead is all that differs between them."""

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
        except WorkerError as error:  # nobody needs the engines any more
            logger.warning("the stream of answers did not end well: %s", error)
        if (shares := self.stream.utilization.shares()) is not None:
            ahead, own = ahead_of(self.config.trainer), not shares_devices(self.config)
            limits = (self.stream.reached, self.stream.loops_limit, float(np.mean(self._evenness or 0.0)))
            setup = Setup(self.config.trainer.mode, ahead.max_staleness, ahead.partial, own, *limits)
            logger.info("Who waited for whom: %s.", tuning_advice(shares, setup))

    @property
    def _prompt_source(self) -> GroupStream:
        return self.stream

    def _next_prompts(self) -> DataProto:
        """They went out long ago: which of them this step trains on is known when it has its weights."""
        return DataProto()

    def _train_step(self, batch: DataProto) -> dict[str, float]:
        self._finish_answers()
        return super()._train_step(batch)

    def _finish_answers(self) -> None:
        """Before a hand-over of weights, of whose time it is none: where these wait for the answers under way."""
        if not ahead_of(self.config.trainer).partial:
            self.recovery.retry_on_worker_loss(self.weight_sync.resume_generation)
            self.stream.drain()

    def _collect_rollouts(self, prompts: DataProto, metrics: dict[str, float]) -> DataProto:
        self.stream.begin_step(self.global_steps, self.policy_version)
        batch = super()._collect_rollouts(self.stream.take(self.config.data.train_batch_size), metrics)
        metrics |= self.stream.metrics()
        # Of conversations with tools tokens say nothing of the time.
        if self.config.actor_rollout_ref.rollout.agent.default_agent_loop == names.SINGLE_TURN:
            lengths = batch.batch["response_mask"].sum(dim=-1)
            self._evenness.append(float(lengths.float().mean() / lengths.max().clamp(min=1)))
        return batch

    def _generate(self, batch: DataProto) -> DataProto:
        return self.stream.responses(batch)

    def _validate(self) -> dict[str, float]:
        """Beside the stream, with the weights after the step."""
        self._finish_answers()
        found = super()._validate()
        self._release_weights()
        return found

    def _flow_metrics(self) -> dict[str, float]:
        return self.stream.utilization.step(self.phases.seconds)

    def _waits_for_answers(self) -> AbstractContextManager[None]:
        """Before a validation, after the step, it is a part of that: no time of the step, and given up with it."""
        phase = self.phases if self.phases.within("step") else self.status.phase
        return phase("gen", *self.groups.answering)
