"""Worker functions of the tests of shared prefixes on several ranks (imported by name in the rank processes)."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.engine_cases import OUTPUTS_OF_KIND, engine_gradients, make_engine, model_of_kind, token_loss
from tests.support.prefix_cases import policy_columns, policy_config, shared_batch
from verl.config.names import LOSS_AGG_MODES
from verl.workers.engine.base import MicroBatching
from verl.workers.roles.policy_loss import PolicyLoss

KINDS = tuple(OUTPUTS_OF_KIND)
MICRO = MicroBatching(max_tokens=16)  # two rows: on a CPU, token budgets count shared prefixes in every row


def rows_of_rank(rank: int, size: int) -> slice:
    """Rows of a rank: all with sequence parallelism, otherwise 5 rows of two groups, then 2 rows."""
    return slice(None) if size > 1 else (slice(0, 5), slice(5, 7))[rank]


def run_prefix_cases(rank: int, ranks: int, folder: str) -> None:
    """Results by sequence-parallel size and kind of model; rank r writes `prefixes-r.pt`."""
    results = {}
    for size in (1, 2):
        for kind in KINDS:
            data = shared_batch("groups")[rows_of_rank(rank, size)]
            results[size, kind] = train(kind, data, sequence_parallel_size=size, prefix_sharing="true")
    for size in (1, 2):
        data = policy_columns(shared_batch("groups"))[rows_of_rank(rank, size)]
        results |= train_policy(data, size, sequence_parallel_size=size, prefix_sharing="true")
    torch.save(results, Path(folder) / f"prefixes-{rank}.pt")


def train_policy(data, size=1, micro=MICRO, **changes):
    """Loss and gradients of the actor by (size, aggregation)."""
    engine = make_engine(model_of_kind("causal_lm"), **changes)
    results = {}
    for mode in LOSS_AGG_MODES:
        loss = PolicyLoss(policy_config(mode, "vanilla"))
        metrics = engine.forward_backward(data, loss, ("log_probs", "entropy"), micro=micro)
        gradients = {name: value.clone() for name, value in engine_gradients(engine).items()}
        engine.optimizer.zero_grad()
        results[size, mode] = {"loss": metrics["loss"][0], "gradients": gradients}
    return results


def train(kind, data, micro=MICRO, **changes):
    """Fields, loss, saved tokens and gradients."""
    engine = make_engine(model_of_kind(kind), kind, enable_gradient_checkpointing=True, **changes)
    outputs = OUTPUTS_OF_KIND[kind]
    fields = engine.infer(data, outputs, 0.7, micro).batch
    metrics = engine.forward_backward(data, token_loss, outputs, 0.7, micro)
    gradients = {name: value.clone() for name, value in engine_gradients(engine).items()}
    return {
        "fields": dict(fields.items()),
        "loss": metrics["loss"][0],
        "saving": metrics.get("prefix_saving"),
        "gradients": gradients,
    }
