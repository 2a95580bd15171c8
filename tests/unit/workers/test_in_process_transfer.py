"""Weight sync within one process: bucket by bucket, the rollout's weights become the trainer's."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny import save_tiny_model, tiny_model
from tests.support.unsharded_model import UnshardedModel
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.types.request import Request, SamplingParams
from verl.types.weights import WeightMismatchError
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.embedded_rollout import EmbeddedRollout
from verl.workers.sharding_manager import InProcessTransfer


@pytest.fixture(params=["hf", "native"])
def make_rollout(request, tmp_path):
    engines = []

    def make(tied: bool = False, **keys) -> EmbeddedRollout:
        path = save_tiny_model(tmp_path / f"model-{len(engines)}", tie_word_embeddings=tied)
        model = as_config(ModelConfig, {"path": str(path)}, "actor_rollout_ref.model")
        config = as_config(RolloutConfig, {"name": request.param, "max_new_tokens": 8, **keys})
        engines.append(get_rollout_class(request.param)(str(path), model, config))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_after_a_sync_the_rollout_has_the_trainers_weights_bit_for_bit(make_rollout, tied, dtype, load_format):
    rollout = make_rollout(tied, dtype=dtype, load_format=load_format)
    trainer = UnshardedModel(tiny_model(seed=5, tie_word_embeddings=tied))
    stats = InProcessTransfer(trainer, rollout, bucket_bytes=20_000).sync(version=7)
    assert trainer.buckets_sent > 3
    assert rollout.version == 7
    assert (stats.tensors, stats.bytes) == (
        27,
        sum(t.to(rollout.weight_dtype).nbytes for t in trainer.weights.values()),
    )
    for name, tensor in trainer.weights.items():
        assert torch.equal(rollout.weights[name], tensor.to(rollout.weight_dtype)), name
    output = rollout.submit([Request("a", [5, 6], SamplingParams(max_new_tokens=3))])[0].result()
    assert output.versions == [7] * 3


def test_a_sync_wakes_released_weights_and_leaves_the_kv_asleep(make_rollout):
    rollout = make_rollout()
    rollout.release()
    InProcessTransfer(UnshardedModel(tiny_model(seed=5)), rollout).sync(version=1)
    with pytest.raises(RuntimeError, match=r"\['kv_cache'\].*resume\(\)"):
        rollout.submit([Request("a", [5, 6], SamplingParams())])


def test_data_damaged_on_the_way_is_named(make_rollout):
    rollout = make_rollout()
    load = rollout.load_bucket

    def damaging(tensors):
        name = "model.layers.0.self_attn.q_proj.weight"
        load({k: t if k != name else t.flip(0) * 1.0001 for k, t in tensors.items()})

    rollout.load_bucket = damaging
    with pytest.raises(WeightMismatchError, match=r"'model.layers.0.self_attn.q_proj.weight'"):
        InProcessTransfer(UnshardedModel(tiny_model(seed=5)), rollout).sync(version=1)


def test_another_architecture_is_refused_before_anything_is_sent(make_rollout):
    trainer = UnshardedModel(tiny_model(num_hidden_layers=3))
    with pytest.raises(WeightMismatchError, match=r"model.layers.2"):
        InProcessTransfer(trainer, make_rollout()).sync(version=1)
    assert trainer.buckets_sent == 0


def test_who_waits_for_an_answer_hears_of_a_trainer_that_broke(make_rollout):
    class Broken(UnshardedModel):
        def buckets(self, dtype, max_bytes, requested=None):
            yield from ()
            raise MemoryError("no room to gather")

    rollout = make_rollout()
    rollout.pause_generation("keep")
    waiting = rollout.submit([Request("a", [5, 6], SamplingParams(max_new_tokens=3))])[0]
    with pytest.raises(MemoryError):
        InProcessTransfer(Broken(tiny_model(seed=5)), rollout).sync(version=1)
    with pytest.raises(MemoryError, match="no room to gather"):
        waiting.result()
    rollout.resume_generation()
    with pytest.raises(RuntimeError, match=r"version 1 .*: no room to gather"):
        rollout.submit([Request("b", [5, 6], SamplingParams(max_new_tokens=3))])
