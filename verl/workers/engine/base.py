"""TrainEngine: what a role may ask of a training engine, whatever shards the model underneath."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch

from verl.protocol import DataProto
from verl.types.weights import Bucket, Manifest, Wanted

Metrics: TypeAlias = dict[str, tuple[float, float | None]]
"""(sum, count) per name: parts of any size add up. A count of None: a part of one number of the whole step."""


@dataclass(frozen=True)
class MicroBatching:
    """How a rank's rows are cut for one forward pass each; neither set: all rows at once."""

    size: int | None = None
    """Rows per micro-batch."""
    max_tokens: int | None = None
    """Or as many rows as fit this many tokens (padding not counted)."""

    @classmethod
    def by(cls, tokens: bool, size: int | None, max_tokens: int | None) -> MicroBatching:
        """As configurations say it: by `max_tokens` if they count tokens, else by `size`."""
        return cls(max_tokens=max_tokens) if tokens else cls(size=size)

    def shared_by(self, ranks: int) -> MicroBatching:
        """Where several ranks share every row, their token budgets add up."""
        return self if self.max_tokens is None else replace(self, max_tokens=self.max_tokens * ranks)


ALL_ROWS = MicroBatching()


TOP = ("top_ids", "top_log_probs")
"""Fields that `infer` gives with `top_k`."""


@dataclass(frozen=True)
class Counts:
    """What a loss is divided by: sums over one whole optimizer step and all data-parallel ranks."""

    tokens: float
    """Positions with response_mask 1; where a batch has `loss_weights`, the sum of theirs."""
    sequences: float
    """Trajectories that have at least one; a row is its share of its trajectory's."""


LossFn: TypeAlias = Callable[
    [dict[str, torch.Tensor], DataProto, Counts],
    tuple[torch.Tensor, Mapping[str, tuple["float | torch.Tensor", "float | torch.Tensor | None"]]],
]
"""(outputs, each [b, R]; the micro-batch on the engine's device; counts) -> (loss divided by counts, metrics)."""


class TrainEngine(Protocol):
    """One rank's part of a model in training.

    `outputs` name per-token fields [B, R] whose column t belongs to `responses[:, t]`: `log_probs` and `entropy` (of a
    causal LM, at `temperature`), `values` (of a value model: of the state before that token). A sequence classifier
    gives `scores` [B]. All float32, and 0 where the response is padding.

    A value model also gives `last_value` [B]: of the state after the row's last token. A causal LM gives
    `other_log_probs` [B, R, K], too: those of the tokens that a batch names beside each in `teacher_top_ids`.

    Every method but `manifest` is a collective: all ranks call it, in the same order. Ranks that share rows (of a
    tensor-parallel group, the stages of a pipeline) get the same ones. Where a rank has no outputs, `loss_fn` is not
    called, metrics are {} and `infer` gives no columns.

    Rows are counted per micro-batch (`verl.utils.progress`): `infer` expects its rows and ticks them;
    `forward_backward` only ticks, for its caller knows how many steps there are.
    """

    dp_rank: int
    """Which of the `dp_size` parts of a batch this rank works on; ranks that share one have the same."""
    dp_size: int
    collects: bool
    """Whether results are taken from this rank: one of those that share a part, and one that has outputs."""
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
        """Add the gradient of this rank's rows of one optimizer step; takes no step.

        Without `counts` they are summed over the ranks' `response_mask` first. Returns this rank's metrics.
        """

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, advance the schedule, zero the gradients: `grad_norm`, `lr`, and 1 under what kept it from that.

        A step that is not taken leaves weights, moments and schedule untouched on all ranks: a gradient that is not
        finite on any (`skipped`), no token that counts on any (`empty`), a float16 loss scale that is still too large
        (`loss_scale_search`), a step far larger than the weights (`refused`).
        """

    def sound(self, thorough: bool) -> bool:
        """Whether the weights are finite; `thorough`: and what they give for a few tokens, which takes a pass."""

    def infer(
        self,
        data: DataProto,
        outputs: Sequence[str],
        temperature: float = 1.0,
        micro: MicroBatching = ALL_ROWS,
        top_k: int = 0,
    ) -> DataProto:
        """The fields without gradient, on the CPU, in the order of the rows. With `top_k` of a causal LM also `top_ids`
        and `top_log_probs` [B, R, top_k]: of the likeliest tokens at each place, the likeliest first."""

    def base_weights(self) -> AbstractContextManager[None]:
        """Within it a model with LoRA adapters computes without them: the reference, at no memory."""

    def manifest(self) -> Manifest:
        """Every weight of the whole model under its Hugging Face name, with adapters added in."""

    def buckets(
        self, dtype: torch.dtype | None, max_bytes: int, wanted: Sequence[Wanted] | None = None
    ) -> Iterator[Bucket]:
        """Those weights in parts of at most `max_bytes`, as `dtype` if given. All ranks walk in lockstep.

        `wanted` says for every rank what of them it gets, the same on all ranks; rows of a tensor above `max_bytes` may
        then come apart. None: every rank gets all of them whole (and a larger tensor alone).

        Tensors may alias the live weights: read or copy them, do not write.
        """

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move to host memory ("cpu"), or back to the engine's own ("device")."""

    def park(self) -> None:
        """Between phases: what the engine's configuration offloads moves to host memory."""

    def awake(self, optimizer: bool = True) -> AbstractContextManager[None]:
        """For one phase: on its device, the optimizer's state too if it is used; parked afterwards, also on errors."""

    def begin_save(self, path: str | os.PathLike, contents: Collection[str]) -> None:
        """Freeze the state as it is now and write it under `path`, which may go on after this returns.

        `model`, `optimizer` and `extra` (schedule, random states of all ranks) are written in shards, and as `hf_model`
        what `export_hf` writes under `path/huggingface`. `model` is what learns; of LoRA also `lora_adapter`, which
        peft loads. Weights that are not sound raise FloatingPointError and are not written.

        Whatever changes or moves the state waits for it to be copied. A second save waits for the first one's writing.
        """

    def finish_save(self) -> None:
        """Wait until what was begun is written, and raise what went wrong; no collective, and from any thread."""

    def save(self, path: str | os.PathLike, contents: Collection[str]) -> None:
        """Both."""

    def load(self, path: str | os.PathLike, contents: Collection[str]) -> None:
        """Read back what `save` wrote, also with another number of ranks; `hf_model` is not read."""

    def export_hf(self, path: str | os.PathLike) -> None:
        """Write the whole model as transformers loads it."""
