"""Record: every answer that the model gave within a trajectory, kept beside the loop that asked for it.

It is found by context: whatever tasks a loop starts write to their own trajectory's. Noise belongs to the number of the
call in its trajectory, so that a run gives the same tokens again, whatever names a loop gives its requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from verl.types.request import Output
from verl.utils.counter_noise import sample_keys

__all__ = ["Call", "Partial", "Record", "current", "recording"]


@dataclass(slots=True)
class Call:
    """One answer of the model: what it read, what it said."""

    prompt_ids: list[int]
    output: Output
    seconds: float = 0.0
    context_start: int = 0
    """Number of tokens in the prompt with which the context of this call began."""

    def continued_by(self, prompt_ids: list[int]) -> bool:
        """Whether a prompt extends this call's prompt and answer; the answer's end token may have been stripped."""
        answer, start = self.output.token_ids, len(self.prompt_ids)
        if self.output.finish_reason == "stop" and len(answer) > 1:
            answer = answer[:-1]
        follows = bool(answer) and prompt_ids[start : start + len(answer)] == answer
        return follows and prompt_ids[:start] == self.prompt_ids


@dataclass(slots=True)
class Partial:
    """What there is of an answer that is not finished."""

    prompt_ids: list[int]
    output: Output


@dataclass(slots=True)
class Record:
    """The calls of one trajectory, in the order in which they were answered."""

    key: int = 0
    """Noise of the first call, as of an answer without a loop."""
    group: str = ""
    """The prompt (uid): first calls of a group share theirs."""
    calls: list[Call] = field(default_factory=list)
    asked: int = 0
    most: int | None = None
    """Response tokens that this trajectory's contexts may have, where that is less than the run's limit."""
    partial: Partial | None = None
    """Of the first answer, while it was under way, as last noted, or as another process left it."""
    templated: dict[tuple[int, ...], list[dict[str, Any]]] = field(default_factory=dict)
    """Messages that the loop rendered with `apply_chat_template`, by the resulting token ids."""

    @classmethod
    def of(cls, seed: int, step: int, uid: str, sample_index: int) -> Record:
        """Of one answer to a prompt in a step of a run."""
        return cls(sample_keys(seed, step, uid, sample_index), uid)

    @property
    def generate_s(self) -> float:
        """Seconds that its answers took, all together."""
        return sum(call.seconds for call in self.calls)

    @property
    def num_preempted(self) -> int:
        return sum(call.output.preemptions for call in self.calls)

    def context_start(self, prompt_ids: list[int]) -> int:
        """Number of tokens in the prompt with which the context of `prompt_ids` began.

        `prompt_ids` continue the context of an earlier call if they contain its prompt and answer. Otherwise they are
        the prompt of a new context, also if they begin with an earlier prompt.
        """
        earlier = [call for call in self.calls if call.continued_by(prompt_ids)]
        if not earlier:
            return len(prompt_ids)
        return max(earlier, key=lambda call: len(call.prompt_ids)).context_start

    def left(self, prompt_ids: list[int], most: int) -> int:
        """The number of response tokens that remain in the context of `prompt_ids`, of `most` per context."""
        most = most if self.most is None else min(most, self.most)
        return most - (len(prompt_ids) - self.context_start(prompt_ids))

    def add(self, prompt_ids: list[int], output: Output, seconds: float = 0.0) -> None:
        """Append an answered call."""
        self.calls.append(Call(prompt_ids, output, seconds, self.context_start(prompt_ids)))

    def add_without_room(self, prompt_ids: list[int]) -> None:
        """Append a call that got no tokens, because its context or its token budget was full."""
        self.add(prompt_ids, Output(finish_reason="length"))

    def note(self, prompt_ids: list[int], output: Output) -> None:
        """So much there is of the first answer, which is to this prompt."""
        self.partial = Partial(prompt_ids, output)

    def resumed(self, prompt_ids: list[int]) -> Output | None:
        """What the call that `next_key` was last for goes on from. A later one to the same prompt is another draw."""
        partial = self.partial if self.asked == 1 else None
        return partial.output if partial is not None and partial.prompt_ids == prompt_ids else None

    def next_key(self) -> int:
        """Noise key of the next call: a new one each time, the same in each run."""
        number, self.asked = self.asked, self.asked + 1
        if number == 0:
            return self.key
        identity = f"{self.key}/{number}".encode()
        return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little", signed=True)


_CURRENT: ContextVar[Record | None] = ContextVar("verl_agent_record", default=None)


def current() -> Record | None:
    """The record of the trajectory that this code runs for; None outside of one."""
    return _CURRENT.get()


@contextmanager
def recording(record: Record) -> Iterator[Record]:
    """What is generated inside, also by tasks that are started inside, goes to this record."""
    token = _CURRENT.set(record)
    try:
        yield record
    finally:
        _CURRENT.reset(token)
