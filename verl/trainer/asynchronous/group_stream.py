"""GroupStream: submits prompts while the buffer has capacity, receives finished trajectories, returns complete groups.

The trainer uses it as a source of prompts, like `PromptStream`, but the responses are already generated. The trainer's
thread does all bookkeeping; collector threads of the RolloutManager only update scores and utilization. Stale groups
are dropped by `RolloutBuffer.drop_stale`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from verl.config import PPOConfig
from verl.config.layout import async_settings
from verl.protocol import DataProto, object_array
from verl.trainer.asynchronous.group_state import (
    GroupState,
    group_shape,
    join_prompts,
    load_buffer,
    oldest_step,
    save_buffer,
    saved_prompts,
)
from verl.trainer.asynchronous.rollout_buffer import PromptGroup, RolloutBuffer
from verl.trainer.asynchronous.utilization import InFlight, Utilization
from verl.trainer.ppo.generator import Generator
from verl.trainer.ppo.rollout_jobs import (
    FinishedTrajectory,
    join_rows,
    read_trajectories,
    store_trajectories,
    trajectory_names,
)
from verl.trainer.ppo.rollout_manager import RolloutManager
from verl.trainer.ppo.row_balancing import concat_prompts
from verl.trainer.ppo.state import TrainerState
from verl.trainer.ppo.worker_recovery import WorkerRecovery

logger = logging.getLogger(__name__)

# Interval in which a wait for trajectories checks the state of the hosts.
_POLL_S = 0.5


class GroupStream:
    """One instance per run. After a WorkerError and recovery, a call can be repeated without loss of trajectories."""

    def __init__(
        self,
        config: PPOConfig,
        rollouts: RolloutManager,
        generator: Generator,
        state: TrainerState,
        total_steps: int,
        wait_phase: Callable[[], AbstractContextManager[None]],
        recovery: WorkerRecovery,
    ) -> None:
        """`state.prompts`: source of the prompts. `wait_phase()`: returns the context of a wait for trajectories."""
        self._config, self._rollouts, self._generator = config, rollouts, generator
        self._state, self._wait_phase, self._recovery = state, wait_phase, recovery
        data, settings = config.data, async_settings(config.trainer)
        self._uses_partial_rollouts, self._max_staleness = settings.partial_rollout, settings.max_staleness
        surplus = max(0, data.gen_batch_size - data.train_batch_size)
        self.buffer = RolloutBuffer(
            data.train_batch_size,
            settings.max_staleness,
            settings.staleness_strategy,
            settings.in_order,
            surplus,
            total_steps,
        )
        self.utilization = Utilization()
        self.job: str | None = None
        self._loops_are_fewer = False
        """Whether loop workers run fewer trajectories concurrently than the engines could decode."""
        self._version = 0
        self.steps: dict[int, int] = {}
        """By weight version: the last step (number of trained batches) at which the rollout had it. Contains only
        versions that tokens of live groups may have."""
        self._serial = itertools.count()
        self._live: dict[str, PromptGroup] = {}
        """Groups in flight, finished or taken by the current step, by the `uid` of their rows."""
        self._dropped: set[str] = set()
        """The `uid` of dropped prompts. Their next group gets another name, so that late results of the dropped group
        are not stored in it."""
        self._taken: list[PromptGroup] = []
        self._in_flight = InFlight(self.utilization.set_in_flight)
        self._is_waiting = False
        """Whether the trainer is blocked in `next_batch`."""

    # ---------------------------------------------------------------- for the trainer, step by step

    def begin_step(self, step: int, weight_version: int) -> None:
        """Begin a step and drop groups that have become too old. `weight_version`: weight version of the rollout."""
        self._version = step - 1
        oldest = self._version - self._max_staleness
        self.steps = {version: at for version, at in self.steps.items() if at >= oldest} | {
            weight_version: self._version
        }
        self._receive_all()  # groups may have finished during the last update
        for group in self._taken:
            del self._live[group.state.name]
        self._taken = []
        if old := self.buffer.drop_stale(self._version):
            self._put_back(old)
            names = [name for group in old for name in group.state.trajectory_names(group.response_count)]
            self._in_flight.remove(names)
            if self.job is not None:
                self._rollouts.cancel(self.job, names)

    def next_batch(self) -> DataProto:
        """Block until enough groups are finished to complete the batch of the step; return their prompts."""
        self._is_waiting = True
        try:
            with self._wait_phase(), self._rollouts.monitored():
                groups = self._recovery.retry_on_worker_loss(self._next_groups)
        finally:
            self._is_waiting = False
        self._taken += groups
        return self.group_prompts(groups)

    def responses(self, prompts: DataProto) -> DataProto:
        """Return the responses to prompts of `next_batch`; all rows of a prompt are adjacent."""
        groups = [self._live[str(uid)] for uid in prompts.non_tensor_batch["uid"]]
        rows = self._rows(groups)
        by_name = {name: trajectory for group in groups for name, trajectory in group.state.finished.items()}
        finished = [by_name[name] for name in trajectory_names(rows)]
        self._generator.use_early_scores(rows, [group.state.scorer for group in groups])
        return self._generator.join_prompt_columns(rows, join_rows(finished), validate=False)

    def reject(self, prompts: DataProto) -> None:
        """Exclude taken prompts from training. They are not generated again; other prompts may be submitted."""
        self.buffer.reject([self._live[str(uid)] for uid in prompts.non_tensor_batch["uid"]])

    def put_back(self, prompts: DataProto) -> None:
        """Return taken prompts to the source: their responses will be generated again."""
        groups = [self._live[str(uid)] for uid in prompts.non_tensor_batch["uid"]]
        self.buffer.reject(groups)
        self._state.prompts.put_back(join_prompts([group.state for group in groups]))

    def update_sampler(self, batch: DataProto) -> None:
        """Pass a trained batch to a curriculum sampler."""
        self._state.prompts.update_sampler(batch)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of the dataloader."""
        return self._state.prompts.batches_per_epoch

    def drain(self) -> None:
        """Block until no group is in flight: every trajectory then has one weight version."""
        if self.job is not None and self.buffer.in_flight():
            with self._wait_phase(), self._rollouts.monitored():
                self._recovery.retry_on_worker_loss(self._finish_all)

    @property
    def max_trained_staleness(self) -> int:
        """The largest staleness that was trained."""
        return self.buffer.max_trained_staleness

    @property
    def limited_by_loops(self) -> bool:
        """Whether trajectories waited for a loop worker although the engines had capacity."""
        return self._loops_are_fewer and self.utilization.was_full

    def metrics(self) -> dict[str, float]:
        """Return metrics of this step's batch, and of groups dropped or rejected since the last call."""
        return self.buffer.metrics(self._version)

    def abandon(self) -> None:
        """Receive no further trajectories, because the run has failed."""
        self._rollouts.abandon()

    def close(self) -> None:
        """End generation; raise the error of a failed engine, if there is one."""
        self._in_flight.close()
        self.job = None
        self._rollouts.close()

    # ---------------------------------------------------------------- checkpoints

    def state(self, partials: bool) -> dict[str, Any]:
        """Return the state for a checkpoint between steps, as plain data: finished groups, and groups in flight with
        their finished trajectories. `partials`: include current partial outputs, if the run uses partial rollouts."""
        if partials and self._uses_partial_rollouts and self.job is not None:
            for name, output in self._rollouts.partials(self.job).items():
                if (group := self._live.get(name.rpartition("/")[0])) is not None:
                    group.state.partials[name] = output
        self._receive_all()
        saved = save_buffer(self.buffer, read_trajectories)
        return {"buffer": saved, "versions": dict(self.steps), "asked_for": self._group_shape}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. The next step submits the groups in flight again, to resume from their partial outputs.

        If the number or maximum length of responses has changed, all responses are generated again.
        """
        before = self._group_shape | group_shape(state)
        if before != self._group_shape and (prompts := saved_prompts(state)):
            now = ", ".join(f"{name} = {value} (was {before[name]})" for name, value in self._group_shape.items())
            logger.warning("%s: responses to %d prompts are discarded; they are generated again", now, len(prompts))
            self._state.prompts.put_back(concat_prompts(prompts))
            return
        load_buffer(self.buffer, state["buffer"])
        self.steps = dict(state["versions"])
        self._serial = itertools.count(state["buffer"]["last_serial"] + 1)
        self._live = {group.state.name: group for group in (*self.buffer.in_flight(), *self.buffer.finished_groups())}
        states = [group.state for group in self._live.values()]
        trajectories = [trajectory for state in states for trajectory in state.finished.values()]
        meta, policy = self._generator.meta(self._version + 1, validate=False), self._config.actor_rollout_ref
        finished = iter(store_trajectories(trajectories, policy, meta, self._rollouts.uses_ray))
        for group_state in states:
            group_state.finished = {name: next(finished) for name in group_state.finished}

    @property
    def _group_shape(self) -> dict[str, int]:
        """Settings that must be the same in a checkpoint and in the run that resumes from it."""
        return {
            "answers to a prompt": self._generator.responses_per_prompt,
            "rollout.n": self._config.actor_rollout_ref.rollout.n,
            "data.max_response_length": self._config.data.max_response_length,
        }

    # ---------------------------------------------------------------- waiting

    def _next_groups(self) -> list[PromptGroup]:
        """Submit and receive until the buffer returns groups for the batch. Can be called again after a WorkerError."""
        while True:
            self.open()
            self._top_up()
            if (groups := self.buffer.take(self._version)) is not None:
                return groups
            self.receive(_POLL_S)

    def _finish_all(self) -> None:
        """Receive until no group is in flight. Can be called again after a WorkerError."""
        while self.buffer.in_flight():
            self.open()
            self.receive(_POLL_S)

    # ---------------------------------------------------------------- submitting

    def open(self) -> None:
        """Open generation if it is not open or a host was lost. The first call also starts the job and submits the
        groups in flight of a checkpoint."""
        self._rollouts.open()
        if self.job is None:
            rollout = self._config.actor_rollout_ref.rollout
            engines = self._rollouts.engine_count * rollout.max_num_seqs
            loops = self._rollouts.loop_capacity
            self.utilization.max_concurrent, self._loops_are_fewer = (
                min(engines, loops or engines),
                loops is not None and loops < engines,
            )
            self._in_flight = in_flight = InFlight(self.utilization.set_in_flight)
            meta = self._generator.meta(self._version + 1, validate=False)
            self.job = self._rollouts.start(meta, partial(self._on_finished, in_flight))
            self._submit(self.buffer.in_flight())

    def _top_up(self) -> None:
        """Submit as many prompts as the buffer has capacity for."""
        if (count := self.buffer.capacity(self._version)) > 0:
            prompts = self._state.prompts.take(count, prefetch=False)
            self._submit([self.new_group(prompts, row) for row in range(len(prompts))])
            self._state.prompts.prefetch()  # after the submission, which the prefetching thread would delay

    def new_group(self, prompts: DataProto, row: int = 0) -> PromptGroup:
        """Return a new group for the prompt at `row`, in the buffer."""
        uid, count = str(prompts.non_tensor_batch["uid"][row]), self._generator.responses_per_prompt
        serial, is_new = next(self._serial), uid not in self._live and uid not in self._dropped
        self._dropped.discard(uid)
        name = uid if is_new else f"{uid}~{serial}"
        state = GroupState(name, prompts, self._version + 1, row=row)
        group = PromptGroup(serial, uid, count, self._version, state=state)
        self.buffer.add(group)
        self._live[name] = group
        return group

    def _submit(self, groups: Sequence[PromptGroup]) -> None:
        """Submit the unfinished trajectories of these groups."""
        assert self.job is not None
        for step in dict.fromkeys(group.state.step for group in groups):
            of_step = [group for group in groups if group.state.step == step]
            rows = self._rows(of_step)
            for number, group in enumerate(of_step):
                span = slice(number * group.response_count, (number + 1) * group.response_count)
                columns = {name: values[span] for name, values in rows.non_tensor_batch.items()}
                group.state.scorer = self._generator.early_scorer(columns)
            names = trajectory_names(rows)
            finished = {name for group in of_step for name in group.state.finished}
            missing = [row for row, name in enumerate(names) if name not in finished]
            self._in_flight.add(names[row] for row in missing)
            partials = {name: output for group in of_step for name, output in group.state.partials.items()}
            request = self._generator.request(rows.select_idxs(missing), step, False)
            self._rollouts.submit(self.job, request, partials)

    def group_prompts(self, groups: Sequence[PromptGroup]) -> DataProto:
        """Return the prompts of these groups; their `uid` is the name of the group."""
        prompts = join_prompts([group.state for group in groups])
        prompts.non_tensor_batch["uid"] = object_array([group.state.name for group in groups])
        return prompts

    def _rows(self, groups: Sequence[PromptGroup]) -> DataProto:
        """Return the rows to generate; all rows of a group are adjacent."""
        return self._generator.rollout_rows(self.group_prompts(groups))

    def _put_back(self, groups: Sequence[PromptGroup]) -> None:
        for group in groups:
            del self._live[group.state.name]
            self._dropped.add(group.uid)
        self._state.prompts.put_back(join_prompts([group.state for group in groups]))

    # ---------------------------------------------------------------- receiving

    def _on_finished(self, in_flight: InFlight, finished: Sequence[FinishedTrajectory]) -> None:
        """Update utilization and submit responses for scoring. Runs in a collector thread, also while the trainer
        trains."""
        in_flight.remove(trajectory.name for trajectory in finished)
        if self._is_waiting and not len(in_flight):
            return  # no generation or training to overlap with: the trainer scores the whole batch
        unscored: dict[str, list[tuple[int, np.ndarray]]] = {}
        for trajectory in finished:
            if trajectory.status == "finished" and trajectory.score is None:
                unscored.setdefault(trajectory.uid, []).append((trajectory.sample_index, trajectory.last_tokens))
        for uid, responses in unscored.items():
            group = self._live.get(uid)
            if group is not None and group.state.scorer:
                group.state.scorer.add(responses)

    def receive(self, timeout: float) -> None:
        assert self.job is not None
        self._store(self._rollouts.collect(self.job, timeout))

    def _receive_all(self) -> None:
        """Receive finished trajectories without blocking. Errors are left to the next `receive`."""
        if self.job is not None:
            self._store(self._rollouts.take_finished(self.job))

    def _store(self, finished: Iterable[FinishedTrajectory]) -> None:
        for trajectory in finished:
            group = self._live.get(trajectory.uid)
            if group is None or group.oldest is not None:  # the group was dropped, or is complete
                continue
            state: GroupState = group.state
            state.finished[trajectory.name] = trajectory
            state.partials.pop(trajectory.name, None)
            if len(state.finished) == group.response_count:
                versions = [item.versions for item in state.finished.values()]
                oldest, partial_count = oldest_step(versions, self.steps, group.sent_at)
                self.buffer.mark_finished(group, oldest, partial_count)
