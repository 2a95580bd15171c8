"""What each of two ranks does for test_memory_ranks.py."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.engine_cases import engine_gradients, make_batch, make_engine, token_loss, whole_weights
from tests.support.tiny import tiny_model
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common.offload import OffloadedTensors, local_shard

MINE = [[0, 1, 2], [3, 4]]
# Neither vocabulary nor widths divide by two: the last shards are padded.
ODD = {"vocab_size": 265, "intermediate_size": 129}


def two_ranks(rank: int, ranks: int, folder: str) -> None:
    found = {}
    mine = make_batch(rows=5)[MINE[rank]]
    for prefetch in (False, True):
        engine = make_engine(tiny_model(**ODD), forward_prefetch=prefetch)
        engine.forward_backward(mine, token_loss, ["log_probs"], micro=MicroBatching(size=1))
        found[f"prefetch-{prefetch}"] = engine_gradients(engine)
    found["offloaded"] = offloaded_steps(mine)
    engine = make_engine(tiny_model(**ODD), grad_offload=True)
    engine.forward_backward(mine, token_loss, ["log_probs"], micro=MicroBatching(size=1))
    found["waiting"] = len(engine._memory._gradients._offloaded)
    engine._memory.wait_ready()
    found["grad_offload"] = engine_gradients(engine)
    engine = make_engine(tiny_model(), state_dtype="bf16", fsdp_size=1)
    for _ in range(3):
        engine.forward_backward(mine, token_loss, ["log_probs"])
        engine.optimizer_step()
    found["replica"] = [local_shard(value).clone() for value in engine.model.parameters()]
    torch.save(found, Path(folder) / f"found-{rank}.pt")


def offloaded_steps(data):
    """Weights after two steps, with everything away in between, and without."""
    results = []
    for moved in (False, True):
        engine = make_engine(tiny_model(**ODD))
        weights, moments = (OffloadedTensors(torch.device("cpu")) for _ in range(2))
        for _ in range(2):
            engine.forward_backward(data, token_loss, ["log_probs"])
            engine.optimizer_step()
            if moved:
                weights.offload([*engine.model.parameters(), *engine.model.buffers()])
                moments.offload(engine._optimizer.state_tensors())
                weights.reload()
                moments.reload()
        results.append(whole_weights(engine))
    return results
