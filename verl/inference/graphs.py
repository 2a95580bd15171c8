"""StepGraphs: CUDA graphs of model steps, captured once per size, which save the launch overhead of kernels."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch

from verl.utils.buffer_sizes import graph_sizes

__all__ = ["CudaRecorder", "GraphOptions", "GraphRecorder", "StepGraphs", "StepInputs", "always_permitted"]

logger = logging.getLogger(__name__)

_Step: TypeAlias = tuple[bool, int]
"""Whether the step has prefills, and its size in tokens with padding."""


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


@dataclass(frozen=True)
class GraphOptions:
    """Options of CUDA graphs."""

    max_tokens: int
    """Maximum tokens of a step."""
    reserved_bytes: int
    """Memory that the KV cache leaves for the tensors of all graphs."""
    in_lockstep: bool = False
    """Whether other ranks run the same steps, so that all must capture the same graphs at the same time."""


def always_permitted() -> AbstractContextManager[bool]:
    """Context of a capture that no other thread can disturb."""
    return nullcontext(True)


class GraphRecorder(Protocol):
    """Records the work that a function launches on a device."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what `run` launches, without running it; the returned function launches it."""


class CudaRecorder:
    """Captures CUDA graphs, which share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # A failed capture does not restore the stream; the outer context does.
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            run()
        return graph.replay


class StepGraphs:
    """CUDA graphs by kind of step and size. Graphs that are not captured in advance are captured when a step of their
    size first runs.

    A model whose step synchronises with the device (some MoE models) cannot be captured and runs eagerly.
    """

    def __init__(
        self,
        decode: Callable[..., torch.Tensor],
        mixed: Callable[..., torch.Tensor],
        last_tokens: torch.Tensor,
        max_sequences: int,
        max_tokens: int,
        recorder: GraphRecorder,
        may_capture: Callable[[], AbstractContextManager[bool]],
        skips_out_of_memory: bool = True,
    ) -> None:
        """`decode`: `ModelRunner.forward_decode`; `mixed`: `ModelRunner.forward_mixed`. `last_tokens` has an entry per
        slot; the last slot is for padding.

        `may_capture`: context of a capture; if it yields False, the step runs without its graph, which a later step
        captures. `skips_out_of_memory`: steps whose graph does not fit into memory run without it; False: they raise.
        """
        device = last_tokens.device
        self._decode, self._mixed = decode, mixed
        self._last_tokens = last_tokens
        self._max_sequences = max_sequences
        self._recorder, self._may_capture = recorder, may_capture
        self._skips_out_of_memory = skips_out_of_memory
        self._decode_sizes, self._mixed_sizes = graph_sizes(max_sequences, max_tokens)
        self._padding_slot = len(last_tokens) - 1
        self._can_capture = True
        self._replays: dict[_Step, Callable[[], None]] = {}
        self._failed_captures: set[_Step] = set()
        """Steps whose capture has failed. They are not captured again: every attempt empties the allocator's cache."""
        # Inputs of the graphs. Rows beyond those of a step refer to the padding slot.
        tokens = max(self._decode_sizes[-1], self._mixed_sizes[-1])
        self._ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._rows = torch.full((tokens,), self._padding_slot, dtype=torch.int64, device=device)
        self._positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._starts = torch.zeros(max_sequences + 1, dtype=torch.int32, device=device)
        self._sequence_rows = torch.full((max_sequences,), self._padding_slot, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(max_sequences, dtype=torch.int32, device=device)
        self._hidden: torch.Tensor | None = None
        """Output of every graph, [tokens, hidden]; the next step overwrites it."""

    @property
    def captured(self) -> int:
        """Number of graphs."""
        return len(self._replays)

    def capture_largest(self) -> None:
        """Capture the largest graph of each kind. They determine the size of the memory pool: later captures use it in
        any order without enlarging it. No other thread may use the device."""
        self._capture_each([(True, self._mixed_sizes[-1]), (False, self._decode_sizes[-1])])

    def capture_all(self) -> None:
        """Capture every graph. No other thread may use the device."""
        mixed = [(True, size) for size in self._mixed_sizes]
        self._capture_each(mixed + [(False, size) for size in self._decode_sizes])

    def _capture_each(self, steps: list[_Step]) -> None:
        for step in sorted(steps, key=lambda step: -step[1]):
            self._run(step)
            self._record(step)

    def run(self, inputs: StepInputs, has_prefills: bool) -> torch.Tensor | None:
        """Run a step, padded to the size of its graph; returns its hidden states [T or more, hidden], padding last,
        valid until the next step. None if no graph can be captured for it; it must then be run without padding."""
        sizes = self._mixed_sizes if has_prefills else self._decode_sizes
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
        step = (has_prefills, size)
        if step in self._replays:
            self._replays[step]()
        else:
            self._run(step)  # compiles kernels and fills caches of libraries, which is not possible during a capture
            self._capture(step)
        assert self._hidden is not None
        return self._hidden[:size]

    def _set_sequences(self, inputs: StepInputs) -> None:
        prefilled, count, sequences = len(inputs.prefill_ids), len(inputs.token_rows), len(inputs.lengths)
        self._ids[:prefilled].copy_(inputs.prefill_ids)
        self._ids[prefilled:count].copy_(self._last_tokens[inputs.token_rows[prefilled:]])
        self._starts[: sequences + 1].copy_(inputs.query_starts)
        # Padding sequences are empty: they start where the last one ends.
        self._starts[sequences + 1 :].fill_(count)
        self._sequence_rows[:sequences].copy_(inputs.sequence_rows)
        self._lengths[:sequences].copy_(inputs.lengths)

    def _capture(self, step: _Step) -> None:
        """Capture the graph of a step that has run, if this is possible now."""
        if self._can_capture and step not in self._failed_captures:
            with self._may_capture() as permitted:
                if permitted:
                    self._record(step)

    def _record(self, step: _Step) -> None:
        if not self._can_capture:
            return
        try:
            self._replays[step] = self._recorder.record(partial(self._run, step))
        except torch.OutOfMemoryError as error:
            if not self._skips_out_of_memory:
                raise
            self._failed_captures.add(step)
            logger.warning("steps of %d tokens run without a CUDA graph, which does not fit: %s", step[1], error)
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if any(has_prefills == step[0] for has_prefills, _ in self._replays):
                self._failed_captures.add(step)  # a step of this kind was captured: the model is not the cause
                logger.warning("steps of %d tokens run without a CUDA graph: its capture failed: %s", step[1], reason)
                return
            self._can_capture = False
            logger.warning("steps of this model cannot be captured as CUDA graphs and run eagerly: %s", reason)

    def _run(self, step: _Step) -> None:
        """Run a step on the inputs of the graphs, and write its hidden states to their output."""
        has_prefills, size = step
        hidden = self._run_mixed(size) if has_prefills else self._run_decode(size)
        if self._hidden is None:
            self._hidden = hidden.new_empty(len(self._rows), hidden.shape[-1])
        self._hidden[:size].copy_(hidden)

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
