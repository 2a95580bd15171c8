"""From what a loop returned to a trajectory: whose tokens are whose, and what the model said of each of its own.

Log-probs and versions come from the trace of the model's answers, by token match: a token counts as matched if it was
sampled in exactly this place, after exactly the tokens that the row has before it. What does not match is stale.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from verl.agent.loop import AgentLoopOutput, TrajectoryFailed
from verl.types.routed_experts import combine_calls
from verl.types.trajectory import Row, Status, Trajectory, Turn
from verl.workers.rollout.call_trace import CallTrace, ModelCall

__all__ = ["Limits", "failed_trajectory", "trajectory_of"]

NAN, STALE = math.nan, -1


def trajectory_of(
    outputs: AgentLoopOutput | Sequence[AgentLoopOutput],
    trace: CallTrace,
    uid: str,
    sample_index: int,
    most: Limits | None = None,
) -> Trajectory:
    """The trajectory of a loop's outputs, its rows in order.

    With `most`, responses that are too long are cut, and rows that no engine could have are refused.
    """
    outputs = [outputs] if isinstance(outputs, AgentLoopOutput) else list(outputs)
    if not outputs or not all(isinstance(output, AgentLoopOutput) for output in outputs):
        raise TypeError(f"an agent loop returned {outputs!r:.200}. Return an AgentLoopOutput, or a list of them.")
    _check_finite(outputs)
    answers = _Answers(trace.calls)
    outputs = outputs if most is None else [most.held(output) for output in outputs]
    made = [_row_of(output, answers) for output in outputs]
    for output, one, reason in zip(outputs, made, answers.reasons_without_answer(outputs), strict=True):
        _set_finish_reason(one.row, output.finish_reason or reason)
    aborted = made[-1].row.finish_reason == "abort" or (answers.end_aborted and outputs[-1].finish_reason is None)
    status: Status = "aborted" if aborted else "finished"
    extra: dict[str, Any] = {}
    for output in outputs:
        extra |= output.extra_fields
    extra.pop("turn_names", None)
    extra["num_turns"] = sum(output.num_turns for output in outputs) or _count_turns([one.row for one in made])
    unmatched = sum(one.unmatched for one in made)
    extra["agent_metrics"] = _metrics(outputs, trace) | {"unmatched_tokens": unmatched, "status": status}
    return Trajectory(uid, sample_index, [one.row for one in made], status, _score(outputs), extra)


def failed_trajectory(
    error: BaseException, trace: CallTrace, uid: str, sample_index: int, prompt_ids: Sequence[int], max_response: int
) -> Trajectory:
    """One of a loop that raised: its last context to look at, none of it learned from."""
    prompt: list[int] = list(prompt_ids)
    response: list[int] = []
    mask: list[int] = []
    # Where nothing was said there was no room: such a context may be longer than any row.
    for call in (call for call in trace.calls if call.output.token_ids):
        known, said = len(prompt) + len(response), call.output.token_ids
        if call.prompt_ids[:known] != [*prompt, *response]:
            prompt, response, mask, known = call.prompt_ids, [], [], len(call.prompt_ids)
        between = call.prompt_ids[known:]
        response = [*response, *between, *said]
        mask = [*mask, *([0] * len(between)), *([1] * len(said))]
    shown = AgentLoopOutput(prompt, response[:max_response], mask[:max_response])
    metrics = _metrics([], trace) | {
        "failures": {error.kind if isinstance(error, TrajectoryFailed) else "loop": 1},
        "unmatched_tokens": 0,
        "status": "failed",
        "error": f"{type(error).__name__}: {error}",
    }
    extra = {"num_turns": len(trace.calls), "agent_metrics": metrics}
    return Trajectory(uid, sample_index, [_row_of(shown, _Answers(trace.calls)).row], "failed", None, extra)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a row may have at most: response tokens, and tokens in all."""

    response: int
    row: int

    def held(self, output: AgentLoopOutput) -> AgentLoopOutput:
        """The output within them."""
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
    """Column `agent_metrics`, but for what only the caller knows."""
    failures: dict[str, int] = defaultdict(int)
    tools: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for output in outputs:
        for kind, count in output.metrics.failures.items():
            failures[kind] += count
        for tool, figures in output.metrics.tools.items():
            for name, value in figures.items():
                tools[tool][name] += value
    metrics = [output.metrics for output in outputs]
    return {
        "generate_s": sum(one.generate_sequences for one in metrics) or trace.generate_s,
        "tool_s": sum(one.tool_calls for one in metrics),
        "compute_score_s": sum(one.compute_score for one in metrics),
        "tool_calls": sum(one.tool_call_counts for one in metrics),
        "num_preempted": sum(one.num_preempted for one in metrics) or trace.num_preempted,
        "turns": len(trace.calls),
        "failures": dict(failures),
        "tools": {tool: dict(figures) for tool, figures in tools.items()},
        "error": None,
    }


def _check_finite(outputs: Sequence[AgentLoopOutput]) -> None:
    """One reward that is no number would cost the whole step, and this one only its trajectory."""
    earned = [reward for output in outputs for _, reward in output.turn_rewards]
    if not all(math.isfinite(value) for value in (*earned, _score(outputs) or 0.0)):
        raise ValueError(f"an agent's rewards are not finite: reward_score {_score(outputs)}, turn_rewards {earned}.")


def _score(outputs: Sequence[AgentLoopOutput]) -> float | None:
    return next((float(one.reward_score) for one in reversed(outputs) if one.reward_score is not None), None)


@dataclass(slots=True)
class _Made:
    row: Row
    unmatched: int


def _row_of(output: AgentLoopOutput, answers: _Answers) -> _Made:
    """The row's turns are the runs of equal mask; an environment's reward belongs to the turn it ends in."""
    ids = [*output.prompt_ids, *output.response_ids]
    start, turns, unmatched = len(output.prompt_ids), [], 0
    names = iter(output.extra_fields.get("turn_names", ()))
    for by_model, run in groupby(output.response_mask, bool):
        end = start + len(list(run))
        if by_model:
            said = answers.of(ids, start, end)
            unmatched += said.fill(output, start - len(output.prompt_ids))
            turns.append(said.turn(ids[start:end]))
        else:
            turns.append(Turn("environment", ids[start:end], name=next(names, None)))
        start = end
    _add_rewards(turns, output.turn_rewards)
    return _Made(Row(output.prompt_ids, turns, output.messages), unmatched)


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
    """The number of prompts and turns of all rows. A beginning that several rows share is counted once."""
    prefixes = set()
    for row in rows:
        prefix = hashlib.blake2b(digest_size=16)
        for token_ids in (row.prompt_ids, *(turn.token_ids for turn in row.turns)):
            if len(token_ids):
                prefix.update(np.asarray(token_ids, np.int64).tobytes())
                prefixes.add(prefix.digest())
    return len(prefixes)


def _add_rewards(turns: Sequence[Turn], earned: Iterable[tuple[int, float]]) -> None:
    for position, reward in earned:
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
class _Said:
    """Of each token of a run: what the model said of it."""

    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    drawn: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    """Finish reason of the last answer that has tokens in this run; None: there is none."""
    knows_drawn: bool = True
    routed_experts: Any = None
    unmatched: list[int] = field(default_factory=list)
    """Places in the run that no answer has."""

    def take(self, output: Any, count: int, position: int) -> None:
        """Add the first `count` tokens of an answer, which are at `position` of the row."""
        self.log_probs += output.log_probs[:count]
        self.versions += output.versions[:count]
        self.drawn += output.sampled_log_probs[:count] or [NAN] * count
        self.knows_drawn &= bool(output.sampled_log_probs)
        if (experts := output.routed_experts) is not None:
            self.routed_experts = combine_calls(self.routed_experts, experts[: position + count], position)
        self.finish_reason = output.finish_reason

    def miss(self, count: int) -> None:
        self.unmatched += range(len(self.log_probs), len(self.log_probs) + count)
        self.log_probs += [NAN] * count
        self.versions += [STALE] * count
        self.drawn += [NAN] * count

    def fill(self, output: AgentLoopOutput, start: int) -> int:
        """What no answer has, from the loop's own lists, where it gave them; returns of how many nobody knows."""
        for place in self.unmatched:
            if output.response_logprobs is not None:
                self.log_probs[place] = output.response_logprobs[start + place]
            if output.response_versions is not None:
                self.versions[place] = output.response_versions[start + place]
        return sum(self.versions[place] == STALE for place in self.unmatched)

    def turn(self, token_ids: list[int]) -> Turn:
        drawn = self.drawn if self.knows_drawn else None
        return Turn(
            "model",
            token_ids,
            self.log_probs,
            self.versions,
            self.finish_reason,
            routed_experts=self.routed_experts,
            drawn_log_probs=drawn,
        )


class _Answers:
    """The model's answers, by the length of what it had read."""

    def __init__(self, calls: Sequence[ModelCall]) -> None:
        self._at: dict[int, list[ModelCall]] = defaultdict(list)
        self._unanswered = [call for call in calls if _adds_nothing(call)]
        self._last = calls[-1] if calls else None
        for call in calls:
            if call.output.token_ids:
                self._at[len(call.prompt_ids)].append(call)

    @property
    def end_aborted(self) -> bool:
        """Whether the trajectory's last call was aborted."""
        return self._last is not None and self._last.output.finish_reason == "abort"

    def of(self, ids: list[int], start: int, end: int) -> _Said:
        """What the model said of `ids[start:end]`, after everything before it."""
        said, position = _Said(), start
        while position < end:
            call, count = self._longest(ids, position, end)
            if call is not None and count:
                said.take(call.output, count, position)
                if position + count == len(ids) and _is_cut(call, count):
                    said.finish_reason = "length"
            else:  # up to the next place where an answer begins
                later = [place for place in self._at if position < place < end]
                count = min(later, default=end) - position
                said.miss(count)
                # The loop edited this call's answer from its first token on: the finish reason is still the call's.
                said.finish_reason = said.finish_reason if call is None else call.output.finish_reason
            position += count
        if said.finish_reason is None:
            said.finish_reason = "stop" if self._last is None else self._last.output.finish_reason
        return said

    def reasons_without_answer(self, outputs: Sequence[AgentLoopOutput]) -> list[str | None]:
        """Per row, the finish reason of the last call that continued the row and returned no tokens (no room) or was
        aborted; None: there is no such call.

        A call belongs to the row with which its prompt has the most tokens in common. The trajectory's last call, if it
        continues no row, belongs to the last row if it begins with that row's prompt: the loop edited the answers.
        """
        reasons: list[str | None] = [None] * len(outputs)
        for call in self._unanswered:
            shared = [_shared(call.prompt_ids, output) for output in outputs]
            if max(shared) >= 0:
                reasons[len(shared) - 1 - shared[::-1].index(max(shared))] = call.output.finish_reason
            elif call is self._last and _starts_with(call.prompt_ids, outputs[-1].prompt_ids):
                reasons[-1] = call.output.finish_reason
        return reasons

    def _longest(self, ids: list[int], position: int, end: int) -> tuple[ModelCall | None, int]:
        """Of the calls whose prompt is `ids[:position]`, the one whose answer has the most leading tokens in common
        with the row from `position` on, and the number of these tokens. Ties: a whole answer, then the later call."""
        best: tuple[ModelCall | None, int, bool] = None, 0, False
        for call in self._at.get(position, ()):
            count = _common(call.output.token_ids, ids, position, end)
            whole = count == len(call.output.token_ids)
            if (count, whole) >= best[1:] and call.prompt_ids == ids[:position]:
                best = call, count, whole
        return best[:2]


def _adds_nothing(call: ModelCall) -> bool:
    return not call.output.token_ids or call.output.finish_reason == "abort"


def _is_cut(call: ModelCall, count: int) -> bool:
    """Whether a loop that keeps the first `count` tokens of a finished answer, and ends the row there, cut the answer.
    Stripping end tokens does not."""
    missing = call.output.token_ids[count:]
    return call.output.finish_reason == "stop" and not call.end_ids.issuperset(missing)


def _starts_with(ids: list[int], prefix: list[int]) -> bool:
    return ids[: len(prefix)] == prefix


def _shared(prompt_ids: list[int], output: AgentLoopOutput) -> int:
    """The number of tokens that a prompt shares with a row; -1 if it does not continue the row's last sampled token."""
    ids = [*output.prompt_ids, *output.response_ids]
    mask = output.response_mask
    trailing = next((index for index, sampled in enumerate(reversed(mask)) if sampled), len(mask))
    count = min(len(prompt_ids), len(ids))
    follows = len(prompt_ids) >= len(ids) - trailing and prompt_ids[:count] == ids[:count]
    return count if follows else -1


def _common(answer: list[int], ids: list[int], position: int, end: int) -> int:
    """How many tokens of the answer stand at the position."""
    most = min(len(answer), end - position)
    if answer[:most] == ids[position : position + most]:
        return most
    return next(place for place in range(most) if answer[place] != ids[position + place])
