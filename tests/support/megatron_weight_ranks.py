"""Worker functions of the tests of MegatronEngine weights and checkpoints (imported by name in the rank processes)."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.support.engine_cases import make_batch, make_engine, token_loss, whole_weights
from tests.support.megatron_cases import make_megatron
from tests.support.megatron_ranks import KINDS, LAYOUTS, MODELS, WEIGHTS_ONLY, model_of
from tests.support.memory import TensorBytes
from tests.support.tiny import tiny_model
from verl.types.weights import TensorSlice
from verl.utils.checkpoint.manifest import prepare_records, write_manifest
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common import sharded_checkpoint

RANKS = 4
ALL = ("model", "optimizer", "extra")
BUCKET = 1 << 20
LARGE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 1024}


def mismatched(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that only one side has, or whose tensors are not bit-identical."""
    return [
        name
        for name in {**expected, **actual}
        if name not in actual or name not in expected or not torch.equal(actual[name], expected[name])
    ]


def export_cases(rank: int, ranks: int, folder: str, cases: list[tuple[str, str]]) -> None:
    """Load weights from files or memory and export them in buckets of several sizes; rank r writes `results-r.pt`."""
    results = {}
    for layout, name in cases:
        kind = MODELS[name][0]
        model = model_of(name)
        expected = model.state_dict()
        model_folder = Path(folder) / f"{layout}-{name}"
        if rank == 0 and kind == "causal_lm":
            model.save_pretrained(model_folder)
        dist.barrier()
        # Of models in memory, only the weights of rank 0 are used: the other ranks pass different ones.
        source: Any = str(model_folder) if kind == "causal_lm" else model if rank == 0 else other_model(name)
        engine = make_megatron(source, kind, train=kind != "sequence_classification", **LAYOUTS[layout])
        case: dict[str, Any] = {"names": list(engine.manifest()) == list(expected)}
        for size in (1 << 30, 40_000, 3_000):
            case[f"whole, {size}"] = mismatched(collect_buckets(engine, None, size, None), expected)
            parts = [shard_rows(expected, part, ranks) for part in range(ranks)]
            case[f"rows, {size}"] = mismatched(
                collect_buckets(engine, None, size, parts), cut_rows(expected, parts[rank])
            )
            first = [shard_rows(expected, 0, 1), *({} for _ in range(ranks - 1))]
            rounded = {key: value.bfloat16() for key, value in expected.items()}
            first_rank_rows = collect_buckets(engine, torch.bfloat16, size, first)
            case[f"first rank, {size}"] = mismatched(first_rank_rows, cut_rows(rounded, first[rank]))
        engine.export_hf(Path(folder) / "exported" / f"{layout}-{name}", torch.float32)
        if (
            kind != "sequence_classification" and layout != WEIGHTS_ONLY
        ):  # a save first checks the outputs of a forward pass
            half = make_megatron(source, kind, dtype="bf16", background_save=False, **LAYOUTS[layout])
            half.save(Path(folder) / "masters" / f"{layout}-{name}", ("model",))
            loaded = _megatron(name, layout, other_model)
            loaded.load(Path(folder) / "masters" / f"{layout}-{name}", ("model",))
            case["masters"] = mismatched(whole_weights(loaded), expected)
        results[layout, name] = case
    torch.save(results, Path(folder) / f"results-{rank}.pt")


def shard_rows(tensors: Mapping[str, torch.Tensor], part: int, parts: int) -> dict[str, range]:
    return {key: range(len(value) * part // parts, len(value) * (part + 1) // parts) for key, value in tensors.items()}


def cut_rows(tensors: Mapping[str, torch.Tensor], rows: Mapping[str, range]) -> dict[str, torch.Tensor]:
    return {key: tensors[key][span.start : span.stop] for key, span in rows.items() if span}


def collect_buckets(engine: Any, dtype: torch.dtype | None, size: int, wanted: Any) -> dict[str, torch.Tensor]:
    """The tensors of all buckets; tensors that arrive in slices are concatenated."""
    parts: dict[str, list[torch.Tensor]] = {}
    for bucket in engine.buckets(dtype, size, wanted):
        assert len(bucket) == 1 or sum(value.nbytes for value in bucket.values()) <= size
        for key, value in bucket.items():
            parts.setdefault(key.name if isinstance(key, TensorSlice) else key, []).append(value.clone())
    return {name: torch.cat(values) for name, values in parts.items()}


def measure_memory(rank: int, ranks: int, folder: str) -> None:
    """Peak bytes of tensors besides a rank's own weights while it loads, exports, saves and syncs weights."""
    model_folder = Path(folder) / "large"
    if rank == 0:
        tiny_model(**LARGE).save_pretrained(model_folder)
    dist.barrier()
    engine = make_megatron(
        str(model_folder), background_save=False, tensor_model_parallel_size=2, pipeline_model_parallel_size=2
    )
    parameters = [*(value for model in engine.models for value in model.parameters())]
    results = {"shard": sum(value.nbytes for value in parameters)}
    operations: dict[str, Any] = {
        "fill": lambda: engine.load_weights(str(model_folder)),
        "whole": lambda: _drain_buckets(engine, None),
        "rows": lambda: _drain_buckets(engine, _halves(engine)),
        "save": lambda: engine.save(Path(folder) / "saved", ("model",)),
        "load": lambda: engine.load(Path(folder) / "saved", ("model",)),
        "export": lambda: engine.export_hf(Path(folder) / "exported"),
    }
    for name, run in operations.items():
        with TensorBytes(parameters) as memory:
            run()
        results[name] = memory.peak
    torch.save(results, Path(folder) / f"results-{rank}.pt")


def _halves(engine: Any) -> list[dict[str, range]]:
    """Rows for two rollout engines of two ranks each: every rank needs half of each weight."""
    return [
        {
            name: range(spec.shape[0] * (rank % 2) // 2, spec.shape[0] * (rank % 2 + 1) // 2)
            for name, spec in engine.manifest().items()
        }
        for rank in range(RANKS)
    ]


def _drain_buckets(engine: Any, wanted: Any) -> None:
    """Iterate over all buckets; each is freed before the next."""
    buckets = engine.buckets(None, BUCKET, wanted)
    while next(buckets, None) is not None:
        pass


def checkpoint_cases(rank: int, ranks: int, folder: str, cases: list[tuple[str, str]], others: list[str]) -> None:
    """Save with each layout, load with the same layout, others and FSDP; save with FSDP, load with each layout."""
    results = {}
    for layout, name in cases:
        target = Path(folder) / f"{layout}-{name}"
        engine = _megatron(name, layout)
        _train_steps(engine, 2)
        engine.begin_save(target, ALL)
        noise = torch.rand(3)
        before = whole_weights(engine)
        rates = _train_steps(engine, 2)  # while the checkpoint is copied and written
        engine.finish_save()
        after = whole_weights(engine)
        case: dict[str, Any] = {"loaded": {}, "steps": {}}
        for other in dict.fromkeys((layout, *others, "fsdp")):
            loaded = (
                make_engine(other_model(name), MODELS[name][0])
                if other == "fsdp"
                else _megatron(name, other, other_model)
            )
            loaded.load(target, ALL)
            same_noise = torch.equal(torch.rand(3), noise)
            case["loaded"][other] = mismatched(whole_weights(loaded), before)
            same_rates = _train_steps(loaded, 2) == rates
            case["steps"][other] = _largest_difference(whole_weights(loaded), after)
            if other == layout:
                case["same numbers"] = same_noise and same_rates
        loaded.save(Path(folder) / f"fsdp-{layout}-{name}", ALL)
        reloaded = _megatron(name, layout, other_model)
        reloaded.load(Path(folder) / f"fsdp-{layout}-{name}", ALL)
        case["loaded"]["from fsdp"] = mismatched(whole_weights(reloaded), whole_weights(loaded))
        _train_steps(reloaded, 2)
        _train_steps(loaded, 2)
        case["steps"]["from fsdp"] = _largest_difference(whole_weights(reloaded), whole_weights(loaded))
        results[layout, name] = case
    torch.save(results, Path(folder) / f"results-{rank}.pt")


def _megatron(name: str, layout: str, build: Any = model_of) -> Any:
    return make_megatron(build(name), MODELS[name][0], **LAYOUTS[layout])


def other_model(name: str) -> Any:
    """The same model with other weights."""
    model = model_of(name)
    for value in model.parameters():
        value.data.add_(1.0)
    return model


def _train_steps(engine: Any, count: int) -> list[tuple[float, float]]:
    results = []
    for step in range(count):
        rows = make_batch(rows=8, vocab=260, seed=step)[slice(engine.dp_rank, None, engine.dp_size)]
        engine.forward_backward(rows, token_loss, KINDS[engine.kind], 1.0, MicroBatching(size=2))
        metrics = engine.optimizer_step()
        results.append((metrics["grad_norm"], metrics["lr"]))
    return results


def _largest_difference(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(float((actual[name] - expected[name]).abs().max()) for name in expected)


def load_core_checkpoint(rank: int, ranks: int, folder: str, model: str, layout: str) -> None:
    """Load weights that Megatron Core saved with one layout on another; also into the float32 master weights."""
    from megatron.core import dist_checkpointing

    target = Path(folder) / "core"
    if rank == 0:
        target.mkdir()
    dist.barrier()
    engine = _megatron(model, layout)
    with engine.layout.activate():
        parts = {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(engine.models)}
        dist_checkpointing.save(parts, str(target))
    loaded = _megatron(model, "DP4", other_model)
    loaded.load(target, ("model",))
    results: dict[str, Any] = {"loaded": mismatched(whole_weights(loaded), whole_weights(engine))}
    for trained in (engine, loaded):
        _train_steps(trained, 1)
    results["steps"] = _largest_difference(whole_weights(loaded), whole_weights(engine))
    torch.save(results, Path(folder) / f"results-{rank}.pt")


def kill_during_save(rank: int, ranks: int, folder: str) -> None:
    """Save two steps; rank 1 is killed after it has written its data file of the second step."""
    engine = make_megatron(model_of("tied"), **LAYOUTS["TP2 PP2"])
    _train_steps(engine, 1)
    for step in (1, 2):
        target = Path(folder) / f"global_step_{step}"
        prepare_records(target)
        dist.barrier()
        if (rank, step) == (1, 2):
            write = sharded_checkpoint.ShardWriter.write_data
            patch.object(sharded_checkpoint.ShardWriter, "write_data", _kill_after(write)).start()
        engine.begin_save(target, ALL)
        engine.finish_save()
        dist.barrier()
        if rank == 0:
            write_manifest(target, step, step)


def _kill_after(write: Any) -> Any:
    def write_and_kill(*args: Any) -> None:
        write(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    return write_and_kill
