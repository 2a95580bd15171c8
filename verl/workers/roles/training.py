"""What roles share: starting an engine, inference, epochs of mini-batches, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pkgutil import resolve_name
from typing import Any

import numpy as np

from verl.config.engine import CheckpointConfig
from verl.config.names import TRAINING_ENGINES
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.progress import expect
from verl.workers.engine.base import TOP, LossFn, Metrics, MicroBatching, TrainEngine
from verl.workers.engine.common.groups import largest
from verl.workers.engine.common.optim import EMPTY, REASONS, REFUSED, SEARCHING, SKIPPED

__all__ = ["SavingWorker"]


# The same quantity under the name that users' dashboards know.
ALIASES = {
    "actor/policy_loss": "actor/pg_loss",
    "critic/value_loss": "critic/vf_loss",
}

# Present only where the weights are lost: the number of the update, of this training step, that last reached them.
LOST_AT = "lost_at"


def run_epochs(
    engine: TrainEngine,
    data: DataProto,
    loss_fn: LossFn,
    outputs: Sequence[str],
    temperature: float,
    micro: MicroBatching,
    mini_batches: int | Sequence[int],
    epochs: int,
    prefix: str,
) -> DataProto:
    """`epochs` passes over this rank's rows, which stand mini-batch by mini-batch; a result with metrics only.

    `mini_batches` are the rows of each, or the number of equal ones; as many on every rank.
    """
    sizes = rows_of_mini_batches(len(data), mini_batches)
    parts = [data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    expect(len(data) * epochs)
    totals: dict[str, list[tuple[float, float]]] = {}
    reached, step = 0, {}  # the last update that reached the weights; the last of all
    for place, mini_batch in enumerate(parts * epochs, start=1):
        found = engine.forward_backward(mini_batch, loss_fn, outputs, temperature=temperature, micro=micro)
        step = engine.optimizer_step()
        _record(totals, prefix, found, step, engine.dp_size)
        if not any(step[reason] for reason in REASONS):
            reached = place
    # Where the last pass gave no finite gradient, the batch may be at fault, or the weights that came before it.
    if not engine.sound(thorough=bool(step[SKIPPED] or step[SEARCHING])):
        totals[f"{prefix}/{LOST_AT}"] = [(float(reached), 1.0)]
    for reason in (EMPTY, SEARCHING, REFUSED):  # rare: only where there was any
        if not any(share for share, _ in totals[f"{prefix}/{reason}_steps"]):
            del totals[f"{prefix}/{reason}_steps"]
    for name, alias in ALIASES.items():
        if name in totals:
            totals[alias] = totals[name]
    return DataProto(meta_info={"metrics": totals})


def rows_of_mini_batches(rows: int, mini_batches: int | Sequence[int]) -> list[int]:
    """The rows of each mini-batch: as given, or so many equal ones."""
    sizes = [rows // mini_batches] * mini_batches if isinstance(mini_batches, int) else list(mini_batches)
    if sum(sizes) != rows or not sizes or min(sizes) < 1:
        raise ValueError(f"{rows} rows on this rank do not divide into mini-batches: {mini_batches}.")
    return sizes


def mini_batches_of_call(
    data: DataProto, prompts: int | None, configured: int, n: int, engine: TrainEngine
) -> list[int]:
    """The rows of each mini-batch on this rank for one update call.

    Precedence: an explicit number of `prompts` per mini-batch, the mini-batches that the controller put into
    `meta_info`, the `configured` number of prompts. `n`: rows per prompt in batches without `uid`.
    """
    if prompts is None and "mini_batches" in data.meta_info:
        return rows_of_mini_batches(len(data), data.meta_info["mini_batches"])
    return mini_batches_of_prompts(data, configured if prompts is None else prompts, n, engine)


def mini_batches_of_prompts(data: DataProto, prompts: int, n: int, engine: TrainEngine) -> list[int]:
    """The rows of each mini-batch of `prompts` prompts over all ranks, where the controller did not cut the batch.

    Runs of whole prompts by `uid`; without that column a prompt has `n` rows. A collective.
    """
    uids = np.asarray(data.non_tensor_batch["uid"] if "uid" in data.non_tensor_batch else np.arange(len(data)) // n)
    starts = [row for row in range(len(uids)) if row == 0 or uids[row] != uids[row - 1]]
    most, fewest = (largest(count, engine.device) for count in (len(starts), -len(starts)))
    parts = max(1, min(-fewest, most * engine.dp_size // prompts))
    bounds = [*(starts[len(starts) * part // parts] for part in range(parts)), len(data)]
    return np.diff(bounds).tolist()


def _record(
    totals: dict[str, list[tuple[float, float]]], prefix: str, found: Metrics, step: dict[str, float], dp_size: int
) -> None:
    """Add the metrics of one optimizer step."""
    for reason in REASONS:
        totals.setdefault(f"{prefix}/{reason}_steps", []).append((step[reason], 1.0))
    if step[EMPTY]:
        return  # there was nothing to measure
    for name, (total, count) in found.items():
        # A part of the step's loss counts once per step, shared by the ranks that hold the parts.
        totals.setdefault(f"{prefix}/{name}", []).append((total, 1.0 / dp_size if count is None else count))
    for name, value in (("grad_norm", step["grad_norm"]), ("lr", step["lr"])):
        totals.setdefault(f"{prefix}/{name}", []).append((value, 1.0))


def start_engine(
    worker: Worker,
    mesh: str,
    model_path: str,
    kind: str,
    model_config: Any,
    block: Any,
    optim: Any = None,
    grad_clip: float | None = None,
    replays: bool = False,
) -> TrainEngine:
    """The engine of `block.strategy` for a model, frozen without `optim`. Calls dispatched over `mesh` reach it.

    `replays`: routers go through the experts that a batch has in `routed_experts`.
    """
    at = TRAINING_ENGINES[block.strategy].at
    engine: TrainEngine = resolve_name(at).of_block(
        model_path, kind, model_config, block, worker.device, optim=optim, grad_clip=grad_clip, replays=replays
    )
    worker.register_mesh_place(mesh, engine.dp_rank, collect=engine.collects)
    return engine


def inferred(
    engine: TrainEngine,
    data: DataProto,
    columns: Mapping[str, str],
    temperature: float,
    micro: MicroBatching,
    top_k: int = 0,
) -> DataProto:
    """The engine's fields as columns of the batch: {field: column}. None where results are not taken from this rank."""
    found = engine.infer(data, [name for name in columns if name not in TOP], temperature, micro, top_k)
    if not engine.collects:
        return DataProto()
    return DataProto.from_dict({column: found.batch[field] for field, column in columns.items()})


class SavingWorker(Worker):
    """A rank whose `engine` learns."""

    engine: TrainEngine

    @property
    def checkpoint(self) -> CheckpointConfig:
        """Which contents are saved and loaded."""
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, path: str) -> None:
        """Sharded state under `path`; a folder that transformers loads under `path/huggingface`.

        With LoRA: what learns, `path/lora_adapter` as peft loads it, and the merged model under `path/huggingface`.
        """
        self.begin_save(path)
        self.finish_save()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_save(self, path: str) -> None:
        """Freeze the state as it is now; it is written while other calls go on."""
        self.engine.begin_save(path, self.checkpoint.save_contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, lane="control")
    def finish_save(self) -> None:
        """Wait until what was begun is written."""
        self.engine.finish_save()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Read back what `save_checkpoint` wrote."""
        with self.engine.awake():
            self.engine.load(path, self.checkpoint.load_contents)
