"""LoRA adapters of two training ranks in engines of one rank each, and in one tensor-parallel engine."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.engine_cases import make_batch, run_ranks
from tests.support.lora_cases import lora_engine, train_steps
from tests.support.lora_sync_ranks import make_rollout, run_rank
from tests.support.tensor_parallel_ranks import generate
from tests.support.tiny import save_tiny_model
from verl.workers.sharding_manager import InProcessTransfer


@pytest.mark.parametrize(("family", "changes", "parallel"), [("qwen2", {}, 2), ("llama", {"attention_bias": True}, 1)])
def test_two_ranks_generate_with_adapters_as_one(tmp_path, family, changes, parallel):
    save_tiny_model(tmp_path / "model", family, **changes)
    run_ranks(run_rank, tmp_path, parallel)
    found = [torch.load(tmp_path / f"results-{rank}-{parallel}.pt", weights_only=False) for rank in range(2)]
    engine, data = lora_engine(str(tmp_path / "model")), make_batch()
    rollout = make_rollout(str(tmp_path / "model"), 1)
    try:
        transfer = InProcessTransfer(engine, rollout)
        sizes = [transfer.sync(1).bytes]
        train_steps(engine, data, 2)
        sizes.append(transfer.sync(2).bytes)
        expected = generate(rollout)
    finally:
        rollout.close()
        dist.destroy_process_group()
    assert expected is not None
    for rank, results in enumerate(found):
        if parallel == 1:
            assert results["bytes"] == sizes
        assert results["bytes"][1] < results["bytes"][0] / 2
        if rank % parallel == 0:
            assert torch.equal(results["generated"]["responses"], expected["responses"])
            differences = results["generated"]["rollout_log_probs"] - expected["rollout_log_probs"]
            assert differences.abs().max() < 1e-4
            assert torch.equal(results["repaired"]["responses"], expected["responses"])
    assert "lora_" in found[1]["rejected"]
    assert found[1]["failed"] == "no memory on this rank"
    assert "was not received" in found[1]["missing"]
    if parallel == 2:  # otherwise the first rank would wait for the second one
        assert "rank 1: OutOfMemoryError: no memory on this rank" in found[0]["failed"]
        assert "rank 1: WeightMismatchError: " in found[0]["missing"]
