"""What four ranks do with the weights of Megatron engines; the processes import it by name."""

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


def wrong(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of what is missing, more, or not the same bit for bit."""
    return [
        name
        for name in {**wanted, **found}
        if name not in found or name not in wanted or not torch.equal(found[name], wanted[name])
    ]


def handed_over(rank: int, ranks: int, folder: str, cases: list[tuple[str, str]]) -> None:
    """Weights filled from files or from memory, and given out in buckets of any size; rank r writes `found-r.pt`."""
    found = {}
    for layout, name in cases:
        kind = MODELS[name][0]
        model = model_of(name)
        there = model.state_dict()
        stored = Path(folder) / f"{layout}-{name}"
        if rank == 0 and kind == "causal_lm":
            model.save_pretrained(stored)
        dist.barrier()
        # Only the first rank's model in memory counts.
        source: Any = str(stored) if kind == "causal_lm" else model if rank == 0 else other_model(name)
        engine = make_megatron(source, kind, train=kind != "sequence_classification", **LAYOUTS[layout])
        case: dict[str, Any] = {"names": list(engine.manifest()) == list(there)}
        for size in (1 << 30, 40_000, 3_000):
            case[f"whole, {size}"] = wrong(walked(engine, None, size, None), there)
            parts = [rows_of(there, each, ranks) for each in range(ranks)]
            case[f"rows, {size}"] = wrong(walked(engine, None, size, parts), cut_rows(there, parts[rank]))
            first = [rows_of(there, 0, 1), *({} for _ in range(ranks - 1))]
            rounded = {key: value.bfloat16() for key, value in there.items()}
            one = walked(engine, torch.bfloat16, size, first)
            case[f"first rank, {size}"] = wrong(one, cut_rows(rounded, first[rank]))
        engine.export_hf(Path(folder) / "exported" / f"{layout}-{name}", torch.float32)
        if kind != "sequence_classification" and layout != WEIGHTS_ONLY:  # a save looks first at what a pass gives
            half = make_megatron(source, kind, dtype="bf16", background_save=False, **LAYOUTS[layout])
            half.save(Path(folder) / "masters" / f"{layout}-{name}", ("model",))
            again = _megatron(name, layout, other_model)
            again.load(Path(folder) / "masters" / f"{layout}-{name}", ("model",))
            case["masters"] = wrong(whole_weights(again), there)
        found[layout, name] = case
    torch.save(found, Path(folder) / f"found-{rank}.pt")


def rows_of(tensors: Mapping[str, torch.Tensor], part: int, parts: int) -> dict[str, range]:
    return {key: range(len(value) * part // parts, len(value) * (part + 1) // parts) for key, value in tensors.items()}


def cut_rows(tensors: Mapping[str, torch.Tensor], rows: Mapping[str, range]) -> dict[str, torch.Tensor]:
    return {key: tensors[key][each.start : each.stop] for key, each in rows.items() if each}


def walked(engine: Any, dtype: torch.dtype | None, size: int, wanted: Any) -> dict[str, torch.Tensor]:
    """All buckets; what comes in strips put together again."""
    parts: dict[str, list[torch.Tensor]] = {}
    for bucket in engine.buckets(dtype, size, wanted):
        assert len(bucket) == 1 or sum(value.nbytes for value in bucket.values()) <= size
        for key, value in bucket.items():
            parts.setdefault(key.name if isinstance(key, TensorSlice) else key, []).append(value.clone())
    return {name: torch.cat(values) for name, values in parts.items()}


def measured(rank: int, ranks: int, folder: str) -> None:
    """The most bytes beside a rank's own weights while it loads, hands over, exports and saves."""
    stored = Path(folder) / "large"
    if rank == 0:
        tiny_model(**LARGE).save_pretrained(stored)
    dist.barrier()
    engine = make_megatron(
        str(stored), background_save=False, tensor_model_parallel_size=2, pipeline_model_parallel_size=2
    )
    own = [*(value for model in engine.models for value in model.parameters())]
    found = {"shard": sum(value.nbytes for value in own)}
    acts: dict[str, Any] = {
        "fill": lambda: engine.load_weights(str(stored)),
        "whole": lambda: _passed_on(engine, None),
        "rows": lambda: _passed_on(engine, _halves(engine)),
        "save": lambda: engine.save(Path(folder) / "saved", ("model",)),
        "load": lambda: engine.load(Path(folder) / "saved", ("model",)),
        "export": lambda: engine.export_hf(Path(folder) / "exported"),
    }
    for name, act in acts.items():
        with TensorBytes(own) as seen:
            act()
        found[name] = seen.peak
    torch.save(found, Path(folder) / f"found-{rank}.pt")


def _halves(engine: Any) -> list[dict[str, range]]:
    """Two engines of two ranks each: every rank wants half of each weight."""
    return [
        {
            name: range(spec.shape[0] * (rank % 2) // 2, spec.shape[0] * (rank % 2 + 1) // 2)
            for name, spec in engine.manifest().items()
        }
        for rank in range(RANKS)
    ]


def _passed_on(engine: Any, wanted: Any) -> None:
    """Each bucket is let go before the next."""
    buckets = engine.buckets(None, BUCKET, wanted)
    while next(buckets, None) is not None:
        pass


def saved_and_loaded(rank: int, ranks: int, folder: str, cases: list[tuple[str, str]], others: list[str]) -> None:
    """Checkpoints of each layout, read back by it, by other layouts and by FSDP; and of FSDP, read by each layout."""
    found = {}
    for layout, name in cases:
        place = Path(folder) / f"{layout}-{name}"
        engine = _megatron(name, layout)
        _steps(engine, 2)
        engine.begin_save(place, ALL)
        noise = torch.rand(3)
        before = whole_weights(engine)
        rates = _steps(engine, 2)  # while it is copied and written
        engine.finish_save()
        after = whole_weights(engine)
        case: dict[str, Any] = {"loaded": {}, "steps": {}}
        for other in dict.fromkeys((layout, *others, "fsdp")):
            again = (
                make_engine(other_model(name), MODELS[name][0])
                if other == "fsdp"
                else _megatron(name, other, other_model)
            )
            again.load(place, ALL)
            same_noise = torch.equal(torch.rand(3), noise)
            case["loaded"][other] = wrong(whole_weights(again), before)
            same_rates = _steps(again, 2) == rates
            case["steps"][other] = _furthest(whole_weights(again), after)
            if other == layout:
                case["same numbers"] = same_noise and same_rates
        again.save(Path(folder) / f"fsdp-{layout}-{name}", ALL)
        back = _megatron(name, layout, other_model)
        back.load(Path(folder) / f"fsdp-{layout}-{name}", ALL)
        case["loaded"]["from fsdp"] = wrong(whole_weights(back), whole_weights(again))
        _steps(back, 2)
        _steps(again, 2)
        case["steps"]["from fsdp"] = _furthest(whole_weights(back), whole_weights(again))
        found[layout, name] = case
    torch.save(found, Path(folder) / f"found-{rank}.pt")


def _megatron(name: str, layout: str, of: Any = model_of) -> Any:
    return make_megatron(of(name), MODELS[name][0], **LAYOUTS[layout])


def other_model(name: str) -> Any:
    """The same model with other weights."""
    model = model_of(name)
    for value in model.parameters():
        value.data.add_(1.0)
    return model


def _steps(engine: Any, count: int) -> list[tuple[float, float]]:
    found = []
    for step in range(count):
        rows = make_batch(rows=8, vocab=260, seed=step)[slice(engine.dp_rank, None, engine.dp_size)]
        engine.forward_backward(rows, token_loss, KINDS[engine.kind], 1.0, MicroBatching(size=2))
        metrics = engine.optimizer_step()
        found.append((metrics["grad_norm"], metrics["lr"]))
    return found


def _furthest(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def started_from_core(rank: int, ranks: int, folder: str, model: str, layout: str) -> None:
    """Weights that Core itself wrote on one layout, read on another; the masters are theirs as well."""
    from megatron.core import dist_checkpointing

    place = Path(folder) / "core"
    if rank == 0:
        place.mkdir()
    dist.barrier()
    engine = _megatron(model, layout)
    with engine.layout.active():
        parts = {f"model{number}": each.sharded_state_dict() for number, each in enumerate(engine.models)}
        dist_checkpointing.save(parts, str(place))
    again = _megatron(model, "DP4", other_model)
    again.load(place, ("model",))
    found: dict[str, Any] = {"loaded": wrong(whole_weights(again), whole_weights(engine))}
    for each in (engine, again):
        _steps(each, 1)
    found["steps"] = _furthest(whole_weights(again), whole_weights(engine))
    torch.save(found, Path(folder) / f"found-{rank}.pt")


def killed(rank: int, ranks: int, folder: str) -> None:
    """One rank is killed in the middle of its file, in the second of two steps."""
    engine = make_megatron(model_of("tied"), **LAYOUTS["TP2 PP2"])
    _steps(engine, 1)
    for step in (1, 2):
        place = Path(folder) / f"global_step_{step}"
        prepare_records(place)
        dist.barrier()
        if (rank, step) == (1, 2):
            write = sharded_checkpoint._Writer.write_data
            patch.object(sharded_checkpoint._Writer, "write_data", _dying(write)).start()
        engine.begin_save(place, ALL)
        engine.finish_save()
        dist.barrier()
        if rank == 0:
            write_manifest(place, step, step)


def _dying(write: Any) -> Any:
    def dying(*args: Any) -> None:
        write(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    return dying
