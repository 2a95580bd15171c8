"""LoopHost: jobs, replies, cancellation and partial outputs, with the rows of a real engine."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.support.rollout_hosts import (
    MANY_TOKENS,
    add_partials,
    collect_all,
    named_rows,
    names_of,
    one_reply,
    open_host,
    pause_with_tokens,
    tokens_by_name,
    wait_finished,
    wait_until,
)
from verl.single_controller.base.heartbeat import ComputeTracker
from verl.single_controller.base.worker_group import CallCancelled
from verl.types.request import resumable
from verl.utils import progress
from verl.workers.rollout import loop_host
from verl.workers.rollout.engine_host import EngineHost


@pytest.fixture(params=["native", pytest.param("hf", marks=pytest.mark.slow)])
def engine_name(request):
    return request.param


@pytest.fixture
def engine(start):
    return start(max_new_tokens=MANY_TOKENS, ignore_eos=True)


def test_collect_returns_all_finished_trajectories_of_one_job_together(start, make_prompts):
    rows = named_rows(make_prompts, rows=6)
    host = open_host(start(max_new_tokens=5), "a", rows)
    reply, collected = one_reply(host, "a")
    assert (reply.job, reply.closed, reply.failure) == ("a", False, None)
    assert sorted(reply.headers.names) == sorted(names_of(rows))
    assert reply.headers.row_counts.tolist() == [1] * 6
    assert reply.headers.statuses == ["finished"] * 6
    assert reply.headers.versions == [(0,)] * 6
    assert len(collected) == 6
    assert collected.non_tensor_batch == {}
    assert reply.objects["trajectory"].tolist() == reply.headers.names
    assert host.collect(host.id, 0.0, False)[0].headers is None, "reported once"


def test_collect_waits_for_the_rows_that_are_left_before_it_replies(start, make_prompts, monkeypatch):
    monkeypatch.setattr(loop_host, "COALESCE_S", 60.0)
    rows = named_rows(make_prompts, rows=5)
    rows.non_tensor_batch["max_new_tokens"] = np.array([1, 4, 9, 14, 19], dtype=object)
    host = open_host(start(ignore_eos=True), "a", rows)
    reply, _ = host.collect(host.id, 60, False)
    assert sorted(reply.headers.names) == sorted(names_of(rows)), "one reply as soon as nothing is left"
    assert np.diff(reply.headers.token_offsets).tolist() == [
        dict(zip(names_of(rows), [1, 4, 9, 14, 19], strict=True))[name] for name in reply.headers.names
    ]


def test_two_jobs_run_concurrently_with_their_own_sampling_parameters(start, make_prompts):
    engine, rows = start(max_new_tokens=6), named_rows(make_prompts)
    host = open_host(engine, "train", rows)
    host.start("validate", rows.meta_info | {"temperature": 0.0, "max_new_tokens": 3})
    host.submit("validate", rows)
    wait_finished(host, "train", "validate")
    replies = {(reply := host.collect(host.id, 60, False))[0].job: reply for _ in range(2)}
    assert set(replies) == {"train", "validate"}, "a reply is of one job"
    for job, meta in {"train": {}, "validate": {"temperature": 0.0, "max_new_tokens": 3}}.items():
        alone = open_host(engine, job, rows, **meta)
        assert tokens_by_name([replies[job]]) == tokens_by_name([one_reply(alone, job)])


def test_a_call_for_an_earlier_host_of_the_process_gets_nothing(engine, make_prompts):
    host = open_host(engine, "a", named_rows(make_prompts, rows=1))
    reply, rows = host.collect("another id", 60, True)
    assert (reply.closed, reply.headers, rows) == (True, None, None)
    host.close()


def test_cancelled_rows_are_not_reported_and_the_others_are(engine, make_prompts):
    rows = named_rows(make_prompts)
    host = open_host(engine, "a", rows)
    pause_with_tokens(engine, 3)
    host.cancel("a", [*names_of(rows)[:2], "unknown/0"])
    host.cancel("unknown", names_of(rows))
    engine.resume_generation()
    tokens = tokens_by_name(collect_all(host, 2))
    assert list(map(len, tokens.values())) == [MANY_TOKENS] * 2
    assert set(tokens) == set(names_of(rows)[2:])
    wait_until(lambda: not engine.loop.all_unfinished())
    assert host.collect(host.id, 0.0, False)[0].headers is None


def test_a_finished_job_ends_its_rows_and_leaves_other_jobs_alone(engine, make_prompts):
    first, second = named_rows(make_prompts), named_rows(make_prompts, seed=1)
    host = open_host(engine, "a", first)
    host.start("b", second.meta_info)
    host.submit("b", second)
    pause_with_tokens(engine, 2)
    host.finish("a")
    host.finish("unknown")
    assert host.partials("a") == {}
    engine.resume_generation()
    assert set(tokens_by_name(collect_all(host, 4))) == set(names_of(second))


def test_close_aborts_all_rows_and_wakes_the_collector(engine, make_prompts):
    host = open_host(engine, "a", named_rows(make_prompts))
    pause_with_tokens(engine, 2)
    replies = []
    collector = threading.Thread(target=lambda: replies.append(host.collect(host.id, 60, False)))
    collector.start()
    engine.resume_generation()
    host.close()
    collector.join()
    assert [(reply.closed, rows) for reply, rows in replies] == [(True, None)]
    assert engine.loop.all_unfinished() == []
    host.submit("a", named_rows(make_prompts))
    assert host.closed
    assert engine.loop.all_unfinished() == [], "a closed host starts nothing"


def test_periodic_partials_joined_are_the_final_outputs(engine, make_prompts, monkeypatch):
    monkeypatch.setattr(loop_host, "PARTIALS_S", 0.0)
    rows, known = named_rows(make_prompts), {}
    host = open_host(engine, "a", rows)
    for count in (3, 20, 50):
        pause_with_tokens(engine, count)
        reply, _ = host.collect(host.id, 0.0, True)
        add_partials(known, reply.partials["a"], rows)
        assert host.collect(host.id, 0.0, True)[0].partials["a"] == {}, "each token is reported once"
        current = host.partials("a")
        assert {name: output.token_ids for name, output in known.items()} == {
            name: output.token_ids for name, output in current.items()
        }
        assert all(len(output.token_ids) >= count for output in known.values())
        engine.resume_generation()
    replies = collect_all(host, 4)
    for reply, collected in replies:
        for number, name in enumerate(reply.headers.names):
            length, partial = len(known[name].token_ids), known[name]
            assert collected.batch["responses"][number, :length].tolist() == partial.token_ids
            assert collected.batch["rollout_log_probs"][number, :length].tolist() == pytest.approx(partial.log_probs)
            assert collected.batch["rollout_versions"][number, :length].tolist() == partial.versions


@pytest.mark.parametrize("reported", [False, True], ids=["current", "reported"])
def test_rows_resumed_from_partials_have_the_uninterrupted_tokens(engine, make_prompts, reported, monkeypatch):
    monkeypatch.setattr(loop_host, "PARTIALS_S", 0.0)
    rows = named_rows(make_prompts)
    whole = tokens_by_name(collect_all(open_host(engine, "a", rows), 4))
    interrupted = open_host(engine, "a", rows)
    pause_with_tokens(engine, 10)
    if reported:  # the partial outputs that a manager has after the loss of a host
        known: dict = {}
        add_partials(known, interrupted.collect(interrupted.id, 0.0, True)[0].partials["a"], rows)
        partials = {name: resumable(output) for name, output in known.items()}
    else:
        partials = interrupted.partials("a")
    engine.resume_generation()
    interrupted.close()
    resumed = open_host(engine, "a", rows, partials)
    pause_with_tokens(engine, 12)
    add_partials(partials, resumed.collect(resumed.id, 0.0, True)[0].partials["a"], rows)
    assert all(whole[name][: len(output.token_ids)] == output.token_ids for name, output in partials.items())
    engine.resume_generation()
    assert tokens_by_name(collect_all(resumed, 4)) == whole


def test_a_closed_host_ends_a_batch(engine, make_prompts):
    host, failures = EngineHost(engine), []

    def generate() -> None:
        try:
            host.generate_batch(make_prompts())
        except CallCancelled as error:
            failures.append(error)

    caller = threading.Thread(target=generate)
    caller.start()
    pause_with_tokens(engine, 2)
    engine.resume_generation()
    host.close()
    caller.join()
    assert len(failures) == 1


def test_stream_batch_yields_every_row_and_aborts_the_rest_when_it_is_closed(engine, make_prompts):
    prompts = make_prompts(rows=3)
    whole = EngineHost(engine).generate_batch(prompts)
    streamed = dict(EngineHost(engine).stream_batch(prompts, {}))
    assert sorted(streamed) == [0, 1, 2]
    for row, sample in streamed.items():
        assert sample.batch["responses"].tolist() == whole.batch["responses"][row : row + 1].tolist()
    prompts.non_tensor_batch["max_new_tokens"] = np.array([1, MANY_TOKENS, MANY_TOKENS], dtype=object)
    stream = EngineHost(engine).stream_batch(prompts, {})
    assert next(stream)[0] == 0
    stream.close()
    wait_until(lambda: not engine.loop.all_unfinished())


def test_hang_diagnosis_sees_rows_like_a_compute_call(engine, make_prompts, monkeypatch):
    """A rank that generates rows runs no compute call: its heartbeat must report the rows and the thread instead."""
    monkeypatch.setattr(progress, "work_sources", [])  # of hosts that other tests left open
    tracker = ComputeTracker()
    rows = named_rows(make_prompts, rows=3)
    host = open_host(engine, "a", rows)
    try:
        pause_with_tokens(engine, 1)
        beat = tracker.heartbeat(all_threads=False)
        assert beat.method == "generation of 3 rows"
        assert any("async_engine" in frame.file for frame in beat.stacks[0])
        with tracker.running("update_actor", lambda: 7):
            assert tracker.heartbeat(all_threads=False).method == "update_actor"
    finally:
        host.close()
    assert tracker.heartbeat(all_threads=False).method is None
