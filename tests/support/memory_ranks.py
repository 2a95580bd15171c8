"""Worker functions of test_memory_ranks.py (imported by name in the rank processes)."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.engine_cases import engine_gradients, make_batch, make_engine, token_loss, whole_weights
from tests.support.tiny import tiny_model
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common.offload import OffloadedTensors, local_shard

ROWS_BY_RANK = [[0, 1, 2], [3, 4]]
# Neither vocabulary nor widths divide by two: the last shards are padded.
ODD = {"vocab_size": 265, "intermediate_size": 129}


def run_rank(rank: int, ranks: int, folder: str) -> None:
    results = {}
    rank_rows = make_batch(rows=5)[ROWS_BY_RANK[rank]]
    for prefetch in (False, True):
        engine = make_engine(tiny_model(**ODD), forward_prefetch=prefetch)
        engine.forward_backward(rank_rows, token_loss, ["log_probs"], micro=MicroBatching(size=1))
        results[f"prefetch-{prefetch}"] = engine_gradients(engine)
    results["offloaded"] = offloaded_steps(rank_rows)
    engine = make_engine(tiny_model(**ODD), grad_offload=True)
    engine.forward_backward(rank_rows, token_loss, ["log_probs"], micro=MicroBatching(size=1))
    results["waiting"] = len(engine.memory.gradients.offloaded)
    engine.memory.wait_ready()
    results["grad_offload"] = engine_gradients(engine)
    engine = make_engine(tiny_model(), state_dtype="bf16", fsdp_size=1)
    for _ in range(3):
        engine.forward_backward(rank_rows, token_loss, ["log_probs"])
        engine.optimizer_step()
    results["replica"] = [local_shard(value).clone() for value in engine.model.parameters()]
    torch.save(results, Path(folder) / f"results-{rank}.pt")


def offloaded_steps(data):
    """Weights after two steps, without and with everything offloaded after each step."""
    results = []
    for offload in (False, True):
        engine = make_engine(tiny_model(**ODD))
        weights, moments = (OffloadedTensors(torch.device("cpu")) for _ in range(2))
        for _ in range(2):
            engine.forward_backward(data, token_loss, ["log_probs"])
            engine.optimizer_step()
            if offload:
                weights.offload([*engine.model.parameters(), *engine.model.buffers()])
                moments.offload(engine.optimizer.state_tensors())
                weights.reload()
                moments.reload()
        results.append(whole_weights(engine))
    return results
