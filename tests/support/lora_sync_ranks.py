"""Worker function of the test of LoRA weight sync over several ranks (imported by name in the rank processes)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.engine_cases import make_batch
from tests.support.lora_cases import RANK, lora_engine, train_steps
from tests.support.tensor_parallel_ranks import generate
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.types.weights import WeightMismatchError
from verl.workers.rollout.native_rollout import NativeRollout
from verl.workers.sharding_manager import InProcessTransfer


def make_rollout(path: str, ranks: int) -> NativeRollout:
    keys = {"max_new_tokens": 12, "max_num_seqs": 6, "max_model_len": 64, "tensor_model_parallel_size": ranks}
    config = as_config(RolloutConfig, {**keys, "load_format": "dummy", "dtype": "float32", "free_weights": False})
    model = as_config(ModelConfig, {"path": path, "lora_rank": RANK}, "actor_rollout_ref.model")
    return NativeRollout(path, model, config)


def run_rank(rank: int, ranks: int, folder: str, parallel: int) -> None:
    """Sync adapters before and after training to engines of `parallel` ranks and generate.

    Then the last rank fails, loads nothing or loads changed tensors, and another sync repairs the engine.
    """
    engine, data = lora_engine(f"{folder}/model"), make_batch()
    rollout = make_rollout(f"{folder}/model", parallel)
    transfer = InProcessTransfer(engine, rollout, bucket_bytes=50_000)
    results: dict[str, Any] = {"bytes": [transfer.sync(1).bytes]}
    train_steps(engine, data, 2)
    results["bytes"].append(transfer.sync(2).bytes)
    results["generated"] = generate(rollout)
    load = rollout.load_bucket

    def load_changed(bucket: Any) -> None:
        load({key: value + 1e-3 if rank == ranks - 1 else value for key, value in bucket.items()})

    def load_and_fail(bucket: Any) -> None:
        if rank == ranks - 1:
            raise torch.OutOfMemoryError("no memory on this rank")
        load(bucket)

    def load_nothing(bucket: Any) -> None:
        load({} if rank == ranks - 1 else bucket)

    for name, changed in (("failed", load_and_fail), ("missing", load_nothing), ("rejected", load_changed)):
        rollout.load_bucket = changed  # type: ignore[method-assign]
        try:
            transfer.sync(3)
        except (WeightMismatchError, RuntimeError) as error:
            results[name] = str(error)
    rollout.load_bucket = load  # type: ignore[method-assign]
    transfer.sync(4)
    results["repaired"] = generate(rollout)
    torch.save(results, Path(folder) / f"results-{rank}-{parallel}.pt")
    rollout.close()
