"""AgentHost with real engines in one process: jobs, partial outputs, lost replicas, cancellation and failures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.agents import (
    ROLLOUT,
    TOOL,
    AgentSetup,
    DyingHandle,
    HangingLoop,
    SlowCancelLoop,
    SlowEngines,
    make_agent_setup,
    prompts_of,
    tokens_by_name,
    tokens_of,
    trajectories_of,
)
from tests.support.training_harness import make_task
from verl.agent.loop import AgentLoopBase, AgentLoopOutput
from verl.protocol import DataProto, object_array
from verl.single_controller.base.worker_group import WorkerCallError
from verl.types.request import join_outputs
from verl.workers.rollout import engine_client, loop_host

HERE = "tests.support.agents"
TOKENS = 40


class Releasing(AgentLoopBase):
    """Waits in a tool until it is cancelled; the release of the tool takes several iterations of the event loop."""

    entered, released = threading.Event(), 0

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        try:
            self.entered.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)
            Releasing.released += 1
        raise AssertionError("unreachable")


class Prefixed(AgentLoopBase):
    """Generates from another prompt than that of its row."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt = [5, *row["prompt_ids"]]
        answer = await self.server_manager.generate("x", prompt_ids=prompt, sampling_params=sampling_params)
        return AgentLoopOutput(prompt, answer.token_ids, [1] * len(answer.token_ids))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("hosts"))


@pytest.fixture(scope="module")
def engines(task: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> AgentSetup:
    more = (f"data.max_response_length={TOKENS}", f"{ROLLOUT}.enable_prefix_caching=False")
    return make_agent_setup(task, tmp_path_factory.mktemp("two"), *more, replicas=2)


@pytest.fixture
def two(engines: AgentSetup) -> Iterator[AgentSetup]:
    """Two replicas, open for generation."""
    with engines.open_engines():
        yield engines
        engines.agents.close_host()


def single_turns(task: dict[str, str], count: int = 6) -> DataProto:
    return prompts_of(task, count, "single_turn_agent", ignore_eos=True)


def whole_outputs(two: AgentSetup, prompts: DataProto) -> dict[str, list[int]]:
    batch = two.agents.generate_sequences(prompts, two.handles)
    return {name: rows[0][0] for name, rows in tokens_of(batch).items()}


def test_jobs_with_different_sampling_parameters_run_at_the_same_time(two: AgentSetup, task: dict[str, str]):
    trained, validated = single_turns(task), single_turns(task)
    validated.meta_info |= {"validate": True, "max_new_tokens": 7, "do_sample": False, "seed": 3}
    expected = whole_outputs(two, trained), whole_outputs(two, validated)
    assert expected[0] != expected[1]
    two.start(trained, job="train")
    two.start(validated, job="validation")
    finished: dict[str, dict[str, list[int]]] = {"train": {}, "validation": {}}
    while sum(map(len, finished.values())) < 24:
        reply, rows = two.host.collect(two.host.id, 30.0, False)
        finished[str(reply.job)] |= tokens_by_name(trajectories_of(reply, rows))
    assert (finished["train"], finished["validation"]) == expected
    assert {len(tokens) for tokens in finished["validation"].values()} == {7}
    assert {len(tokens) for tokens in finished["train"].values()} == {TOKENS}


def test_finished_trajectories_are_reported_while_others_run(two: AgentSetup, task: dict[str, str]):
    """Each is reported once, with the tokens to score, and not to a later job."""
    prompts = prompts_of(task, 3, f"{HERE}.TwoTurns")
    expected = whole_outputs(two, prompts)
    prompts.non_tensor_batch["agent_name"][2] = f"{HERE}.HangingLoop"  # sample 0: does not end
    two.start(prompts)
    headers: dict[str, list[int]] = {}
    while len(headers) < len(prompts) - 1:
        reply, _ = two.host.collect(two.host.id, 30.0, False)
        assert reply.headers is not None
        offsets = reply.headers.token_offsets
        for number, name in enumerate(reply.headers.names):
            assert name not in headers
            headers[name] = reply.headers.tokens[offsets[number] : offsets[number + 1]].tolist()
    assert headers == {name: tokens for name, tokens in expected.items() if name != "p1/0"}
    two.host.finish("job")
    two.start(prompts_of(task, 1, f"{HERE}.TwoTurns"), job="next")
    assert {one.name for one in two.collect(2, "next")} == {"p0/0", "p0/1"}


def test_rows_are_added_at_any_time_and_resumed_outputs_equal_uninterrupted_ones(
    two: AgentSetup, task: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """Partial outputs are read while generation continues: the job finishes with the same tokens, and so does another
    job that resumes from them."""
    prompts = single_turns(task)
    whole = whole_outputs(two, prompts)
    slow = SlowEngines(monkeypatch, steps=16)
    two.start(prompts[:4])
    two.host.submit("job", prompts[4:])
    assert slow.reached.wait(30)
    partials = two.host.partials("job")
    slow.resume.set()
    assert partials
    assert all(0 < len(part.token_ids) < TOKENS for part in partials.values())
    assert all(whole[name][: len(part.token_ids)] == part.token_ids for name, part in partials.items())
    two.host.cancel("job", ["p5/1"])
    finished = tokens_by_name(two.collect(11))
    assert finished == {name: tokens for name, tokens in whole.items() if name != "p5/1"}
    two.start(prompts, job="resumed", partials=partials)
    assert tokens_by_name(two.collect(12, "resumed")) == whole


def test_reported_partial_outputs_join_to_the_beginning_of_the_output(
    two: AgentSetup, task: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    for module, name in ((engine_client, "PARTIALS_S"), (loop_host, "PARTIALS_S")):
        monkeypatch.setattr(module, name, 0.0)
    monkeypatch.setattr(engine_client, "COLLECT_S", 0.005)
    prompts = single_turns(task, 2)
    whole = whole_outputs(two, prompts)
    slow = SlowEngines(monkeypatch, steps=8)
    two.start(prompts)
    two.host.next_partials = 0.0
    known: dict[str, Any] = {}
    reports = 0
    while not reports > 2 * len(known) == 2 * len(prompts):  # in several parts
        reply, _ = two.host.collect(two.host.id, 0.01, True)
        for name, piece in reply.partials.get("job", {}).items():
            reports += 1
            known[name] = join_outputs([known[name], piece] if name in known else [piece])
    slow.resume.set()
    assert all(whole[name][: len(part.token_ids)] == part.token_ids for name, part in known.items())


def test_only_first_calls_with_the_prompt_of_the_row_have_partial_outputs(
    two: AgentSetup, task: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    prompts = prompts_of(task, 2, ignore_eos=True)
    loops = ["single_turn_agent", f"{__name__}.Prefixed", f"{HERE}.HangingLoop", f"{HERE}.TwoTurns"]
    prompts.non_tensor_batch["agent_name"] = object_array(loops)
    slow, handles = SlowEngines(monkeypatch, steps=8), two.handles[:1]
    two.start(prompts, handles)
    while not any(prompt[-len(TOOL) :] == TOOL for prompt in handles[0].prompts):
        time.sleep(0.001)  # until TwoTurns is in its second call
    names = set(two.host.partials("job"))
    slow.resume.set()
    assert names == {"p0/0"}


def test_cancelled_trajectories_are_not_reported_and_their_tools_not_waited_for(two: AgentSetup, task: dict[str, str]):
    SlowCancelLoop.entered.clear()
    SlowCancelLoop.may_exit.clear()
    two.start(prompts_of(task, 1, f"{HERE}.SlowCancelLoop"))
    assert SlowCancelLoop.entered.wait(30)
    cancelling = threading.Thread(target=two.host.cancel, args=("job", ["p0/0"]))
    cancelling.start()
    cancelling.join(10)
    waited = cancelling.is_alive()
    SlowCancelLoop.may_exit.set()
    assert not waited
    assert list(tokens_by_name(two.collect(1))) == ["p0/1"]
    reply, rows = two.host.collect(two.host.id, 0.3, False)
    assert (reply.headers, rows) == (None, None)


@pytest.mark.parametrize("end", ["close", "finish and close", "cancel and close"])
def test_closing_waits_for_the_release_of_tools_and_does_not_interrupt_it(
    two: AgentSetup, task: dict[str, str], end: str
):
    Releasing.entered.clear()
    Releasing.released = 0
    two.start(prompts_of(task, 1, f"{__name__}.Releasing"))
    assert Releasing.entered.wait(30)
    if end == "finish and close":
        two.host.finish("job")
    elif end == "cancel and close":
        two.host.cancel("job", ["p0/0"])
    two.agents.close_host()
    assert Releasing.released == 2
    reply, rows = two.host.collect(two.host.id, 30.0, False)
    assert (reply.closed, reply.headers, rows) == (True, None, None)


def test_finishing_a_job_cancels_its_rows_only_and_empties_the_engines(two: AgentSetup, task: dict[str, str]):
    HangingLoop.entered.clear()
    two.start(prompts_of(task, 2, f"{HERE}.HangingLoop"), job="endless")
    assert HangingLoop.entered.wait(30)
    two.host.finish("endless")
    two.host.finish("unknown")
    prompts = single_turns(task, 2)
    two.start(prompts)
    assert len(two.collect(len(prompts))) == 4
    assert two.host.partials("endless") == {}
    while any(two.engine(number).loop.all_unfinished() for number in range(2)):
        time.sleep(0.001)


def test_a_call_for_an_earlier_host_gets_nothing(two: AgentSetup, task: dict[str, str]):
    (earlier,) = two.agents.open_host(two.handles)
    two.agents.close_host()
    (current,) = two.agents.open_host(two.handles)
    assert current != earlier
    reply, _ = two.host.collect(earlier, 30.0, False)
    assert reply.closed


def test_requests_of_a_lost_replica_resume_and_those_without_any_wait_for_open_host(
    two: AgentSetup, task: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """The loss is reported once; outputs equal uninterrupted ones."""
    monkeypatch.setattr(engine_client, "PARTIALS_S", 0.0)
    monkeypatch.setattr(engine_client, "COLLECT_S", 0.005)
    prompts = single_turns(task)
    whole = whole_outputs(two, prompts)
    slow = SlowEngines(monkeypatch, steps=16)
    first, second = (DyingHandle(replica.handle(0)) for replica in two.replicas)
    second.dies_after = None
    two.start(prompts, [first, second])
    (host_id,) = two.agents.open_host([first, second])  # nothing is lost yet
    finished: dict[str, list[int]] = {}
    lost: list[str] = []
    while len(finished) < len(prompts):
        reply, rows = two.host.collect(host_id, 30.0, False)
        finished |= tokens_by_name(trajectories_of(reply, rows))
        if reply.lost_replica:
            lost.append(reply.lost_replica)
            slow.resume.set()
    assert finished == whole
    assert (len(lost), second.resumed > 0) == (1, True)
    assert "worker process died" in lost[0]
    assert first.prompts
    second.dead = True
    two.host.submit("job", prompts)
    while not (reply := two.host.collect(host_id, 30.0, False)[0]).lost_replica:
        assert reply.headers is None
    assert two.agents.open_host(two.handles) == [host_id]
    assert tokens_by_name(two.collect(12)) == whole


def test_a_failing_agent_costs_its_own_trajectory(two: AgentSetup, task: dict[str, str]):
    two.start(prompts_of(task, 2, f"{HERE}.FailingLoop"))
    statuses: dict[str, tuple[str, str | None]] = {}
    while len(statuses) < 4:
        reply, rows = two.host.collect(two.host.id, 30.0, False)
        assert reply.failure is None
        if reply.headers is not None:
            errors = [one.extra["agent_metrics"]["error"] for one in trajectories_of(reply, rows)]
            statuses |= dict(zip(reply.headers.names, zip(reply.headers.statuses, errors, strict=True), strict=True))
    failed = ("failed", "LookupError: the tool is unavailable")
    assert statuses == {
        "p0/0": ("finished", None),
        "p0/1": failed,
        "p1/0": ("finished", None),
        "p1/1": failed,
    }


def test_a_job_with_an_unknown_loop_is_rejected_and_leaves_no_rows(two: AgentSetup, task: dict[str, str]):
    with pytest.raises(ValueError, match=r"(?s)agent_name.*'toool_agent'"):
        two.start(prompts_of(task, 1, "toool_agent"))
    two.host.submit("job", single_turns(task, 1))
    assert len(two.collect(2)) == 2


def test_a_failed_engine_is_reported_as_a_lost_replica(
    two: AgentSetup, task: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """The host continues; the rank raises the error of its engine."""
    slow = SlowEngines(monkeypatch, steps=4)
    prompts = single_turns(task)
    two.start(prompts, two.handles[:1])
    while not (reply := two.host.collect(two.host.id, 0.1, False)[0]).lost_replica:
        two.engine().loop.fail(RuntimeError("the kernel failed"))
    assert reply.lost_replica == "RuntimeError: the kernel failed"
    slow.resume.set()
    with pytest.raises(WorkerCallError, match="RuntimeError: the kernel failed"):
        two.replicas[0].end_generation()
    two.replicas[0].begin_generation()
    two.agents.open_host(two.handles[:1])
    two.collect(1)
