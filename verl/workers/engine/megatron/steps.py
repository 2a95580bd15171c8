"""Micro-batches through Megatron-Core's schedules: one stage, stages in turn (1F1B), or chunks of stages in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from verl.models.packing import PackedRows
from verl.protocol import DataProto
from verl.utils.progress import tick
from verl.workers.engine.common.routers import Routes
from verl.workers.engine.common.trained_engine import Passes
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


def run_micro_batches(
    chunks: Sequence[Any], layout: CoreLayout, micro_batches: Sequence[MicroBatch], passes: Passes, *, backward: bool
) -> None:
    """Each of `micro_batches` forward through this rank's `chunks` and, with `backward`, back again."""
    if not micro_batches:
        return
    no_tokens = torch.zeros((), dtype=torch.int, device=micro_batches[0].rows.input_ids.device)

    def forward_step(source: Iterator[MicroBatch], chunk: Any) -> tuple[Any, Callable[..., Any]]:
        micro = next(source)
        output = chunk(micro.rows, passes.fields, micro.shape, passes.temperature, passes.top_k, micro.routes)
        if source is sources[0]:
            tick(len(micro.indices or ()))
        # Core adds up tokens to divide gradients by, and leaves the loss of a triple as it is.
        return output, lambda found: (passes.use(found, micro.part, micro.indices), no_tokens, None)

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
