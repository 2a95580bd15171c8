"""Weights arrive whole and exact, of every kind of model, or the engine answers nothing."""

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

PROMPT = list(range(20, 60))
GREEDY = SamplingParams(max_new_tokens=12, do_sample=False)


def assert_generates_with(engine: Any, model: Any, version: int) -> None:
    output = engine.submit([Request("a", PROMPT, GREEDY)])[0].result()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + output.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    assert output.token_ids == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-4, rtol=0)
    assert set(output.versions) == {version}


def in_buckets(weights: dict[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """Of `count` tensors each, in memory that is overwritten by the next one."""
    items = list(weights.items())
    return [dict(items[first : first + count]) for first in range(0, len(items), count)]


def hand_over(
    engine: Any, weights: dict[str, torch.Tensor], version: int, change: Callable[..., None] | None = None
) -> None:
    engine.begin_update(version, weights)
    for bucket in in_buckets(weights, 5):
        borrowed = {name: tensor.clone() for name, tensor in bucket.items()}
        if change is not None:
            change(borrowed)
        engine.load_bucket(borrowed)
        for tensor in borrowed.values():
            tensor.fill_(float("nan"))
    engine.finish_update(fingerprints(weights, engine.weight_dtype))


@pytest.mark.parametrize("kind", list(MODELS))
def test_an_update_in_buckets_gives_the_new_model_again_and_again(start: Callable[..., Any], kind: str) -> None:
    engine = start(kind)
    assert_generates_with(engine, tiny_model(**MODELS[kind]), 0)
    for version in (1, 2):
        new = tiny_model(seed=version, **MODELS[kind])
        hand_over(engine, new.state_dict(), version)
        assert_generates_with(engine, new, version)


def test_one_changed_bit_in_one_expert_is_caught_and_the_next_good_update_mends_it(start: Callable[..., Any]) -> None:
    engine, good = start("experts"), tiny_model(seed=3, **MODELS["experts"])
    weights = good.state_dict()
    (name,) = [name for name in weights if name.startswith("model.layers.1.") and "down_proj" in name]
    assert weights[name].dim() == 3, "the trainer holds the experts of a layer in one tensor"

    def flip_a_bit(bucket: dict[str, torch.Tensor]) -> None:
        if name in bucket:
            bucket[name].view(torch.int32)[2, 7, 5] ^= 1

    waiting = engine.submit([Request("w", PROMPT, SamplingParams(max_new_tokens=400))])
    with pytest.raises(WeightMismatchError, match=rf"'{name}' .*fingerprint.*\b1 of {len(weights)} tensors"):
        hand_over(engine, weights, 1, flip_a_bit)
    with pytest.raises(WeightMismatchError, match=f"'{name}' .*fingerprint"):
        waiting[0].result(timeout=10)
    with pytest.raises(RuntimeError, match=f"version 1 .*'{name}' "):
        engine.submit([Request("a", PROMPT, GREEDY)])
    hand_over(engine, weights, 2)
    assert_generates_with(engine, good, 2)


@pytest.mark.parametrize("sent", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_weights_may_come_under_either_name(start: Callable[..., Any], sent: str) -> None:
    engine, new = start("tied"), tiny_model(seed=4, **MODELS["tied"])
    tied = {"model.embed_tokens.weight", "lm_head.weight"}
    hand_over(engine, {k: v for k, v in new.state_dict().items() if k not in tied or k == sent}, 1)
    assert_generates_with(engine, new, 1)


def test_a_trainer_that_does_not_tie_what_the_rollout_ties_is_noticed(start: Callable[..., Any]) -> None:
    engine = start("tied")
    with pytest.raises(WeightMismatchError, match=r"'(model.embed_tokens|lm_head).weight' .*fingerprint"):
        hand_over(engine, tiny_model(seed=4, **MODELS["plain"]).state_dict(), 1)
    hand_over(engine, tiny_model(**MODELS["tied"]).state_dict(), 2)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"model.norm.weight": torch.ones(65)}, r"'model\.norm\.weight' .*\[65\].*\[64\]"),
        ({"value_head.weight": torch.ones(1)}, "'value_head.weight'"),
        ({"model.norm.weight": None}, "'model.norm.weight' .*manifest"),
    ],
)
def test_another_model_is_refused_before_anything_is_overwritten(
    start: Callable[..., Any], change: dict[str, Any], cause: str
) -> None:
    engine, here = start(), tiny_model(**MODELS["plain"])
    manifest = {name: t for name, t in {**here.state_dict(), **change}.items() if t is not None}
    with pytest.raises(WeightMismatchError, match=cause):
        engine.begin_update(1, manifest)
    assert_generates_with(engine, here, 0)


def test_a_weight_that_never_arrives_is_named(start: Callable[..., Any]) -> None:
    engine, weights = start(), tiny_model(**MODELS["plain"]).state_dict()
    with pytest.raises(WeightMismatchError, match=r"'model.norm.weight'"):
        engine.update_weights((name, tensor) for name, tensor in weights.items() if name != "model.norm.weight")
    engine.update_weights(weights.items(), version=2)


def test_dummy_weights_answer_nothing_before_the_first_update(start: Callable[..., Any]) -> None:
    engine = start(load_format="dummy")
    with pytest.raises(RuntimeError, match="load_format=dummy"):
        engine.submit([Request("a", PROMPT, GREEDY)])
    model = tiny_model(seed=5, **MODELS["plain"])
    hand_over(engine, model.state_dict(), 1)
    assert_generates_with(engine, model, 1)
