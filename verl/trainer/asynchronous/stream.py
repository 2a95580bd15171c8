"""AnswerStream: prompts go out as the buffer has room, trajectories come in as they end, whole groups make batches.

For the trainer it is where prompts come from, as the `PromptStream` is, but their answers are there already. Only the
loops that collect from the loop workers run in threads of their own; all bookkeeping is the trainer's thread's.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from verl.agent.answering import asked_params, empty_experts, trained_rows
from verl.agent.stream import Finished
from verl.config import PPOConfig
from verl.config.asynchronous import ahead_of
from verl.protocol import DataProto, object_array
from verl.single_controller.base.errors import CallCancelled, WorkerError
from verl.single_controller.base.open_calls import OpenCall
from verl.trainer.asynchronous.asked import Asked, ages, asked_for, prompts_of, restore, stored
from verl.trainer.asynchronous.buffer import Buffer, Group
from verl.trainer.asynchronous.idle import IdleTime
from verl.trainer.asynchronous.in_flight import InFlight
from verl.trainer.asynchronous.lane import Heard, Lane
from verl.trainer.ppo.arrange import concat_prompts
from verl.trainer.ppo.generator import Generator
from verl.trainer.ppo.groups import WorkerGroups
from verl.trainer.ppo.prompts import PromptStream
from verl.trainer.ppo.recovery import WorkerRecovery

__all__ = ["AnswerStream"]

logger = logging.getLogger(__name__)

# The trainer looks up so often while it waits: whether it is to give up.
_WAKE_S = 0.5


class AnswerStream:
    """From the first step to the last. It may break and be opened anew: what was under way is asked for again."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        groups: WorkerGroups,
        generator: Generator,
        source: Callable[[], PromptStream],
        total_steps: int,
        waiting: Callable[[], AbstractContextManager[None]],
        recovery: WorkerRecovery,
    ) -> None:
        """`source()` has the run's prompts; while the trainer waits for answers it is inside `waiting()`."""
        self._config, self._tokenizer, self._groups, self._generator = config, tokenizer, groups, generator
        self._source, self._wait_phase, self._recovery = source, waiting, recovery
        self._no_experts = empty_experts(config)
        data, ahead = config.data, ahead_of(config.trainer)
        self._partial, self._max_staleness = ahead.partial, ahead.max_staleness
        surplus = max(0, data.gen_batch_size - data.train_batch_size)
        self._buffer = Buffer(
            data.train_batch_size, ahead.max_staleness, ahead.strategy, ahead.in_order, surplus, total_steps
        )
        self.idle = IdleTime()
        self._loops_are_fewer = False
        """Loop workers keep fewer answers going than the engines could decode at once."""
        self._version = 0
        self._steps: dict[int, int] = {}
        """By version of the weights: the last version (trained batches) at which the rollout had them. Of those that
        tokens of a group that is out may have."""
        self._serial = itertools.count()
        self._live: dict[str, Group] = {}
        """Groups that are out, finished or taken by the step under way, by the `uid` of their rows."""
        self._dropped: set[str] = set()
        """The `uid` of prompts that went back: answers of before may still come, to another name than they get."""
        self._taken: list[Group] = []
        self._lanes: list[Lane] = []
        self._heard: Heard = queue.SimpleQueue()
        self._in_flight = InFlight(self.idle.under_way)
        self._renews = False
        self._calls: list[OpenCall] = []
        self._cancelled = threading.Event()

    # ---------------------------------------------------------------- for the trainer, step by step

    def begin_step(self, step: int, weights: int) -> None:
        """The step has begun, and the rollout has these weights: what has become too old goes back."""
        self._version = step - 1
        youngest = self._version - self._max_staleness
        self._steps = {each: at for each, at in self._steps.items() if at >= youngest} | {weights: self._version}
        self._hear_all()  # what was answered during the last update is not out, and may be younger than its request
        for group in self._taken:
            del self._live[group.rows.name]
        self._taken = []
        old = self._buffer.dropped(self._version)
        if old:
            for asked in (group.rows for group in old if group.oldest is None and group.rows.lane):
                asked.lane.rows -= self._generator.answers_per_prompt - len(asked.made)
            self._put_back(old)
            names = [name for group in old for name in group.rows.trajectories(group.answers)]
            self._in_flight.remove(names)
            for lane in self._lanes:
                lane.drop(names)

    def take(self, count: int) -> DataProto:
        """Prompts of groups that are answered, at most `count`: what the step's batch lacks. Waits for them."""
        with self._wait_phase(), self._watched():
            groups = self._recovery.retry_on_worker_loss(self._next_groups)
        self._taken += groups
        return self._prompts(groups)

    def answers(self, prompts: DataProto) -> DataProto:
        """The answers to prompts that were taken: all rows of one prompt stand together."""
        groups = [self._live[str(uid)] for uid in prompts.non_tensor_batch["uid"]]
        rows, meta = self._rows(groups), self._generator.meta(self._version + 1, validate=False)
        names = zip(rows.non_tensor_batch["uid"], rows.non_tensor_batch["sample_index"], strict=True)
        trajectories = [self._live[uid].rows.made[f"{uid}/{number}"] for uid, number in names]
        params = asked_params(self._config.actor_rollout_ref.rollout, meta["eos_token_id"], meta)
        width, pad = rows.batch["input_ids"].shape[1], self._tokenizer.pad_token_id
        self._generator.scored_ahead(rows, [group.rows.ahead for group in groups])
        trained = trained_rows(trajectories, width, params, meta, pad, self._no_experts)
        return self._generator.joined(rows, trained, validate=False)

    def reject(self, prompts: DataProto) -> None:
        """Prompts that were taken and teach nothing: they are used up, and others may go out."""
        self._buffer.reject([self._live[str(uid)] for uid in prompts.non_tensor_batch["uid"]])

    def put_back(self, prompts: DataProto) -> None:
        """Prompts that were taken and are to be asked again."""
        groups = [self._live[str(uid)] for uid in prompts.non_tensor_batch["uid"]]
        self._buffer.reject(groups)
        self._source().put_back(concat_prompts([group.rows.prompt for group in groups]))

    def learn_from(self, batch: DataProto) -> None:
        """Show a finished batch to the sampler, if that is one that learns."""
        self._source().learn_from(batch)

    @property
    def batches_per_epoch(self) -> int:
        """Of the dataloader."""
        return self._source().batches_per_epoch

    def drain(self) -> None:
        """Return when nothing is under way: every answer is of the weights that it was begun with."""
        if self._lanes and self._buffer.in_flight():
            with self._wait_phase(), self._watched():
                self._recovery.retry_on_worker_loss(self._finish_all)

    @property
    def reached(self) -> int:
        """The largest staleness that was trained."""
        return self._buffer.reached

    @property
    def loops_limit(self) -> bool:
        """Answers waited for a loop worker that the engines could have decoded."""
        return self._loops_are_fewer and self.idle.was_full

    def metrics(self) -> dict[str, float]:
        """Of the batch that the step took, and what became of the others."""
        return self._buffer.metrics(self._version)

    def cancel(self) -> None:
        """Whoever waits for answers is to give up. From any thread."""
        self._cancelled.set()

    def abandon(self) -> None:
        """The run has failed: nobody collects any more."""
        for lane in self._lanes:
            lane.closed = True

    def close(self) -> None:
        """End what is under way; what broke an engine meanwhile is raised."""
        lanes, self._lanes = self._lanes, []
        self._in_flight.close()
        for lane in lanes:
            lane.closed = True
        for lane in lanes:
            lane.end()
        if lanes:
            self._groups.close_generation()

    # ---------------------------------------------------------------- checkpoints

    def state(self, partials: bool) -> dict[str, Any]:
        """Plain data, between steps: groups that are finished, and those that are under way with their answers so far;
        with `partials`, the unfinished answers among them, too."""
        if partials and self._partial and not self._groups.must_take_turns:  # those cannot be ended now
            self._note_partials()
        self._hear_all()
        return {"buffer": stored(self._buffer), "versions": dict(self._steps), "asked_for": self._asked_for}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there; what was under way is asked for again, from what there was of it.

        Where a prompt gets another number of answers now, or of another length, all of them are asked again.
        """
        before = self._asked_for | asked_for(state)
        if before != self._asked_for and (prompts := prompts_of(state)):
            now = ", ".join(f"{name} = {value} (was {before[name]})" for name, value in self._asked_for.items())
            logger.warning("%s: the answers to %d prompts are not trained; they are asked again", now, len(prompts))
            self._source().put_back(concat_prompts(prompts))
            return
        restore(self._buffer, state["buffer"])
        self._steps = dict(state["versions"])
        self._serial = itertools.count(state["buffer"]["last_serial"] + 1)
        self._live = {group.rows.name: group for group in (*self._buffer.in_flight(), *self._buffer.ready())}

    @property
    def _asked_for(self) -> dict[str, int]:
        """What makes the answers to a prompt a whole group."""
        return {
            "answers to a prompt": self._generator.answers_per_prompt,
            "rollout.n": self._config.actor_rollout_ref.rollout.n,
            "data.max_response_length": self._config.data.max_response_length,
        }

    def _note_partials(self) -> None:
        for name, output in (each for lane in self._lanes for each in lane.partial_answers().items()):
            if (group := self._live.get(name.rpartition("/")[0])) is not None:
                group.rows.partials[name] = output

    # ---------------------------------------------------------------- waiting

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """The watch for hangs looks at those who answer, and may give them up."""
        groups = [group for group in self._groups.answering if hasattr(group, "processes")]
        self._calls = [OpenCall(group, "collect_trajectories") for group in groups]
        try:
            yield
        finally:
            for call in self._calls:
                call.close()

    def _next_groups(self) -> list[Group]:
        """May be called again after an error: the stream is opened anew."""
        while True:
            self._open()
            self._top_up()
            if (groups := self._buffer.take(self._version)) is not None:
                return groups
            self._hear(_WAKE_S)

    def _finish_all(self) -> None:
        """A stream that broke has nothing under way: its prompts are asked again, with the weights that come."""
        while self._lanes and self._buffer.in_flight():
            self._renew()
            self._hear(_WAKE_S)

    # ---------------------------------------------------------------- out

    def _top_up(self) -> None:
        """Send as many prompts as there is room for."""
        if (room := self._buffer.room(self._version)) > 0:
            drawn = self._source().take(room)
            self._send([self._new_group(drawn[row : row + 1]) for row in range(len(drawn))])

    def _new_group(self, prompt: DataProto) -> Group:
        uid, answers = str(prompt.non_tensor_batch["uid"][0]), self._generator.answers_per_prompt
        serial, is_new = next(self._serial), uid not in self._live and uid not in self._dropped
        self._dropped.discard(uid)
        name = uid if is_new else f"{uid}~{serial}"
        group = Group(serial, uid, answers, self._version, rows=Asked(name, prompt, self._version + 1))
        self._buffer.sent(group)
        self._live[name] = group
        return group

    def _send(self, groups: Sequence[Group]) -> None:
        """What is not there yet of these groups is asked of the loop workers that have the least to do."""
        asked: dict[tuple[Lane, int], list[Group]] = {}
        for group in groups:
            lane = min(self._lanes, key=lambda each: each.rows)
            lane.rows += group.answers - len(group.rows.made)
            group.rows.lane = lane
            asked.setdefault((lane, group.rows.step), []).append(group)
        for (lane, step), some in asked.items():
            rows = self._rows(some)
            for place, group in enumerate(some):
                own = slice(place * group.answers, (place + 1) * group.answers)
                group.rows.ahead = self._generator.score_ahead(rows[own])
            uids, numbers = rows.non_tensor_batch["uid"], rows.non_tensor_batch["sample_index"]
            missing = [
                row
                for row, (uid, number) in enumerate(zip(uids, numbers, strict=True))
                if f"{uid}/{number}" not in self._live[uid].rows.made
            ]
            self._in_flight.add(f"{uids[row]}/{numbers[row]}" for row in missing)
            partials = {name: output for group in some for name, output in group.rows.partials.items()}
            self._ask(lane, "add_rows", self._generator.request(rows.select_idxs(missing), step, False), partials)

    def _prompts(self, groups: Sequence[Group]) -> DataProto:
        """Their prompts, each under the name of its group."""
        prompts = concat_prompts([group.rows.prompt for group in groups])
        prompts.non_tensor_batch["uid"] = object_array([group.rows.name for group in groups])
        return prompts

    def _rows(self, groups: Sequence[Group]) -> DataProto:
        """The rows that were asked, all of a group together."""
        return self._generator.answer_rows(self._prompts(groups))

    def _put_back(self, groups: Sequence[Group]) -> None:
        for group in groups:
            del self._live[group.rows.name]
            self._dropped.add(group.uid)
        self._source().put_back(concat_prompts([group.rows.prompt for group in groups]))

    # ---------------------------------------------------------------- in

    def _open(self) -> None:
        """Reach the loop workers, at first and after a loss, and ask for all that is not there."""
        if self._lanes:
            return self._renew()
        replicas, agents = self._groups.open_generation(), self._groups.agents
        meta = self._generator.meta(self._version + 1, validate=False)
        lanes = [Lane(agents.handle(rank)) for rank in range(agents.world_size)]
        for lane in lanes:
            lane.handle.ask("begin_stream", replicas, meta)
        rollout = self._config.actor_rollout_ref.rollout
        engines, loops = len(replicas) * rollout.max_num_seqs, len(lanes) * rollout.agent.max_concurrent_requests
        self.idle.at_once, self._loops_are_fewer = min(engines, loops), loops < engines
        self._lanes, self._heard, self._renews = lanes, queue.SimpleQueue(), False
        self._in_flight = InFlight(self.idle.under_way)
        for lane in lanes:
            lane.collect(self._heard, partial(self._came, self._in_flight))
        self._send(self._buffer.in_flight())

    def _renew(self) -> None:
        """After the loss of a replica, which is raised here if nobody has mended it: show those that there are now."""
        if self._renews:
            self._groups.require_engines()
            replicas = self._groups.open_generation()
            for lane in list(self._lanes):
                self._ask(lane, "renew_replicas", replicas)
            self._renews = False

    def _ask(self, lane: Lane, method: str, *args: Any) -> None:
        try:
            lane.handle.ask(method, *args)
        except WorkerError:
            self.close()  # with another worker in its place it is opened anew
            raise

    def _came(self, in_flight: InFlight, told: Finished) -> None:
        """In a lane's thread: while the trainer trains, idle times and scores go on."""
        in_flight.remove(made.name for made in told.trajectories)
        self._score(told)

    def _score(self, told: Finished) -> None:
        """Those that are finished, while others are under way."""
        for made in told.trajectories:
            group = self._live.get(made.uid)
            if group is not None and group.rows.ahead and made.status == "finished" and made.score is None:
                group.rows.ahead.add([(made.sample_index, made.last_tokens)])

    def _hear(self, within: float) -> None:
        """Take note of what has come, after so many seconds at most; raise what went wrong."""
        if self._cancelled.is_set():
            raise CallCancelled("waiting for answers was given up")
        for call in self._calls:
            if call.given_up is not None:
                raise call.given_up
        try:
            lane, told = self._heard.get(timeout=within)
        except queue.Empty:
            return
        self._note(lane, told)
        self._hear_all()

    def _hear_all(self) -> None:
        """Without waiting; what went wrong is left for who waits."""
        while not self._heard.empty():
            lane, told = self._heard.get()
            if isinstance(told, Exception) or (told.ended and not lane.closed):
                self._heard.put((lane, told))
                return
            self._note(lane, told)

    def _note(self, lane: Lane, told: Finished | Exception) -> None:
        if isinstance(told, Exception):
            self.close()  # what broke the engines says more than what it did to the loop workers
            raise told
        for made in told.trajectories:
            group = self._live.get(made.uid)
            if group is None or group.oldest is not None:  # it was dropped meanwhile
                continue
            lane.rows -= 1
            group.rows.made[made.name] = made
            group.rows.partials.pop(made.name, None)
            if len(group.rows.made) == group.answers:
                oldest, partial = ages(group.rows.made.values(), self._steps, group.sent_at)
                self._buffer.finished(group, oldest, partial)
        self._renews = self._renews or told.lost is not None
        if told.ended and not lane.closed:
            self.close()
