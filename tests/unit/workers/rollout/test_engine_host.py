"""EngineHost: single-turn rows and clients' requests on a real engine, its failures, and the columns of its rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.agents import make_agent_setup, prompts_of
from tests.support.rollout_hosts import (
    MANY_TOKENS,
    assert_same_tensors,
    collect_all,
    named_rows,
    names_of,
    one_reply,
    open_host,
    pause_with_tokens,
    tokens_by_name,
    wait_until,
)
from tests.support.training_harness import make_task
from verl.protocol import DataProto, object_array
from verl.types.request import Output, Request, SamplingParams
from verl.workers.rollout.engine_host import EngineHost

PROMPT = [10, 20, 30, 40]
LONG = SamplingParams(max_new_tokens=MANY_TOKENS, key=42)


@pytest.fixture(params=["native", pytest.param("hf", marks=pytest.mark.slow)])
def engine_name(request):
    return request.param


@pytest.fixture
def engine(start):
    return start(max_new_tokens=MANY_TOKENS, ignore_eos=True)


def outputs_of(host: EngineHost, client: str, count: int) -> dict[str, Output]:
    """Collect until the client has `count` outputs."""
    outputs: dict[str, Output] = {}
    while len(outputs) < count:
        for one in host.collect_outputs(client, 60).outputs:
            assert one.output is not None, one
            outputs[one.id] = one.output
    return outputs


# ---------------------------------------------------------------- columns


@pytest.mark.parametrize("meta", [{}, {"validate": True}, {"pad_to_max": True, "pad_token_id": 3}, {"top_k": 9}])
def test_collected_rows_are_those_of_generate_batch(start, make_prompts, meta):
    engine, rows = start(), named_rows(make_prompts, rows=6, **meta)
    expected = engine.generate_sequences(rows)
    reply, collected = one_reply(open_host(engine, "a", rows), "a")
    order = np.array([reply.headers.names.index(name) for name in names_of(rows)])
    assert_same_tensors(collected[order], expected)
    assert {name: values[order].tolist() for name, values in reply.objects.items()} == {
        "uid": rows.non_tensor_batch["uid"].tolist(),
        "sample_index": rows.non_tensor_batch["sample_index"].tolist(),
        **{name: values.tolist() for name, values in expected.non_tensor_batch.items()},
    }
    assert expected.non_tensor_batch["trajectory"].tolist() == names_of(rows)


def test_rows_with_agent_columns_are_those_of_the_single_turn_agent(tmp_path):
    task = make_task(tmp_path)
    agents = make_agent_setup(task, tmp_path)
    prompts = prompts_of(task, 3, agent_columns=True, pad_token_id=0)
    with agents.open_engines():
        handles = [replica.handle(0) for replica in agents.replicas]
        expected = agents.agents.generate_sequences(prompts, handles)
    rows = EngineHost(agents.engine()).generate_batch(prompts)
    assert_same_tensors(rows, expected)
    assert set(rows.non_tensor_batch) == set(expected.non_tensor_batch)
    assert {"num_turns", "agent_metrics", "extra_fields", "given_score", "agent_turns"} <= set(rows.non_tensor_batch)
    for name, values in expected.non_tensor_batch.items():
        own = rows.non_tensor_batch[name].tolist()
        if name == "agent_metrics":
            own = [one | {"generate_s": 0.0} for one in own]
            assert own == [one | {"generate_s": 0.0} for one in values.tolist()]
        else:
            assert own == values.tolist(), name


# ---------------------------------------------------------------- rows that cannot be generated


def with_empty_prompt(rows: DataProto) -> DataProto:
    rows.batch["attention_mask"][1] = 0
    return rows


def test_an_invalid_row_fails_the_submit_and_no_row_of_it_runs(engine, make_prompts):
    host = EngineHost(engine)
    rows = with_empty_prompt(named_rows(make_prompts))
    host.start("a", rows.meta_info)
    with pytest.raises(ValueError, match=r"^request '.*': prompt_ids"):
        host.submit("a", rows)
    assert host.jobs["a"].unfinished == {}
    assert engine.loop.all_unfinished() == []
    host.submit("a", named_rows(make_prompts))
    assert len(tokens_by_name(collect_all(host, 4))) == 4
    assert not host.failed


def test_with_agent_columns_an_invalid_row_fails_alone(engine, make_prompts):
    rows = with_empty_prompt(named_rows(make_prompts))
    host = open_host(engine, "a", rows, agent_columns=True)
    reply, collected = one_reply(host, "a")
    (failed,) = [number for number, status in enumerate(reply.headers.statuses) if status == "failed"]
    assert reply.headers.names[failed] == names_of(rows)[1]
    metrics = reply.objects["agent_metrics"][failed]
    assert metrics["status"] == "failed"
    assert "prompt_ids" in metrics["error"]
    assert metrics["failures"] == {"loop": 1}
    assert collected.batch["response_mask"].sum(-1).tolist() == [
        0 if number == failed else MANY_TOKENS for number in range(4)
    ]
    assert not host.failed


def test_with_agent_columns_a_prompt_without_room_gets_an_empty_answer(start, make_prompts):
    lengths = named_rows(make_prompts).batch["attention_mask"].sum(-1)
    engine, rows = start(max_model_len=int(lengths.max())), named_rows(make_prompts)
    host = open_host(engine, "a", rows, agent_columns=True)
    reply, collected = one_reply(host, "a")
    by_name = {name: number for number, name in enumerate(reply.headers.names)}
    for row, name in enumerate(names_of(rows)):
        number = by_name[name]
        full = lengths[row] == lengths.max()
        assert reply.headers.statuses[number] == "finished"
        assert (collected.batch["response_mask"][number].sum() == 0) == full
        if full:
            assert reply.objects["finish_reason"][number] == "length"
    with pytest.raises(ValueError, match=r"max_model_len"):
        open_host(engine, "b", rows)


# ---------------------------------------------------------------- clients


def test_requests_of_clients_and_rows_run_concurrently_and_each_gets_its_own(engine, make_prompts):
    rows = named_rows(make_prompts)
    whole = tokens_by_name(collect_all(open_host(engine, "a", rows), 4))
    alone = engine.submit([Request("x", PROMPT, LONG)])[0].result()
    host = open_host(engine, "a", rows)
    for client in ("one", "two"):
        host.submit_requests(client, [Request(f"{client}/0", PROMPT, LONG), Request(f"{client}/1", PROMPT, LONG)])
    assert tokens_by_name(collect_all(host, 4)) == whole
    for client in ("one", "two"):
        outputs = outputs_of(host, client, 2)
        assert set(outputs) == {f"{client}/0", f"{client}/1"}
        assert all(output.token_ids == alone.token_ids for output in outputs.values())
    assert host.collect_outputs("one", 0.0).unfinished == 0


def test_partials_of_a_client_joined_are_its_output_and_a_resumed_request_reports_only_new_tokens(engine):
    whole = engine.submit([Request("x", PROMPT, LONG)])[0].result()
    host = EngineHost(engine)
    host.submit_requests("one", [Request("a", PROMPT, LONG)])
    pause_with_tokens(engine, 5)
    first = host.collect_outputs("one", 0.0, True).partials["a"]
    assert host.collect_outputs("one", 0.0, True).partials == {}
    assert host.current_outputs(["a", "unknown"])["a"].token_ids == first.token_ids
    host.abort_requests(["a"])
    engine.resume_generation()
    assert outputs_of(host, "one", 1)["a"].finish_reason == "abort"
    known = replace(first, raw_log_probs=[])
    host.submit_requests("one", [Request("b", PROMPT, LONG, resume_from=known)])
    pause_with_tokens(engine, len(first.token_ids) + 5)
    second = host.collect_outputs("one", 0.0, True).partials["b"]
    joined = first.token_ids + second.token_ids
    assert joined == whole.token_ids[: len(joined)]
    engine.resume_generation()
    assert outputs_of(host, "one", 1)["b"].token_ids == whole.token_ids


def test_an_invalid_request_of_a_client_is_refused_and_the_others_are_generated(engine):
    host = EngineHost(engine)
    host.submit_requests("one", [Request("good", PROMPT, LONG), Request("bad", [], LONG)])
    collected = {}
    while len(collected) < 2:
        collected |= {one.id: one for one in host.collect_outputs("one", 60).outputs}
    assert "prompt_ids" in collected["bad"].refused
    assert len(collected["good"].output.token_ids) == MANY_TOKENS
    assert not host.failed


def test_requests_of_lost_clients_are_aborted_and_rows_go_on(engine, make_prompts):
    rows = named_rows(make_prompts)
    host = open_host(engine, "a", rows)
    host.submit_requests("gone", [Request("x", PROMPT, replace(LONG, max_new_tokens=10**6))])
    pause_with_tokens(engine, 2)
    host.abort_clients()
    engine.resume_generation()
    assert len(tokens_by_name(collect_all(host, 4))) == 4
    wait_until(lambda: not engine.loop.all_unfinished())


# ---------------------------------------------------------------- failures and end


def test_an_engine_failure_is_reported_and_raised(engine, make_prompts):
    host = open_host(engine, "a", named_rows(make_prompts))
    host.submit_requests("one", [Request("x", PROMPT, LONG)])
    pause_with_tokens(engine, 2)
    host.raise_if_failed()
    engine.loop.fail(ArithmeticError("the device is gone"))
    engine.resume_generation()
    wait_until(lambda: host.failed)
    reply, rows = host.collect(host.id, 60, True)
    assert (reply.failure, rows) == ("ArithmeticError: the device is gone", None)
    (output,) = host.collect_outputs("one", 60).outputs
    assert output.failed == "ArithmeticError: the device is gone"
    for raises in (host.raise_if_failed, host.close):
        with pytest.raises(ArithmeticError, match="the device is gone"):
            raises()
    assert host.closed


def test_a_batch_whose_engine_fails_raises_its_error(engine, make_prompts):
    prompts = make_prompts()
    stream = engine.stream(prompts)
    pause_with_tokens(engine, 2)
    engine.loop.fail(ArithmeticError("the device is gone"))
    engine.resume_generation()
    with pytest.raises(ArithmeticError, match="the device is gone"):
        next(stream)
    assert engine.generate_sequences(prompts).batch["response_mask"].sum() == 8 * MANY_TOKENS


def test_a_closed_engine_fails_what_is_submitted_later(engine, make_prompts):
    host = EngineHost(engine)
    rows = named_rows(make_prompts)
    host.start("a", rows.meta_info)
    engine.close()
    host.submit("a", rows)
    host.submit_requests("one", [Request("x", PROMPT, LONG)])
    assert host.collect(host.id, 60, False)[0].failure.endswith("engine is closed.")
    assert [one.failed is not None for one in host.collect_outputs("one", 60).outputs] == [True]


def test_routed_experts_are_there_when_no_row_knows_them(engine, make_prompts):
    host = EngineHost(engine, lambda: np.zeros((0, 2, 3), dtype=np.uint8))
    rows = named_rows(make_prompts)
    host.start("a", rows.meta_info)
    host.submit("a", rows)
    _, collected = one_reply(host, "a")
    experts = collected.batch["routed_experts"]
    assert experts.shape == (*collected.batch["attention_mask"].shape, 2, 3)
    assert torch.all(experts == 255)


def test_greedy_and_sampled_rows_of_one_job(engine, make_prompts):
    rows = named_rows(make_prompts, rows=2)
    rows.non_tensor_batch["do_sample"] = object_array([False, True])
    mixed = tokens_by_name(collect_all(open_host(engine, "a", rows), 2))
    del rows.non_tensor_batch["do_sample"]
    sampled = tokens_by_name(collect_all(open_host(engine, "a", rows), 2))
    greedy = tokens_by_name(collect_all(open_host(engine, "a", rows, do_sample=False), 2))
    first, second = names_of(rows)
    assert mixed == {first: greedy[first], second: sampled[second]}
