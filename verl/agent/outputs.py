"""Convert the outputs of an agent loop to a Trajectory, which `training_rows.rows_from_trajectories` converts to rows.

Log-probs and versions of sampled tokens come from the trace of model calls: a token of a row matches a call if the call
sampled it at this position after exactly the row's preceding tokens. Unmatched tokens get the log-probs and versions
of the loop's output; without those the log-probs are NaN and the versions unknown (-1).
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from verl.agent.loop import AgentLoopOutput, TrajectoryFailed
from verl.types.request import combine_calls
from verl.types.trajectory import Row, Status, Trajectory, Turn
from verl.utils.import_utils import describe_error
from verl.workers.rollout.call_trace import CallTrace, ModelCall

__all__ = ["RowLimits", "build_trajectory", "derive_messages", "failed_trajectory"]

Messages = Sequence[Mapping[str, Any]]

NAN, UNKNOWN_VERSION = math.nan, -1


def build_trajectory(
    outputs: AgentLoopOutput | Sequence[AgentLoopOutput],
    trace: CallTrace,
    uid: str,
    sample_index: int,
    limits: RowLimits | None = None,
) -> Trajectory:
    """The trajectory of a loop's outputs, one row per output.

    With `limits`, responses that are too long are truncated; a row longer than the context is a ValueError.
    """
    outputs = [outputs] if isinstance(outputs, AgentLoopOutput) else list(outputs)
    if not outputs or not all(isinstance(output, AgentLoopOutput) for output in outputs):
        raise TypeError(f"an agent loop returned {outputs!r:.200}. Return an AgentLoopOutput, or a list of them.")
    _check_finite(outputs)
    calls = _CallIndex(trace.calls)
    outputs = outputs if limits is None else [limits.truncate(output) for output in outputs]
    rows, unmatched = [], 0
    for output, reason in zip(outputs, calls.reasons_of_incomplete_calls(outputs), strict=True):
        row, unmatched_in_row = _build_row(output, calls)
        _set_finish_reason(row, output.finish_reason or reason)
        rows.append(row)
        unmatched += unmatched_in_row
    aborted = rows[-1].finish_reason == "abort" or (calls.last_aborted and outputs[-1].finish_reason is None)
    status: Status = "aborted" if aborted else "finished"
    extra: dict[str, Any] = {}
    for output in outputs:
        extra |= output.extra_fields
    extra.pop("turn_names", None)
    extra["num_turns"] = sum(output.num_turns for output in outputs) or _count_turns(rows)
    extra["agent_metrics"] = _metrics(outputs, trace) | {"unmatched_tokens": unmatched, "status": status}
    return Trajectory(uid, sample_index, rows, status, _score(outputs), extra)


def failed_trajectory(
    error: BaseException, trace: CallTrace, uid: str, sample_index: int, prompt_ids: Sequence[int], max_response: int
) -> Trajectory:
    """The trajectory of a loop that raised: its last context, for inspection. It is excluded from training."""
    prompt: list[int] = list(prompt_ids)
    response: list[int] = []
    mask: list[int] = []
    # Skip calls without tokens: no tokens were left for a response, and their context may be longer than any row.
    for call in (call for call in trace.calls if call.output.token_ids):
        known, sampled = len(prompt) + len(response), call.output.token_ids
        if call.prompt_ids[:known] != [*prompt, *response]:
            prompt, response, mask, known = call.prompt_ids, [], [], len(call.prompt_ids)
        between = call.prompt_ids[known:]
        response = [*response, *between, *sampled]
        mask = [*mask, *([0] * len(between)), *([1] * len(sampled))]
    last_context = AgentLoopOutput(prompt, response[:max_response], mask[:max_response])
    metrics = _metrics([], trace) | {
        "failures": {error.kind if isinstance(error, TrajectoryFailed) else "loop": 1},
        "unmatched_tokens": 0,
        "status": "failed",
        "error": describe_error(error),
    }
    extra = {"num_turns": len(trace.calls), "agent_metrics": metrics}
    row, _ = _build_row(last_context, _CallIndex(trace.calls))
    return Trajectory(uid, sample_index, [row], "failed", None, extra)


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Maximum numbers of response tokens and of all tokens of a row."""

    response: int
    row: int

    def truncate(self, output: AgentLoopOutput) -> AgentLoopOutput:
        """The output with at most `response` response tokens. ValueError if it is still longer than `row`."""
        kept = len(output.response_ids[: self.response])
        if len(output.prompt_ids) + kept > self.row:
            raise ValueError(
                f"AgentLoopOutput: {len(output.prompt_ids)} prompt and {kept} response tokens are more than"
                f" max_model_len={self.row}."
            )
        if kept == len(output.response_ids):
            return output
        log_probs, versions = output.response_logprobs, output.response_versions
        return replace(
            output,
            response_ids=output.response_ids[:kept],
            response_mask=output.response_mask[:kept],
            response_logprobs=None if log_probs is None else log_probs[:kept],
            response_versions=None if versions is None else versions[:kept],
            turn_rewards=[(min(kept, position), reward) for position, reward in output.turn_rewards],
            finish_reason="length",
        )


def _metrics(outputs: Sequence[AgentLoopOutput], trace: CallTrace) -> dict[str, Any]:
    """The fields of the column `agent_metrics` that are sums over the outputs or come from the trace."""
    failures: dict[str, int] = defaultdict(int)
    tools: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for output in outputs:
        for kind, count in output.metrics.failures.items():
            failures[kind] += count
        for tool, statistics in output.metrics.tools.items():
            for name, value in statistics.items():
                tools[tool][name] += value
    metrics = [output.metrics for output in outputs]
    return {
        "generate_s": sum(output_metrics.generate_sequences for output_metrics in metrics) or trace.generate_s,
        "tool_s": sum(output_metrics.tool_calls for output_metrics in metrics),
        "compute_score_s": sum(output_metrics.compute_score for output_metrics in metrics),
        "tool_calls": sum(output_metrics.tool_call_counts for output_metrics in metrics),
        "num_preempted": sum(output_metrics.num_preempted for output_metrics in metrics) or trace.num_preempted,
        "turns": len(trace.calls),
        "failures": dict(failures),
        "tools": {tool: dict(statistics) for tool, statistics in tools.items()},
        "error": None,
    }


def _check_finite(outputs: Sequence[AgentLoopOutput]) -> None:
    """ValueError for a reward that is not finite: it fails this trajectory instead of the training step."""
    rewards = [reward for output in outputs for _, reward in output.turn_rewards]
    if not all(math.isfinite(value) for value in (*rewards, _score(outputs) or 0.0)):
        raise ValueError(f"an agent's rewards are not finite: reward_score {_score(outputs)}, turn_rewards {rewards}.")


def _score(outputs: Sequence[AgentLoopOutput]) -> float | None:
    return next((float(output.reward_score) for output in reversed(outputs) if output.reward_score is not None), None)


def _build_row(output: AgentLoopOutput, calls: _CallIndex) -> tuple[Row, int]:
    """The row of an output, and the number of its model tokens of unknown version. Consecutive tokens with the same
    mask are a turn."""
    ids = [*output.prompt_ids, *output.response_ids]
    start, turns, unmatched = len(output.prompt_ids), [], 0
    names = iter(output.extra_fields.get("turn_names", ()))
    for by_model, run in groupby(output.response_mask, bool):
        end = start + len(list(run))
        if by_model:
            tokens = calls.match(ids, start, end)
            unmatched += tokens.fill_unmatched(output, start - len(output.prompt_ids))
            turns.append(tokens.as_turn(ids[start:end]))
        else:
            turns.append(Turn("environment", ids[start:end], name=next(names, None)))
        start = end
    _add_rewards(turns, output.turn_rewards)
    return Row(output.prompt_ids, turns, output.messages), unmatched


def _set_finish_reason(row: Row, reason: str | None) -> None:
    """Set the finish reason of the last model turn; None keeps it. A row without a model turn gets an empty one."""
    if reason is None:
        return
    last = next((turn for turn in reversed(row.turns) if turn.source == "model"), None)
    if last is None:
        row.turns.append(Turn("model", [], [], [], reason))
    else:
        last.finish_reason = reason


def _count_turns(rows: Sequence[Row]) -> int:
    """The number of prompts and turns of all rows. A prefix that several rows share is counted once."""
    prefixes = set()
    for row in rows:
        prefix = hashlib.blake2b(digest_size=16)
        for token_ids in (row.prompt_ids, *(turn.token_ids for turn in row.turns)):
            if len(token_ids):
                prefix.update(np.asarray(token_ids, np.int64).tobytes())
                prefixes.add(prefix.digest())
    return len(prefixes)


def _add_rewards(turns: Sequence[Turn], rewards: Iterable[tuple[int, float]]) -> None:
    """Add each (position, reward) to the turn that contains the position or ends at it."""
    for position, reward in rewards:
        end = 0
        for turn in turns:
            end += len(turn.token_ids)
            if position <= end:
                turn.reward = (turn.reward or 0.0) + reward
                break
        else:
            if position > end:
                raise ValueError(
                    f"AgentLoopOutput.turn_rewards: position {position} is beyond the {end} response tokens."
                )


@dataclass(slots=True)
class _SampledTokens:
    """Log-probs, versions and routed experts of the tokens of one model turn."""

    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    drawn: list[float] = field(default_factory=list)
    """Log-probs under the distribution that was sampled from, after top-k, top-p and min-p; NaN: unknown."""
    finish_reason: str | None = None
    """Finish reason of the last call that has tokens in this turn; None: no call has."""
    has_drawn: bool = True
    routed_experts: Any = None
    unmatched: list[int] = field(default_factory=list)
    """Indices of tokens that match no call."""

    def add_matched(self, output: Any, count: int, position: int) -> None:
        """Add the first `count` tokens of a call's output, which are at `position` of the row."""
        self.log_probs += output.log_probs[:count]
        self.versions += output.versions[:count]
        self.drawn += output.sampled_log_probs[:count] or [NAN] * count
        self.has_drawn &= bool(output.sampled_log_probs)
        if (experts := output.routed_experts) is not None:
            self.routed_experts = combine_calls(self.routed_experts, experts[: position + count], position)
        self.finish_reason = output.finish_reason

    def add_unmatched(self, count: int) -> None:
        self.unmatched += range(len(self.log_probs), len(self.log_probs) + count)
        self.log_probs += [NAN] * count
        self.versions += [UNKNOWN_VERSION] * count
        self.drawn += [NAN] * count

    def fill_unmatched(self, output: AgentLoopOutput, start: int) -> int:
        """Set log-probs and versions of unmatched tokens from the loop's output, if it has them; `start`: index of the
        turn in the response. Returns the number of tokens whose version stays unknown."""
        for index in self.unmatched:
            if output.response_logprobs is not None:
                self.log_probs[index] = output.response_logprobs[start + index]
            if output.response_versions is not None:
                self.versions[index] = output.response_versions[start + index]
        return sum(self.versions[index] == UNKNOWN_VERSION for index in self.unmatched)

    def as_turn(self, token_ids: list[int]) -> Turn:
        drawn = self.drawn if self.has_drawn else None
        return Turn(
            "model",
            token_ids,
            self.log_probs,
            self.versions,
            self.finish_reason,
            routed_experts=self.routed_experts,
            drawn_log_probs=drawn,
        )


class _CallIndex:
    """The model calls of a trajectory, by the length of their prompt."""

    def __init__(self, calls: Sequence[ModelCall]) -> None:
        self._by_length: dict[int, list[ModelCall]] = defaultdict(list)
        self._incomplete = [call for call in calls if _is_incomplete(call)]
        self._last = calls[-1] if calls else None
        for call in calls:
            if call.output.token_ids:
                self._by_length[len(call.prompt_ids)].append(call)

    @property
    def last_aborted(self) -> bool:
        """Whether the trajectory's last call was aborted."""
        return self._last is not None and self._last.output.finish_reason == "abort"

    def match(self, ids: list[int], start: int, end: int) -> _SampledTokens:
        """The model turn `ids[start:end]` of the row `ids`."""
        tokens, position = _SampledTokens(), start
        while position < end:
            call, count = self._longest(ids, position, end)
            if call is not None and count:
                tokens.add_matched(call.output, count, position)
                if position + count == len(ids) and _is_cut(call, count):
                    tokens.finish_reason = "length"
            else:  # up to the next position at which a call begins
                later = [length for length in self._by_length if position < length < end]
                count = min(later, default=end) - position
                tokens.add_unmatched(count)
                # The loop edited this call's output from its first token on: the finish reason is still the call's.
                tokens.finish_reason = tokens.finish_reason if call is None else call.output.finish_reason
            position += count
        if tokens.finish_reason is None:
            tokens.finish_reason = "stop" if self._last is None else self._last.output.finish_reason
        return tokens

    def reasons_of_incomplete_calls(self, outputs: Sequence[AgentLoopOutput]) -> list[str | None]:
        """Per row, the finish reason of the last call that continued the row and was aborted or returned no tokens
        (because none were left); None: there is no such call.

        A call belongs to the row with which its prompt has the most tokens in common. The trajectory's last call, if it
        continues no row, belongs to the last row if it begins with that row's prompt: the loop edited the outputs.
        """
        reasons: list[str | None] = [None] * len(outputs)
        for call in self._incomplete:
            shared = [_shared_length(call.prompt_ids, output) for output in outputs]
            if max(shared) >= 0:
                reasons[len(shared) - 1 - shared[::-1].index(max(shared))] = call.output.finish_reason
            elif call is self._last and _starts_with(call.prompt_ids, outputs[-1].prompt_ids):
                reasons[-1] = call.output.finish_reason
        return reasons

    def _longest(self, ids: list[int], position: int, end: int) -> tuple[ModelCall | None, int]:
        """Of the calls whose prompt is `ids[:position]`, the one whose output has the most leading tokens in common
        with the row from `position` on, and the number of these tokens. Ties: a whole output, then the later call."""
        best: tuple[ModelCall | None, int, bool] = None, 0, False
        for call in self._by_length.get(position, ()):
            count = _matching_tokens(call.output.token_ids, ids, position, end)
            whole = count == len(call.output.token_ids)
            if (count, whole) >= best[1:] and call.prompt_ids == ids[:position]:
                best = call, count, whole
        return best[:2]


def _is_incomplete(call: ModelCall) -> bool:
    """Whether a call returned no tokens or was aborted."""
    return not call.output.token_ids or call.output.finish_reason == "abort"


def _is_cut(call: ModelCall, count: int) -> bool:
    """Whether a loop that ends the row after the first `count` tokens of a finished output truncated it. Removing end
    tokens does not count."""
    missing = call.output.token_ids[count:]
    return call.output.finish_reason == "stop" and not call.end_ids.issuperset(missing)


def _starts_with(ids: list[int], prefix: list[int]) -> bool:
    return ids[: len(prefix)] == prefix


def _shared_length(prompt_ids: list[int], output: AgentLoopOutput) -> int:
    """The number of tokens that a prompt shares with a row; -1 if it differs, or ends before the last sampled token."""
    ids = [*output.prompt_ids, *output.response_ids]
    mask = output.response_mask
    trailing = next((index for index, sampled in enumerate(reversed(mask)) if sampled), len(mask))
    count = min(len(prompt_ids), len(ids))
    follows = len(prompt_ids) >= len(ids) - trailing and prompt_ids[:count] == ids[:count]
    return count if follows else -1


def _matching_tokens(sampled: list[int], ids: list[int], position: int, end: int) -> int:
    """The number of leading tokens of `sampled` that equal `ids[position:end]`."""
    count = min(len(sampled), end - position)
    if sampled[:count] == ids[position : position + count]:
        return count
    return next(index for index in range(count) if sampled[index] != ids[position + index])


def derive_messages(
    row: Row, prompts: Mapping[tuple[int, ...], Messages], rendered: Mapping[tuple[int, ...], Messages], tokenizer: Any
) -> list[dict[str, Any]]:
    """The messages of a row up to the model's last response, derived from its tokens. Reward models with their own chat
    template need them if the loop did not return `AgentLoopOutput.messages`.

    `prompts` and `rendered` map token ids to messages: of the data's prompts, and of calls of the loop's
    `apply_chat_template`. An unknown prompt becomes one user message; replies with unknown tokens become part of the
    surrounding response.
    """

    def text(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    start = tuple(int(token) for token in row.prompt_ids)
    prompt = {**rendered, **prompts}.get(start, [{"role": "user", "content": text(start)}])
    messages = [dict(message) for message in prompt]
    last = max((index for index, turn in enumerate(row.turns) if turn.source == "model"), default=-1)
    response: list[int] = []
    for turn in row.turns[: last + 1]:
        token_ids = tuple(int(token) for token in turn.token_ids)
        replies = None if turn.source == "model" else rendered.get(token_ids)
        if replies is None:
            response += token_ids
        else:
            messages += [{"role": "assistant", "content": text(response)}, *(dict(reply) for reply in replies)]
            response = []
    return [*messages, {"role": "assistant", "content": text(response)}]
