"""CallTrace: the model calls of one trajectory, with their outputs.

`current_trace()` returns the trace of the running trajectory from a context variable, which asyncio tasks of an agent
loop inherit. The sampling noise of a call depends on its number in the trajectory, not on its `request_id`, so that a
run is reproducible.

A context is a sequence of calls in which every prompt continues an earlier prompt and its response, e.g. the turns of
one conversation. An agent loop may have several contexts: each becomes a row of training data.
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
from verl.utils.counter_noise import sample_key


@dataclass(slots=True)
class ModelCall:
    """One model call: its prompt and output."""

    prompt_ids: list[int]
    output: Output
    seconds: float = 0.0
    """Duration of the call."""
    end_ids: frozenset[int] = frozenset()
    """End tokens of the request: `eos_token_ids` and `stop_token_ids`."""


@dataclass(slots=True)
class PartialCall:
    """The partial output of an unfinished model call."""

    prompt_ids: list[int]
    output: Output


@dataclass(frozen=True, slots=True)
class PromptContext:
    """A prompt and its position in its context."""

    start: int
    """Length of the first prompt of the context; all later tokens count as response tokens."""
    length: int
    """Number of tokens in this prompt."""
    digest: Any
    """Hash object of this prompt's tokens."""


class _Contexts:
    """Assigns prompts to contexts.

    A prompt continues the context of an earlier call if it starts with the prefix of that call: its prompt and the
    first token of its response. Only the first token is compared, because a loop may edit the remaining ones. If the
    response is empty, the prefix is the prompt alone.

    Prefixes are stored as digests, so that a lookup takes one pass over the prompt for any number of calls.
    """

    def __init__(self) -> None:
        self._lengths: list[int] = []
        """Lengths of the prefixes, ascending, without duplicates."""
        self._starts: dict[bytes, int] = {}
        """`PromptContext.start` by the digest of a prefix."""

    def find(self, prompt_ids: Sequence[int]) -> PromptContext:
        """Return the context with the longest matching prefix, or a new context."""
        digest = hashlib.blake2b(digest_size=16)
        hashed = 0  # number of tokens in `digest`
        start = len(prompt_ids)
        tokens = memoryview(array("i", prompt_ids))
        for length in self._lengths:
            if length > len(prompt_ids):
                break
            digest.update(tokens[hashed:length])
            start, hashed = self._starts.get(digest.digest(), start), length
        digest.update(tokens[hashed:])
        return PromptContext(start, len(prompt_ids), digest)

    def add(self, context: PromptContext, response: Sequence[int]) -> None:
        """Record a call with a prompt of `context`, and its response."""
        first_token = array("i", response[:1])  # empty if the response is empty
        prefix = context.digest.copy()
        prefix.update(first_token)
        self._starts.setdefault(prefix.digest(), context.start)
        length = context.length + len(first_token)
        if length not in self._lengths:
            insort(self._lengths, length)


@dataclass(slots=True, eq=False)
class CallTrace:
    """The model calls of one trajectory, in the order in which they finished."""

    noise_key: int = 0
    """Noise key of the first call, equal to that of a single-turn row."""
    group: str = ""
    """The uid of the prompt: first calls of a group share their prompt."""
    calls: list[ModelCall] = field(default_factory=list)
    """Finished calls."""
    num_started: int = 0
    """Number of started model calls, i.e. of calls of `next_key`."""
    max_response: int | None = None
    """Maximum number of response tokens of a context, if less than the run's limit."""
    partial: PartialCall | None = None
    """Partial output of the first call, from which it resumes after its replica was lost or the run was restarted."""
    prompt_ids: list[int] | None = None
    """The row's prompt: only a first call with this prompt can be resumed by another process. None: any prompt."""
    params: SamplingParams | None = None
    """Sampling parameters of the trajectory's job; None: the client's parameters."""
    rendered_messages: dict[tuple[int, ...], list[dict[str, Any]]] = field(default_factory=dict)
    """Messages that the loop rendered with `apply_chat_template`, by the resulting token ids."""
    _contexts: _Contexts = field(default_factory=_Contexts, init=False, repr=False)

    def __post_init__(self) -> None:
        for call in self.calls:
            self._contexts.add(self.context_of(call.prompt_ids), call.output.token_ids)

    @classmethod
    def for_sample(cls, seed: int, step: int, uid: str, sample_index: int) -> CallTrace:
        """Return an empty trace of the trajectory `sample_index` of a prompt in a step."""
        return cls(sample_key(seed, step, uid, sample_index), uid)

    @property
    def generate_s(self) -> float:
        """Total seconds of all calls."""
        return sum(call.seconds for call in self.calls)

    @property
    def num_preempted(self) -> int:
        """Total number of preemptions of all calls."""
        return sum(call.output.preemptions for call in self.calls)

    def context_of(self, prompt_ids: Sequence[int]) -> PromptContext:
        """Return the context of a prompt: that of an earlier call if `prompt_ids` start with its prompt and the first
        token of its response; otherwise a new one, also if they start with its prompt only."""
        return self._contexts.find(prompt_ids)

    def remaining_tokens(self, context: PromptContext, max_response: int) -> int:
        """Return the number of response tokens that may follow a prompt.

        A context may have `max_response` response tokens, or `self.max_response` if that is less. All tokens after its
        first prompt count, including those of tools and users. The result may be negative.
        """
        if self.max_response is not None:
            max_response = min(max_response, self.max_response)
        return max_response - (context.length - context.start)

    def add(
        self,
        prompt_ids: list[int],
        output: Output,
        seconds: float = 0.0,
        end_ids: frozenset[int] = frozenset(),
        context: PromptContext | None = None,
    ) -> None:
        """Append a finished call. `end_ids`: end tokens of the request. `context`: `context_of(prompt_ids)`, if already
        computed."""
        self.calls.append(ModelCall(prompt_ids, output, seconds, end_ids))
        self._contexts.add(context or self.context_of(prompt_ids), output.token_ids)

    def add_empty_call(self, prompt_ids: list[int]) -> None:
        """Append a call without output tokens: its context or token budget was full."""
        self.add(prompt_ids, Output(finish_reason="length"))

    def set_partial(self, prompt_ids: list[int], output: Output) -> None:
        """Store the partial output of the first call, whose prompt is `prompt_ids`."""
        self.partial = PartialCall(prompt_ids, output)

    def partial_for(self, prompt_ids: list[int]) -> Output | None:
        """Return the partial output from which the call that was started last (by `next_key`) resumes, or None.

        Only the first call of a trajectory resumes; a later call with the same prompt is a new sample.
        """
        partial = self.partial if self.num_started == 1 else None
        return partial.output if partial is not None and partial.prompt_ids == prompt_ids else None

    def next_key(self) -> int:
        """Start a call and return its noise key: different for every call, and the same in every run."""
        number = self.num_started
        self.num_started += 1
        if number == 0:
            return self.noise_key
        identity = f"{self.noise_key}/{number}".encode()
        return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little", signed=True)


_CURRENT: ContextVar[CallTrace | None] = ContextVar("verl_call_trace", default=None)


def current_trace() -> CallTrace | None:
    """The trace of the running trajectory; None outside of a trajectory."""
    return _CURRENT.get()


@contextmanager
def tracing(trace: CallTrace) -> Iterator[CallTrace]:
    """Context in which `current_trace()` is this trace, also in tasks that are started inside."""
    token = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(token)
