"""StepGraphs: CUDA graphs of model steps, captured once per size, which save the launch overhead of kernels."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl.utils.buffer_sizes import DECODE_SIZES, MIXED_SIZES

__all__ = ["StepGraphs", "StepInputs"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepInputs:
    """Inputs of a step, int64 on the device. T tokens: those of the prefills, then one per decode."""

    token_rows: torch.Tensor
    """[T]: slot of the sequence a token belongs to."""
    positions: torch.Tensor
    """[T]: position of the token in its sequence."""
    prefill_ids: torch.Tensor
    """[prefill tokens]: token ids; those of decodes are already on the device."""
    query_starts: torch.Tensor
    """[sequences + 1]: first token of each sequence of the step, prefills first."""
    sequence_rows: torch.Tensor
    """[sequences]: slots."""
    lengths: torch.Tensor
    """[sequences]: KV length after the step."""
    sampled_tokens: torch.Tensor
    """[samples]: index of the token whose hidden state is sampled from."""
    sample_rows: torch.Tensor
    """[samples]: slots."""
    sample_positions: torch.Tensor
    """[samples]: position of the sampled token."""
    table_entries: torch.Tensor
    """[updates]: flat index into the block tables."""
    table_blocks: torch.Tensor
    """[updates]"""
    adapter_rows: torch.Tensor
    """[admitted]: slots whose adapter is set."""
    adapter_slots: torch.Tensor
    """[admitted]: adapter slot, -1: none."""


class StepGraphs:
    """CUDA graphs by kind of step and size, captured on first use. All share one memory pool.

    A model whose step synchronises with the device (some MoE models) cannot be captured and runs eagerly.
    """

    def __init__(
        self,
        decode: Callable[..., torch.Tensor],
        mixed: Callable[..., torch.Tensor],
        last_tokens: torch.Tensor,
        max_sequences: int,
    ) -> None:
        """`decode`: `ModelRunner.forward_decode`; `mixed`: `ModelRunner.forward_mixed`. `last_tokens` has an entry per
        slot; the last slot is for padding."""
        device = last_tokens.device
        self._decode, self._mixed = decode, mixed
        self._last_tokens = last_tokens
        self._max_sequences = max_sequences
        self._padding_slot = len(last_tokens) - 1
        self._pool = torch.cuda.graph_pool_handle()
        self._can_capture = True
        self._graphs: dict[tuple[bool, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        # Inputs of the graphs. Rows beyond those of a step refer to the padding slot.
        tokens = MIXED_SIZES[-1]
        self._ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._rows = torch.full((tokens,), self._padding_slot, dtype=torch.int64, device=device)
        self._positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._starts = torch.zeros(max_sequences + 1, dtype=torch.int32, device=device)
        self._sequence_rows = torch.full((max_sequences,), self._padding_slot, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(max_sequences, dtype=torch.int32, device=device)

    def capture_all(self) -> None:
        """Capture every size up to `max_sequences`, the largest first: the others reuse its memory."""
        decode = [size for size in DECODE_SIZES if size < 2 * self._max_sequences]
        steps = [(True, size) for size in MIXED_SIZES] + [(False, size) for size in decode]
        for has_prefills, size in sorted(steps, key=lambda step: -step[1]):
            if not self._can_capture or self._capture(has_prefills, size) is None:
                return

    def replay(self, inputs: StepInputs, has_prefills: bool) -> torch.Tensor | None:
        """Run the step's graph; returns its hidden states, padding last, or None if there is no graph for it."""
        sizes = MIXED_SIZES if has_prefills else DECODE_SIZES
        count = len(inputs.token_rows)
        if count > sizes[-1] or not self._can_capture:
            return None
        size = sizes[bisect.bisect_left(sizes, count)]
        self._rows[:count].copy_(inputs.token_rows)
        self._positions[:count].copy_(inputs.positions)
        if count < size:
            self._rows[count:size].fill_(self._padding_slot)
            self._positions[count:size].zero_()
        if has_prefills:
            self._set_sequences(inputs)
        captured = self._graphs.get((has_prefills, size)) or self._capture(has_prefills, size)
        if captured is None:
            return None
        graph, hidden = captured
        graph.replay()
        return hidden

    def _set_sequences(self, inputs: StepInputs) -> None:
        prefilled, count, sequences = len(inputs.prefill_ids), len(inputs.token_rows), len(inputs.lengths)
        self._ids[:prefilled].copy_(inputs.prefill_ids)
        self._ids[prefilled:count].copy_(self._last_tokens[inputs.token_rows[prefilled:]])
        self._starts[: sequences + 1].copy_(inputs.query_starts)
        # Padding sequences are empty: they start where the last one ends.
        self._starts[sequences + 1 :].fill_(count)
        self._sequence_rows[:sequences].copy_(inputs.sequence_rows)
        self._lengths[:sequences].copy_(inputs.lengths)

    def _capture(self, has_prefills: bool, size: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor] | None:
        run = self._run_mixed if has_prefills else self._run_decode
        run(size)  # compiles kernels and fills caches of libraries, which is not possible during a capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                hidden = run(size)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # The step itself succeeded above: only its capture fails.
            self._can_capture = False
            reason = str(error).strip().splitlines()[0]
            logger.warning("steps of this model cannot be captured as CUDA graphs and run eagerly: %s", reason)
            return None
        self._graphs[has_prefills, size] = (graph, hidden)
        return graph, hidden

    def _run_decode(self, size: int) -> torch.Tensor:
        return self._decode(self._rows[:size], self._positions[:size])

    def _run_mixed(self, size: int) -> torch.Tensor:
        sequences = min(size, self._max_sequences)
        return self._mixed(
            self._ids[:size],
            self._rows[:size],
            self._positions[:size],
            self._starts[: sequences + 1],
            self._sequence_rows[:sequences],
            self._lengths[:sequences],
            size,
        )
