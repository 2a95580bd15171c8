"""The prefix cache, and memory given back and taken again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engines.engines import MODELS
from tests.support.tiny import tiny_model
from verl.types.request import Output, Request, SamplingParams

PROMPT = [5 + i % 200 for i in range(128)]
GREEDY = SamplingParams(max_new_tokens=8, do_sample=False)


def ask(engine: Any, name: str = "a", prompt: list[int] = PROMPT, params: SamplingParams = GREEDY) -> Output:
    return engine.submit([Request(name, prompt, params)])[0].result()


def assert_of(output: Output, model: Any, prompt: list[int] = PROMPT) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.tensor(output.log_probs), logits.log_softmax(-1).max(-1).values, atol=1e-4, rtol=0)


@pytest.mark.needs("prefix cache")
def test_equal_prefixes_are_computed_once_and_forgotten_with_the_weights(start: Callable[..., Any]) -> None:
    engine, new = start(), tiny_model(seed=1, **MODELS["plain"])
    engine.update_weights(tiny_model(**MODELS["plain"]).state_dict().items(), version=0)
    assert ask(engine).cached_tokens == 0
    longer = [*PROMPT, 7, 8, 9]
    again = ask(engine, prompt=longer)
    assert again.cached_tokens >= 96, "most of the prompt was found"
    assert_of(again, tiny_model(**MODELS["plain"]), longer)
    engine.update_weights(new.state_dict().items(), version=1)
    fresh = ask(engine)
    assert fresh.cached_tokens == 0, "nothing of the old weights' was"
    assert_of(fresh, new)


def test_released_memory_must_be_resumed_and_what_was_under_way_survives(start: Callable[..., Any]) -> None:
    engine, model = start(), tiny_model(**MODELS["plain"])
    long = SamplingParams(max_new_tokens=200, do_sample=False)
    futures = engine.submit([Request("long", PROMPT, long)])
    ask(engine)
    engine.release()
    with pytest.raises(RuntimeError, match=r"(?s)'kv_cache'.*'weights'"):
        engine.submit([Request("b", PROMPT, GREEDY)])
    engine.resume(["weights"])
    engine.resume(["kv_cache"])
    survivor = futures[0].result()
    assert len(survivor.token_ids) == 200
    assert_of(survivor, model)
    assert_of(ask(engine), model)


def test_weights_that_were_let_go_come_with_the_next_update(start: Callable[..., Any]) -> None:
    engine, new = start(free_weights=True), tiny_model(seed=2, **MODELS["plain"])
    ask(engine)
    for version in (1, 2):
        engine.release()
        with pytest.raises(RuntimeError, match="free_weights"):
            ask(engine)
        engine.update_weights(new.state_dict().items(), version=version)
        engine.resume()
        output = ask(engine)
        assert_of(output, new)
        assert set(output.versions) == {version}
