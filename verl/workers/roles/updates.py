"""Walking through the mini-batches of a training step: forward and backward, optimizer step, metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.protocol import DataProto
from verl.utils.progress import expect
from verl.workers.engine.base import LossFn, Metrics, MicroBatching, TrainEngine
from verl.workers.engine.common.step_checks import EMPTY, REASONS, REFUSED, SEARCHING, SKIPPED

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
    mini_batches: int,
    epochs: int,
    prefix: str,
) -> DataProto:
    """`epochs` passes over this rank's rows, which stand mini-batch by mini-batch; a result with metrics only."""
    size, rest = divmod(len(data), mini_batches)
    if rest or size == 0:
        raise ValueError(f"{len(data)} rows on this rank do not divide into {mini_batches} mini-batches.")
    expect(len(data) * epochs)
    totals: dict[str, list[tuple[float, float]]] = {}
    reached, step = 0, {}  # the last update that reached the weights; the last of all
    for place, mini_batch in enumerate(data.split(size) * epochs, start=1):
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


def micro_batching(block: Any, size_key: str, tokens_key: str, dynamic_key: str = "use_dynamic_bsz") -> MicroBatching:
    """How a configuration block cuts this rank's rows into passes."""
    values: Mapping[str, Any] = block
    if values[dynamic_key]:
        return MicroBatching(max_tokens=values[tokens_key])
    return MicroBatching(size=values[size_key])
