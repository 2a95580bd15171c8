"""Functions that roles share: start of an engine, inference, epochs of mini-batches, checkpoints, and out-of-memory
errors that name the phase, the requested size, the memory in use, and the keys to change."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, wraps
from itertools import accumulate
from pkgutil import resolve_name
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from verl.config.devices import host_memory_available
from verl.config.engine import CheckpointConfig
from verl.config.names import TRAINING_ENGINES
from verl.planning.remedies import UNKNOWN, applicable_remedies, is_read_by_engine, remedies, value_of
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import memory_in_use
from verl.utils.progress import expect
from verl.workers.engine.base import TOP_K_FIELDS, LossFn, Metrics, MicroBatching, TrainEngine
from verl.workers.engine.common.groups import max_over_ranks
from verl.workers.engine.common.optim import EMPTY, NON_FINITE, REASONS, RECOMPILES, REFUSED, SEARCHING

# Additional names of metrics, as used in existing dashboards.
ALIASES = {
    "actor/policy_loss": "actor/pg_loss",
    "critic/value_loss": "critic/vf_loss",
}

# Metric that is present only if weights are no longer finite: the index, within the training step, of the last
# optimizer step that changed weights.
LOST_AT = "lost_at"

_P = ParamSpec("_P")
_R = TypeVar("_R")
_REQUESTED_SIZE = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")
_MAX_REMEDIES = 14
# Configuration blocks of roles whose name is not the name of their only block.
_CONFIG_NAMES = {
    "actor_rollout": ("actor", "rollout"),
    "actor_rollout_ref": ("actor", "rollout", "ref"),
    "rm": ("reward_model",),
}
_HOST_ALLOCATOR = "DefaultCPUAllocator"  # part of torch's message when host memory is exhausted


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
    """Train `epochs` epochs on this rank's rows, which are ordered by mini-batch; return a DataProto with metrics only.

    `mini_batches`: the number of rows of each mini-batch, or the number of mini-batches of equal size. All ranks have
    the same number of mini-batches.
    """
    sizes = rows_of_mini_batches(len(data), mini_batches)
    parts = [data[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    expect(len(data) * epochs)
    totals: dict[str, list[tuple[float, float]]] = {}
    recompiles: list[float] = []
    last_taken, step = 0, {}  # index of the last step that was not skipped; metrics of the last step
    for index, mini_batch in enumerate(parts * epochs, start=1):
        metrics = engine.forward_backward(mini_batch, loss_fn, outputs, temperature=temperature, micro=micro)
        step = engine.optimizer_step()
        _add_metrics(totals, prefix, metrics, step, engine.dp_size)
        recompiles += [step[RECOMPILES]] if RECOMPILES in step else []
        if not any(step[reason] for reason in REASONS):
            last_taken = index
    # A non-finite gradient of the last step may be caused by the batch, or by weights that are no longer finite.
    if not engine.weights_finite(thorough=bool(step[NON_FINITE] or step[SEARCHING])):
        totals[f"{prefix}/{LOST_AT}"] = [(float(last_taken), 1.0)]
    for reason in (EMPTY, SEARCHING, REFUSED):  # rare: reported only if they occurred
        if not any(count for count, _ in totals[f"{prefix}/{reason}_steps"]):
            del totals[f"{prefix}/{reason}_steps"]
    if recompiles:
        totals[f"perf/recompiles/{prefix}"] = [(sum(recompiles), 1.0)]
    for name, alias in ALIASES.items():
        if name in totals:
            totals[alias] = totals[name]
    return DataProto(meta_info={"metrics": totals})


def rows_of_mini_batches(rows: int, mini_batches: int | Sequence[int]) -> list[int]:
    """Return the rows of each mini-batch; ValueError if they do not add up to `rows`."""
    sizes = [rows // mini_batches] * mini_batches if isinstance(mini_batches, int) else list(mini_batches)
    if sum(sizes) != rows or not sizes or min(sizes) < 1:
        raise ValueError(f"mini-batches: {rows} rows on this rank cannot be divided into {mini_batches}.")
    return sizes


def mini_batches_of_call(
    data: DataProto, prompts: int | None, configured: int, n: int, engine: TrainEngine
) -> list[int]:
    """Return the rows of each mini-batch on this rank for one update call.

    In order of precedence: an explicit number of `prompts` per mini-batch, the mini-batches that the controller put
    into `meta_info`, the `configured` number of prompts. `n`: rows per prompt in batches without `uid`.
    """
    if prompts is None and "mini_batches" in data.meta_info:
        return rows_of_mini_batches(len(data), data.meta_info["mini_batches"])
    return mini_batches_of_prompts(data, configured if prompts is None else prompts, n, engine)


def mini_batches_of_prompts(data: DataProto, prompts: int, n: int, engine: TrainEngine) -> list[int]:
    """Return the rows of each mini-batch of `prompts` prompts over all ranks, for a batch the controller did not split.

    Mini-batches contain whole prompts by `uid`; without that column a prompt has `n` rows. A collective.
    """
    uids = np.asarray(data.non_tensor_batch["uid"] if "uid" in data.non_tensor_batch else np.arange(len(data)) // n)
    starts = [row for row in range(len(uids)) if row == 0 or uids[row] != uids[row - 1]]
    most, minus_fewest = (max_over_ranks(count, engine.device) for count in (len(starts), -len(starts)))
    parts = max(1, min(-minus_fewest, most * engine.dp_size // prompts))
    bounds = [*(starts[len(starts) * part // parts] for part in range(parts)), len(data)]
    return np.diff(bounds).tolist()


def _add_metrics(
    totals: dict[str, list[tuple[float, float]]], prefix: str, metrics: Metrics, step: dict[str, float], dp_size: int
) -> None:
    """Add the metrics of one optimizer step to `totals`."""
    for reason in REASONS:
        totals.setdefault(f"{prefix}/{reason}_steps", []).append((step[reason], 1.0))
    if step[EMPTY]:
        return  # no tokens, no metrics
    for name, (total, count) in metrics.items():
        # Metrics without a count are terms of the step's loss, summed over ranks: each rank counts 1 / dp_size.
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
    router_replay: bool = False,
) -> TrainEngine:
    """Start the engine of `block.strategy`, and register this rank's position in `mesh`, which dispatches calls.

    Without `optim` the model is frozen. `router_replay`: routers use the experts in the column `routed_experts`.
    """
    engine_class = resolve_name(TRAINING_ENGINES[block.strategy].import_path)
    engine: TrainEngine = engine_class.from_config(
        model_path, kind, model_config, block, worker.device, optim, grad_clip, router_replay
    )
    worker.register_mesh_place(mesh, engine.dp_rank, collect=engine.collects)
    return engine


def log_prob_micro_batching(block: Any) -> MicroBatching:
    """Return the micro-batch limit of a log-prob pass of the policy, the reference or a teacher."""
    return MicroBatching.from_config(
        block.log_prob_use_dynamic_bsz, block.log_prob_micro_batch_size_per_gpu, block.log_prob_max_token_len_per_gpu
    )


def update_micro_batching(block: Any) -> MicroBatching:
    """Return the micro-batch limit of an update of the actor or the critic."""
    return MicroBatching.from_config(
        block.use_dynamic_bsz, block.ppo_micro_batch_size_per_gpu, block.ppo_max_token_len_per_gpu
    )


def infer_columns(
    engine: TrainEngine,
    data: DataProto,
    columns: Mapping[str, str],
    temperature: float,
    micro: MicroBatching,
    top_k: int = 0,
) -> DataProto:
    """Return fields of the engine as columns, named by {field: column}; empty if results are not collected here."""
    fields = engine.infer(data, [name for name in columns if name not in TOP_K_FIELDS], temperature, micro, top_k)
    if not engine.collects:
        return DataProto()
    return DataProto.from_dict({column: fields.batch[field] for field, column in columns.items()})


class CheckpointedWorker(Worker):
    """A worker whose `engine` is trained, and saved in checkpoints."""

    engine: TrainEngine

    @property
    def checkpoint(self) -> CheckpointConfig:
        """The contents to save and to load."""
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def save_checkpoint(self, path: str) -> None:
        """Save the sharded state under `path`, and a Hugging Face model under `path/huggingface`.

        With LoRA: the trained weights, `path/lora_adapter` in peft's format, and the merged model.
        """
        self.begin_save(path)
        self.finish_save()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_save(self, path: str) -> None:
        """Copy the current state; it is written during later calls."""
        self.engine.begin_save(path, self.checkpoint.save_contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False, lane="control")
    def finish_save(self) -> None:
        """Wait until the save is written."""
        self.engine.finish_save()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Load a checkpoint written by `save_checkpoint`."""
        with self.engine.on_device():
            self.engine.load(path, self.checkpoint.load_contents)


def explain_out_of_memory(phase: str, config_root: str = "") -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a worker's method: out-of-memory errors name `phase` and the keys to change. `config_root`: the key of
    the worker's `config` in the configuration of a run."""

    def decorate(method: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(method)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return method(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                worker: Any = args[0]
                message = device_oom_message(
                    phase, error, *_config_and_root(worker, config_root), worker.device, _colocated_roles(worker)
                )
                raise torch.OutOfMemoryError(message) from error
            except (MemoryError, RuntimeError) as error:
                if not isinstance(error, MemoryError) and _HOST_ALLOCATOR not in str(error):
                    raise
                worker = args[0]
                message = host_oom_message(
                    phase, error, *_config_and_root(worker, config_root), _colocated_roles(worker)
                )
                raise MemoryError(message) from error

        return run

    return decorate


def device_oom_message(
    phase: str,
    error: torch.OutOfMemoryError,
    config: Any,
    config_root: str,
    device: torch.device,
    roles: Collection[str] | None = None,
) -> str:
    """Return the message for device memory: requested size, memory in use, keys of `roles` (None: all) to change."""
    size = _REQUESTED_SIZE.search(str(error))
    lines = [f"{phase}: out of device memory. " + (f"{size[1]} more were requested; " if size else "")]
    lines[0] += _in_use(device)
    if size is None:
        lines.append(f"  {str(error).splitlines()[0] if str(error) else 'no size reported'}")
    lines.append("What helps, cheapest first:")
    advice = list(applicable_remedies(phase, partial(_value_of, config, root=config_root), roles))[:_MAX_REMEDIES]
    lines += [f"  {number}. {remedy.describe(now)}" for number, (remedy, now) in enumerate(advice, start=1)]
    if not advice:
        lines.append("  more devices, or a smaller model")
    return "\n".join(lines)


def host_oom_message(
    phase: str, error: Exception, config: Any, config_root: str, roles: Collection[str] | None = None
) -> str:
    """Return the message for host memory, without remedies that offload to host memory."""
    cause = str(error).splitlines()[0] if str(error) else "no size reported"
    free = f"{host_memory_available() / 2**30:.1f} GB are free now"
    return f"{phase}: out of host memory, {free}. {cause}\n{host_advice(phase, config, config_root, roles)}"


def host_advice(phase: str, config: Any, config_root: str = "", roles: Collection[str] | None = None) -> str:
    """Return the keys to change if a phase needs more host memory than available, cheapest first."""
    value = partial(_value_of, config, root=config_root)
    applicable = applicable_remedies(phase, value, roles)
    advice = [remedy.describe(now) for remedy, now in applicable if "offload" not in remedy.key]
    read_keys = [remedy.key for remedy in remedies(phase, roles) if is_read_by_engine(remedy, value)]
    offloads = [key for key in read_keys if "offload" in key]
    active = [key for key in offloads if value(key) is True]
    steps = [
        *advice[:_MAX_REMEDIES],
        *(f"{key}=False" for key in active),
        "fewer ranks on this machine, or more memory",
    ]
    return "\n".join(["What helps, cheapest first:", *(f"  {i}. {step}" for i, step in enumerate(steps, start=1))])


def _in_use(device: torch.device) -> str:
    if device.type != "cuda":
        return "the memory in use is not reported on this device."
    peak, now = memory_in_use(device)
    free, total = torch.cuda.mem_get_info(device)
    gb = 2**30
    return (
        f"this process holds {now / gb:.1f} GB (peak {peak / gb:.1f}), and {free / gb:.1f} of the device's "
        f"{total / gb:.1f} GB are free."
    )


def _value_of(config: Any, key: str, root: str) -> Any:
    """Return the value of a full key in `config`, the block at the key `root`; UNKNOWN for keys of other blocks."""
    if root and not key.startswith(f"{root}."):
        return UNKNOWN
    return value_of(config, key.removeprefix(f"{root}.") if root else key)


def _config_and_root(worker: Any, config_root: str) -> tuple[Any, str]:
    """Return the configuration of the run and "", or, if it is unknown, the worker's `config` and `config_root`."""
    run = worker.run_config if isinstance(worker, Worker) else None
    return (worker.config, config_root) if run is None else (run, "")


def _colocated_roles(worker: Any) -> list[str] | None:
    """Return the roles that share the worker's process and device, by their configuration names; None: unknown."""
    names = worker.colocated if isinstance(worker, Worker) else ()
    return [role for name in names for role in _CONFIG_NAMES.get(name, (name,))] or None
