"""The number of in-flight trajectories: exact while answers arrive, groups are dropped, and the stream is reopened."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.agent.stream import Finished
from verl.config import load_config
from verl.protocol import DataProto, object_array
from verl.single_controller.base.handle import RankHandle
from verl.trainer.asynchronous.stream import AnswerStream
from verl.trainer.ppo.generator import answer_rows
from verl.types.trajectory import Row, Trajectory, Turn

BATCH, ANSWERS = 4, 3


class LoopWorker(RankHandle):
    """A loop worker that finishes what the test names; `outstanding` is the reference: requested and not finished."""

    def __init__(self) -> None:
        self.outstanding: dict[str, tuple[str, int]] = {}
        self._finished: list[Trajectory] = []
        self._changed, self._polls = threading.Condition(), 0
        self._stream, self._nudged = 0, False

    def ask(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    def tell(self, method: str, *args: Any) -> None:
        raise AssertionError(method)

    def begin_stream(self, replicas: Any, meta: Any) -> None:
        with self._changed:
            self.outstanding, self._finished, self._stream = {}, [], self._stream + 1

    def add_rows(self, rows: DataProto, partials: Any) -> None:
        columns = rows.non_tensor_batch
        with self._changed:
            for uid, number in zip(columns["uid"], columns["sample_index"], strict=True):
                self.outstanding[f"{uid}/{number}"] = uid, number

    def drop_trajectories(self, names: Any) -> None:
        with self._changed:
            for name in names:
                self.outstanding.pop(name, None)

    def end_stream(self) -> None:
        with self._changed:
            self._stream += 1
            self._changed.notify_all()

    def collect_trajectories(self, within: float) -> Finished:
        with self._changed:
            own = self._stream
            self._polls += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._finished or self._stream != own or self._nudged, within)
            if self._stream != own:
                return Finished([], 0, ended=True)
            self._nudged = False
            finished, self._finished = self._finished, []
            return Finished(finished, 0)

    def finish(self, names: list[str]) -> None:
        """Finish these, and return when the stream has received them."""
        with self._changed:
            self._finish(names)
            self._nudged = True
            self._changed.notify_all()
            polls = self._polls
            assert self._changed.wait_for(lambda: self._polls > polls, 10)

    def _finish(self, names: list[str]) -> None:
        for name in names:
            uid, number = self.outstanding.pop(name)
            turn = Turn("model", [5], [-0.5], [0], "stop")
            self._finished.append(Trajectory(uid, int(number), [Row([1], [turn])]))


class Prompts:
    """An endless source; prompts that are put back come first."""

    def __init__(self) -> None:
        self._serial, self._back = itertools.count(), []

    def take(self, count: int) -> DataProto:
        uids = [self._back.pop(0) if self._back else f"p{next(self._serial)}" for _ in range(count)]
        ids = torch.ones(count, 1, dtype=torch.long)
        return DataProto.from_dict({"input_ids": ids, "attention_mask": ids}, {"uid": object_array(uids)})

    def put_back(self, prompts: DataProto) -> None:
        self._back += [str(uid).partition("~")[0] for uid in prompts.non_tensor_batch["uid"]]


class Generator:
    """Rows and requests as the real one makes them; nothing is scored."""

    answers_per_prompt = ANSWERS

    def answer_rows(self, prompts: DataProto) -> DataProto:
        return answer_rows(prompts, ANSWERS, greedy=False)

    def meta(self, step: int, validate: bool) -> dict[str, Any]:
        return {}

    def request(self, rows: DataProto, step: int, validate: bool) -> DataProto:
        return rows

    def score_ahead(self, rows: DataProto) -> None:
        return None


class Groups:
    """Worker groups with one loop worker."""

    answering: tuple[Any, ...] = ()
    world_size = 1

    def __init__(self, worker: LoopWorker) -> None:
        self.worker, self.agents = worker, self

    def handle(self, rank: int) -> LoopWorker:
        return self.worker

    def open_generation(self) -> list[Any]:
        return [None]

    def close_generation(self) -> None:
        pass


class Run:
    """A stream with one loop worker, and the last number of in-flight trajectories that it reported."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.worker, source = LoopWorker(), Prompts()
        given = ["data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=a/b", f"data.train_batch_size={BATCH}"]
        given += ["trainer.mode=async", "trainer.max_staleness=1", "trainer.staleness_strategy=drop"]
        given += ["actor_rollout_ref.rollout.mode=async"]
        given += [f"actor_rollout_ref.rollout.n={ANSWERS}", "algorithm.adv_estimator=grpo"]
        given += [f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}"]
        config = load_config(None, given, check_files=False)
        waiting: Any = contextlib.nullcontext
        recovery = SimpleNamespace(retry_on_worker_loss=lambda call: call())
        parts: Any = (config, None, Groups(self.worker), Generator(), lambda: source, 100, waiting, recovery)
        self.stream = AnswerStream(*parts)
        self.reported = 0
        self.stream.idle.under_way = self._report  # type: ignore[method-assign]
        self._hear, self.stream._hear = self.stream._hear, self._finish_a_group_and_hear  # type: ignore[method-assign]
        self._dropped = self.stream._buffer.dropped
        self.stream._buffer.dropped = self._drop_while_answers_arrive  # type: ignore[method-assign]
        self.drops = 0

    def _report(self, count: int) -> None:
        assert count >= 0
        self.reported = count

    def _drop_while_answers_arrive(self, version: int) -> Any:
        """Answers of a group that is about to be dropped arrive after the trainer has looked."""
        old = [group for group in self.stream._buffer.in_flight() if version - group.born > 1]
        names = [
            name
            for group in old
            for name in group.rows.trajectories(ANSWERS)
            if name in self.worker.outstanding and self.rng.random() < 0.4
        ]
        if names and self.stream._lanes:
            self.worker.finish(names)
        found = self._dropped(version)
        self.drops += len(found)
        return found

    def finish_some(self) -> None:
        names = sorted(self.worker.outstanding)
        if names and self.rng.random() < 0.7:
            self.worker.finish(self.rng.sample(names, self.rng.randint(1, min(4, len(names)))))

    def _finish_a_group_and_hear(self, within: float) -> None:
        """While the trainer waits, one group after the other is finished; mostly the youngest, so that others age."""
        uids = list(dict.fromkeys(uid for uid, _ in self.worker.outstanding.values()))
        chosen = uids[-1] if self.rng.random() < 0.8 else self.rng.choice(uids)
        self.worker.finish([name for name, (uid, _) in self.worker.outstanding.items() if uid == chosen])
        self._hear(within)


@pytest.mark.parametrize("seed", range(8))
def test_every_trajectory_is_counted_once_whatever_arrives_while_groups_are_dropped(seed):
    run = Run(seed)
    try:
        for step in range(1, 40):
            is_open = bool(run.stream._lanes)
            run.stream.begin_step(step, step)
            assert not is_open or run.reported == len(run.worker.outstanding)
            run.stream.take(BATCH)
            assert run.reported == len(run.worker.outstanding)
            run.finish_some()
            assert run.reported == len(run.worker.outstanding)
            if run.rng.random() < 0.1:
                run.stream.close()  # it is opened anew, and what is missing is requested again
    finally:
        run.stream.close()
    assert run.drops
