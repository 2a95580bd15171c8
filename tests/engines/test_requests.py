"""The request primitive: aborting, pausing, going on with other weights, and whose weights a token is of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engines.engines import MODELS
from tests.support.tiny import tiny_model
from verl.types.request import Output, Request, SamplingParams

PROMPT = [10, 20, 30, 40]
LONG = SamplingParams(max_new_tokens=200, key=42)


def request(name: str = "a", params: SamplingParams = LONG, **fields: Any) -> Request:
    return Request(name, fields.pop("prompt_ids", PROMPT), params, **fields)


def only(futures: list[Future[Output]]) -> Output:
    return futures[0].result()


def after_some_tokens(engine: Any, requests: list[Request], act: Callable[[], None]) -> list[Output]:
    """The answers to `requests`, with `act` called while they are sampled."""
    shorter = replace(LONG, max_new_tokens=15, key=1)
    futures = engine.submit(requests)
    only(engine.submit([request("clock", shorter)]))  # by then the others have as many
    assert not any(future.done() for future in futures)
    act()
    return [future.result() for future in futures]


def test_an_aborted_output_carries_what_there_is_and_can_be_resumed_from(start: Callable[..., Any]) -> None:
    engine = start()
    (part,) = after_some_tokens(engine, [request()], lambda: engine.abort(["a"]))
    assert part.finish_reason == "abort"
    assert 10 <= len(part.token_ids) < 200
    resumed = only(engine.submit([request(resume_from=part)]))
    assert resumed.token_ids[: len(part.token_ids)] == part.token_ids
    assert (resumed.finish_reason, len(resumed.token_ids), len(resumed.versions)) == ("length", 200, 200)


def test_a_cancelled_future_aborts_its_request_and_nobody_elses(start: Callable[..., Any]) -> None:
    engine = start()
    futures = engine.submit([request("a"), request("b")])
    futures[0].cancel()
    assert futures[1].result().finish_reason == "length"
    assert only(engine.submit([request("a", replace(LONG, max_new_tokens=3))])).finish_reason == "length"


def test_pause_finish_completes_what_is_there_and_later_requests_wait(start: Callable[..., Any]) -> None:
    engine = start()
    earlier = engine.submit([request("a"), request("b")])
    engine.pause_generation("finish")
    assert {future.result(timeout=1).finish_reason for future in earlier} == {"length"}
    later = engine.submit([request("c")])
    assert not wait(later, timeout=0.2).done
    engine.resume_generation()
    assert only(later).finish_reason == "length"


def test_pause_abort_returns_what_there_is(start: Callable[..., Any]) -> None:
    engine = start()
    outputs = after_some_tokens(engine, [request("a"), request("b")], lambda: engine.pause_generation("abort"))
    assert {output.finish_reason for output in outputs} == {"abort"}
    assert all(output.token_ids for output in outputs)
    engine.resume_generation()


@pytest.mark.parametrize("pause", [True, False], ids=["paused", "in passing"])
def test_new_weights_in_the_middle_continue_a_sequence_under_their_version(
    start: Callable[..., Any], pause: bool
) -> None:
    engine, old, new = start(), tiny_model(**MODELS["plain"]), tiny_model(seed=1, **MODELS["plain"])

    def change() -> None:
        if pause:
            engine.pause_generation("keep")
        engine.update_weights(new.state_dict().items(), version=1)
        if pause:
            engine.resume_generation()

    prompts = [PROMPT, [8] * 9]
    asked = [request(f"r{i}", replace(LONG, key=i), prompt_ids=prompt) for i, prompt in enumerate(prompts)]
    for prompt, output in zip(prompts, after_some_tokens(engine, asked, change), strict=True):
        changed_at = output.versions.index(1)
        assert output.versions == [0] * changed_at + [1] * (200 - changed_at)
        assert changed_at >= 10
        with torch.no_grad():
            ids = torch.tensor([prompt + output.token_ids])
            both = [m(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for m in (old, new)]
        picked = torch.tensor(output.token_ids).unsqueeze(1)
        by_version = torch.cat([m.gather(1, picked) for m in both], dim=1)
        expected = by_version.gather(1, torch.tensor(output.versions).unsqueeze(1))[:, 0]
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-4, rtol=0)


def test_kept_kv_goes_on_under_new_weights_and_newcomers_take_none_of_it(start: Callable[..., Any]) -> None:
    engine, new = start(), tiny_model(seed=1, **MODELS["plain"])
    prompt = list(range(10, 74))  # blocks that a newcomer would share
    newcomer: list[Future[Output]] = []

    def change() -> None:
        engine.pause_generation("keep", kv="keep")
        newcomer.extend(engine.submit([request("b", replace(LONG, max_new_tokens=1), prompt_ids=prompt)]))
        engine.update_weights(new.state_dict().items(), version=1)
        engine.resume_generation()

    (kept,) = after_some_tokens(engine, [request(prompt_ids=prompt)], change)
    fresh = only(newcomer)

    def difference(output: Output, first: int = 0) -> float:
        with torch.no_grad():
            logits = new(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids).unsqueeze(1))[:, 0]
        return (expected - torch.tensor(output.log_probs)).abs()[first:].max().item()

    assert difference(kept, kept.versions.index(1)) > 1e-2, "its context is still the old weights'"
    assert difference(fresh) < 1e-4


def test_requests_come_from_many_threads_and_join_a_running_batch(start: Callable[..., Any]) -> None:
    engine, outputs = start(), {}

    def ask(number: int) -> None:
        time.sleep(0.01 * number)
        outputs[number] = only(engine.submit([request(f"r{number}", replace(LONG, key=number, max_new_tokens=40))]))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {len(output.token_ids) for output in outputs.values()} == {40}


def test_closing_fails_what_is_unfinished(start: Callable[..., Any], running_engine: Any) -> None:
    engine = start()
    futures = engine.submit([request("a")])
    running_engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        only(futures)
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([request("b")])
