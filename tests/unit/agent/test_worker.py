"""Loop workers with the real engine in one process: what loops may do, whom it costs what, and who answers whom."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.agents import (
    ROLLOUT,
    TOOL,
    AgentSetup,
    HangingLoop,
    loop_worker,
    make_agent_setup,
    prompts_of,
    tokens_of,
)
from tests.support.training_harness import make_task
from verl.agent.loop import LoopSpec
from verl.protocol import DataProto, object_array
from verl.single_controller.base.worker_group import CallCancelled, WorkerCallError
from verl.utils import hf_tokenizer
from verl.utils.import_utils import ImportPath

HERE = "tests.support.agents"
LOOPS = {"deep": LoopSpec(ImportPath.read(f"{HERE}.TwoTurns"), {"depth": 3})}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("workers"))


@pytest.fixture(scope="module")
def two(task: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> AgentSetup:
    """Two replicas."""
    more = ("data.max_response_length=40", f"{ROLLOUT}.enable_prefix_caching=False")
    return make_agent_setup(task, tmp_path_factory.mktemp("two"), *more, replicas=2, loops=LOOPS)


def metrics(answers: DataProto) -> list[dict[str, Any]]:
    return list(answers.non_tensor_batch["agent_metrics"])


def test_turns_line_up_and_stay_on_one_replica(two: AgentSetup, task: dict[str, str]):
    handles = two.handles
    answers = two.generate(prompts_of(task, 6, f"{HERE}.TwoTurns"), handles)
    mask, responses = answers.batch["response_mask"], answers.batch["responses"]
    versions = answers.batch["rollout_versions"]
    assert torch.equal(versions >= 0, mask.bool())
    assert not answers.batch["rollout_log_probs"].isnan().any()
    assert [each["unmatched_tokens"] for each in metrics(answers)] == [0] * 12
    assert [each["turns"] for each in metrics(answers)] == [2] * 12
    for row in range(12):
        said = responses[row][answers.batch["attention_mask"][row, -responses.shape[1] :].bool()].tolist()
        of_tool = [token for token, sampled in zip(said, mask[row].tolist(), strict=False) if not sampled]
        assert of_tool == TOOL
    assert all(handle.prompts for handle in handles)
    for handle in handles:
        firsts = [prompt for prompt in handle.prompts if prompt[-3:] != TOOL]
        seconds = [prompt for prompt in handle.prompts if prompt[-3:] == TOOL]
        assert len(firsts) == len(seconds)
        assert all(any(later[: len(first)] == first for first in firsts) for later in seconds)


def test_neither_workers_nor_replicas_nor_their_number_change_a_token(two: AgentSetup, task: dict[str, str]):
    prompts = prompts_of(task, 6, "deep")
    one_replica = tokens_of(two.generate(prompts, two.handles[:1]))
    assert max(len(rows[0][0]) for rows in one_replica.values()) > 10
    again = tokens_of(two.generate(prompts))
    assert again == one_replica
    with two.open_engines(), ThreadPoolExecutor(2) as threads:
        handles, other = two.handles, loop_worker(two.config, LOOPS)
        halves = threads.map(
            lambda worker, part: worker.generate_sequences(part, handles),
            [two.agents, other],
            [prompts[:5], prompts[5:]],
        )
        joined = {name: rows for half in halves for name, rows in tokens_of(half).items()}
    assert joined == one_replica


def test_a_context_that_was_rewritten_gives_several_rows(two: AgentSetup, task: dict[str, str]):
    answers = two.generate(prompts_of(task, 2, f"{HERE}.ContextRewriter"))
    assert list(answers.non_tensor_batch["trajectory"]) == [f"p{n}/{i}" for n in (0, 1) for i in (0, 1) for _ in "ab"]
    lengths = answers.batch["attention_mask"][:, : answers.batch["prompts"].shape[1]].sum(-1).tolist()
    assert lengths[1::2] == [length + 2 for length in lengths[::2]]
    assert torch.equal(answers.batch["rollout_versions"] >= 0, answers.batch["response_mask"].bool())


def test_a_reward_model_is_given_the_messages_of_each_rows_own_context(two: AgentSetup, task: dict[str, str]):
    """Only where one scores: of the first row those of the data, of the second those that its loop wrote."""
    prompts = prompts_of(task, 1, f"{HERE}.Summarising", samples=1)
    answers = two.generate(prompts)
    assert answers.non_tensor_batch["agent_messages"].tolist() == [None, None]
    judged = replace(two, config=copy.deepcopy(two.config))
    judged.config.reward_model.enable, judged.config.custom_reward_function.path = True, None
    judged.agents = loop_worker(judged.config, LOOPS)
    answers = judged.generate(prompts)
    said = hf_tokenizer(task["model"]).batch_decode(answers.batch["responses"], skip_special_tokens=True)
    assert [list(row) for row in answers.non_tensor_batch["agent_messages"]] == [
        [{"role": "user", "content": "Say"}, {"role": "assistant", "content": said[0]}],
        [{"role": "user", "content": "In short:"}, {"role": "assistant", "content": said[1]}],
    ]


def test_a_loop_that_raises_costs_its_own_trajectory(two: AgentSetup, task: dict[str, str]):
    answers = two.generate(prompts_of(task, 2, f"{HERE}.FailingLoop"))
    assert [each["status"] for each in metrics(answers)] == ["finished", "failed"] * 2
    assert metrics(answers)[1]["error"] == "LookupError: the tool is unavailable"
    assert not answers.batch["response_mask"][1::2].any()
    assert answers.batch["response_mask"][::2].any(-1).all()


@pytest.mark.parametrize(
    ("loop", "error"),
    [
        ("UnprintableFailureLoop", "UnprintableError"),
        ("UnhashableKindLoop", "RuntimeError: TypeError"),
        ("ExitingLoop", "SystemExit: 3"),
        ("InterruptedLoop", "KeyboardInterrupt: "),
    ],
)
def test_a_failure_of_any_kind_costs_its_own_trajectory(two: AgentSetup, task: dict[str, str], loop: str, error: str):
    answers = two.generate(prompts_of(task, 1, f"{HERE}.{loop}"))
    assert [each["error"] for each in metrics(answers)] == [error] * 2


def test_what_an_engine_refuses_costs_who_asked(task: dict[str, str], tmp_path: Path):
    small = make_agent_setup(task, tmp_path, f"{ROLLOUT}.name=hf", "data.max_response_length=24")
    answers = small.generate(prompts_of(task, 2, f"{HERE}.UnsupportedParamsLoop", samples=3))
    assert [each["status"] for each in metrics(answers)] == ["finished", "failed", "finished"] * 2
    assert "penalties" in metrics(answers)[1]["error"]


@pytest.mark.parametrize(
    "sampling", [{"logit_bias": {3: -100.0}}, {"logit_bias": {10**6: 1.0}}, {"prompt_ids": [10**6]}]
)
def test_tokens_that_the_model_does_not_have_cost_who_asked(
    two: AgentSetup, task: dict[str, str], sampling: dict[str, Any]
):
    prompts = prompts_of(task, 2, f"{HERE}.RowParamsLoop", samples=1)
    prompts.non_tensor_batch["sampling"] = object_array([sampling, {}])
    possible = 10**6 not in [*sampling.get("prompt_ids", []), *sampling.get("logit_bias", {})]
    statuses = [each["status"] for each in metrics(two.generate(prompts))]
    assert statuses == ["finished" if possible else "failed", "finished"]


def test_a_generation_that_is_cancelled_leaves_nothing_in_the_engine(two: AgentSetup, task: dict[str, str]):
    HangingLoop.entered.clear()
    with two.open_engines(), ThreadPoolExecutor(1) as thread:
        call = thread.submit(two.agents.generate_sequences, prompts_of(task, 2, f"{HERE}.HangingLoop"), two.handles)
        assert HangingLoop.entered.wait(60)
        while not any(two.agents.cancel()):
            pass
        with pytest.raises(WorkerCallError) as caught:
            call.result()
        assert isinstance(caught.value.__cause__, CallCancelled)
    assert all(metric["status"] == "finished" for metric in metrics(two.generate(prompts_of(task, 1, "deep"))))


def test_an_engine_that_breaks_ends_the_call_and_says_why(two: AgentSetup, task: dict[str, str]):
    two.replicas[0].begin_generation()
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(two.agents.generate_sequences, prompts_of(task, 2, f"{HERE}.HangingLoop"), two.handles[:1])
        while not call.done():
            two.engine().loop.fail(RuntimeError("the kernel failed"))
        with pytest.raises(WorkerCallError, match="EngineLostError: RuntimeError: the kernel failed"):
            call.result()
    with pytest.raises(WorkerCallError, match="RuntimeError: the kernel failed"):
        two.replicas[0].end_generation()
    two.generate(prompts_of(task, 1, "deep"))


def test_agents_of_another_generation_are_told_that_it_is_over(two: AgentSetup, task: dict[str, str]):
    with pytest.raises(WorkerCallError, match="EngineLostError"):
        two.agents.generate_sequences(prompts_of(task, 1, "deep"), two.handles)


def test_a_name_that_is_no_loop_fails_the_call(two: AgentSetup, task: dict[str, str]):
    with pytest.raises(WorkerCallError, match=r"(?s)agent_name.*'toool_agent'"):
        two.generate(prompts_of(task, 1, "toool_agent"))
