"""ModelRunner: carries out a step's plan on the device. It knows slots and blocks, not requests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from verl.inference.attention.base import AttentionBackend, AttentionStep
from verl.inference.graphs import StepGraphs
from verl.inference.kv_memory import KVMemory
from verl.inference.models import InferenceModel
from verl.inference.sampler import Sampler
from verl.inference.step_details import details_of
from verl.inference.step_inputs import InputSender, StepInputs
from verl.inference.step_plan import StepDetails, StepPlan
from verl.inference.token_sampling import SampledRows

__all__ = ["ModelRunner", "Pending"]

Results = tuple[list[int], list[float], list[float], list[float]]


class Pending:
    """A launched step's results on their way to the host."""

    def __init__(self, sampled: SampledRows, details: Callable[[], StepDetails] | None = None) -> None:
        log_probs = torch.stack(sampled[1:])
        self._tokens, self._log_probs, self._done = sampled.tokens, log_probs, None
        self._details = details
        if log_probs.is_cuda:
            self._tokens = sampled.tokens.to("cpu", non_blocking=True)
            self._log_probs = log_probs.to("cpu", non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> Results:
        """(tokens, log-probs, log-probs at temperature 1, log-probs as drawn), one entry per sampled row."""
        if self._done is not None:
            self._done.synchronize()
        full, raw, drawn = self._log_probs.tolist()
        return self._tokens.tolist(), full, raw, drawn

    def details(self) -> StepDetails:
        assert self._details is not None, "the plan was not detailed"
        return self._details()


class ModelRunner:
    """A model, its KV memory, and what the device remembers of each slot: block table, last token, sampling."""

    def __init__(
        self,
        model: InferenceModel,
        backend: AttentionBackend,
        kv: KVMemory,
        max_num_seqs: int,
        max_model_len: int,
        use_graphs: bool,
    ) -> None:
        device = model.device
        self.model, self.kv = model, kv
        self.lag = 1 if device.type == "cuda" else 0
        self._backend = backend
        width = -(-max_model_len // kv.block_size)
        # One slot more than sequences: what padded rows of a graph belong to.
        self._tables = torch.full((max_num_seqs + 1, width), kv.spare_block, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._sampler = Sampler(max_num_seqs + 1, max_model_len, device)
        self._sender = InputSender(device, width)
        self._graphs: StepGraphs | None = None
        if use_graphs and device.type == "cuda":
            self._graphs = StepGraphs(self.decode, self.mixed, self._last_tokens, max_num_seqs)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Start a step; on a GPU this returns before it is done. Steps run in the order they were launched."""
        if self.lag:
            # A new thread starts on device 0.
            torch.cuda.set_device(self.model.device)
        inputs = self._sender.send(plan)
        self._sampler.assign(plan.new_params, plan.histories)
        if plan.block_updates:
            self._tables.view(-1).index_copy_(0, inputs.table_entries, inputs.table_blocks.int())
        hidden = self._hidden(inputs, bool(plan.prefills))
        self.kv.copy_blocks(plan.copies_after)
        logits = self.model.logits(hidden[inputs.sampled_tokens])
        sampled = self._sampler.sample(
            logits, plan.sample_slots, inputs.sample_rows, inputs.sample_positions, plan.banned
        )
        self._last_tokens.index_copy_(0, inputs.sample_rows, sampled.tokens)
        return Pending(sampled, details_of(plan, self.model, hidden, logits) if plan.detailed else None)

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
        """One token for each of `rows` [D]: the last one it sampled, which stands at `positions` [D]."""
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
            max_query=0,
            max_prefill_length=0,
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
        """Pieces of prompts and single tokens of other sequences, packed. On a GPU all go through one varlen kernel."""
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
            max_query=0 if self.lag else int(query_starts[: prefills + 1].diff().max()),
            max_prefill_length=0 if self.lag else int(lengths[:prefills].max()),
            decode_lengths=lengths[prefills:],
            decode_tables=tables[prefills:],
        )
        return self.model.hidden(token_ids, positions, step)

    def _slots(self, tables: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Cache slot of tokens [T] at `positions` of the sequences whose blocks `tables[rows]` lists."""
        size = self.kv.block_size
        return tables[rows, positions // size].long() * size + positions % size

    def _token_ids(self, inputs: StepInputs) -> torch.Tensor:
        decoded = inputs.token_rows[len(inputs.prefill_ids) :]
        return torch.cat([inputs.prefill_ids, self._last_tokens[decoded]])
