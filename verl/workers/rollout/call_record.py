"""Record: every answer that the model gave within a trajectory, kept beside the loop that asked for it.

It is found by context: whatever tasks a loop starts write to their own trajectory's. Noise belongs to the number of the
call in its trajectory, so that a run gives the same tokens again, whatever names a loop gives its requests.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from verl.types.request import Output, SamplingParams
from verl.utils.counter_noise import sample_keys

__all__ = ["Call", "Context", "Partial", "Record", "current", "recording"]


@dataclass(slots=True)
class Call:
    """One answer of the model: what it read, what it said."""

    prompt_ids: list[int]
    output: Output
    seconds: float = 0.0
    end_ids: frozenset[int] = frozenset()
    """Tokens at which the engine stops."""


@dataclass(slots=True)
class Partial:
    """What there is of an answer that is not finished."""

    prompt_ids: list[int]
    output: Output


@dataclass(frozen=True, slots=True)
class Context:
    """The context that a prompt belongs to."""

    start: int
    """Number of tokens in the prompt with which the context began."""
    length: int
    """Number of tokens in this prompt."""
    digest: Any
    """Hash object of this prompt's tokens."""


class _Contexts:
    """Start of each call's context, by the prefix that later prompts of the context have: the call's prompt and the
    first token of its answer (the end of an answer may be edited). If the answer is empty, the prefix is the prompt.

    Prefixes are stored as digests, so that a lookup takes one pass over the prompt for any number of calls.
    """

    def __init__(self) -> None:
        self._lengths: list[int] = []
        """Lengths of the prefixes, ascending, without duplicates."""
        self._starts: dict[bytes, int] = {}

    def of(self, prompt_ids: Sequence[int]) -> Context:
        """The longest prefix counts; a prompt without one begins a new context."""
        digest, hashed, start = hashlib.blake2b(digest_size=16), 0, len(prompt_ids)
        tokens = memoryview(array("i", prompt_ids))
        for length in self._lengths:
            if length > len(prompt_ids):
                break
            digest.update(tokens[hashed:length])
            start, hashed = self._starts.get(digest.digest(), start), length
        digest.update(tokens[hashed:])
        return Context(start, len(prompt_ids), digest)

    def add(self, context: Context, answer: Sequence[int]) -> None:
        first, prefix = array("i", answer[:1]), context.digest.copy()
        prefix.update(first)
        self._starts.setdefault(prefix.digest(), context.start)
        length = context.length + len(first)
        if length not in self._lengths:
            insort(self._lengths, length)


@dataclass(slots=True, eq=False)
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
    prompt_ids: list[int] | None = None
    """The row's prompt: only a first call with this prompt can be resumed by another process. None: any prompt."""
    params: SamplingParams | None = None
    """Sampling parameters of the trajectory's job; None: those of the client."""
    templated: dict[tuple[int, ...], list[dict[str, Any]]] = field(default_factory=dict)
    """Messages that the loop rendered with `apply_chat_template`, by the resulting token ids."""
    _contexts: _Contexts = field(default_factory=_Contexts, init=False, repr=False)

    def __post_init__(self) -> None:
        for call in self.calls:
            self._contexts.add(self.context_of(call.prompt_ids), call.output.token_ids)

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

    def context_of(self, prompt_ids: Sequence[int]) -> Context:
        """The context of an earlier call if `prompt_ids` begin with its prompt and the first token of its answer.
        Otherwise a new one, also if they begin with an earlier prompt."""
        return self._contexts.of(prompt_ids)

    def left(self, context: Context, most: int) -> int:
        """The number of response tokens that remain after the prompt of `context`, of `most` per context."""
        most = most if self.most is None else min(most, self.most)
        return most - (context.length - context.start)

    def add(
        self,
        prompt_ids: list[int],
        output: Output,
        seconds: float = 0.0,
        end_ids: frozenset[int] = frozenset(),
        context: Context | None = None,
    ) -> None:
        """Append an answered call. `end_ids` are the tokens at which the engine stops; `context` is that of
        `prompt_ids`, if it is known."""
        self.calls.append(Call(prompt_ids, output, seconds, end_ids))
        self._contexts.add(context or self.context_of(prompt_ids), output.token_ids)

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
