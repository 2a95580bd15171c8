"""Worker functions of the tests of weight sync from sharded trainers (imported by name in the rank processes)."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.support.engine_cases import make_engine, whole_weights
from tests.support.tensor_parallel_ranks import make_rollout
from tests.support.tiny import tiny_model
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.config.names import ROLLOUTS
from verl.types.request import EngineDiedError, Request, SamplingParams
from verl.types.weights import TensorSlice, WeightMismatchError
from verl.utils.weight_fingerprint import fingerprints
from verl.workers.rollout.native_rollout import NativeRollout
from verl.workers.rollout.placement import open_rollout
from verl.workers.sharding_manager import InProcessTransfer

# Vocabularies that divide evenly over tensor-parallel ranks, and that do not.
SIZES = {
    kind: {"vocab_size": vocab, "intermediate_size": 150, "num_hidden_layers": 1}
    for kind, vocab in (("plain", 270), ("adapters", 269), ("hybrid", 269))
}
LIMIT = 12_000  # bytes: less than the embeddings, more than most others


def uneven_rows(weights: dict[str, torch.Tensor], rank: int) -> dict[str, range]:
    """Rows that a rank requests: the middle of most tensors, all rows of some, none of others."""
    results = {}
    for index, (name, tensor) in enumerate(weights.items()):
        start = min(index % 3 + rank, len(tensor) - 1)
        results[name] = range(len(tensor)) if index % 4 == 0 else range(start, len(tensor) - index % 2)
        if index % 5 == rank:
            del results[name]
    return results


def run_rank(rank: int, ranks: int, folder: str, kind: str) -> None:
    """Request some rows, all rows on every rank, all rows on one rank, and sync to colocated engines."""
    changes: dict[str, Any] = {"hybrid": {"fsdp_size": 2}, "adapters": {"lora_rank": 4}}.get(kind, {})
    engine = make_engine(tiny_model(**SIZES[kind]), **changes)
    weights = whole_weights(engine)
    uneven: list[dict[str, range]] = [uneven_rows(weights, other) for other in range(ranks - 1)]
    requests: dict[str, list[dict[str, range]]] = {
        "rows": [*uneven, {}],
        "all": [{name: range(len(tensor)) for name, tensor in weights.items()}] * ranks,
        "one": [{name: range(len(tensor)) for name, tensor in weights.items()}, *[{}] * (ranks - 1)],
    }
    results = {
        name: check_rows(weights, [*engine.buckets(torch.bfloat16, LIMIT, wanted)], wanted[rank])
        for name, wanted in requests.items()
    }
    if kind == "plain":
        results["tensor parallel"] = sync_to_tensor_parallel(engine, weights, f"{folder}/model", rank, ranks)
        results["hosted"] = sync_to_process(engine, f"{folder}/model", rank, ranks)
    torch.save(results, Path(folder) / f"weight-sync-{rank}.pt")


def check_rows(weights: dict[str, torch.Tensor], buckets: list[Any], wanted: dict[str, range]) -> dict[str, Any]:
    """Whether exactly the requested rows arrived, and their sizes."""
    received: dict[str, list[int]] = {}
    is_equal, largest = True, 0
    for bucket in buckets:
        largest = max(largest, sum(tensor.nbytes for tensor in bucket.values()))
        for key, tensor in bucket.items():
            name = key if isinstance(key, str) else key.name
            rows = slice(0, None) if isinstance(key, str) else slice(key.start, key.stop)
            is_equal &= torch.equal(tensor.cpu(), weights[name][rows].to(torch.bfloat16))
            received.setdefault(name, []).extend(range(len(weights[name]))[rows])
    complete = {name: sorted(rows) for name, rows in received.items()} == {
        n: list(rows) for n, rows in wanted.items() if rows
    }
    slices = sum(isinstance(key, TensorSlice) for bucket in buckets for key in bucket)
    return {"equal": is_equal, "complete": complete, "largest": largest, "slices": slices}


def mismatch_error(rollout: Any, weights: dict[str, torch.Tensor], name: str, rank: int) -> str:
    """The error of an update that corrupts a weight on every rank except rank 0; "" on rank 0."""
    rollout.begin_update(4, None)
    rollout.load_bucket(weights)
    rollout.weights[name].add_(rank)
    try:
        rollout.finish_update(fingerprints(weights, rollout.weight_dtype))
    except WeightMismatchError as error:
        return str(error)
    return ""


def sync_to_tensor_parallel(
    engine: Any, weights: dict[str, torch.Tensor], path: str, rank: int, ranks: int
) -> dict[str, Any]:
    """Sync to a tensor-parallel engine of all ranks; weights are checked by fingerprints, and some directly."""
    rollout = make_rollout(path, tensor_model_parallel_size=ranks)
    stats = InProcessTransfer(engine, rollout, bucket_bytes=LIMIT).sync(3)
    requested = {name: weights[name][rows.start : rows.stop] for name, rows in rollout.requested_rows().items()}
    same = [
        torch.equal(rollout.weights[name], rows)
        for name, rows in requested.items()
        if rollout.weights[name].shape == rows.shape
    ]
    results = {"version": rollout.version, "same": all(same), "compared": len(same), "bytes": stats.bytes}
    results["changed"] = mismatch_error(rollout, weights, "model.norm.weight", rank)
    rollout.close()
    return results


class UnshardedEngine(NativeRollout):
    """Stands for an engine of several ranks in its own process, which accepts unsharded tensors only."""

    def __init__(self, model_path: str, model_config: ModelConfig, config: RolloutConfig, device: Any) -> None:
        super().__init__(model_path, model_config, replace(config, tensor_model_parallel_size=1), device)

    def requested_rows(self) -> None:
        return None


def sync_to_process(engine: Any, path: str, rank: int, ranks: int) -> dict[str, Any]:
    """Sync to an engine process that the first rank has started for all; it is killed before the first sync."""
    ROLLOUTS["native"] = replace(ROLLOUTS["native"], import_path=f"{__name__}:UnshardedEngine", package="torch")
    config = as_config(RolloutConfig, {"load_format": "dummy", "tensor_model_parallel_size": ranks})
    rollout = open_rollout(path, as_config(ModelConfig, {"path": path}), config, "cpu")
    transfer, errors = InProcessTransfer(engine, rollout, bucket_bytes=LIMIT), []
    if rank == 0:
        os.kill(rollout.pid, signal.SIGKILL)
    for version in (1, 2):
        try:
            stats = transfer.sync(version)
        except EngineDiedError as error:
            errors.append(str(error))
        rollout.restart_if_dead()
    results = {"kind": type(rollout).__name__, "errors": errors, "bytes": stats.bytes, "version": rollout.version}
    if rank == 0:
        requests = [Request("a", [5, 6, 7], SamplingParams(max_new_tokens=8, temperature=0))]
        results["answer"] = rollout.submit(requests)[0].result().token_ids
    rollout.close()
    return results
