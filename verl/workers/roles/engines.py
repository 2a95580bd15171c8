"""A role and its engine: the one its configuration names, in its place in the group, and a pass without gradient."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from verl.config.names import TRAINING_ENGINES
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.workers.engine.base import TOP, MicroBatching, TrainEngine


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
