"""Worker functions of the test of dynamic micro-batches (imported by name in the rank processes)."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.engine_cases import engine_gradients, make_batch, make_engine
from tests.support.tiny import tiny_model
from verl.config import ActorConfig, as_config
from verl.workers.engine.base import MicroBatching
from verl.workers.roles.policy_loss import PolicyLoss

# Rank 0 has many tokens, rank 1 few: a token budget splits them into different numbers of micro-batches.
ROWS_BY_RANK = {1: {0: slice(0, 12)}, 2: {0: slice(0, 9), 1: slice(9, 12)}}
BATCHINGS = {
    "one by one": MicroBatching(size=1),
    "fixed": MicroBatching(size=4),
    "dynamic": MicroBatching(max_tokens=32),
    "dynamic wide": MicroBatching(max_tokens=70),
}


def batch():
    data = make_batch(rows=12, seed=3)
    generator = torch.Generator().manual_seed(1)
    shape = data.batch["responses"].shape
    data.batch["old_log_probs"] = -5.5 + torch.randn(shape, generator=generator)
    data.batch["advantages"] = torch.randn(shape, generator=generator)
    return data


def update_with_every_batching(rank, ranks, folder):
    """Gradients, metrics and log-probs of the same rows for every batching; rank r writes `results-<ranks>-r.pt`."""
    rank_rows = batch()[ROWS_BY_RANK[ranks][rank]]
    engine = make_engine(tiny_model())
    loss = PolicyLoss(as_config(ActorConfig, {"entropy_coeff": 0.01}))
    results = {}
    for name, micro in BATCHINGS.items():
        passes = []

        def counting_loss(output, part, counts, passes=passes):
            passes.append(len(part))
            return loss(output, part, counts)

        metrics = engine.forward_backward(rank_rows, counting_loss, loss.outputs, 0.7, micro)
        results[name] = {
            "metrics": metrics,
            "gradients": engine_gradients(engine),
            "passes": passes,
            "inferred": engine.infer(rank_rows, loss.outputs, 0.7, micro).batch["log_probs"],
        }
        engine.optimizer.zero_grad()
    torch.save(results, Path(folder) / f"results-{ranks}-{rank}.pt")
