"""Worker functions of the distributed tests of FSDPEngine (imported by name in the rank processes)."""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.support.engine_cases import engine_gradients, make_batch, make_engine, token_loss, whole_weights
from tests.support.lora_cases import lora_results
from tests.support.tiny import tiny_model
from verl.models.loading import ValueModel
from verl.utils.torch_functional import distributed_masked_mean, distributed_mean_max_min_std
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common.host_snapshot import HostSnapshot

ROWS = 7  # the ranks have different numbers of rows, and of micro-batches of 2 rows
ROWS_BY_RANK = {0: slice(0, 5), 1: slice(5, 7)}
BOTH = ("log_probs", "entropy")
CHANGES = {"lr_scheduler": "cosine", "lr_warmup_steps": 1}


def run_rank(rank, ranks, folder):
    """All results that the tests check, computed in one process start; rank r writes `results-r.pt`."""
    folder = Path(folder)
    results = {}
    data = make_batch(rows=ROWS)
    rank_rows = data[ROWS_BY_RANK[rank]]
    layouts = {"all": {}, "hybrid": {"fsdp_size": 1}, "padded": {"use_remove_padding": False}, "tied": {}}
    for name, changes in layouts.items():
        engine = make_engine(tiny_model(tie_word_embeddings=name == "tied"), **changes)
        engine.forward_backward(rank_rows, token_loss, BOTH, 0.7, MicroBatching(size=2))
        results[f"gradients-{name}"] = engine_gradients(engine)
        results[f"buckets-{name}"] = [
            {key: value.clone() for key, value in part.items()} for part in engine.buckets(None, 40_000)
        ]
    results["inferred"] = dict(engine.infer(rank_rows, BOTH, 0.7, MicroBatching(size=2)).batch.items())
    results["skipped"] = skipped_step(engine, rank_rows, rank)
    results["no tokens"] = empty_steps(engine, rank_rows, rank)
    results["value"] = value_gradients(rank_rows)
    results["value weights"] = whole_weights(make_engine(value_model(), "value"))
    results["second step"] = {tied: second_gradients(rank_rows, tied) for tied in (False, True)}
    values = torch.arange(3.0) + 3 * rank
    results["statistics"] = [float(part) for part in distributed_mean_max_min_std(values)]
    results["statistics of one rank"] = [
        float(part) for part in distributed_mean_max_min_std(values if rank else values[:0])
    ]
    results["masked mean"] = float(distributed_masked_mean(values, torch.tensor([1, rank, 0])))
    results["empty"] = dict(engine.infer(rank_rows if rank else rank_rows[:0], BOTH).batch.items())

    engine = make_engine(str(folder / "model"), **CHANGES)
    engine.load(folder / "one")
    steps(engine, rank_rows, 2)
    results["loaded from one"] = whole_weights(engine)
    engine = make_engine(str(folder / "model"), **CHANGES)
    steps(engine, rank_rows, 2)
    engine.begin_save(folder / "export", ["hf_model"])
    engine.begin_save(folder / "two", ["model", "optimizer", "extra"])
    noise = torch.rand(3)
    results["rates"] = steps(engine, rank_rows, 2)  # while the checkpoint is copied and written
    results["continued"] = whole_weights(engine)
    engine.finish_save()
    resumed = make_engine(tiny_model(seed=9), **CHANGES)
    resumed.load(folder / "two")
    results["same noise"] = torch.equal(torch.rand(3), noise)
    results["rates again"] = steps(resumed, rank_rows, 2)
    results["continued again"] = whole_weights(resumed)
    results["failed saves"] = failed_saves(resumed, folder)
    results["adapters"] = lora_results(rank_rows, folder)
    torch.save(results, folder / f"results-{rank}.pt")


def steps(engine, data, count):
    rates = []
    for _ in range(count):
        engine.forward_backward(data, token_loss, ["log_probs"])
        rates.append(engine.optimizer_step())
    return rates


def second_gradients(data, tied):
    """Weights after one step, and the next gradient over several micro-batches, after an inference pass in between."""
    engine = make_engine(tiny_model(tie_word_embeddings=tied), reshard_after_forward=tied)
    engine.forward_backward(data, token_loss, BOTH, 0.7, MicroBatching(size=2))
    engine.optimizer_step()
    weights = whole_weights(engine)
    engine.infer(data, BOTH)
    engine.forward_backward(data, token_loss, BOTH, 0.7, MicroBatching(size=2))
    return weights, engine_gradients(engine)


def failed_saves(engine, folder):
    """Errors on this rank when only rank 0 cannot write its file or allocate the host copy; all ranks continue."""
    errors = []
    for name in ("extra.pt", "model.json"):
        (folder / "blocked" / name).mkdir(parents=True, exist_ok=True)
    (folder / "a file").touch()
    for save in (
        lambda: engine.save(folder / "blocked", ["extra"]),
        lambda: engine.save(folder / "blocked", ["model", "optimizer"]),
        lambda: engine.export_hf(folder / "a file"),
        lambda: without_host_memory(lambda: engine.begin_save(folder / "no memory", ["model"])),
    ):
        try:
            save()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def without_host_memory(save):
    if dist.get_rank() > 0:
        return save()
    with patch.object(HostSnapshot, "_allocate", side_effect=MemoryError("no memory")):
        return save()


def empty_steps(engine, data, rank):
    """(is empty, weights changed) of a step without trained tokens on rank 1, then on both ranks."""
    results = []
    for masked_ranks in ((1,), (0, 1)):
        before, rank_rows = whole_weights(engine), data.select()
        if rank in masked_ranks:
            rank_rows.batch["response_mask"] = torch.zeros_like(rank_rows.batch["response_mask"])
        engine.forward_backward(rank_rows, token_loss, ["log_probs"])
        empty, after = engine.optimizer_step()["empty"], whole_weights(engine)
        results.append((empty, any(not torch.equal(before[name], after[name]) for name in before)))
    return results


def skipped_step(engine, data, rank):
    """(skipped, state unchanged, number of optimizer tensors) of a step in which only rank 1 has a NaN loss."""
    engine.optimizer_step()
    before = whole_weights(engine), {key: local(value) for key, value in engine.optimizer.tensors().items()}

    def nan_on_rank_1(outputs, batch, counts):
        loss, metrics = token_loss(outputs, batch, counts)
        return loss * (math.nan if rank == 1 else 1.0), metrics

    engine.forward_backward(data, nan_on_rank_1, ["log_probs"])
    metrics = engine.optimizer_step()
    after = whole_weights(engine), {key: local(value) for key, value in engine.optimizer.tensors().items()}
    unchanged = all(torch.equal(was[key], now[key]) for was, now in zip(before, after, strict=True) for key in was)
    return metrics["skipped"], unchanged, len(before[1])


def local(value):
    return value.to_local().clone() if hasattr(value, "to_local") else value.clone()


def value_model():
    model = ValueModel(tiny_model().base_model)
    torch.manual_seed(1)
    torch.nn.init.normal_(model.score.weight)
    return model


def value_gradients(data):
    engine = make_engine(value_model(), "value")
    engine.forward_backward(data, token_loss, ["values"])
    return engine_gradients(engine)
