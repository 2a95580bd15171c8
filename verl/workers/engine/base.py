"""TrainEngine: the interface between roles and training engines, independent of how the model is sharded."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch

from verl.protocol import DataProto
from verl.types.weights import Bucket, Manifest, RequestedRows

Metrics: TypeAlias = dict[str, tuple[float, float | None]]
"""(sum, count) by metric name; results of micro-batches and ranks are added. The count is None for a term of a sum over
the whole optimizer step, such as the loss."""


@dataclass(frozen=True)
class MicroBatching:
    """Limit of a micro-batch; with neither field set, all rows of a rank form one micro-batch."""

    size: int | None = None
    """Maximum number of rows."""
    max_tokens: int | None = None
    """Maximum number of tokens without padding."""

    def __post_init__(self) -> None:
        for key, value in (("size", self.size), ("max_tokens", self.max_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"micro batch {key}: {value} is less than 1. Use 1 or more.")

    @classmethod
    def from_config(cls, use_dynamic_bsz: bool, size: int | None, max_tokens: int | None) -> MicroBatching:
        """Use `max_tokens` with dynamic batch sizes, otherwise `size`."""
        return cls(max_tokens=max_tokens) if use_dynamic_bsz else cls(size=size)

    def scaled_by(self, ranks: int) -> MicroBatching:
        """Return the limit for `ranks` ranks that share every row: their token budgets add up."""
        return self if self.max_tokens is None else replace(self, max_tokens=self.max_tokens * ranks)


ALL_ROWS = MicroBatching()


TOP_K_FIELDS = ("top_ids", "top_log_probs")
"""Additional fields returned by `infer` with `top_k`."""


@dataclass(frozen=True)
class Counts:
    """Denominators of a loss: sums over one optimizer step and all data-parallel ranks."""

    tokens: float
    """Positions with response_mask 1; if the batch has `loss_weights`, the sum of their weights."""
    sequences: float
    """Trajectories that have tokens with response_mask 1. Each row counts as the fraction of them that it contains."""


LossFn: TypeAlias = Callable[
    [dict[str, torch.Tensor], DataProto, Counts],
    tuple[torch.Tensor, Mapping[str, tuple["float | torch.Tensor", "float | torch.Tensor | None"]]],
]
"""(outputs, each [b, R]; the micro-batch on the engine's device; counts) -> (loss divided by counts, metrics)."""


class UnmergedSource(Protocol):
    """The frozen weights of a model with LoRA adapters, and the adapters: `<layer>.lora_A.weight` [rank, inputs], and
    `<layer>.lora_B.weight` [outputs, rank], which includes the scale. Methods as in `TrainEngine`."""

    trained_names: frozenset[str]
    """Names of the adapters' tensors; the others never change."""

    def manifest(self) -> Manifest: ...

    def buckets(
        self, dtype: torch.dtype | None, max_bytes: int, requested: Sequence[RequestedRows] | None = None
    ) -> Iterator[Bucket]: ...


class TrainEngine(Protocol):
    """One rank of a sharded model.

    `outputs` are names of per-token fields [B, R]; column t belongs to `responses[:, t]`. All are float32, and 0 at
    padding of the response:

    - `log_probs`, `entropy`: of a causal LM, at `temperature`;
    - `other_log_probs` [B, R, K]: of a causal LM, for the tokens in the column `teacher_top_ids`;
    - `values`: of a value model, for the state before the token; `last_value` [B]: after the last token of the row;
    - `scores` [B]: of a sequence classifier.

    Every method except `manifest` and `finish_save` is a collective: all ranks call it in the same order. Ranks of the
    same tensor-parallel group or pipeline receive the same rows. On a rank without outputs (an earlier pipeline stage)
    `loss_fn` is not called, metrics are {} and `infer` returns no columns.

    Progress is counted in rows (`verl.utils.progress`): `infer` calls `expect` and `tick`; `forward_backward` only
    calls `tick`, because its caller knows the number of steps.
    """

    dp_rank: int
    """Index of this rank's part of a batch, out of `dp_size`; ranks that share rows have the same index."""
    dp_size: int
    collects: bool
    """Whether results are collected from this rank: true on one of the ranks that share rows, which has outputs."""
    device: torch.device

    def forward_backward(
        self,
        data: DataProto,
        loss_fn: LossFn,
        outputs: Sequence[str],
        temperature: float = 1.0,
        micro: MicroBatching = ALL_ROWS,
        counts: Counts | None = None,
    ) -> Metrics:
        """Accumulate the gradient of `data`, this rank's rows of one optimizer step, and return this rank's metrics.

        Without `counts`, they are summed over the `response_mask` of all ranks before the forward pass.
        """

    def optimizer_step(self) -> dict[str, float]:
        """Clip the gradient, step, advance the schedule and zero the gradient.

        Returns `grad_norm`, `lr` and one flag per reason to skip a step, 1 if the step was skipped for this reason. A
        skipped step leaves weights, moments and schedule unchanged on all ranks. Reasons: a non-finite gradient
        (`skipped`), no token with loss (`empty`), a float16 loss scale that is still too large (`loss_scale_search`), a
        learning rate far above the size of the weights (`refused`). With compiled layers also `recompiles`, the number
        of graphs that this process has compiled since the previous step.
        """

    def weights_finite(self, thorough: bool) -> bool:
        """Return whether all trained weights are finite; with `thorough`, also the outputs of a short forward pass."""

    def infer(
        self,
        data: DataProto,
        outputs: Sequence[str],
        temperature: float = 1.0,
        micro: MicroBatching = ALL_ROWS,
        top_k: int = 0,
    ) -> DataProto:
        """Compute the fields `outputs` without gradients; return them on the CPU, in the row order of `data`.

        With `meta_info["eager"]` nothing is compiled for this pass.

        With `top_k`, a causal LM also returns `top_ids` and `top_log_probs` [B, R, top_k]: the most likely tokens at
        each position in descending order.
        """

    def base_weights(self) -> AbstractContextManager[None]:
        """Context in which a model with LoRA adapters computes without them (as the reference policy)."""

    def manifest(self) -> Manifest:
        """Return shape and dtype of every weight of the full model by Hugging Face name, adapters merged."""

    def unmerged(self) -> UnmergedSource | None:
        """Return the weights without merging LoRA adapters; None for a model without adapters."""

    def buckets(
        self, dtype: torch.dtype | None, max_bytes: int, requested: Sequence[RequestedRows] | None = None
    ) -> Iterator[Bucket]:
        """Yield the weights of `manifest` in buckets of at most `max_bytes`, cast to `dtype` if given; all ranks in
        lockstep.

        `requested`: the rows that each rank receives, the same list on all ranks; tensors larger than `max_bytes` may
        be split by rows. None: every rank receives whole tensors; a tensor larger than `max_bytes` forms its own
        bucket.

        Tensors may alias the live weights: do not write to them.
        """

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move to host memory ("cpu"), or back to the engine's device ("device")."""

    def offload(self) -> None:
        """Move weights and optimizer state to host memory, as far as the configuration offloads them between phases."""

    def on_device(self, optimizer: bool = True) -> AbstractContextManager[None]:
        """Context of one phase: the model, and with `optimizer` its state, is on the device; `offload` at exit."""

    def begin_save(self, path: str | os.PathLike, contents: Collection[str]) -> None:
        """Save the current state under `path`; writing may continue in the background after this returns.

        `model`, `optimizer` and `extra` (schedule, random states of all ranks) are written in shards, `hf_model` as by
        `export_hf` to `path/huggingface`. `model` contains the trained weights; with LoRA, `lora_adapter` is written as
        well, in peft's format. Raises FloatingPointError, and writes nothing, if weights are not finite.

        Methods that change or move the state wait until it has been copied. A second save waits for the first.
        """

    def finish_save(self) -> None:
        """Wait until the save is written and raise its error, if any. Not a collective; thread-safe."""

    def save(self, path: str | os.PathLike, contents: Collection[str]) -> None:
        """`begin_save`, then `finish_save`."""

    def load(self, path: str | os.PathLike, contents: Collection[str]) -> None:
        """Load a checkpoint written by `save` on any number of ranks; `hf_model` is ignored."""

    def export_hf(self, path: str | os.PathLike) -> None:
        """Write the full model in Hugging Face format."""
