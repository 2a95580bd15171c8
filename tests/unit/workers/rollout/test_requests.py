"""The request primitive: joining, aborting, pausing, and going on with new weights."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import replace

import pytest
import torch

from tests.support.requests import requests_of
from tests.support.tiny import tiny_model
from verl.types.request import Output, Request, SamplingParams
from verl.workers.rollout.prompts import sampling_params

LONG = SamplingParams(max_new_tokens=160, key=42)
PROMPT = [10, 20, 30, 40]


# What happens to requests is written once for both engines: one of them proves it in the CI tier.
@pytest.fixture(params=["native", pytest.param("hf", marks=pytest.mark.slow)])
def engine_name(request):
    return request.param


def request(name: str = "a", params: SamplingParams = LONG, **fields) -> Request:
    return Request(name, fields.pop("prompt_ids", PROMPT), params, **fields)


def tokens_so_far(engine, count: int) -> None:
    """Wait until some running request has this many tokens."""
    deadline = time.monotonic() + 120
    while not any(len(a.output.token_ids) >= count for a in engine.loop.all_unfinished()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def only(futures: list[Future]) -> Output:
    return futures[0].result()


def test_a_request_gives_the_tokens_that_a_batch_gives(start, make_prompts):
    engine = start()
    prompts = make_prompts(rows=6)
    batch = engine.generate_sequences(prompts).batch
    params = sampling_params(engine.config, prompts.meta_info, engine.eos_token_ids)
    requests = requests_of(prompts, params, prompts.meta_info["seed"])

    async def all_of_them() -> list[Output]:
        return await asyncio.gather(*(engine.generate(replace(r, id=f"again-{r.id}")) for r in requests))

    for row, output in enumerate(asyncio.run(all_of_them())):
        n = len(output.token_ids)
        assert output.token_ids == batch["responses"][row, :n].tolist()
        assert n == batch["response_mask"][row].sum()
        torch.testing.assert_close(torch.tensor(output.log_probs), batch["rollout_log_probs"][row, :n])
        assert output.finish_reason in ("stop", "length")


def test_a_request_joins_a_running_batch_and_changes_nobodys_tokens(start):
    engine = start()
    other = replace(LONG, key=7, max_new_tokens=30)
    alone = [only(engine.submit([r])) for r in (request(), request("b", other, prompt_ids=[9] * 11))]
    first = engine.submit([request()])
    tokens_so_far(engine, 10)
    second = engine.submit([request("b", other, prompt_ids=[9] * 11)])
    joined = [only(first), only(second)]
    assert [o.token_ids for o in joined] == [o.token_ids for o in alone]
    assert joined[1].finish_reason == "length"


def test_an_aborted_output_is_a_valid_resume_from_and_gives_the_uninterrupted_tokens(start):
    engine = start()
    whole = only(engine.submit([request()]))
    assert len(whole.token_ids) == 160
    futures = engine.submit([request()])
    tokens_so_far(engine, 15)
    engine.abort(["a"])
    part = only(futures)
    assert part.finish_reason == "abort"
    assert 15 <= len(part.token_ids) < 160
    assert part.token_ids == whole.token_ids[: len(part.token_ids)]
    resumed = only(engine.submit([request(resume_from=part)]))
    assert resumed.token_ids == whole.token_ids
    assert (resumed.finish_reason, len(resumed.versions)) == ("length", 160)
    torch.testing.assert_close(resumed.log_probs, whole.log_probs, atol=1e-5, rtol=1e-5)


def test_abort_without_ids_ends_waiting_requests_too(start):
    engine = start(max_num_seqs=1)
    futures = engine.submit([request(name) for name in "abc"])
    tokens_so_far(engine, 3)
    engine.abort()
    outputs = [future.result() for future in futures]
    assert {output.finish_reason for output in outputs} == {"abort"}
    assert [bool(output.token_ids) for output in outputs] == [True, False, False]
    assert only(engine.submit([request(resume_from=outputs[2])])).finish_reason == "length"


def test_cancelling_the_awaiting_task_aborts_its_request(start):
    engine = start()

    async def start_and_cancel() -> None:
        task = asyncio.create_task(engine.generate(request()))
        while not any(sequence.output.token_ids for sequence in engine.loop.all_unfinished()):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(start_and_cancel())
    engine.pause_generation("finish")
    assert engine.loop.all_unfinished() == []


def test_pause_finish_completes_what_is_there_and_later_requests_wait(start):
    engine = start(max_num_seqs=1)
    earlier = engine.submit([request("a"), request("b")])
    engine.pause_generation("finish")
    assert all(future.done() or future.result(timeout=1) for future in earlier)
    later = engine.submit([request("c")])
    assert not wait(later, timeout=0.2).done
    engine.resume_generation()
    assert only(later).finish_reason == "length"


def test_pause_keep_stops_at_a_token_and_goes_on_from_there(start):
    engine = start()
    whole = only(engine.submit([request()]))
    futures = engine.submit([request()])
    tokens_so_far(engine, 10)
    engine.pause_generation("keep")
    stopped_at = len(engine.loop.all_unfinished()[0].output.token_ids)
    time.sleep(0.1)
    assert len(engine.loop.all_unfinished()[0].output.token_ids) == stopped_at < 160
    engine.resume_generation()
    assert only(futures).token_ids == whole.token_ids


def test_pause_abort_returns_what_there_is(start):
    engine = start()
    futures = engine.submit([request("a"), request("b")])
    tokens_so_far(engine, 5)
    engine.pause_generation("abort")
    assert [future.result().finish_reason for future in futures] == ["abort"] * 2
    later = engine.submit([request("a")])
    assert not wait(later, timeout=0.1).done
    engine.pause_generation("finish")
    assert only(later).finish_reason == "length", "finishing works from a paused engine too"


@pytest.mark.parametrize(("how", "wrong"), [({"mode": "stop"}, "mode 'stop'"), ({"kv": "drop"}, "kv 'drop'")])
def test_an_unknown_pause_mode_is_refused(start, how, wrong):
    with pytest.raises(ValueError, match=rf"^pause_generation: {wrong} "):
        start().pause_generation(**how)


@pytest.mark.parametrize("pause", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["paused", "in passing"])
def test_new_weights_in_the_middle_continue_the_sequence_under_the_new_version(start, pause):
    engine = start()
    old_model, new_model = tiny_model(seed=0), tiny_model(seed=1)
    futures = engine.submit([request("a"), request("b", replace(LONG, key=2), prompt_ids=[8] * 9)])
    tokens_so_far(engine, 20)
    if pause:
        engine.pause_generation("keep")
    engine.update_weights(new_model.state_dict().items())
    if pause:
        engine.resume_generation()
    for prompt, future in zip((PROMPT, [8] * 9), futures, strict=True):
        output = future.result()
        changed_at = output.versions.index(1)
        assert output.versions == [0] * changed_at + [1] * (160 - changed_at)
        assert changed_at >= 15
        with torch.no_grad():
            ids = torch.tensor([prompt + output.token_ids])
            old, new = (m(ids).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1) for m in (old_model, new_model))
        picked = torch.tensor(output.token_ids).unsqueeze(1)
        expected = torch.where(
            torch.tensor(output.versions) == 0, old.gather(1, picked)[:, 0], new.gather(1, picked)[:, 0]
        )
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-5, rtol=1e-4)


def test_kept_kv_goes_on_under_new_weights_and_newcomers_take_none_of_it(start):
    engine, new_model = start(), tiny_model(seed=1)
    prompt = list(range(10, 50))  # two blocks that a newcomer would share
    futures = engine.submit([request(prompt_ids=prompt)])
    tokens_so_far(engine, 20)
    engine.pause_generation("keep", kv="keep")
    newcomer = engine.submit([request("b", replace(LONG, max_new_tokens=1), prompt_ids=prompt)])
    engine.update_weights(new_model.state_dict().items())
    engine.resume_generation()
    kept, fresh = only(futures), only(newcomer)
    changed_at = kept.versions.index(1)
    assert kept.versions == [0] * changed_at + [1] * (160 - changed_at)

    def difference(output: Output, first: int = 0) -> float:
        """The largest of its log-probs, from `first` on, from those under the new weights alone."""
        with torch.no_grad():
            logits = new_model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids).unsqueeze(1))[:, 0]
        return (expected - torch.tensor(output.log_probs)).abs()[first:].max().item()

    assert difference(kept, changed_at) > 1e-2, "its context is still the old weights'"
    assert difference(fresh) < 1e-5


def test_released_memory_must_be_resumed_before_new_requests_and_running_ones_survive(start):
    engine = start(free_weights=False)
    whole = only(engine.submit([request()]))
    futures = engine.submit([request()])
    tokens_so_far(engine, 5)
    engine.release()
    with pytest.raises(RuntimeError, match=r"(?s)'kv_cache'.*'weights'"):
        engine.submit([request("b")])
    engine.resume(["weights"])
    assert not wait(futures, timeout=0.1).done
    engine.resume(["kv_cache"])
    assert only(futures).token_ids == whole.token_ids
    with pytest.raises(ValueError, match=r"^release/resume: tags 'weights' .*'kv_cache'"):
        engine.release("weights")


def test_weights_that_were_let_go_come_with_an_update_and_running_requests_wait_for_it(start):
    engine = start(free_weights=True)
    weights = {name: tensor.clone() for name, tensor in engine.weights.items()}
    whole = only(engine.submit([request()]))
    futures = engine.submit([request()])
    tokens_so_far(engine, 5)
    engine.release()
    assert engine.held_bytes()["weights"] == 0
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in engine.weights.values())
    engine.resume()
    with pytest.raises(RuntimeError, match="free_weights"):
        engine.submit([request("b")])
    engine.pause_generation("keep")
    later = engine.submit([request("b")])  # who asks in a pause waits for its end
    assert not wait([*futures, *later], timeout=0.1).done
    engine.update_weights(weights.items())
    engine.resume_generation()
    assert only(futures).token_ids == whole.token_ids
    assert only(later).token_ids
    assert only(engine.submit([request()])).token_ids == whole.token_ids


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt_ids": [5] * 2000}, "max_model_len"),
        ({"resume_from": Output([1], [0.0], [0], "stop")}, "resume_from .*tokens"),
        ({"resume_from": Output([1] * 160, [0.0] * 160, [0] * 160, "length")}, "resume_from .*tokens"),
        ({"resume_from": Output([1], [], [0])}, "resume_from .*log-prob .*version"),
    ],
)
def test_impossible_requests_are_refused_by_name(start, wrong, cause):
    with pytest.raises(ValueError, match=f"request 'a': .*{cause}"):
        start().submit([request(**wrong)])


def test_two_requests_of_one_id_are_refused(start):
    engine = start()
    with pytest.raises(ValueError, match=r"request 'a': .* id. "):
        engine.submit([request(), request()])
    assert engine.loop.all_unfinished() == [], "a refused call queues nothing"


def test_weights_that_overflow_fail_the_requests_and_not_the_engine(start):
    engine = start()
    good = {name: tensor.clone() for name, tensor in engine.weights.items()}
    engine.update_weights({**good, "model.norm.weight": torch.full((64,), torch.nan)}.items())
    with pytest.raises(FloatingPointError, match=r"version 1 .*log-prob nan .*'a'"):
        only(engine.submit([request()]))
    engine.update_weights(good.items())
    assert only(engine.submit([request()])).versions == [2] * 160


def test_closing_fails_what_is_unfinished_and_ends_the_thread(start):
    engine = start()
    futures = engine.submit([request()])
    tokens_so_far(engine, 2)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        only(futures)
    assert engine.loop.thread is not None
    assert not engine.loop.thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([request()])


def test_an_idle_engine_has_no_thread(start):
    before = threading.active_count()
    engine = start()
    engine.pause_generation("keep")
    engine.resume_generation()
    engine.pause_generation("abort")
    assert threading.active_count() == before


@pytest.mark.parametrize("asked", [{"presence_penalty": 1.0}, {"logit_bias": ((1, 2.0),)}, {"prompt_log_probs": True}])
@pytest.mark.parametrize("engine_name", ["hf"])
def test_what_only_the_native_engine_does_is_not_left_out_in_silence(start, asked):
    with pytest.raises(
        ValueError, match=r"^request 'a': .*penalties, logit_bias, top_log_probs .*rollout\.name=native"
    ):
        start().submit([request(params=replace(LONG, **asked))])
