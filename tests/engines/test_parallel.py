"""One copy of the model on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engines.engines import MODELS
from tests.support.tiny import tiny_model
from verl.types.request import Request, SamplingParams
from verl.types.weights import WeightMismatchError
from verl.utils.weight_fingerprint import fingerprints

PROMPTS = [list(range(20, 60)), [9] * 7]
PARAMS = SamplingParams(max_new_tokens=12, temperature=0.7, key=5)


def assert_generates_with(engine: Any, model: Any, version: int) -> None:
    requests = [Request(f"r{i}", prompt, PARAMS) for i, prompt in enumerate(PROMPTS)]
    for prompt, future in zip(PROMPTS, engine.submit(requests), strict=True):
        output = future.result()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids).unsqueeze(1))[:, 0]
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-4, rtol=0)
        assert set(output.versions) == {version}


@pytest.mark.needs("tensor parallel")
@pytest.mark.parametrize("kind", ["wide", "experts"])
def test_two_ranks_generate_as_one_and_take_new_weights(start: Callable[..., Any], kind: str) -> None:
    engine = start(kind, tensor_model_parallel_size=2)
    assert_generates_with(engine, tiny_model(**MODELS[kind]), 0)
    new = tiny_model(seed=1, **MODELS[kind])
    engine.update_weights(new.state_dict().items(), version=1)
    assert_generates_with(engine, new, 1)
    wrong = {name: tensor + (name == "model.norm.weight") for name, tensor in new.state_dict().items()}
    engine.begin_update(2, wrong)
    engine.load_bucket(wrong)
    with pytest.raises(WeightMismatchError, match=r"'model.norm.weight' .*fingerprint"):
        engine.finish_update(fingerprints(new.state_dict(), engine.weight_dtype))
    engine.update_weights(new.state_dict().items(), version=3)
    assert_generates_with(engine, new, 3)
