"""A model runner in plain Python whose next token is a hash of all the KV it reads: any wrong block changes the output.

The KV entry of a token is a hash of the weights, the token, its position and the entries before it, read through the
slot's block table at the moment it is computed. A lost copy, a block shared or reused too early, a stale prefix, a
wrong position or another slot's parameters therefore show up in the tokens, as they would in a real model.
"""

from __future__ import annotations

import pickle

from verl.inference.sequence import Sequence
from verl.inference.step_plan import StepPlan
from verl.types.request import Output, SamplingParams

VOCAB = 7


class HashRunner:
    """Computes each step in `launch`; `steps_ahead` only defines how many steps later the results are read."""

    def __init__(
        self, num_blocks: int, block_size: int, max_num_seqs: int, max_tokens: int, steps_ahead: int = 0
    ) -> None:
        self.steps_ahead = steps_ahead
        self.weights = 0
        self.steps = 0
        self.prefilled = 0
        self._size = block_size
        self._max_tokens = max_tokens
        self._kv: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._tables: list[dict[int, int]] = [{} for _ in range(max_num_seqs)]
        self._params = [SamplingParams()] * max_num_seqs
        self._last = [-1] * max_num_seqs

    def launch(self, plan: StepPlan) -> FinishedStep:
        plan = pickle.loads(pickle.dumps(plan))
        self._check(plan)
        self.steps += 1
        for slot, params in plan.new_params:
            self._params[slot] = params
            self._tables[slot] = {}
        for slot, column, block in plan.block_updates:
            self._tables[slot][column] = block
        states = []
        for prefill in plan.prefills:
            for offset, token in enumerate(prefill.token_ids):
                state = self._feed(prefill.slot, prefill.start + offset, token)
            states += [state] * len(prefill.samples)
            self.prefilled += len(prefill.token_ids)
        states += [
            self._feed(slot, position, self._last[slot])
            for slot, position in zip(plan.decode_slots, plan.decode_positions, strict=True)
        ]
        for source, target in plan.block_copies:
            self._kv[target] = list(self._kv[source])
        banned: dict[int, set[int]] = {}
        for row, token in plan.banned:
            banned.setdefault(row, set()).add(token)
        rows = []
        for row, (state, slot) in enumerate(zip(states, plan.sample_slots, strict=True)):
            rows.append(self._sampled(state, slot, plan.sample_positions[row], banned.get(row, set())))
            self._last[slot] = rows[-1][0]
        return FinishedStep(rows)

    def _sampled(self, state: int, slot: int, position: int, banned: set[int]) -> tuple[int, float, float, float]:
        return sampled(state, self._params[slot].key, position, banned)

    def _feed(self, slot: int, position: int, token: int) -> int:
        """Write the token's KV entry and return the resulting model state."""
        table = self._tables[slot]
        cells = [(table[p // self._size], p % self._size) for p in range(position + 1)]
        earlier = [self._kv[block][offset] for block, offset in cells[:-1]]
        assert None not in earlier, f"slot {slot} reads KV that was never written, before position {position}"
        block, offset = cells[-1]
        self._kv[block][offset] = entry = hash((self.weights, token, position, *earlier))
        return hash((*earlier, entry))

    def _check(self, plan: StepPlan) -> None:
        tokens = sum(len(prefill.token_ids) for prefill in plan.prefills) + len(plan.decode_slots)
        assert 0 < tokens <= self._max_tokens
        assert all(prefill.token_ids for prefill in plan.prefills)
        fed = [prefill.slot for prefill in plan.prefills] + plan.decode_slots
        assert len(set(fed)) == len(fed)
        assert plan.sample_slots == [s for prefill in plan.prefills for s in prefill.samples] + plan.decode_slots
        assert len(set(plan.sample_slots)) == len(plan.sample_slots) == len(plan.sample_positions)


class FinishedStep:
    """The results of a step; `wait` returns its tokens and their three log-probs."""

    def __init__(self, rows: list[tuple[int, float, float, float]]) -> None:
        self._rows = rows

    def wait(self) -> tuple[list[int], list[float], list[float], list[float]]:
        tokens, *log_probs = ([row[column] for row in self._rows] for column in range(4))
        return tokens, *log_probs


def sampled(state: int, key: int, position: int, banned: set[int]) -> tuple[int, float, float, float]:
    """A token of 0…VOCAB-1 and its three log-probs."""
    first = hash((state, key, position))
    token = next(t for t in ((first + i) % VOCAB for i in range(VOCAB)) if t not in banned)
    log_prob = -(hash((state, token)) % 1000 + 1) / 1000
    return token, log_prob, log_prob - 1, log_prob - 2


def expected(sequence: Sequence, output: Output) -> Output:
    """Recompute an output from scratch, with the weights that produced each of its tokens."""
    params = sequence.params
    expected_output = Output(finish_reason=output.finish_reason, versions=output.versions)
    for version in output.versions:
        entries: list[int] = []
        tokens = [*sequence.prompt_ids, *expected_output.token_ids]
        for position, token in enumerate(tokens):
            entries.append(hash((version, token, position, *entries)))
        banned = set(params.end_token_ids) if len(expected_output.token_ids) < params.min_new_tokens else set()
        token, log_prob, raw, drawn = sampled(hash(tuple(entries)), params.key, len(tokens), banned)
        expected_output.token_ids.append(token)
        expected_output.log_probs.append(log_prob)
        expected_output.raw_log_probs.append(raw)
        expected_output.sampled_log_probs.append(drawn)
    return expected_output
