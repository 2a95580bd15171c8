"""EngineHost with a scripted engine: calls that cross each other, and what a host leaves behind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scripted_hosts import ScriptedEngine, prompt_rows, scripted_config
from verl.types.request import EngineDiedError, Request, SamplingParams
from verl.utils import progress
from verl.workers.roles.policy import ActorRolloutRefWorker
from verl.workers.rollout.engine_host import EngineHost

META = {"step": 1, "seed": 7}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(scripted_config().actor_rollout_ref.rollout)


def host_of(engine: Any, *jobs: str) -> EngineHost:
    host = EngineHost(engine)
    for job in jobs:
        host.start(job, META)
    return host


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_rows_cancelled_while_they_are_submitted_do_not_stay_in_the_engine(engine, how):
    host, submit = host_of(engine, "job"), engine.submit

    def submit_and_cancel(requests: Any) -> Any:
        futures = submit(requests)
        host.cancel("job", ["a/0"]) if how == "cancel" else host.close()
        return futures

    engine.submit = submit_and_cancel
    host.submit("job", prompt_rows(["a", "b"]))
    assert engine.running == (["b/0"] if how == "cancel" else [])
    host.close()


def test_outputs_of_clients_that_are_gone_are_not_kept(engine):
    host = host_of(engine)
    host.submit_requests("gone", [Request("gone/0", [1], SamplingParams(max_new_tokens=9, key=8))])
    host.abort_clients()
    assert engine.running == []
    assert not host.outputs["gone"]
    host.submit_requests("here", [Request("here/0", [1], SamplingParams(max_new_tokens=9, key=8))])
    engine.advance()
    assert [one.id for one in host.collect_outputs("here", 1.0).outputs] == ["here/0"]


def test_no_job_waits_for_the_end_of_another(engine):
    """A stream whose rows finish all the time, and a validation beside it."""
    host = host_of(engine, "stream", "validation")
    host.submit("validation", prompt_rows(["v"]))
    collected = []
    for number in range(4):
        host.submit("stream", prompt_rows([f"s{number}"]))
        engine.advance()
        collected.append(host.collect(host.id, 0.0, False)[0].job)
    assert "validation" in collected[:2]
    host.close()


def test_a_host_whose_engine_is_restarted_leaves_no_unfinished_work(engine):
    """Hang diagnosis would report its rows for the rest of the run, and its clients would wait for a reply."""
    worker: Any = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
    worker.rollout, worker.host, worker._make_room = engine, host_of(engine, "job"), lambda: None
    engine.restart_if_dead = lambda: True
    worker._new_host = lambda: EngineHost(engine)
    failed = worker.host
    failed.submit("job", prompt_rows(["a", "b"]))
    assert failed.work in progress.work_sources
    engine.fail(EngineDiedError("the engine's process ended"))
    worker.restart_engine()
    assert worker.host is not failed
    assert failed.collect_outputs("client", 0.0).closed
    assert failed.work not in progress.work_sources
