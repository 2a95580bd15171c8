"""Micro-batches through Megatron-Core's schedules: one stage, stages in turn (1F1B), or chunks of stages in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from verl.models.packing import PackedRows
from verl.protocol import DataProto
from verl.workers.engine.common.routers import Routes
from verl.workers.engine.megatron.layout import CoreLayout


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one pass through all stages."""

    part: DataProto
    indices: list[int] | None
    """Of its rows in the batch; None: a filler, which keeps step with other ranks."""
    rows: PackedRows
    """On the device."""
    shape: tuple[int, int]
    routes: Routes | None = None
    """Of a mixture of experts."""


Use = Callable[[dict[str, torch.Tensor], MicroBatch], torch.Tensor]
"""What the last stage does with the fields of a micro-batch; the loss, scaled, for the backward pass."""


def run_micro_batches(
    chunks: Sequence[Any],
    layout: CoreLayout,
    micro_batches: Sequence[MicroBatch],
    fields: Sequence[str],
    temperature: float,
    use: Use,
    *,
    backward: bool,
    done: Callable[[MicroBatch], None],
) -> None:
    """Each of `micro_batches` forward through this rank's `chunks` and, with `backward`, back again.

    `done` is called on every rank with each micro-batch that has passed its first chunk.
    """
    if not micro_batches:
        return
    no_tokens = torch.zeros((), dtype=torch.int, device=micro_batches[0].rows.input_ids.device)

    def forward_step(source: Iterator[MicroBatch], chunk: Any) -> tuple[Any, Callable[..., Any]]:
        micro = next(source)
        output = chunk(micro.rows, fields, micro.shape, temperature, micro.routes)
        if source is sources[0]:
            done(micro)
        # Core adds up tokens to divide gradients by, and leaves the loss of a triple as it is.
        return output, lambda found: (use(found, micro), no_tokens, None)

    sources = [iter(micro_batches) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=sources,
        model=list(chunks),
        num_microbatches=len(micro_batches),
        # Chunks that take turns: of all of them alike. Otherwise each stage tells the next.
        seq_length=micro_batches[0].rows.input_ids.shape[1] * layout.cp.size,
        micro_batch_size=1,
        forward_only=not backward,
    )
