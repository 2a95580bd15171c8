"""What two ranks do in the engine's distributed tests; the processes import it by name."""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.support.engine_cases import engine_gradients, make_batch, make_engine, token_loss, whole_weights
from tests.support.lora_cases import adapters_at_work
from tests.support.tiny import tiny_model
from verl.models.heads import ValueModel
from verl.utils.torch_functional import distributed_masked_mean, distributed_mean_max_min_std
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common.host_snapshot import HostSnapshot

ROWS = 7  # not the same number on both ranks, and with micro-batches of 2 not the same number of those
MINE = {0: slice(0, 5), 1: slice(5, 7)}
BOTH = ("log_probs", "entropy")
CHANGES = {"lr_scheduler": "cosine", "lr_warmup_steps": 1}


def two_ranks_at_work(rank, ranks, folder):
    """Everything the tests below look at, in one start of the processes; rank r writes `<name>-r.pt`."""
    folder = Path(folder)
    found = {}
    data = make_batch(rows=ROWS)
    mine = data[MINE[rank]]
    layouts = {"all": {}, "hybrid": {"fsdp_size": 1}, "padded": {"use_remove_padding": False}, "tied": {}}
    for name, changes in layouts.items():
        engine = make_engine(tiny_model(tie_word_embeddings=name == "tied"), **changes)
        engine.forward_backward(mine, token_loss, BOTH, 0.7, MicroBatching(size=2))
        found[f"gradients-{name}"] = engine_gradients(engine)
        found[f"buckets-{name}"] = [
            {key: value.clone() for key, value in part.items()} for part in engine.buckets(None, 40_000)
        ]
    found["inferred"] = dict(engine.infer(mine, BOTH, 0.7, MicroBatching(size=2)).batch.items())
    found["skipped"] = skipped_step(engine, mine, rank)
    found["no tokens"] = empty_steps(engine, mine, rank)
    found["value"] = value_gradients(mine)
    found["value weights"] = whole_weights(make_engine(value_model(), "value"))
    found["second step"] = {tied: second_gradients(mine, tied) for tied in (False, True)}
    values = torch.arange(3.0) + 3 * rank
    found["statistics"] = [float(part) for part in distributed_mean_max_min_std(values)]
    found["masked mean"] = float(distributed_masked_mean(values, torch.tensor([1, rank, 0])))
    found["empty"] = dict(engine.infer(mine if rank else mine[:0], BOTH).batch.items())

    engine = make_engine(str(folder / "model"), **CHANGES)
    engine.load(folder / "one")
    steps(engine, mine, 2)
    found["loaded from one"] = whole_weights(engine)
    engine = make_engine(str(folder / "model"), **CHANGES)
    steps(engine, mine, 2)
    engine.begin_save(folder / "export", ["hf_model"])
    engine.begin_save(folder / "two", ["model", "optimizer", "extra"])
    noise = torch.rand(3)
    found["rates"] = steps(engine, mine, 2)  # while it is copied and written
    found["continued"] = whole_weights(engine)
    engine.finish_save()
    again = make_engine(tiny_model(seed=9), **CHANGES)
    again.load(folder / "two")
    found["same noise"] = torch.equal(torch.rand(3), noise)
    found["rates again"] = steps(again, mine, 2)
    found["continued again"] = whole_weights(again)
    found["failed saves"] = failed_saves(again, folder)
    found["adapters"] = adapters_at_work(mine, folder)
    torch.save(found, folder / f"found-{rank}.pt")


def steps(engine, data, count):
    rates = []
    for _ in range(count):
        engine.forward_backward(data, token_loss, ["log_probs"])
        rates.append(engine.optimizer_step())
    return rates


def second_gradients(data, tied):
    """Weights after one step, and the gradient there, summed over micro-batches; other passes have come between."""
    engine = make_engine(tiny_model(tie_word_embeddings=tied), reshard_after_forward=tied)
    engine.forward_backward(data, token_loss, BOTH, 0.7, MicroBatching(size=2))
    engine.optimizer_step()
    weights = whole_weights(engine)
    engine.infer(data, BOTH)
    engine.forward_backward(data, token_loss, BOTH, 0.7, MicroBatching(size=2))
    return weights, engine_gradients(engine)


def failed_saves(engine, folder):
    """What each rank raises when rank 0 alone cannot write its file, or has no room for a copy; the ranks go on
    together afterwards."""
    raised = []
    for name in ("extra.pt", "model.json"):
        (folder / "blocked" / name).mkdir(parents=True, exist_ok=True)
    (folder / "a file").touch()
    for act in (
        lambda: engine.save(folder / "blocked", ["extra"]),
        lambda: engine.save(folder / "blocked", ["model", "optimizer"]),
        lambda: engine.export_hf(folder / "a file"),
        lambda: without_room(lambda: engine.begin_save(folder / "no room", ["model"])),
    ):
        try:
            act()
        except Exception as error:
            raised.append(f"{type(error).__name__}: {error}")
    return raised


def without_room(act):
    if dist.get_rank() > 0:
        return act()
    with patch.object(HostSnapshot, "_allocate", side_effect=MemoryError("no room")):
        return act()


def empty_steps(engine, data, rank):
    """Without a token that counts on rank 1 only, then on both: whether the step was taken, and moved the weights."""
    found = []
    for masked_ranks in ((1,), (0, 1)):
        before, mine = whole_weights(engine), data.select()
        if rank in masked_ranks:
            mine.batch["response_mask"] = torch.zeros_like(mine.batch["response_mask"])
        engine.forward_backward(mine, token_loss, ["log_probs"])
        empty, after = engine.optimizer_step()["empty"], whole_weights(engine)
        found.append((empty, any(not torch.equal(before[name], after[name]) for name in before)))
    return found


def skipped_step(engine, data, rank):
    """Only rank 1's loss is broken."""
    engine.optimizer_step()
    before = whole_weights(engine), {key: local(value) for key, value in engine._optimizer.tensors().items()}

    def broken_on_rank_1(outputs, batch, counts):
        loss, metrics = token_loss(outputs, batch, counts)
        return loss * (math.nan if rank == 1 else 1.0), metrics

    engine.forward_backward(data, broken_on_rank_1, ["log_probs"])
    metrics = engine.optimizer_step()
    after = whole_weights(engine), {key: local(value) for key, value in engine._optimizer.tensors().items()}
    same = all(torch.equal(was[key], now[key]) for was, now in zip(before, after, strict=True) for key in was)
    return metrics["skipped"], same, len(before[1])


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
