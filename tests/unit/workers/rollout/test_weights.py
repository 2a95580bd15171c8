"""Weights arrive whole and exact, in place, or the engine stops."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny import save_tiny_model, tiny_model
from verl.inference.weights import EngineWeights, pack_module
from verl.types.request import Request, SamplingParams
from verl.types.weights import TensorSlice, WeightMismatchError
from verl.utils.weight_fingerprint import fingerprints

ASK = Request("a", [5, 6, 7], SamplingParams(max_new_tokens=5))


def addresses(engine) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in engine.weights.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_gives_exactly_the_new_weights_at_the_old_addresses(start, tmp_path, tied, dtype):
    engine = start(save_tiny_model(tmp_path, tie_word_embeddings=tied), dtype=dtype)
    new = tiny_model(seed=9, tie_word_embeddings=tied)
    before = addresses(engine)
    engine.update_weights(new.state_dict().items(), version=4)
    assert engine.version == 4
    assert addresses(engine) == before
    for name, tensor in new.state_dict().items():
        assert torch.equal(engine.weights[name], tensor.to(engine.weight_dtype)), name
    assert only_token_versions(engine) == {4}


def only_token_versions(engine) -> set[int]:
    return set(engine.submit([ASK])[0].result().versions)


@pytest.mark.parametrize("sent", [["model.embed_tokens.weight"], ["lm_head.weight"]])
def test_tied_weights_may_come_under_either_name(start, tmp_path, sent):
    engine = start(save_tiny_model(tmp_path, tie_word_embeddings=True))
    new = tiny_model(seed=9, tie_word_embeddings=True).state_dict()
    tied = {"model.embed_tokens.weight", "lm_head.weight"}
    engine.update_weights((name, tensor) for name, tensor in new.items() if name not in tied or name in sent)
    for name in tied:
        assert torch.equal(engine.weights[name], new["lm_head.weight"])


def test_a_trainer_that_does_not_tie_what_the_rollout_ties_is_noticed(start, tmp_path):
    engine = start(save_tiny_model(tmp_path, tie_word_embeddings=True))
    with pytest.raises(WeightMismatchError, match=r"'model\.embed_tokens\.weight' .*fingerprint.*\b1 of 27 tensors"):
        engine.update_weights(tiny_model(seed=9).state_dict().items())


def test_a_changed_tensor_is_named_and_the_engine_stops_until_the_next_good_update(start):
    engine = start()
    good = tiny_model(seed=9).state_dict()
    expected = fingerprints(good)
    bad = {**good, "model.layers.1.mlp.up_proj.weight": good["model.layers.1.mlp.up_proj.weight"] + 1e-3}
    engine.pause_generation("keep")
    waiting = engine.submit([ASK])
    engine.begin_update(1, good)
    engine.load_bucket(bad)
    with pytest.raises(WeightMismatchError, match=r"'model.layers.1.mlp.up_proj.weight'"):
        engine.finish_update(expected)
    with pytest.raises(WeightMismatchError, match=r"up_proj.weight"):
        waiting[0].result()
    engine.resume_generation()
    with pytest.raises(RuntimeError, match=r"up_proj"):
        engine.submit([ASK])
    engine.update_weights(good.items(), version=2)
    assert only_token_versions(engine) == {2}


def test_an_update_that_finds_no_memory_for_the_weights_fails_and_the_next_one_succeeds(start, monkeypatch):
    engine, good = start(), tiny_model(seed=9).state_dict()
    engine.release(["weights"])

    def run_out_of_memory(_: EngineWeights) -> None:
        raise torch.OutOfMemoryError("no memory for the weights")

    with monkeypatch.context() as context:
        context.setattr(EngineWeights, "onload", run_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            engine.begin_update(1, good)
    with pytest.raises(RuntimeError, match=r"version 1 failed: no memory for the weights"):
        engine.submit([ASK])
    engine.update_weights(good.items(), version=2)
    assert only_token_versions(engine) == {2}


def test_a_request_that_comes_during_an_update_is_answered_with_the_new_weights(start):
    """A later turn of an agent does not wait for the trainer to be done."""
    engine, good = start(), tiny_model(seed=9).state_dict()
    engine.begin_update(4, good)
    (waiting,) = engine.submit([ASK])
    engine.load_bucket(good)
    assert not waiting.done()
    engine.finish_update(fingerprints(good))
    assert set(waiting.result().versions) == {4}


@pytest.mark.parametrize(
    "order",
    [
        lambda w: w.T,
        lambda w: w.roll(1, 0),
        lambda w: w.roll(1, 1),
        lambda w: w.flip(0),
        lambda w: w[[1, 0, *range(2, 64)]],
    ],
    ids=["transposed", "rows shifted", "columns shifted", "turned", "two rows swapped"],
)
def test_the_right_numbers_in_another_order_are_refused(start, order):
    """In a matrix of its own and in one that the engine merges with others."""
    engine = start()
    good = tiny_model(seed=9).state_dict()
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        engine.begin_update(1, good)
        engine.load_bucket(good | {name: order(good[name]).contiguous()})
        with pytest.raises(WeightMismatchError, match=rf"'{name}' .*fingerprint.*\b1 of 27 tensors"):
            engine.finish_update(fingerprints(good))


def in_rows(weights, name, *cuts):
    """The same with one tensor in pieces, last rows first."""
    rows = zip((0, *cuts), (*cuts, len(weights[name])), strict=True)
    pieces = [(TensorSlice(name, start, stop), weights[name][start:stop]) for start, stop in rows]
    return {key: tensor for key, tensor in weights.items() if key != name} | dict(reversed(pieces))


def update(engine, weights, bucket):
    engine.begin_update(1, weights)
    engine.load_bucket(bucket)
    engine.finish_update(fingerprints(weights))


def test_rows_of_a_tensor_may_come_apart_and_in_any_order(start):
    engine, name = start(), "model.embed_tokens.weight"
    good = tiny_model(seed=9).state_dict()
    update(engine, good, in_rows(good, name, 3, 100))
    assert torch.equal(engine.weights[name], good[name])
    assert engine.requested_rows()[name] == range(len(good[name]))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (
            lambda rows: rows.pop(next(key for key in rows if not isinstance(key, str))),
            "rows",
        ),
        (
            lambda rows: rows.update({key: t.flip(0) for key, t in rows.items() if not isinstance(key, str)}),
            "fingerprint",
        ),
        (
            lambda rows: rows.update({TensorSlice("model.embed_tokens.weight", 260, 270): torch.ones(10, 64)}),
            "264",
        ),
    ],
    ids=["missing", "in another order", "beyond the end"],
)
def test_wrong_rows_are_named(start, change, cause):
    engine, name = start(), "model.embed_tokens.weight"
    good = tiny_model(seed=9).state_dict()
    rows = in_rows(good, name, 3, 100)
    change(rows)
    with pytest.raises(WeightMismatchError, match=rf"'{name}',? .*{cause}"):
        update(engine, good, rows)


def test_a_weight_that_never_arrives_is_named(start):
    engine = start()
    weights = tiny_model().state_dict()
    weights.pop("model.norm.weight")
    with pytest.raises(WeightMismatchError, match=r"'model\.norm\.weight' .*rows"):
        engine.update_weights(weights.items())


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"model.norm.weight": torch.ones(65)}, r"'model\.norm\.weight' .*\[65\].*\[64\]"),
        ({"value_head.weight": torch.ones(1)}, "'value_head.weight'"),
        ({"model.norm.weight": None}, "'model.norm.weight' .*manifest"),
    ],
)
def test_another_model_is_refused_before_anything_is_overwritten(start, change, cause):
    engine = start()
    manifest = {name: t for name, t in {**tiny_model(seed=9).state_dict(), **change}.items() if t is not None}
    with pytest.raises(WeightMismatchError, match=cause):
        engine.begin_update(1, manifest)
    assert only_token_versions(engine) == {0}, "the engine goes on as before"


def test_dummy_weights_generate_nothing_before_the_first_update_and_disturb_no_random_numbers(start):
    torch.manual_seed(3)
    engine = start(load_format="dummy")
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), drawn)
    with pytest.raises(RuntimeError, match="load_format=dummy"):
        engine.submit([ASK])
    engine.update_weights(tiny_model().state_dict().items(), version=0)
    assert only_token_versions(engine) == {0}


def test_offloaded_weights_take_no_memory_and_come_back_whole_ties_included():
    model = tiny_model(tie_word_embeddings=True)
    ids = torch.arange(5, 25).view(2, 10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits = model(ids).logits
    region = pack_module(model, "cpu", torch.float32)
    weights = EngineWeights(model.state_dict(), region, torch.float32)
    weights.offload()
    assert sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()) == 0
    weights.onload()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model(ids).logits, logits)


def test_auto_precision_is_that_of_the_device(start):
    assert start().weight_dtype == torch.float32
    assert start(dtype="bf16").weight_dtype == torch.bfloat16
