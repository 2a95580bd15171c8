"""RolloutManager with real EngineHosts in this process: assignment, cancellation, lost hosts, batches, checkpoints."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.scripted_hosts import ScriptedGroups, expected_tokens, prompt_rows, scripted_config
from verl.protocol import DataProto
from verl.single_controller.base.heartbeat import OpenCall, open_calls
from verl.single_controller.base.worker_group import CallCancelled, HangError, WorkerDiedError, WorkerError
from verl.trainer.ppo import rollout_jobs, rollout_manager
from verl.trainer.ppo.rollout_jobs import FinishedTrajectory, join_rows, read_trajectories, store_trajectories
from verl.trainer.ppo.rollout_manager import RolloutManager
from verl.types.request import Output
from verl.types.trajectory import Row, Trajectory, Turn
from verl.utils.counter_noise import sample_key
from verl.workers.rollout import loop_host
from verl.workers.rollout.prompts import with_row_names

META = {"step": 1, "seed": 7, "validate": False, "pad_token_id": 0}
LIMIT = 12


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial outputs are reported with every reply."""
    monkeypatch.setattr(rollout_jobs, "COLLECT_S", 0.01)
    monkeypatch.setattr(rollout_manager, "POLL_S", 0.01)
    monkeypatch.setattr(loop_host, "COALESCE_S", 0.001)
    monkeypatch.setattr(loop_host, "PARTIALS_S", 0.0)


class Setup:
    """A manager over scripted ranks. `drive`: a thread lets all engines generate."""

    def __init__(self, engines: int = 2, loops: int = 0) -> None:
        self.config = scripted_config(*(["actor_rollout_ref.rollout.mode=async"] if loops else []))
        self.groups = ScriptedGroups(self.config, engines, loops)
        groups: Any = self.groups
        self.manager = RolloutManager(self.config, groups)
        self._stop = threading.Event()

    def drive(self) -> None:
        def run() -> None:
            while not self._stop.wait(0.002):
                for rank in self.groups.ranks:
                    rank.engine.advance()

        threading.Thread(target=run, daemon=True).start()

    def collect_all(self, job: str, count: int) -> dict[str, FinishedTrajectory]:
        """Collect `count` trajectories and recover lost ranks meanwhile."""
        finished: dict[str, FinishedTrajectory] = {}
        deadline = time.monotonic() + 20
        while len(finished) < count and time.monotonic() < deadline:
            self.groups.retry(self.manager.open)
            for one in self.groups.retry(lambda: self.manager.collect(job, 0.05)):
                assert one.name not in finished
                finished[one.name] = one
        assert len(finished) == count
        return finished

    def wait_for(self, holds: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 20
        while not holds() and time.monotonic() < deadline:
            time.sleep(0.002)
        assert holds()

    def close(self) -> None:
        self._stop.set()
        self.manager.abandon()
        self.groups.retry(self.manager.close)


@pytest.fixture
def setup() -> Iterator[Callable[..., Setup]]:
    created: list[Setup] = []

    def create(engines: int = 2, loops: int = 0) -> Setup:
        created.append(Setup(engines, loops))
        return created[-1]

    yield create
    for instance in created:
        instance.close()


def tokens_of(name: str, step: int = 1) -> list[int]:
    uid, _, number = name.rpartition("/")
    return expected_tokens(sample_key(7, step, uid, int(number)), LIMIT)


def responses(batch: DataProto) -> list[list[int]]:
    """Response tokens of each row, without padding."""
    width = batch.batch["responses"].shape[1]
    mask = batch.batch["attention_mask"][:, -width:].bool()
    return [row[real].tolist() for row, real in zip(batch.batch["responses"], mask, strict=True)]


def names(rows: DataProto) -> list[str]:
    columns = rows.non_tensor_batch
    return [f"{uid}/{number}" for uid, number in zip(columns["uid"], columns["sample_index"], strict=True)]


# ---------------------------------------------------------------- assignment and jobs


def test_generate_assigns_rows_by_position_and_returns_them_in_order(setup):
    run = setup()
    run.drive()
    rows, seen = prompt_rows(["a", "bb", "ccc"], samples=3), []
    batch = run.manager.generate(rows, META, seen.extend)
    assert [rank.engine.requests for rank in run.groups.rollout_ranks] == [names(rows)[:5], names(rows)[5:]]
    assert batch.non_tensor_batch["trajectory"].tolist() == names(rows)
    assert responses(batch) == [tokens_of(name) for name in names(rows)]
    assert sorted(one.name for one in seen) == sorted(names(rows)), "each is reported once, as it finishes"
    assert not run.manager.is_open
    assert not run.groups.generation_open


def test_submit_sends_whole_groups_to_the_host_with_the_fewest_rows(setup):
    run = setup()
    run.manager.open()
    job = run.manager.start(META)
    first, second = (rank.engine for rank in run.groups.rollout_ranks)
    run.manager.submit(job, prompt_rows(["a"], samples=3))
    run.manager.submit(job, prompt_rows(["b", "c"], samples=2))
    assert (first.running, second.running) == (["a/0", "a/1", "a/2"], ["b/0", "b/1", "c/0", "c/1"])
    second.advance(names=["b/0", "b/1"])
    assert len(run.collect_all(job, 2)) == 2
    run.manager.submit(job, prompt_rows(["d"], samples=2))
    assert second.running == ["c/0", "c/1", "d/0", "d/1"], "finished rows are no load"
    run.manager.cancel(job, ["c/0", "c/1", "d/0", "d/1"])
    run.manager.submit(job, prompt_rows(["e"], samples=2))
    assert second.running == ["e/0", "e/1"], "cancelled rows are no load"
    run.manager.submit(job, prompt_rows(["f"], samples=2), replica=0)
    assert first.running == ["a/0", "a/1", "a/2", "f/0", "f/1"]
    other = run.manager.start(META)
    run.manager.submit(other, prompt_rows(["g"], samples=9), replica=1)
    run.manager.finish(other)
    run.manager.submit(job, prompt_rows(["h"]))
    assert second.running == ["e/0", "e/1", "h/0"], "rows of a job that was ended are no load"


def test_agents_run_in_loop_workers_and_single_turn_rows_in_the_engines(setup):
    run = setup(engines=2, loops=2)
    run.drive()
    rows = prompt_rows(["a", "b", "c", "d"], agents=["tool_agent", "single_turn_agent", "single_turn_agent", "mine"])
    batch = run.manager.generate(rows, META)
    assert [rank.engine.requests for rank in run.groups.rollout_ranks] == [["b/0"], ["c/0"]]
    assert [rank.engine.requests for rank in run.groups.loop_ranks] == [["a/0"], ["d/0"]]
    assert batch.non_tensor_batch["trajectory"].tolist() == names(rows)


def test_a_validation_runs_beside_a_stream(setup):
    run = setup()
    run.manager.open()
    stream = run.manager.start(META)
    streamed = run.manager.submit(stream, prompt_rows(["a", "b"], samples=2))
    validation = [f"v{number}" for number in range(4)]

    def advance() -> None:
        for rank in run.groups.rollout_ranks:
            rank.engine.advance(names=[name for name in rank.engine.running if name.startswith("v")])

    stop = threading.Event()
    threading.Thread(target=lambda: [advance() for _ in iter(lambda: stop.wait(0.002), True)], daemon=True).start()
    batch = run.manager.generate(prompt_rows(validation), {**META, "step": 5, "validate": True})
    stop.set()
    assert responses(batch) == [tokens_of(f"{uid}/0", step=5) for uid in validation]
    assert run.manager.is_open
    assert run.manager.take_finished(stream) == []
    run.drive()
    finished = run.collect_all(stream, 4)
    assert sorted(finished) == sorted(streamed)


def test_hosts_get_their_rows_at_the_same_time(setup):
    """One after the other, the last of many replicas would start late."""
    run = setup(engines=4)
    run.groups.uses_ray = True
    run.manager.open()
    job = run.manager.start(META)
    barrier = threading.Barrier(4, timeout=5)
    for rank in run.groups.rollout_ranks:
        submit = rank.engine.submit
        rank.engine.submit = lambda requests, submit=submit: (barrier.wait(), submit(requests))[1]
    run.manager.submit_by_position(job, prompt_rows(["a", "b"], samples=4))
    assert [len(rank.engine.running) for rank in run.groups.rollout_ranks] == [2, 2, 2, 2]


def test_rows_submitted_before_generation_is_open_are_sent_by_open(setup):
    run = setup()
    job = run.manager.start(META)
    whole = tokens_of("bb/0")
    partial = Output(whole[:1], [-whole[0] / 100], [0]) if len(whole) > 1 else Output()
    run.manager.submit(job, prompt_rows(["bb"], samples=2), {"bb/0": partial})
    assert run.groups.rollout_ranks[0].calls == []
    run.drive()
    assert sorted(run.collect_all(job, 2)) == ["bb/0", "bb/1"]
    assert run.groups.rollout_ranks[0].engine.resumed_tokens == len(partial.token_ids)


def test_an_invalid_row_is_an_error_of_submit_and_leaves_nothing_behind(setup):
    run = setup()
    rows = prompt_rows(["a"])
    rows.batch["attention_mask"][:] = 0
    run.groups.rollout_ranks[0].engine.submit = _refuse
    with pytest.raises(ValueError, match="the prompt is empty"):
        run.manager.generate(rows, META)
    assert not run.groups.generation_open


def _refuse(requests: Any) -> Any:
    raise ValueError("the prompt is empty")


def test_rows_without_names_are_named_by_their_prompts_and_numbered(setup):
    run = setup()
    run.drive()
    rows = prompt_rows(["a", "a", "bb", "a"])
    rows.pop(non_tensor_batch_keys=["uid", "sample_index"])
    seen: list[FinishedTrajectory] = []
    batch = run.manager.generate(rows, META, seen.extend)
    one, two = (names(with_row_names(rows))[row] for row in (0, 2))
    uid = one.rpartition("/")[0]
    assert sorted(trajectory.name for trajectory in seen) == sorted([f"{uid}/0", f"{uid}/1", f"{uid}/2", two])
    assert responses(batch) == [tokens_of(name) for name in (f"{uid}/0", f"{uid}/1", two, f"{uid}/2")]
    assert "trajectory" not in batch.non_tensor_batch, "another batch may have the same names"
    assert "uid" not in rows.non_tensor_batch


def test_rows_with_the_same_name_are_an_error(setup):
    run = setup()
    with pytest.raises(ValueError, match="'a/0'"):
        run.manager.generate(prompt_rows(["a", "b", "a"]), META)


def test_cancelled_rows_are_not_collected(setup):
    run = setup(engines=1)
    run.manager.open()
    job = run.manager.start(META)
    run.manager.submit(job, prompt_rows(["a"], samples=3))
    run.manager.cancel(job, ["a/1", "unknown/0"])
    run.drive()
    assert sorted(run.collect_all(job, 2)) == ["a/0", "a/2"]
    assert run.manager.collect(job, 0.05) == []


def test_a_wait_can_be_cancelled_from_another_thread(setup):
    run = setup()
    threading.Timer(0.05, run.manager.cancel_waiting).start()
    with pytest.raises(CallCancelled):
        run.manager.generate(prompt_rows(["a", "b"]), META)
    assert not run.groups.generation_open


def test_hang_detection_sees_and_ends_a_wait(setup):
    class Group:
        processes = ()

    run = setup()
    run.groups.generation_groups = (Group(),)
    error = HangError("generation hangs", "rollout", 0, "here", "collect")

    def give_up() -> None:
        run.wait_for(lambda: [call for call in open_calls() if isinstance(call.group, Group)])
        (call,) = (call for call in open_calls() if isinstance(call.group, Group))
        call.abort_error = error

    threading.Thread(target=give_up, daemon=True).start()
    with pytest.raises(HangError, match=r"role 'rollout', rank 0, .*'collect'"):
        run.manager.generate(prompt_rows(["a"]), META)
    assert not [call for call in open_calls() if isinstance(call.group, Group)]


@pytest.mark.parametrize("kind", ["engine", "agent"])
def test_a_batch_that_hangs_ends_without_another_call_of_its_hosts(setup, kind):
    """A worker that hangs does not reply to the calls that close its host either."""
    run = setup(engines=1, loops=1)
    run.manager.open()
    run.manager.close()
    ranks = run.groups.rollout_ranks if kind == "engine" else run.groups.loop_ranks
    never = threading.Event()
    for rank in ranks:
        rank.close_host = lambda: never.wait(30)
    run.manager.calls = [OpenCall(None, "collect")]
    run.manager.calls[0].abort_error = HangError("generation hangs", "rollout", 0, "here", "collect")
    run.manager.monitored = contextlib.nullcontext
    started = time.monotonic()
    with pytest.raises(HangError):
        run.manager.generate(prompt_rows(["a"], agents=["mine"]), META)
    assert time.monotonic() - started < 10
    for rank in ranks:
        del rank.close_host
    run.manager.calls[0].close()


def test_hang_detection_sees_a_wait_again_after_one_inside_it(setup):
    """The engine probe waits for a batch during the recovery of a stream that waits."""

    class Group:
        processes = ()

    run = setup()
    run.groups.generation_groups = (Group(),)

    def watched_calls() -> list[Any]:
        return [call for call in open_calls() if isinstance(call.group, Group)]

    with run.manager.monitored():
        (outer,) = watched_calls()
        with run.manager.monitored():
            assert len(watched_calls()) == 2
        assert watched_calls() == [outer]
        outer.abort_error = HangError("generation hangs", "rollout", 0, "here", "collect")
        with pytest.raises(HangError, match=r"role 'rollout', rank 0, .*'collect'"):
            run.manager.collect(run.manager.start(META), 0.0)
    assert watched_calls() == []


# ---------------------------------------------------------------- lost hosts


def test_rows_of_a_lost_host_continue_from_their_partial_outputs(setup):
    run = setup()
    run.manager.open()
    job = run.manager.start(META)
    rows = prompt_rows([f"p{number}" for number in range(6)], samples=2)
    run.manager.submit(job, rows)
    lost, kept = run.groups.rollout_ranks
    mine = list(kept.engine.running)
    lost.engine.advance(3)
    reported = run.manager.jobs[job].rows
    run.wait_for(lambda: all(row.partial for name, row in reported.items() if name in lost.engine.running))
    lost.die()
    run.drive()
    finished = run.collect_all(job, len(rows))
    assert sorted(finished) == sorted(names(rows))
    assert run.groups.restarts == 1
    assert run.groups.rollout_ranks[1] is kept
    resumed = [rank.engine.resumed_tokens for rank in run.groups.rollout_ranks]
    assert sum(resumed) > 0, "not from the beginning"
    assert [name for name in kept.engine.requests if name in mine] == mine, "the other host's rows are not sent again"
    assert responses(join_rows([finished[name] for name in names(rows)])) == [tokens_of(name) for name in names(rows)]


def test_a_loss_is_recovered_once_however_many_hosts_and_jobs_report_it(setup):
    """Loop workers are restarted together: every one of them reports a loss, to every job."""
    run = setup(engines=1, loops=3)
    run.manager.open()
    stream, validation = run.manager.start(META), run.manager.start({**META, "validate": True})
    run.manager.submit(stream, prompt_rows(["a", "b", "c"], agents=["mine"] * 3))
    run.manager.submit(validation, prompt_rows(["v", "w", "x"], agents=["mine"] * 3))
    run.groups.loop_ranks[1].die()
    run.wait_for(lambda: run.manager.needs_open)
    run.drive()
    assert len(run.collect_all(validation, 3)) == 3
    assert len(run.collect_all(stream, 3)) == 3
    assert run.manager.collect(stream, 0.05) == []
    assert run.groups.restarts == 1


def test_a_host_may_finish_rows_while_those_of_a_lost_one_are_sent_again(setup):
    run = setup()
    run.manager.open()
    job = run.manager.start(META)
    run.manager.submit(job, prompt_rows([f"p{number}" for number in range(8)]))
    rows = run.manager.jobs[job].rows

    class FinishesMeanwhile:
        kind = "engine"

        @property
        def host(self) -> Any:
            rows.popitem()  # as the thread of another host does
            return run.manager.hosts.all[0]

    rows["p0/0"] = FinishesMeanwhile()
    run.manager.needs_open = True
    run.manager.open()
    assert 0 < len(rows) < 8


def test_a_rank_that_dies_while_hosts_are_opened_costs_nothing(setup):
    """It replied to `open_host`, and died before `host.start`."""
    run = setup()
    run.drive()
    rank = run.groups.rollout_ranks[1]
    call = rank.call

    def die_in_start(method: str, *args: Any) -> Any:
        if method == "host.start":
            rank.die()
        return call(method, *args)

    rank.call = die_in_start
    rows = prompt_rows(["a", "b"], samples=2)
    batch = run.manager.generate(rows, META, retry=run.groups.retry)
    assert batch.non_tensor_batch["trajectory"].tolist() == names(rows)
    assert run.groups.restarts == 1


@pytest.mark.parametrize("when", ["before the batch", "in the batch"])
def test_a_batch_can_be_generated_during_the_recovery_of_another(setup, when):
    """The engine probe does so after a restart of the engines."""
    run = setup()
    run.drive()
    probes: list[DataProto] = []

    def retry(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except WorkerDiedError as error:
            run.groups.restart(error.role)
            probes.append(run.manager.generate(prompt_rows(["probe"]), META))
            return retry(call)

    rank = run.groups.rollout_ranks[0]
    if when == "before the batch":
        rank.die()
    else:
        rank.engine.advance = lambda *args: rank.engine.running and not rank.dead and rank.die()
    rows = prompt_rows(["a", "b"], samples=2)
    batch = run.manager.generate(rows, META, retry=retry)
    assert [probe.non_tensor_batch["trajectory"].tolist() for probe in probes] == [["probe/0"]]
    assert responses(batch) == [tokens_of(name) for name in names(rows)]
    assert not run.groups.generation_open


def test_a_rank_that_dies_after_the_last_trajectory_costs_nothing(setup):
    run = setup()
    run.drive()
    close, first = run.groups.close_generation, [True]

    def die_once() -> None:
        if first:
            first.pop()
            run.groups.rollout_ranks[0].die()
        close()

    run.groups.close_generation = die_once
    rows = prompt_rows(["a", "b"])
    batch = run.manager.generate(rows, META, retry=run.groups.retry)
    assert responses(batch) == [tokens_of(name) for name in names(rows)]
    assert run.groups.restarts == 1


def test_replies_of_an_earlier_host_are_not_taken(setup):
    """A reply of the earlier host arrives after its rows were submitted to another host."""
    run = setup(engines=2)
    run.manager.open()
    job = run.manager.start(META)
    seen: list[str] = []
    run.manager.jobs[job].on_finished = lambda finished: seen.extend(one.name for one in finished)
    run.manager.submit(job, prompt_rows(["a"], samples=2), replica=0)
    old = run.groups.rollout_ranks[0]
    old.released.clear()
    old.engine.advance(names=["a/0"])
    run.wait_for(lambda: not run.manager.hosts.all[0].handle.host.jobs[job].finished)
    stale = run.manager.hosts.all[0]
    run.groups.rollout_ranks[0] = type(old)(run.config, "rollout", 0)
    run.manager.needs_open = True
    run.manager.open()
    assert stale.closed
    assert stale not in run.manager.hosts.all
    old.released.set()
    time.sleep(0.05)
    assert (seen, run.manager.take_finished(job)) == ([], [])
    run.drive()
    assert sorted(run.collect_all(job, 2)) == ["a/0", "a/1"]
    assert sorted(seen) == ["a/0", "a/1"]


@pytest.mark.parametrize("method", ["host.start", "host.submit", "host.cancel"])
def test_a_call_that_is_lost_although_its_rank_lives_costs_nothing(setup, method):
    """As in a network failure: the rank is alive when the trainer looks."""
    run = setup(engines=2)
    run.manager.open()
    if method == "host.cancel":
        before = run.manager.start(META)
        run.manager.submit(before, prompt_rows(["before"]), replica=0)
    rank, call = run.groups.rollout_ranks[0], run.groups.rollout_ranks[0].call

    def lose_once(name: str, *args: Any) -> Any:
        if name == method:
            rank.call = call
            raise WorkerDiedError("unavailable", "rollout", 0, "here", method)
        return call(name, *args)

    rank.call = lose_once
    if method == "host.cancel":
        run.manager.cancel(before, ["before/0"])
    job = run.manager.start(META)
    rows = prompt_rows(["a", "b"], samples=2)
    run.manager.submit(job, rows)
    run.drive()
    finished = run.collect_all(job, len(rows))
    assert responses(join_rows([finished[name] for name in names(rows)])) == [tokens_of(name) for name in names(rows)]
    assert run.groups.restarts == 0


def test_results_are_not_given_to_a_call_whose_caller_is_gone(setup):
    """The reply to an earlier `collect` is lost: it must not take what finishes after the host was opened again."""
    run = setup(engines=1)
    run.manager.open()
    rank = run.groups.rollout_ranks[0]
    zombie: list[Any] = []
    old = rank.host.id
    thread = threading.Thread(target=lambda: zombie.append(rank.host.collect(old, 20.0, False)), daemon=True)
    thread.start()
    run.manager.hosts.all[0].closed = True
    run.manager.needs_open = True
    run.manager.open()
    assert rank.host.id != old
    thread.join(5)
    ((reply, rows),) = zombie
    assert (reply.closed, rows) == (True, None)
    job = run.manager.start(META)
    run.manager.submit(job, prompt_rows(["a"]))
    run.drive()
    assert len(run.collect_all(job, 1)) == 1


def test_a_host_gives_nothing_to_a_call_for_an_earlier_host(setup):
    run = setup(engines=1)
    run.manager.open()
    job = run.manager.start(META)
    run.manager.submit(job, prompt_rows(["a"]))
    rank = run.groups.rollout_ranks[0]
    reply, rows = rank.host.collect("another id", 0.0, False)
    assert (reply.closed, reply.job, rows) == (True, None, None)


def test_finished_trajectories_come_before_the_error_of_a_host(setup):
    run = setup()
    run.manager.open()
    job = run.manager.start(META)
    run.manager.submit(job, prompt_rows(["a"]), replica=0)
    run.manager.submit(job, prompt_rows(["b"]), replica=1)
    inbox = run.manager.jobs[job].inbox
    run.groups.rollout_ranks[0].engine.advance()
    run.wait_for(lambda: not inbox.empty())
    run.groups.rollout_ranks[1].die()
    run.wait_for(lambda: run.manager.needs_open)
    assert [one.name for one in run.manager.collect(job, 1)] == ["a/0"]
    for _ in range(2):
        assert run.manager.take_finished(job) == [], "and leaves the error"
    with pytest.raises(WorkerDiedError):
        run.manager.collect(job, 1)


def test_the_error_of_an_engine_is_raised_instead_of_its_effects(setup):
    run = setup()
    run.manager.open()
    job = run.manager.start(META)
    run.manager.submit(job, prompt_rows(["a"]))
    run.groups.rollout_ranks[0].engine.fail(MemoryError("of the engine"))
    run.wait_for(lambda: run.manager.needs_open)
    with pytest.raises(MemoryError, match="of the engine"):
        run.manager.collect(job, 1)
    with pytest.raises(MemoryError, match="of the engine"):
        run.manager.open()
    with pytest.raises(MemoryError, match="of the engine"):
        run.manager.close()


def test_an_error_of_the_callback_is_raised_by_collect(setup):
    def broken(finished: Any) -> None:
        raise KeyError("score")

    run = setup()
    run.drive()
    with pytest.raises(KeyError, match="score"):
        run.manager.generate(prompt_rows(["a"]), META, broken)


def test_partials_are_current_and_survive_the_loss_of_a_host(setup):
    run = setup()
    run.manager.open()
    job = run.manager.start(META)
    run.manager.submit(job, prompt_rows(["a"], samples=6), replica=0)
    run.manager.submit(job, prompt_rows(["b"], samples=6), replica=1)
    for rank in run.groups.rollout_ranks:
        rank.engine.advance(4)
    unfinished = [name for rank in run.groups.rollout_ranks for name in rank.engine.running]
    known = run.manager.jobs[job].rows
    run.wait_for(lambda: set(known) == set(unfinished) and all(row.partial for row in known.values()))
    before = run.manager.partials(job)
    assert {name: output.token_ids for name, output in before.items()} == {
        name: tokens_of(name)[:4] for name in unfinished
    }
    run.groups.rollout_ranks[0].die()
    after = run.manager.partials(job)
    assert {name: len(output.token_ids) for name, output in after.items()} == {
        name: 3 if name.startswith("a/") else 4 for name in unfinished
    }


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_or_doubled_whatever_dies_is_delayed_or_cancelled(setup, seed):
    rng = random.Random(seed)
    run = setup(engines=2, loops=2)
    manager, groups = run.manager, run.groups
    jobs = [manager.start(META), manager.start({**META, "step": 2, "validate": True})]
    received: dict[str, Counter[str]] = {job: Counter() for job in jobs}
    parts: dict[str, dict[str, FinishedTrajectory]] = {job: {} for job in jobs}
    expected: dict[str, set[str]] = {job: set() for job in jobs}
    cancelled: dict[str, set[str]] = {job: set() for job in jobs}

    def take(job: str) -> None:
        groups.retry(manager.open)
        for one in groups.retry(lambda: manager.collect(job, 0.005)):
            received[job][one.name] += 1
            parts[job][one.name] = one

    def submit(number: int) -> None:
        job = rng.choice(jobs)
        agent = rng.choice(["single_turn_agent", "mine"])
        rows = prompt_rows([f"g{number}"], samples=rng.randint(1, 4), agents=[agent])
        expected[job] |= set(manager.submit(job, rows))

    def disturb() -> None:
        rank, event = rng.choice(groups.ranks), rng.random()
        rank.engine.version = rng.randint(0, 5)
        rank.engine.advance(rng.randint(1, 4), [name for name in rank.engine.running if rng.random() < 0.6])
        if event < 0.08:
            rank.die()
        elif event < 0.2:
            rank.released.clear()
        else:
            rank.released.set()

    def cancel() -> None:
        job = rng.choice(jobs)
        chosen = [name for name in sorted(expected[job]) if rng.random() < 0.05]
        cancelled[job] |= {name for name in chosen if not received[job][name]}
        manager.cancel(job, chosen)

    for number in range(120):
        if rng.random() < 0.4:
            submit(number)
        disturb()
        if rng.random() < 0.1:
            cancel()
        if rng.random() < 0.5:
            take(rng.choice(jobs))
    for rank in groups.ranks:
        rank.released.set()
    run.drive()
    deadline = time.monotonic() + 20
    while any(expected[job] - cancelled[job] - set(received[job]) for job in jobs) and time.monotonic() < deadline:
        for job in jobs:
            take(job)
    for step, job in enumerate(jobs, 1):
        assert not manager.jobs[job].rows
        take(job)  # nothing comes twice
        assert max(received[job].values()) == 1
        assert expected[job] - cancelled[job] <= set(received[job]) <= expected[job]
        order = sorted(parts[job])
        rng.shuffle(order)
        batch = join_rows([parts[job][name] for name in order])
        assert batch.non_tensor_batch["trajectory"].tolist() == order
        assert responses(batch) == [tokens_of(name, step) for name in order]
    assert groups.restarts


# ---------------------------------------------------------------- batches and checkpoints


def model(tokens: list[int], **fields: Any) -> Turn:
    return Turn("model", tokens, [-token / 100 for token in tokens], [2] * len(tokens), "stop", **fields)


def restore(manager: RolloutManager, trajectories: list[Trajectory]) -> list[FinishedTrajectory]:
    return store_trajectories(trajectories, manager.config.actor_rollout_ref, META, use_ray=False)


def agent_trajectory(uid: str, number: int, rows: int) -> Trajectory:
    """A trajectory with `rows` contexts of different lengths, and its own `extra`."""
    contexts = [
        Row([1] * (1 + row), [model([10 * row + number + 1] * (2 + row)), Turn("environment", [9], name="tool")])
        for row in range(rows)
    ]
    extra = {"num_turns": rows, "agent_metrics": {"tool_s": 0.5}, "label": f"{uid}/{number}"}
    return Trajectory(uid, number, contexts, score=float(number), extra=extra)


def test_a_batch_has_all_rows_of_each_trajectory_in_the_order_of_its_argument(setup):
    """The replies of the hosts have rows of different widths, and rows that are not in this batch."""
    manager = setup().manager
    parts = [
        restore(manager, [agent_trajectory("a", number, rows) for number, rows in enumerate([2, 1, 3])]),
        restore(manager, [agent_trajectory("b", number, rows) for number, rows in enumerate([1, 4])]),
        restore(manager, [agent_trajectory("c", 0, 2)]),
    ]
    chosen = [parts[1][1], parts[0][2], parts[2][0], parts[0][0]]
    batch = join_rows(chosen)
    assert batch.non_tensor_batch["trajectory"].tolist() == ["b/1"] * 4 + ["a/2"] * 3 + ["c/0"] * 2 + ["a/0"] * 2
    expected = [
        ([1] * (1 + row), [10 * row + number + 1] * (2 + row) + [9])
        for number, rows in ((1, 4), (2, 3), (0, 2), (0, 2))
        for row in range(rows)
    ]
    width = batch.batch["responses"].shape[1]
    prompts = [
        ids[:-width][mask[:-width].bool()].tolist()
        for ids, mask in zip(batch.batch["input_ids"], batch.batch["attention_mask"], strict=True)
    ]
    assert list(zip(prompts, responses(batch), strict=True)) == expected
    labels = [fields["label"] for fields in batch.non_tensor_batch["extra_fields"]]
    assert labels == batch.non_tensor_batch["trajectory"].tolist()
    assert "uid" not in batch.non_tensor_batch, "the batch has it from its prompts"


def test_a_batch_has_the_object_columns_of_all_replies(setup):
    manager = setup().manager
    (first,) = restore(manager, [agent_trajectory("a", 0, 1)])
    (second,) = restore(manager, [agent_trajectory("b", 0, 1)])
    part = replace(second.part, objects={**second.part.objects, "note": np.array(["only here"], dtype=object)})
    for trajectories, notes in (([0, 1], [None, "only here"]), ([1, 0], ["only here", None])):
        chosen = [(first, replace(second, part=part))[index] for index in trajectories]
        assert join_rows(chosen).non_tensor_batch["note"].tolist() == notes


def test_trajectories_of_a_checkpoint_are_restored_as_they_were(setup):
    run = setup()
    run.drive()
    manager = run.manager
    rows = prompt_rows(["a", "bb"], samples=2)
    before: list[FinishedTrajectory] = []
    manager.generate(rows, META, before.extend)
    before = [next(one for one in before if one.name == name) for name in names(rows)]
    before += restore(manager, [agent_trajectory("c", 1, 3)])[:1]
    singles, agents = before[:4], before[4:]
    for group in (singles, agents):
        after = restore(manager, read_trajectories(group))
        for one, other in zip(group, after, strict=True):
            for field in ("name", "uid", "sample_index", "status", "score", "versions", "row_count"):
                assert getattr(one, field) == getattr(other, field), field
            assert np.array_equal(one.last_tokens, other.last_tokens)
        first, second = join_rows(group), join_rows(after)
        assert responses(first) == responses(second)
        for name in ("rollout_log_probs", "rollout_versions", "response_mask"):
            assert first.batch[name].tolist() == second.batch[name].tolist(), name
    assert read_trajectories([]) == restore(manager, []) == []


def test_the_error_of_a_lost_worker_ends_a_batch_without_retry(setup):
    run = setup()
    threading.Timer(0.05, run.groups.rollout_ranks[0].die).start()
    with pytest.raises(WorkerError):
        run.manager.generate(prompt_rows(["a", "b"]), META)
    assert not run.manager.is_open
    run.groups.restart("rollout")
