"""GroupStream: submits prompts as the buffer has room, receives trajectories as they finish, returns whole groups.

For the trainer it is a source of prompts, like `PromptStream`, whose responses exist already. All bookkeeping happens
in the trainer's thread; scoring and utilization are updated by the collector threads of the RolloutManager.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from verl.config import PPOConfig
from verl.config.asynchronous import ahead_of
from verl.protocol import DataProto, object_array
from verl.trainer.asynchronous.buffer import Buffer, Group
from verl.trainer.asynchronous.group_state import (
    GroupState,
    ages,
    group_shape,
    join_prompts,
    load_buffer,
    prompts_of,
    save_buffer,
)
from verl.trainer.asynchronous.in_flight import InFlight
from verl.trainer.asynchronous.utilization import Utilization
from verl.trainer.ppo.arrange import concat_prompts
from verl.trainer.ppo.finished_rows import FinishedTrajectory, join_rows, read_trajectories, store_trajectories
from verl.trainer.ppo.generator import Generator
from verl.trainer.ppo.prompts import PromptStream
from verl.trainer.ppo.recovery import WorkerRecovery
from verl.trainer.ppo.rollout_manager import RolloutManager, trajectory_names

__all__ = ["GroupStream"]

logger = logging.getLogger(__name__)

# Interval in which a wait for trajectories checks the state of the hosts.
_WAKE_S = 0.5


class GroupStream:
    """From the first step to the last. After a WorkerError its calls can be repeated: nothing is lost."""

    def __init__(
        self,
        config: PPOConfig,
        rollouts: RolloutManager,
        generator: Generator,
        source: Callable[[], PromptStream],
        total_steps: int,
        waiting: Callable[[], AbstractContextManager[None]],
        recovery: WorkerRecovery,
    ) -> None:
        """`source()` returns the run's prompts; `waiting()` is the context of waits for trajectories."""
        self._config, self._rollouts, self._generator = config, rollouts, generator
        self._source, self._wait_phase, self._recovery = source, waiting, recovery
        data, ahead = config.data, ahead_of(config.trainer)
        self._partial, self._max_staleness = ahead.partial, ahead.max_staleness
        surplus = max(0, data.gen_batch_size - data.train_batch_size)
        self._buffer = Buffer(
            data.train_batch_size, ahead.max_staleness, ahead.strategy, ahead.in_order, surplus, total_steps
        )
        self.utilization = Utilization()
        self._job: str | None = None
        self._loops_are_fewer = False
        """Loop workers run fewer trajectories than the engines could decode concurrently."""
        self._version = 0
        self._steps: dict[int, int] = {}
        """By weight version: the last step (trained batches) at which the rollout had it. Only versions that tokens of
        a group in flight may have."""
        self._serial = itertools.count()
        self._live: dict[str, Group] = {}
        """Groups in flight, finished or taken by the current step, by the `uid` of their rows."""
        self._dropped: set[str] = set()
        """The `uid` of prompts that were put back: late results must not be taken for those of the next attempt."""
        self._taken: list[Group] = []
        self._in_flight = InFlight(self.utilization.set_in_flight)
        self._is_waiting = False
        """The trainer waits for groups."""

    # ---------------------------------------------------------------- for the trainer, step by step

    def begin_step(self, step: int, weights: int) -> None:
        """The step begins with these weights in the rollout: drop groups that have become too old."""
        self._version = step - 1
        youngest = self._version - self._max_staleness
        self._steps = {each: at for each, at in self._steps.items() if at >= youngest} | {weights: self._version}
        self._receive_all()  # trajectories that finished during the last update are not in flight
        for group in self._taken:
            del self._live[group.rows.name]
        self._taken = []
        if old := self._buffer.dropped(self._version):
            self._put_back(old)
            names = [name for group in old for name in group.rows.trajectories(group.answers)]
            self._in_flight.remove(names)
            if self._job is not None:
                self._rollouts.cancel(self._job, names)

    def take(self, count: int) -> DataProto:
        """Return prompts of finished groups, at most `count`: what the batch of the step lacks. Blocks until there are
        enough."""
        self._is_waiting = True
        try:
            with self._wait_phase(), self._rollouts.watched():
                groups = self._recovery.retry_on_worker_loss(self._next_groups)
        finally:
            self._is_waiting = False
        self._taken += groups
        return self._prompts(groups)

    def responses(self, prompts: DataProto) -> DataProto:
        """Return the responses to prompts that were taken; all rows of one prompt are adjacent."""
        groups = [self._live[str(uid)] for uid in prompts.non_tensor_batch["uid"]]
        rows = self._rows(groups)
        known = {name: one for group in groups for name, one in group.rows.finished.items()}
        finished = [known[name] for name in trajectory_names(rows)]
        self._generator.scored_ahead(rows, [group.rows.scores for group in groups])
        return self._generator.joined(rows, join_rows(finished), validate=False)

    def reject(self, prompts: DataProto) -> None:
        """Prompts that were taken and are not trained on: they are used up, and others may be submitted."""
        self._buffer.reject([self._live[str(uid)] for uid in prompts.non_tensor_batch["uid"]])

    def put_back(self, prompts: DataProto) -> None:
        """Prompts that were taken and are to be generated again."""
        groups = [self._live[str(uid)] for uid in prompts.non_tensor_batch["uid"]]
        self._buffer.reject(groups)
        self._source().put_back(join_prompts([group.rows for group in groups]))

    def learn_from(self, batch: DataProto) -> None:
        """Show a finished batch to a curriculum sampler."""
        self._source().learn_from(batch)

    @property
    def batches_per_epoch(self) -> int:
        """Of the dataloader."""
        return self._source().batches_per_epoch

    def drain(self) -> None:
        """Block until no group is in flight: every trajectory then has one weight version."""
        if self._job is not None and self._buffer.in_flight():
            with self._wait_phase(), self._rollouts.watched():
                self._recovery.retry_on_worker_loss(self._finish_all)

    @property
    def reached(self) -> int:
        """The largest staleness that was trained."""
        return self._buffer.reached

    @property
    def loops_limit(self) -> bool:
        """Trajectories waited for a loop worker although the engines had capacity."""
        return self._loops_are_fewer and self.utilization.was_full

    def metrics(self) -> dict[str, float]:
        """Metrics of the batch of this step, and of groups that were dropped or rejected."""
        return self._buffer.metrics(self._version)

    def abandon(self) -> None:
        """The run has failed: receive nothing any more."""
        self._rollouts.abandon()

    def close(self) -> None:
        """End generation; raise the error of an engine that failed meanwhile."""
        self._in_flight.close()
        self._job = None
        self._rollouts.close()

    # ---------------------------------------------------------------- checkpoints

    def state(self, partials: bool) -> dict[str, Any]:
        """Plain data, between steps: finished groups, and groups in flight with their finished trajectories; with
        `partials`, also the partial outputs of the others."""
        if partials and self._partial and self._job is not None:
            for name, output in self._rollouts.partials(self._job).items():
                if (group := self._live.get(name.rpartition("/")[0])) is not None:
                    group.rows.partials[name] = output
        self._receive_all()
        saved = save_buffer(self._buffer, read_trajectories)
        return {"buffer": saved, "versions": dict(self._steps), "asked_for": self._group_shape}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`: groups in flight are submitted again, from their partial outputs.

        If a prompt now gets another number of responses, or another length, its group is generated again.
        """
        before = self._group_shape | group_shape(state)
        if before != self._group_shape and (prompts := prompts_of(state)):
            now = ", ".join(f"{name} = {value} (was {before[name]})" for name, value in self._group_shape.items())
            logger.warning("%s: the answers to %d prompts are not trained; they are asked again", now, len(prompts))
            self._source().put_back(concat_prompts(prompts))
            return
        load_buffer(self._buffer, state["buffer"])
        self._steps = dict(state["versions"])
        self._serial = itertools.count(state["buffer"]["last_serial"] + 1)
        self._live = {group.rows.name: group for group in (*self._buffer.in_flight(), *self._buffer.ready())}
        states = [group.rows for group in self._live.values()]
        trajectories = [one for each in states for one in each.finished.values()]
        meta, policy = self._generator.meta(self._version + 1, validate=False), self._config.actor_rollout_ref
        finished = iter(store_trajectories(trajectories, policy, meta, self._rollouts.uses_ray))
        for each in states:
            each.finished = {name: next(finished) for name in each.finished}

    @property
    def _group_shape(self) -> dict[str, int]:
        """What makes the responses to a prompt a complete group."""
        return {
            "answers to a prompt": self._generator.answers_per_prompt,
            "rollout.n": self._config.actor_rollout_ref.rollout.n,
            "data.max_response_length": self._config.data.max_response_length,
        }

    # ---------------------------------------------------------------- waiting

    def _next_groups(self) -> list[Group]:
        """Can be called again after a WorkerError."""
        while True:
            self._open()
            self._top_up()
            if (groups := self._buffer.take(self._version)) is not None:
                return groups
            self._receive(_WAKE_S)

    def _finish_all(self) -> None:
        while self._buffer.in_flight():
            self._open()
            self._receive(_WAKE_S)

    # ---------------------------------------------------------------- submitting

    def _open(self) -> None:
        """Open generation, at first and after a loss; the first time, submit the groups of a checkpoint."""
        self._rollouts.open()
        if self._job is None:
            rollout = self._config.actor_rollout_ref.rollout
            engines = self._rollouts.engine_count * rollout.max_num_seqs
            loops = self._rollouts.loop_capacity
            self.utilization.at_once, self._loops_are_fewer = (
                min(engines, loops or engines),
                loops is not None and loops < engines,
            )
            self._in_flight = in_flight = InFlight(self.utilization.set_in_flight)
            meta = self._generator.meta(self._version + 1, validate=False)
            self._job = self._rollouts.start(meta, lambda finished: self._on_finished(in_flight, finished))
            self._submit(self._buffer.in_flight())

    def _top_up(self) -> None:
        """Submit as many prompts as there is room for."""
        if (room := self._buffer.room(self._version)) > 0:
            drawn = self._source().take(room, prefetch=False)
            self._submit([self._new_group(drawn, row) for row in range(len(drawn))])
            self._source().prefetch()  # its thread would delay the submission: the engines wait for that

    def _new_group(self, prompts: DataProto, row: int = 0) -> Group:
        """A group for the prompt at `row`."""
        uid, answers = str(prompts.non_tensor_batch["uid"][row]), self._generator.answers_per_prompt
        serial, is_new = next(self._serial), uid not in self._live and uid not in self._dropped
        self._dropped.discard(uid)
        name = uid if is_new else f"{uid}~{serial}"
        state = GroupState(name, prompts, self._version + 1, row=row)
        group = Group(serial, uid, answers, self._version, rows=state)
        self._buffer.sent(group)
        self._live[name] = group
        return group

    def _submit(self, groups: Sequence[Group]) -> None:
        """Submit the unfinished trajectories of these groups."""
        assert self._job is not None
        for step in dict.fromkeys(group.rows.step for group in groups):
            chosen = [group for group in groups if group.rows.step == step]
            rows = self._rows(chosen)
            for place, group in enumerate(chosen):
                own = slice(place * group.answers, (place + 1) * group.answers)
                columns = {name: values[own] for name, values in rows.non_tensor_batch.items()}
                group.rows.scores = self._generator.score_ahead(columns)
            names = trajectory_names(rows)
            finished = {name for group in chosen for name in group.rows.finished}
            missing = [row for row, name in enumerate(names) if name not in finished]
            self._in_flight.add(names[row] for row in missing)
            partials = {name: output for group in chosen for name, output in group.rows.partials.items()}
            request = self._generator.request(rows.select_idxs(missing), step, False)
            self._rollouts.submit(self._job, request, partials)

    def _prompts(self, groups: Sequence[Group]) -> DataProto:
        """Their prompts, each under the name of its group."""
        prompts = join_prompts([group.rows for group in groups])
        prompts.non_tensor_batch["uid"] = object_array([group.rows.name for group in groups])
        return prompts

    def _rows(self, groups: Sequence[Group]) -> DataProto:
        """The rows to generate, all of a group together."""
        return self._generator.answer_rows(self._prompts(groups))

    def _put_back(self, groups: Sequence[Group]) -> None:
        for group in groups:
            del self._live[group.rows.name]
            self._dropped.add(group.uid)
        self._source().put_back(join_prompts([group.rows for group in groups]))

    # ---------------------------------------------------------------- receiving

    def _on_finished(self, in_flight: InFlight, finished: Sequence[FinishedTrajectory]) -> None:
        """In a collector thread: utilization and scores are updated while the trainer trains."""
        in_flight.remove(one.name for one in finished)
        if self._is_waiting and not len(in_flight):
            return  # nothing is left to overlap with: the trainer scores them together
        unscored: dict[str, list[tuple[int, np.ndarray]]] = {}
        for one in finished:
            if one.status == "finished" and one.score is None:
                unscored.setdefault(one.uid, []).append((one.sample_index, one.last_tokens))
        for uid, responses in unscored.items():
            group = self._live.get(uid)
            if group is not None and group.rows.scores:
                group.rows.scores.add(responses)

    def _receive(self, timeout: float) -> None:
        assert self._job is not None
        self._store(self._rollouts.collect(self._job, timeout))

    def _receive_all(self) -> None:
        """Without waiting; errors are left for the next wait."""
        if self._job is not None:
            self._store(self._rollouts.take_finished(self._job))

    def _store(self, finished: Iterable[FinishedTrajectory]) -> None:
        for one in finished:
            group = self._live.get(one.uid)
            if group is None or group.oldest is not None:  # it was dropped meanwhile
                continue
            state: GroupState = group.rows
            state.finished[one.name] = one
            state.partials.pop(one.name, None)
            if len(state.finished) == group.answers:
                versions = [each.versions for each in state.finished.values()]
                oldest, partial = ages(versions, self._steps, group.sent_at)
                self._buffer.finished(group, oldest, partial)
