"""Weight sync of LoRA adapters: frozen weights once, then adapters only, verified; generation follows training."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tests.support.engine_cases import make_batch
from tests.support.lora_cases import RANK, lora_engine, train_steps
from tests.support.tiny import save_tiny_model
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.types.request import Request, SamplingParams
from verl.types.weights import WeightMismatchError
from verl.utils.transfer_group import TransferGroup, TransferHost
from verl.workers.rollout.native_rollout import NativeRollout
from verl.workers.sharding_manager import BroadcastReceiver, BroadcastSender, InProcessTransfer

DATA = make_batch()
PARAMS = SamplingParams(max_new_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("base") / "model", tie_word_embeddings=True))


@pytest.fixture
def start(folder):
    engines = []

    def make(lora: dict[str, Any] | None = None, **keys: Any) -> NativeRollout:
        values = {"path": folder, "lora_rank": RANK, **(lora or {})}
        model = as_config(ModelConfig, values, "actor_rollout_ref.model")
        usual = {"max_new_tokens": 9, "dtype": "float32", "load_format": "dummy", "free_weights": False}
        engines.append(NativeRollout(folder, model, as_config(RolloutConfig, {**usual, **keys})))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def adapter_bytes(engine: Any, itemsize: int = 4) -> int:
    source = engine.unmerged()
    return sum(itemsize * torch.Size(source.manifest()[name].shape).numel() for name in source.trained_names)


def generate(rollout: NativeRollout) -> list[Any]:
    prompts = [row[-5:].tolist() for row in DATA.batch["prompts"]]
    futures = rollout.submit([Request(str(index), prompt, PARAMS) for index, prompt in enumerate(prompts)])
    return [future.result(60) for future in futures]


def difference(engine: Any, outputs: list[Any]) -> float:
    """Largest difference between the log-probs of engine and training."""
    data = make_batch(rows=len(outputs))
    data.batch["attention_mask"][:] = 1
    data.batch["attention_mask"][:, :2] = 0
    data.batch["position_ids"] = (data.batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    data.batch["input_ids"][:, 2:7] = DATA.batch["prompts"][:, -5:]
    data.batch["input_ids"][:, 7:] = torch.tensor([output.token_ids for output in outputs])
    data.batch["responses"] = data.batch["input_ids"][:, 7:].clone()
    scored = engine.infer(data, ["log_probs"]).batch["log_probs"]
    return float((scored - torch.tensor([output.log_probs for output in outputs])).abs().max())


@pytest.mark.parametrize("kind", ["fused", "generic"])
@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "v_proj", "down_proj"]])
def test_after_the_first_sync_only_adapters_are_sent_and_generation_follows(folder, start, kind, targets):
    engine = lora_engine(folder, target_modules=targets)
    rollout = start({"target_modules": targets}, engine_kwargs={"native": {"model": kind}})
    transfer = InProcessTransfer(engine, rollout, bucket_bytes=20_000)
    assert transfer.sync(1).bytes > 2 * adapter_bytes(engine)
    before = generate(rollout)
    assert difference(engine, before) < 1e-4
    train_steps(engine, DATA, 3)
    assert difference(engine, before) > 1e-3
    stats = transfer.sync(2)
    assert (stats.bytes, stats.tensors) == (adapter_bytes(engine), len(engine.unmerged().trained_names))
    after = generate(rollout)
    assert difference(engine, after) < 1e-4
    assert after[0].versions == [2] * 9


def test_unmerged_bfloat16_agrees_with_training_up_to_rounding(folder, start):
    engine = lora_engine(folder, mixed_precision="bf16")
    train_steps(engine, DATA, 3)
    rollout = start(dtype="bfloat16")
    transfer = InProcessTransfer(engine, rollout)
    transfer.sync(1)
    assert transfer.sync(2).bytes == adapter_bytes(engine, 2)
    assert difference(engine, generate(rollout)) < 0.1


def test_a_changed_bit_of_an_adapter_is_detected_and_the_next_sync_repairs_it(folder, start, monkeypatch):
    engine, rollout = lora_engine(folder), start()
    transfer = InProcessTransfer(engine, rollout)
    transfer.sync(1)
    train_steps(engine, DATA, 1)
    load = rollout.load_bucket

    def load_changed(bucket: Any) -> None:
        name = "model.layers.1.mlp.up_proj.lora_B.weight"
        changed = bucket[name].clone()
        changed[3, 1] += 1e-6
        load({**bucket, name: changed})

    with monkeypatch.context() as patch:
        patch.setattr(rollout, "load_bucket", load_changed)
        with pytest.raises(WeightMismatchError, match=r"layers\.1\.mlp\.up_proj\.lora_B"):
            transfer.sync(2)
    with pytest.raises(RuntimeError, match=r"version 2 .*up_proj\.lora_B"):
        generate(rollout)
    assert transfer.sync(3).bytes == adapter_bytes(engine), "the frozen weights were not touched"
    assert difference(engine, generate(rollout)) < 1e-4


def test_a_missing_adapter_tensor_is_detected(folder, start, monkeypatch):
    engine, rollout = lora_engine(folder), start()
    transfer = InProcessTransfer(engine, rollout)
    transfer.sync(1)
    load = rollout.load_bucket
    monkeypatch.setattr(rollout, "load_bucket", lambda bucket: load(dict(list(bucket.items())[1:])))
    with pytest.raises(WeightMismatchError, match=r"'model\.layers\.0\.mlp\.down_proj\.lora_A\.weight' .*rows"):
        transfer.sync(2)


def test_discarded_weights_are_sent_again(folder, start):
    engine, rollout = lora_engine(folder), start(free_weights=True)
    train_steps(engine, DATA, 1)
    transfer = InProcessTransfer(engine, rollout)
    whole = transfer.sync(1).bytes
    before = generate(rollout)
    rollout.release(["weights"])
    assert transfer.sync(2).bytes == whole
    assert [output.log_probs for output in generate(rollout)] == [output.log_probs for output in before]


def test_merged_weights_on_request(folder, start):
    engine = lora_engine(folder)
    train_steps(engine, DATA, 2)
    rollout = start(engine_kwargs={"native": {"merge_lora": True}})
    assert not rollout.applies_adapters
    transfer = InProcessTransfer(engine, rollout)
    assert transfer.sync(1).bytes == transfer.sync(2).bytes
    assert difference(engine, generate(rollout)) < 1e-4


def test_another_rank_is_rejected_before_anything_is_overwritten(folder, start):
    engine, rollout = lora_engine(folder), start({"lora_rank": RANK + 1})
    with pytest.raises(WeightMismatchError, match=r"lora_A\.weight' .*\[4, 128\].*\[5, 128\]"):
        InProcessTransfer(engine, rollout).sync(1)


def test_between_processes_frozen_weights_are_sent_while_a_receiver_lacks_them(folder, start):
    """Two receivers, one of which is restarted after the first version."""
    engine = lora_engine(folder)
    rollouts = [start(), start()]
    sent = []
    for version, replace in ((1, False), (2, False), (3, True)):
        train_steps(engine, DATA, 1)
        if replace:
            rollouts[1] = start()
        sent.append(broadcast(engine, rollouts, version))
        assert all(difference(engine, generate(rollout)) < 1e-4 for rollout in rollouts)
    assert sent[1] == adapter_bytes(engine)
    assert sent[0] == sent[2] > 2 * sent[1]


def broadcast(engine: Any, rollouts: list[NativeRollout], version: int) -> int:
    """Send one version from this thread to rollouts in other threads; returns the bytes."""
    host, size = TransferHost("127.0.0.1"), 1 + len(rollouts)
    errors: list[Exception] = []

    def receive(rank: int, rollout: NativeRollout) -> None:
        try:
            BroadcastReceiver(TransferGroup(host.address, rank, size, timeout_s=60)).receive(rollout)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=receive, args=(rank, each)) for rank, each in enumerate(rollouts, 1)]
    for thread in threads:
        thread.start()
    sender = BroadcastSender(TransferGroup(host, 0, size, timeout_s=60), torch.float32, bucket_bytes=50_000)
    stats = sender.send(engine.unmerged(), version)
    for thread in threads:
        thread.join(60)
    assert not errors
    return stats.bytes
