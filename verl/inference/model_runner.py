"""ModelRunner: executes the plan of a step on the device, in terms of slots and blocks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import numpy as np
import torch

from verl.inference.attention import AttentionBackend, AttentionStep
from verl.inference.engine import StepResults
from verl.inference.graphs import StepGraphs, StepInputs
from verl.inference.kv_cache import KVCache
from verl.inference.models import InferenceModel
from verl.inference.sampler import Sampler
from verl.inference.step_plan import SampledRows, StepDetails, StepExperts, StepPlan
from verl.types.request import TopLogProbs

__all__ = ["InputSender", "LaunchedStep", "ModelRunner", "StepInputs"]

# Elements of prompt logits computed at a time.
_BLOCK_ELEMENTS = 2**25
# Interval at which threads yield the GIL: a step waits for it twice and takes only a few milliseconds.
_SWITCH_S = 1e-4


class LaunchedStep:
    """A PendingStep: results that are being copied to the host."""

    def __init__(
        self,
        sampled: SampledRows,
        details: Callable[[], StepDetails] | None = None,
        experts: list[torch.Tensor] | None = None,
    ) -> None:
        """`experts`: [tokens, layers, k] of the positions sampled from, then of each prefill's context."""
        log_probs = torch.stack(sampled[1:])
        self._tokens, self._log_probs, self._done = sampled.tokens, log_probs, None
        self._details, self._experts = details, experts
        if log_probs.is_cuda:
            self._tokens = sampled.tokens.to("cpu", non_blocking=True)
            self._log_probs = log_probs.to("cpu", non_blocking=True)
            if experts is not None:
                self._experts = [part.to("cpu", non_blocking=True) for part in experts]
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> StepResults:
        """Return (tokens, log-probs, log-probs at temperature 1, log-probs as sampled), one entry per sampled row."""
        if self._done is not None:
            self._done.synchronize()
        full, raw, drawn = self._log_probs.tolist()
        return self._tokens.tolist(), full, raw, drawn

    def details(self) -> StepDetails:
        assert self._details is not None, "the plan was not detailed"
        return self._details()

    def experts(self) -> StepExperts:
        assert self._experts is not None, "the plan does not return experts"
        # Copied: sequences keep rows of these arrays, which would keep the step's pinned buffers alive.
        sampled, *contexts = (part.numpy().copy() for part in self._experts)
        return StepExperts(sampled, contexts)


class ModelRunner:
    """A model, its KV cache, and the state of each slot on the device: block table, last token, sampling parameters."""

    def __init__(
        self,
        model: InferenceModel,
        backend: AttentionBackend,
        kv: KVCache,
        max_num_seqs: int,
        max_model_len: int,
        use_graphs: bool,
        own_stream: bool = False,
    ) -> None:
        """`own_stream`: on a GPU, steps run on a high-priority stream, concurrently with other threads. All graphs are
        then captured here, because no other thread may free memory during a capture."""
        device = model.device
        self.model, self.kv = model, kv
        self.lag = 1 if device.type == "cuda" else 0
        self._backend = backend
        width = -(-max_model_len // kv.block_size)
        # One extra slot for the padding rows of CUDA graphs.
        self._tables = torch.full((max_num_seqs + 1, width), kv.padding_block, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._sampler = Sampler(max_num_seqs + 1, max_model_len, device)
        self._sender = InputSender(device, width)
        self._graphs: StepGraphs | None = None
        if use_graphs and device.type == "cuda":
            self._graphs = StepGraphs(self.decode, self.mixed, self._last_tokens, max_num_seqs)
        self._stream: torch.cuda.Stream | None = None
        if own_stream and device.type == "cuda":
            self._stream = self._create_stream()

    @torch.inference_mode()
    def _create_stream(self) -> torch.cuda.Stream:
        if self._graphs is not None:
            self._graphs.capture_all()
        sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
        stream = torch.cuda.Stream(self.model.device, priority=-1)
        stream.wait_stream(torch.cuda.current_stream(self.model.device))  # until tables and weights are initialised
        return stream

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step; on a GPU this returns before it has run. Steps run in launch order."""
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)  # of this thread; also sets the device
        elif self.lag:
            # A new thread starts on device 0.
            torch.cuda.set_device(self.model.device)
        inputs = self._sender.send(plan)
        self._sampler.assign(plan.new_params, plan.histories)
        if plan.block_updates:
            self._tables.view(-1).index_copy_(0, inputs.table_entries, inputs.table_blocks.int())
        hidden = self._hidden(inputs, bool(plan.prefills))
        self.kv.copy_blocks(plan.block_copies)
        logits = self.model.logits(hidden[inputs.sampled_tokens])
        sampled = self._sampler.sample(
            logits, plan.sample_slots, inputs.sample_rows, inputs.sample_positions, plan.banned, plan.masks
        )
        self._last_tokens.index_copy_(0, inputs.sample_rows, sampled.tokens)
        details = _launch_details(plan, self.model, hidden, logits) if plan.detailed else None
        return LaunchedStep(sampled, details, self._experts(plan, inputs) if plan.returns_experts else None)

    def _experts(self, plan: StepPlan, inputs: StepInputs) -> list[torch.Tensor]:
        """Experts as tensors [tokens, layers, k]: of the positions sampled from, then of each prefill's context.

        They are read within the step: a later step may assign the KV blocks to another sequence.
        """
        sampled_from = self._slots(self._tables, inputs.sample_rows, inputs.sample_positions - 1)
        parts = [self.kv.experts_at(sampled_from)]
        for prefill in plan.prefills:
            if prefill.context_experts:
                positions = torch.arange(prefill.context_experts, device=self._tables.device)
                rows = torch.full_like(positions, prefill.slot)
                parts.append(self.kv.experts_at(self._slots(self._tables, rows, positions)))
        return parts

    def _hidden(self, inputs: StepInputs, has_prefills: bool) -> torch.Tensor:
        """Hidden states of the step's tokens, [T or more, hidden]."""
        if self._graphs is not None:
            replayed = self._graphs.replay(inputs, has_prefills)
            if replayed is not None:
                return replayed
        if not has_prefills:
            return self.decode(inputs.token_rows, inputs.positions)
        return self.mixed(
            self._token_ids(inputs),
            inputs.token_rows,
            inputs.positions,
            inputs.query_starts.int(),
            inputs.sequence_rows,
            inputs.lengths.int(),
            len(inputs.prefill_ids),
        )

    def decode(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [D, hidden] of the last sampled token of each of `rows` [D], at `positions` [D]."""
        empty = rows.new_empty(0, dtype=torch.int32)
        tables = self._tables[rows]
        step = AttentionStep(
            kv_cache=self.kv.layers,
            backend=self._backend,
            slots=self._slots(tables, torch.arange(len(rows), device=rows.device), positions),
            num_prefill_tokens=0,
            query_starts=empty,
            prefill_lengths=empty,
            prefill_tables=empty,
            decode_lengths=(positions + 1).int(),
            decode_tables=tables,
        )
        return self.model.hidden(self._last_tokens[rows], positions, step)

    def mixed(
        self,
        token_ids: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        query_starts: torch.Tensor,
        sequence_rows: torch.Tensor,
        lengths: torch.Tensor,
        prefill_tokens: int,
    ) -> torch.Tensor:
        """Hidden states of packed prefill chunks and decodes. On a GPU one varlen kernel handles both."""
        decodes = 0 if self.lag else len(token_ids) - prefill_tokens
        prefills = len(lengths) - decodes
        tables = self._tables[sequence_rows]
        step = AttentionStep(
            kv_cache=self.kv.layers,
            backend=self._backend,
            slots=self._slots(self._tables, rows, positions),
            num_prefill_tokens=len(token_ids) - decodes,
            query_starts=query_starts[: prefills + 1],
            prefill_lengths=lengths[:prefills],
            prefill_tables=tables[:prefills],
            decode_lengths=lengths[prefills:],
            decode_tables=tables[prefills:],
        )
        return self.model.hidden(token_ids, positions, step)

    def _slots(self, tables: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """KV slots of tokens [T] at `positions` of the sequences with block tables `tables[rows]`."""
        size = self.kv.block_size
        return tables[rows, positions // size].long() * size + positions % size

    def _token_ids(self, inputs: StepInputs) -> torch.Tensor:
        decoded = inputs.token_rows[len(inputs.prefill_ids) :]
        return torch.cat([inputs.prefill_ids, self._last_tokens[decoded]])


def _launch_details(
    plan: StepPlan, model: InferenceModel, hidden: torch.Tensor, logits: torch.Tensor
) -> Callable[[], StepDetails]:
    """Launch the plan's top and prompt log-probs; the returned function waits for the device and returns them.

    `hidden` [tokens, hidden] of the step; `logits` [samples, vocab].
    """
    rows = [row for row, _ in plan.top_rows]
    top = [_top_log_probs(logits[rows], [0] * len(rows), max(count for _, count in plan.top_rows))] if rows else []
    prompts = []
    first, size = 0, max(1, _BLOCK_ELEMENTS // logits.shape[-1])
    for prefill in plan.prefills:
        if prefill.targets:
            parts = [prefill.targets[start : start + size] for start in range(0, len(prefill.targets), size)]
            starts = range(first, first + len(prefill.targets), size)
            states = [hidden[start : start + len(part)] for start, part in zip(starts, parts, strict=True)]
            prompts.append(
                [_top_log_probs(model.logits(x), part, prefill.top) for x, part in zip(states, parts, strict=True)]
            )
        first += len(prefill.token_ids)
    return lambda: StepDetails(_to_lists(top)[1], [_to_lists(prompt) for prompt in prompts])


def _top_log_probs(
    logits: torch.Tensor, targets: list[int], count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`logits` [rows, vocab] → log-probs of the targets [rows]; top log-probs and their tokens [rows, count]."""
    log_probs = logits.float().log_softmax(dim=-1)
    target_log_probs = log_probs.gather(-1, torch.tensor(targets, device=logits.device).unsqueeze(-1)).squeeze(-1)
    values, tokens = log_probs.topk(min(count, logits.shape[-1]), dim=-1)
    return target_log_probs, values, tokens


def _to_lists(parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> tuple[list[float], list[TopLogProbs]]:
    """Log-probs of the targets and the most likely tokens at their positions, of all parts."""
    log_probs: list[float] = []
    tops: list[TopLogProbs] = []
    for target_log_probs, values, tokens in parts:
        log_probs += target_log_probs.tolist()
        tops += [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)]
    return log_probs, tops


# The host may be one step ahead of the device, so two buffers are in use at a time; the third is being filled.
_BUFFERS = 3


class InputSender:
    """Packs a plan's lists into one pinned buffer and copies it to the device."""

    def __init__(self, device: torch.device, table_width: int) -> None:
        self._device = device
        self._width = table_width
        self._next_buffer = 0
        self._pinned = [torch.empty(0, dtype=torch.int64)] * _BUFFERS
        self._on_device_buffers = [torch.empty(0, dtype=torch.int64)] * _BUFFERS

    def send(self, plan: StepPlan) -> StepInputs:
        """Copy the plan to the device. The result is valid until two more plans have been sent."""
        lists = _flatten_plan(plan, self._width)
        ends = np.cumsum([len(values) for values in lists])
        numbers = np.fromiter(itertools.chain.from_iterable(lists), np.int64, int(ends[-1]))
        tensors = self._copy_to_device(numbers).tensor_split(ends[:-1].tolist())
        return StepInputs(*tensors)

    def _copy_to_device(self, numbers: np.ndarray) -> torch.Tensor:
        if self._device.type == "cpu":
            return torch.from_numpy(numbers)
        buffer, size = self._next_buffer, len(numbers)
        self._next_buffer = (buffer + 1) % _BUFFERS
        if self._pinned[buffer].numel() < size:
            self._pinned[buffer] = torch.empty(2 * size, dtype=torch.int64, pin_memory=True)
            self._on_device_buffers[buffer] = torch.empty(2 * size, dtype=torch.int64, device=self._device)
        self._pinned[buffer].numpy()[:size] = numbers
        copied = self._on_device_buffers[buffer][:size]
        copied.copy_(self._pinned[buffer][:size], non_blocking=True)
        return copied


def _flatten_plan(plan: StepPlan, width: int) -> list[list[int]]:
    """The fields of StepInputs, in order."""
    rows: list[int] = []
    positions: list[int] = []
    ids: list[int] = []
    starts = [0]
    lengths: list[int] = []
    sampled: list[int] = []
    for chunk in plan.prefills:
        count = len(chunk.token_ids)
        rows += [chunk.slot] * count
        positions += range(chunk.start, chunk.start + count)
        ids += chunk.token_ids
        lengths.append(chunk.start + count)
        sampled += [starts[-1] + count - 1] * len(chunk.samples)
        starts.append(starts[-1] + count)
    first = starts[-1]
    decodes = range(first, first + len(plan.decode_slots))
    return [
        rows + plan.decode_slots,
        positions + plan.decode_positions,
        ids,
        [*starts, *(token + 1 for token in decodes)],
        [chunk.slot for chunk in plan.prefills] + plan.decode_slots,
        lengths + [position + 1 for position in plan.decode_positions],
        [*sampled, *decodes],
        plan.sample_slots,
        plan.sample_positions,
        [slot * width + column for slot, column, _ in plan.block_updates],
        [block for _, _, block in plan.block_updates],
    ]
