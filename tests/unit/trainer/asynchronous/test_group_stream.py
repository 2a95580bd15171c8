"""The number of in-flight trajectories: exact while trajectories finish, groups are dropped and hosts are lost."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.scripted_hosts import ScriptedGroups, scripted_config
from verl.protocol import DataProto, object_array
from verl.trainer.asynchronous.group_stream import GroupStream
from verl.trainer.ppo import rollout_jobs
from verl.trainer.ppo.generator import rollout_rows
from verl.trainer.ppo.rollout_manager import RolloutManager
from verl.workers.rollout import loop_host

BATCH, ANSWERS = 4, 3


class Prompts:
    """An endless source; prompts that are put back come first."""

    def __init__(self) -> None:
        self._serial = itertools.count()
        self._back: list[str] = []

    def take(self, count: int, prefetch: bool = True) -> DataProto:
        uids = [self._back.pop(0) if self._back else f"p{next(self._serial)}" for _ in range(count)]
        ids = torch.ones(count, 1, dtype=torch.long)
        return DataProto.from_dict({"input_ids": ids, "attention_mask": ids}, {"uid": object_array(uids)})

    def prefetch(self) -> None:
        """There is nothing to fetch."""

    def put_back(self, prompts: DataProto) -> None:
        self._back += [str(uid).partition("~")[0] for uid in prompts.non_tensor_batch["uid"]]


class Generator:
    """Rows and requests like those of the real one; responses are not scored."""

    responses_per_prompt = ANSWERS

    def rollout_rows(self, prompts: DataProto) -> DataProto:
        return rollout_rows(prompts, ANSWERS, greedy=False)

    def meta(self, step: int, validate: bool) -> dict[str, Any]:
        return {"step": step, "seed": 7, "pad_token_id": 0}

    def request(self, rows: DataProto, step: int, validate: bool) -> DataProto:
        return rows

    def early_scorer(self, rows: DataProto) -> None:
        return None


class Run:
    """A stream on two scripted ranks, and the last number of in-flight trajectories that it reported."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        given = ["trainer.mode=async", "trainer.max_staleness=1", "trainer.staleness_strategy=drop"]
        self.groups: Any = ScriptedGroups(config := scripted_config(*given, "actor_rollout_ref.rollout.mode=async"))
        source, waiting = Prompts(), contextlib.nullcontext
        recovery = SimpleNamespace(retry_on_worker_loss=self.groups.retry)
        self.rollouts = RolloutManager(config, self.groups)
        state = SimpleNamespace(prompts=source)
        parts: Any = (config, self.rollouts, Generator(), state, 100, waiting, recovery)
        self.stream = GroupStream(*parts)
        self.reported = 0
        self.stream.utilization.set_in_flight = self._report  # type: ignore[method-assign]
        self._receive, self.stream.receive = self.stream.receive, self._finish_a_group  # type: ignore[method-assign]
        self._dropped = self.stream.buffer.drop_stale
        self.stream.buffer.drop_stale = self._drop_while_trajectories_finish  # type: ignore[method-assign]
        self.drops = 0

    def _report(self, count: int) -> None:
        assert count >= 0
        self.reported = count

    @property
    def unfinished(self) -> list[str]:
        """Trajectories that the engines generate: the reference."""
        return [name for rank in self.groups.rollout_ranks for name in rank.engine.running]

    def finish(self, names: list[str]) -> None:
        """Finish these; return when the manager has received them."""
        for rank in self.groups.rollout_ranks:
            rank.engine.advance(names=names)
        rows = self.rollouts.jobs[self.stream.job].rows if self.stream.job else {}
        wait_for(lambda: not set(names) & set(rows))

    def check(self) -> None:
        """The callback runs in a collector thread, after the manager has received a trajectory."""
        wait_for(lambda: self.reported == len(self.unfinished))

    def _drop_while_trajectories_finish(self, version: int) -> Any:
        """Trajectories of a group that is about to be dropped finish after the trainer has received the others."""
        old = [group for group in self.stream.buffer.in_flight() if version - group.base_version > 1]
        running = set(self.unfinished)
        names = [name for group in old for name in group.state.trajectory_names(ANSWERS) if name in running]
        self.finish([name for name in names if self.rng.random() < 0.4])
        dropped = self._dropped(version)
        self.drops += len(dropped)
        return dropped

    def finish_some(self) -> None:
        names = sorted(self.unfinished)
        if names and self.rng.random() < 0.7:
            self.finish(self.rng.sample(names, self.rng.randint(1, min(4, len(names)))))

    def _finish_a_group(self, timeout: float) -> None:
        """While the trainer waits, one group after the other finishes; mostly the youngest, so that others age."""
        uids = list(dict.fromkeys(name.rpartition("/")[0] for name in self.unfinished))
        if uids:
            chosen = uids[-1] if self.rng.random() < 0.8 else self.rng.choice(uids)
            self.finish([name for name in self.unfinished if name.rpartition("/")[0] == chosen])
        self._receive(timeout)


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert holds()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_jobs, "COLLECT_S", 0.02)
    monkeypatch.setattr(loop_host, "COALESCE_S", 0.0)


@pytest.mark.parametrize("seed", range(4))
def test_every_trajectory_is_counted_once_while_groups_are_dropped_and_hosts_are_lost(seed):
    run = Run(seed)
    try:
        for step in range(1, 30):
            run.stream.begin_step(step, step)
            if run.stream.job is not None:
                run.check()
            run.stream.next_batch()
            run.check()
            run.finish_some()
            run.check()
            event = run.rng.random()
            if event < 0.1:
                run.stream.close()  # the next step opens it and submits what is missing
            elif event < 0.2:
                run.rng.choice(run.groups.rollout_ranks).die()
                wait_for(lambda: run.rollouts.needs_open)
                run.groups.retry(run.stream.open)
                run.check()
    finally:
        run.stream.close()
    assert run.drops
    assert run.groups.restarts
