"""ModelRunner: executes the plan of a step on the device, in terms of slots and blocks of its KVCache."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch

from verl.inference.attention import AttentionBackend, AttentionStep, LayerKVCache
from verl.inference.engine import StepResults
from verl.inference.graphs import CudaRecorder, GraphOptions, StepGraphs, StepInputs, always_permitted
from verl.inference.memory import Region
from verl.inference.models import InferenceModel
from verl.inference.sampler import Sampler
from verl.inference.step_plan import Prefill, SampledRows, StepDetails, StepExperts, StepPlan
from verl.types.request import TopLogProbs
from verl.utils.buffer_sizes import MIXED_SIZES, bytes_per_token
from verl.utils.device import capture_gate, copy_to_device

__all__ = ["InputSender", "KVCache", "LaunchedStep", "ModelRunner", "StepInputs", "bytes_per_block"]

# Elements of the prompt logits [rows, vocab] that are computed at a time, which limits their memory.
_MAX_LOGIT_ELEMENTS = 2**25
# Interval in seconds after which a running thread yields the GIL to a waiting one. The engine's thread waits for the
# GIL twice per step, and a step takes only a few milliseconds: Python's default of 5 ms would be too long.
_GIL_SWITCH_S = 1e-4
# The host may be one step ahead of the device, so two buffers are in use at a time; the third is being filled.
_NUM_BUFFERS = 3


class LaunchedStep:
    """A PendingStep: results that are being copied to the host."""

    def __init__(
        self,
        sampled: SampledRows,
        details: Callable[[], StepDetails] | None = None,
        experts: list[torch.Tensor] | None = None,
    ) -> None:
        """`experts`: [tokens, layers, k] of the positions sampled from, then of each prefill's context."""
        log_probs = torch.stack([sampled.log_probs, sampled.raw_log_probs, sampled.drawn_log_probs])
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
        log_probs, raw_log_probs, sampled_log_probs = self._log_probs.tolist()
        return self._tokens.tolist(), log_probs, raw_log_probs, sampled_log_probs

    def details(self) -> StepDetails:
        assert self._details is not None, "details() requires a plan with detailed=True"
        return self._details()

    def experts(self) -> StepExperts:
        assert self._experts is not None, "experts() requires a plan with returns_experts=True"
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
        graphs: GraphOptions | None = None,
        own_stream: bool = False,
    ) -> None:
        """`graphs`: on a GPU, steps run as CUDA graphs. `own_stream`: on a GPU, steps run on a high-priority stream,
        concurrently with other threads."""
        device = model.device
        self.model, self.kv = model, kv
        self._is_cuda = device.type == "cuda"
        self.steps_ahead = 1 if self._is_cuda else 0
        self._backend = backend
        width = -(-max_model_len // kv.block_size)
        # One extra slot for the padding rows of CUDA graphs.
        self._tables = torch.full((max_num_seqs + 1, width), kv.padding_block, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._adapter_slots = torch.full((max_num_seqs + 1,), -1, dtype=torch.int64, device=device)
        self._sampler = Sampler(max_num_seqs + 1, max_model_len, device)
        self._sender = InputSender(device, width)
        self._graphs: StepGraphs | None = None
        if graphs is not None and self._is_cuda:
            self._graphs = self._prepare_graphs(graphs, max_num_seqs, own_stream)
        self._stream: torch.cuda.Stream | None = None
        if own_stream and self._is_cuda:
            self._stream = self._prepare_own_stream()

    @property
    def captured_graphs(self) -> int:
        """Number of CUDA graphs that have been captured."""
        return 0 if self._graphs is None else self._graphs.captured

    @torch.inference_mode()
    def _prepare_graphs(self, options: GraphOptions, max_num_seqs: int, own_stream: bool) -> StepGraphs:
        """Capture the largest graphs. The others are captured on first use, if no other thread uses the device then."""
        graphs = StepGraphs(
            self.forward_decode,
            self.forward_mixed,
            self._last_tokens,
            max_num_seqs,
            options.max_tokens,
            CudaRecorder(self.model.device),
            capture_gate.capture if own_stream and not options.in_lockstep else always_permitted,
            skips_out_of_memory=not options.in_lockstep,
        )
        try:
            if own_stream and options.in_lockstep:
                # The ranks capture a step's collectives together, and their other threads are busy at different times.
                graphs.capture_all()
            else:
                graphs.capture_largest()
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"rollout: a step of {min(options.max_tokens, MIXED_SIZES[-1])} tokens does not fit into memory. Lower"
                " gpu_memory_utilization, max_num_batched_tokens or engine_kwargs.native.num_blocks."
            ) from error
        return graphs

    @torch.inference_mode()
    def _prepare_own_stream(self) -> torch.cuda.Stream:
        """Shorten the GIL switch interval of this process, and create the steps' stream."""
        sys.setswitchinterval(min(_GIL_SWITCH_S, sys.getswitchinterval()))
        stream = torch.cuda.Stream(self.model.device, priority=-1)
        stream.wait_stream(torch.cuda.current_stream(self.model.device))  # until tables and weights are initialised
        return stream

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step; on a GPU this returns before it has run. Steps run in launch order."""
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)  # of this thread; also sets the device
        elif self._is_cuda:
            # A new thread starts on device 0.
            torch.cuda.set_device(self.model.device)
        inputs = self._sender.send(plan)
        self._sampler.assign(plan.new_params, plan.histories)
        if plan.block_updates:
            self._tables.view(-1).index_copy_(0, inputs.table_entries, inputs.table_blocks.int())
        if plan.new_adapters:
            self._adapter_slots.index_copy_(0, inputs.adapter_rows, inputs.adapter_slots)
        hidden = self._forward(inputs, bool(plan.prefills))
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
        sampled_from = self._kv_slots(self._tables, inputs.sample_rows, inputs.sample_positions - 1)
        parts = [self.kv.experts_at(sampled_from)]
        for prefill in plan.prefills:
            if prefill.context_experts:
                positions = torch.arange(prefill.context_experts, device=self._tables.device)
                rows = torch.full_like(positions, prefill.slot)
                parts.append(self.kv.experts_at(self._kv_slots(self._tables, rows, positions)))
        return parts

    def _forward(self, inputs: StepInputs, has_prefills: bool) -> torch.Tensor:
        """Hidden states of the step's tokens, [T or more, hidden]."""
        if self._graphs is not None:
            hidden = self._graphs.run(inputs, has_prefills)
            if hidden is not None:
                return hidden
        if not has_prefills:
            return self.forward_decode(inputs.token_rows, inputs.positions)
        return self.forward_mixed(
            self._token_ids(inputs),
            inputs.token_rows,
            inputs.positions,
            inputs.query_starts.int(),
            inputs.sequence_rows,
            inputs.lengths.int(),
            len(inputs.prefill_ids),
        )

    def forward_decode(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [D, hidden] of the last sampled token of each of `rows` [D], at `positions` [D]."""
        empty = rows.new_empty(0, dtype=torch.int32)
        tables = self._tables[rows]
        step = AttentionStep(
            kv_cache=self.kv.layers,
            backend=self._backend,
            slots=self._kv_slots(tables, torch.arange(len(rows), device=rows.device), positions),
            num_prefill_tokens=0,
            query_starts=empty,
            prefill_lengths=empty,
            prefill_tables=empty,
            decode_lengths=(positions + 1).int(),
            decode_tables=tables,
            unused_adapters=self._unused_adapters(rows),
        )
        return self.model.hidden(self._last_tokens[rows], positions, step)

    def forward_mixed(
        self,
        token_ids: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        query_starts: torch.Tensor,
        sequence_rows: torch.Tensor,
        lengths: torch.Tensor,
        num_prefill_tokens: int,
    ) -> torch.Tensor:
        """Hidden states [T, hidden] of packed prefill chunks, followed by decodes. Arguments as in `StepInputs`."""
        # On a GPU the varlen kernel also handles decodes, as prefills of one token.
        num_decodes = 0 if self._is_cuda else len(token_ids) - num_prefill_tokens
        num_prefills = len(lengths) - num_decodes
        tables = self._tables[sequence_rows]
        step = AttentionStep(
            kv_cache=self.kv.layers,
            backend=self._backend,
            slots=self._kv_slots(self._tables, rows, positions),
            num_prefill_tokens=len(token_ids) - num_decodes,
            query_starts=query_starts[: num_prefills + 1],
            prefill_lengths=lengths[:num_prefills],
            prefill_tables=tables[:num_prefills],
            decode_lengths=lengths[num_prefills:],
            decode_tables=tables[num_prefills:],
            unused_adapters=self._unused_adapters(rows),
        )
        return self.model.hidden(token_ids, positions, step)

    def _unused_adapters(self, rows: torch.Tensor) -> torch.Tensor | None:
        """`AttentionStep.unused_adapters` of tokens of the sequences in these slots."""
        adapters = self.model.adapters
        if adapters is None or adapters.options.shared:
            return None
        return adapters.unused_by(self._adapter_slots[rows])

    def _kv_slots(self, tables: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """KV slots of tokens [T] at `positions` of the sequences with block tables `tables[rows]`."""
        size = self.kv.block_size
        return tables[rows, positions // size].long() * size + positions % size

    def _token_ids(self, inputs: StepInputs) -> torch.Tensor:
        """Token ids [T] of the step: those of the prefills, then the last sampled token of each decode."""
        decode_rows = inputs.token_rows[len(inputs.prefill_ids) :]
        return torch.cat([inputs.prefill_ids, self._last_tokens[decode_rows]])


def _launch_details(
    plan: StepPlan, model: InferenceModel, hidden: torch.Tensor, logits: torch.Tensor
) -> Callable[[], StepDetails]:
    """Launch the plan's top and prompt log-probs; the returned function waits for the device and returns them.

    `hidden` [tokens, hidden] of the step; `logits` [samples, vocab].
    """
    rows = [row for row, _ in plan.top_rows]
    no_targets = [0] * len(rows)
    top = [_top_log_probs(logits[rows], no_targets, max(count for _, count in plan.top_rows))] if rows else []
    prompts = []
    first = 0
    for prefill in plan.prefills:
        if prefill.targets:
            prompts.append(_prompt_log_probs(model, hidden[first:], prefill, logits.shape[-1]))
        first += len(prefill.token_ids)
    return lambda: StepDetails(_to_lists(top)[1], [_to_lists(prompt) for prompt in prompts])


def _prompt_log_probs(
    model: InferenceModel, hidden: torch.Tensor, prefill: Prefill, vocab: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """`_top_log_probs` of the prefill's targets, in blocks of rows. `hidden` [tokens, hidden] starts at the prefill."""
    size, targets = max(1, _MAX_LOGIT_ELEMENTS // vocab), prefill.targets
    starts = range(0, len(targets), size)
    blocks = [(hidden[start : min(start + size, len(targets))], targets[start : start + size]) for start in starts]
    return [_top_log_probs(model.logits(states), block, prefill.top) for states, block in blocks]


def _top_log_probs(
    logits: torch.Tensor, targets: list[int], count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`logits` [rows, vocab] → log-probs of the targets [rows]; top log-probs and their tokens [rows, count]."""
    log_probs = logits.float().log_softmax(dim=-1)
    target_log_probs = log_probs.gather(-1, torch.tensor(targets, device=logits.device).unsqueeze(-1)).squeeze(-1)
    values, tokens = log_probs.topk(min(count, logits.shape[-1]), dim=-1)
    return target_log_probs, values, tokens


def _to_lists(parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> tuple[list[float], list[TopLogProbs]]:
    """Concatenate results of `_top_log_probs`: log-probs of the targets, and the most likely tokens per position."""
    log_probs: list[float] = []
    top_log_probs: list[TopLogProbs] = []
    for target_log_probs, values, tokens in parts:
        log_probs += target_log_probs.tolist()
        top_log_probs += [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)]
    return log_probs, top_log_probs


class InputSender:
    """Packs a plan's lists into one pinned buffer and copies it to the device."""

    def __init__(self, device: torch.device, table_width: int) -> None:
        self._device = device
        self._width = table_width
        self._next_buffer = 0
        self._pinned = [torch.empty(0, dtype=torch.int64)] * _NUM_BUFFERS
        self._on_device_buffers = [torch.empty(0, dtype=torch.int64)] * _NUM_BUFFERS

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
        self._next_buffer = (buffer + 1) % _NUM_BUFFERS
        if self._pinned[buffer].numel() < size:
            self._pinned[buffer] = torch.empty(2 * size, dtype=torch.int64, pin_memory=True)
            self._on_device_buffers[buffer] = torch.empty(2 * size, dtype=torch.int64, device=self._device)
        self._pinned[buffer].numpy()[:size] = numbers
        copied = self._on_device_buffers[buffer][:size]
        copied.copy_(self._pinned[buffer][:size], non_blocking=True)
        return copied


def _flatten_plan(plan: StepPlan, width: int) -> list[list[int]]:
    """The fields of StepInputs, in order. `width`: columns of the block tables."""
    token_rows: list[int] = []
    positions: list[int] = []
    prefill_ids: list[int] = []
    query_starts = [0]
    lengths: list[int] = []
    sampled_tokens: list[int] = []
    for prefill in plan.prefills:
        count = len(prefill.token_ids)
        token_rows += [prefill.slot] * count
        positions += range(prefill.start, prefill.start + count)
        prefill_ids += prefill.token_ids
        lengths.append(prefill.start + count)
        sampled_tokens += [query_starts[-1] + count - 1] * len(prefill.samples)
        query_starts.append(query_starts[-1] + count)
    first = query_starts[-1]
    decode_tokens = range(first, first + len(plan.decode_slots))
    return [
        token_rows + plan.decode_slots,  # token_rows
        positions + plan.decode_positions,  # positions
        prefill_ids,  # prefill_ids
        [*query_starts, *(token + 1 for token in decode_tokens)],  # query_starts
        [prefill.slot for prefill in plan.prefills] + plan.decode_slots,  # sequence_rows
        lengths + [position + 1 for position in plan.decode_positions],  # lengths
        [*sampled_tokens, *decode_tokens],  # sampled_tokens
        plan.sample_slots,  # sample_rows
        plan.sample_positions,  # sample_positions
        [slot * width + column for slot, column, _ in plan.block_updates],  # table_entries
        [block for _, _, block in plan.block_updates],  # table_blocks
        [slot for slot, _ in plan.new_adapters],  # adapter_rows
        [adapter for _, adapter in plan.new_adapters],  # adapter_slots
    ]


def bytes_per_block(model: InferenceModel, block_size: int) -> int:
    """KV bytes of `block_size` tokens in every layer."""
    return block_size * bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, model.dtype.itemsize)


class KVCache:
    """The paged KV cache: `num_blocks` blocks, and one more (`padding_block`) to which padding rows write."""

    def __init__(self, model: InferenceModel, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.padding_block = num_blocks
        self.region = Region((num_blocks + 1) * bytes_per_block(model, block_size), model.device)
        shape = (model.num_layers, 2, num_blocks + 1, block_size, model.num_kv_heads, model.head_dim)
        self._all = self.region.bytes.view(model.dtype).view(shape)
        self.layers: list[LayerKVCache] = [(layer[0], layer[1]) for layer in self._all]
        self._clear()
        self._experts: torch.Tensor | None = None

    def record_experts(self, model: InferenceModel) -> None:
        """From now on, store the experts of every token with its KV, so that a cached prefix includes its experts."""
        table = model.record_experts((self.num_blocks + 1) * self.block_size)
        self._experts = table.unflatten(0, (-1, self.block_size))

    def experts_at(self, slots: torch.Tensor) -> torch.Tensor:
        """Experts [tokens, layers, k] of the tokens whose KV is at `slots` [tokens], as a copy on the device."""
        assert self._experts is not None, "this KV cache stores no experts"
        return self._experts.flatten(0, 1)[slots]

    @property
    def held_bytes(self) -> int:
        """Bytes that are currently allocated."""
        return self.region.size if self.region.held else 0

    def release(self) -> None:
        """Free the memory; all KV is lost."""
        self.region.release()

    def restore(self) -> None:
        """Allocate the memory again; the KV is not restored."""
        self.region.restore()
        self._clear()

    def _clear(self) -> None:
        """Zero the memory on GPUs: kernels multiply masked entries by zero, which would spread NaN.

        CPU attention reads no masked entries; there, untouched memory is not even allocated.
        """
        if self.region.device.type != "cpu":
            self._all.zero_()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to), all at once."""
        if pairs:
            (index,) = copy_to_device([torch.tensor(pairs, dtype=torch.int64)], self._all.device)
            self._all[:, :, index[:, 1]] = self._all[:, :, index[:, 0]]
            if self._experts is not None:
                self._experts[index[:, 1]] = self._experts[index[:, 0]]
