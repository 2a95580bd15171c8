"""Request and Output of an inference engine, in token ids; partial outputs; experts of the tokens; errors of engines.

Plain data. Imports neither torch nor numpy (functions on experts import numpy): the scheduler must not need them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

# Within these bounds no finite logit below 1e29 becomes infinite or NaN in float32: (1e29 * 1e3 + 1e9) / 1e-5 < 3.4e38.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e5
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3
MAX_LOGIT_CHANGE = 1e9
"""Largest absolute value of a logit bias, a presence penalty and a frequency penalty."""
_INT64 = 2**63

TopLogProbs = list[tuple[int, float]]
"""(token, log-prob) of the most likely tokens at one position, in descending order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of the sampling of one response, and of its end."""

    key: int = 0
    """Noise key of this sample (`counter_noise.sample_key`)."""
    temperature: float = 1.0
    """0: greedy; log-probs are then reported at temperature 1."""
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    do_sample: bool = True
    max_new_tokens: int = 16
    min_new_tokens: int = 0
    """End tokens are not sampled, and stop strings are ignored, before the response has this many tokens."""
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    stop: tuple[str, ...] = ()
    """Strings that end a response at the token that completes one of them."""
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the response; `frequency_penalty` is subtracted once per occurrence."""
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the response are divided by it if positive, multiplied if negative."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, value that is added to its logit)."""
    grammar: str | None = None
    """Grammar of the response (`verl.inference.constraints`): tokens it forbids are not sampled, and the response ends
    when it is complete."""
    top_log_probs: int = 0
    """Number of most likely tokens to report for each token."""
    prompt_log_probs: bool = False
    """Also report log-probs of the prompt's tokens; the prefix cache is then not used for the prompt."""

    def __post_init__(self) -> None:
        self._check_numbers()
        _require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            self.min_new_tokens,
            "0 to max_new_tokens",
        )
        _require(
            self.grammar is None or not (self.min_new_tokens or self.ignore_eos),
            "grammar",
            self.grammar,
            "None with min_new_tokens or ignore_eos: the grammar decides where a response ends",
        )
        _require(
            isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop),
            "stop",
            self.stop,
            "a tuple of non-empty strings",
        )

    def _check_numbers(self) -> None:
        """Raise ValueError for a number that makes logits infinite or NaN, or that does not fit its tensor."""
        greedy, least, most = self.temperature == 0, MIN_TEMPERATURE, MAX_TEMPERATURE
        allowed = f"0 (greedy), or {least:g} to {most:g}"
        _require(greedy or least <= self.temperature <= most, "temperature", self.temperature, allowed)
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(-1 <= self.top_k < _INT64, "top_k", self.top_k, "-1 (all), or the number of tokens to sample from")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        least, most = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        allowed = f"{least:g} to {most:g}; 1: no penalty"
        _require(least <= self.repetition_penalty <= most, "repetition_penalty", self.repetition_penalty, allowed)
        changes = [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        changes += [(f"logit_bias of token {token}", bias) for token, bias in self.logit_bias]
        for name, value in changes:
            allowed = f"{-MAX_LOGIT_CHANGE:g} to {MAX_LOGIT_CHANGE:g}"
            _require(-MAX_LOGIT_CHANGE <= value <= MAX_LOGIT_CHANGE, name, value, allowed)
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")

    def with_key(self, key: int) -> SamplingParams:
        """A copy with another noise key. Faster than `replace`, since it does not validate the fields again: a batch
        has thousands of copies."""
        copy = object.__new__(SamplingParams)
        for name in _FIELDS_WITHOUT_KEY:
            object.__setattr__(copy, name, getattr(self, name))
        object.__setattr__(copy, "key", key)
        return copy

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether some tokens are never sampled (top-k, top-p, min-p)."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalised(self) -> bool:
        """Whether the logits depend on earlier tokens."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def reshaped(self) -> bool:
        """Whether tokens are sampled from another distribution than the full one at the temperature (greedy,
        truncated, penalised …)."""
        changed = self.truncated or self.min_new_tokens > 0 or self.penalised or bool(self.logit_bias)
        return self.greedy or changed or self.grammar is not None

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end the response: `stop_token_ids`, and `eos_token_ids` unless `ignore_eos` is set."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_token_ids


_FIELDS_WITHOUT_KEY = tuple(item.name for item in fields(SamplingParams) if item.name != "key")


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one response."""

    id: str
    """Unique among the unfinished requests of an engine; argument of `abort`."""
    prompt_ids: Sequence[int]
    params: SamplingParams
    group: str = ""
    """The uid of the prompt: requests of a group share their prompt."""
    resume_from: Output | None = None
    """A partial output of the same request. Its tokens count as generated; the new output begins with them."""
    adapter: str | None = None
    """Name of a loaded LoRA adapter; None: the policy's adapter in training, else none."""


@dataclass(slots=True)
class Output:
    """The sampled tokens, with one log-prob and one weight version per token."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Under the full distribution at the request's temperature, as training computes them."""
    versions: list[int] = field(default_factory=list)
    finish_reason: str = "abort"
    """`stop`: the last token is an end token or completes a stop string. `length`: the token limit was reached.
    `abort`: incomplete; it can be resumed."""
    raw_log_probs: list[float] = field(default_factory=list)
    """At temperature 1, without truncation; empty if the engine does not report them."""
    sampled_log_probs: list[float] = field(default_factory=list)
    """Under the distribution that was sampled from, after temperature, penalties, top-k, top-p, min-p and bans. Empty
    if unknown."""
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    """If requested, for each token: the most likely tokens, at temperature 1."""
    prompt_log_probs: list[float] = field(default_factory=list)
    """If requested: of the prompt's tokens from the second on, at temperature 1."""
    prompt_top_log_probs: list[TopLogProbs] = field(default_factory=list)
    """If requested: the most likely tokens at the same positions."""
    cached_tokens: int = field(default=0, compare=False)
    """Number of prompt tokens whose KV was in the prefix cache."""
    preemptions: int = field(default=0, compare=False)
    """Number of times its KV was evicted and recomputed; only reported by the native engine."""
    routed_experts: Any = field(default=None, compare=False)
    """Array [prompt and response tokens except the last, layers, k]: experts of each token in the forward pass that
    sampled the next token; None if the engine does not return them. Missing rows at the end are unknown. A part of a
    streamed output has the rows of its own tokens."""


@dataclass(slots=True)
class TokenOutput:
    """The result of a loop's `server_manager.generate`."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None
    """`completed`, or `aborted`: the tokens are those sampled before the abort."""
    num_preempted: int = 0
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """`versions`: weight versions, one per token; `finish_reason`: stop, length or abort."""


def check_request(request: Request, max_model_len: int, grammars: bool = False) -> None:
    """Raise ValueError for a request that an engine with this `max_model_len` cannot execute. `grammars`: whether the
    engine supports grammars."""
    if request.params.grammar is not None and not grammars:
        raise ValueError(
            f"request {request.id!r}: grammar is not supported by this engine. Omit it, or use the native engine."
        )
    if not request.prompt_ids:
        raise ValueError(f"request {request.id!r}: prompt_ids is empty. Pass at least one token.")
    earlier = request.resume_from
    generated = len(earlier.token_ids) if earlier else 0
    if len(request.prompt_ids) + generated >= max_model_len:
        raise ValueError(
            f"request {request.id!r}: {len(request.prompt_ids)} prompt and {generated} generated tokens fill"
            f" max_model_len={max_model_len}. Raise it, or shorten the prompt."
        )
    if earlier and (earlier.finish_reason == "stop" or generated >= request.params.max_new_tokens):
        raise ValueError(f"request {request.id!r}: resume_from is finished ({generated} tokens). Do not resume it.")
    if earlier and not len(earlier.token_ids) == len(earlier.log_probs) == len(earlier.versions):
        raise ValueError(f"request {request.id!r}: resume_from needs one log-prob and one version per token.")


def _require(valid: bool, name: str, value: object, allowed: str) -> None:
    if not valid:
        raise ValueError(f"sampling {name}: {value!r} is invalid. Use {allowed}.")


# ---------------------------------------------------------------- experts of tokens
#
# Experts of the tokens of a row [tokens, layers, k] are kept per sampled token, like log-probs and versions. The entry
# of a sampled token holds the experts of the input tokens of the forward pass that sampled it: the whole prompt for the
# first token, the previous token for each later one. So row i of the joined entries belongs to the pass that sampled
# token i + 1, under the weights of that token's version, even if its KV was recomputed later with newer weights.


ExpertEntry: TypeAlias = "np.ndarray | None"
"""The entry of one sampled token [tokens, layers, k]; None: not known."""


def unknown_experts(like: np.ndarray, count: int) -> np.ndarray:
    """[count, layers, k] in the type of `like`, filled with its largest value, which is no expert's id."""
    import numpy as np

    return np.full((count, *like.shape[1:]), np.iinfo(like.dtype).max, dtype=like.dtype)


def split_entries(experts: np.ndarray | None, prompt: int, tokens: int) -> list[ExpertEntry]:
    """The entries of `tokens` sampled tokens after a prompt of `prompt` tokens; None for those beyond `experts`."""
    if experts is None:
        return [None] * tokens
    ends = range(prompt, prompt + tokens)
    return [experts[0 if end == prompt else end - 1 : end] if end <= len(experts) else None for end in ends]


def join_entries(entries: Sequence[ExpertEntry], prompt: int, first: int = 0) -> np.ndarray | None:
    """The rows of consecutive entries, beginning with that of sampled token `first`; None if no entry is known."""
    import numpy as np

    like = next((entry for entry in entries if entry is not None), None)
    if like is None:
        return None
    sizes = (prompt if first + place == 0 else 1 for place in range(len(entries)))
    rows = [unknown_experts(like, n) if entry is None else entry for entry, n in zip(entries, sizes, strict=True)]
    return np.concatenate(rows)


def join_pieces(first: np.ndarray | None, count: int, then: np.ndarray | None) -> np.ndarray | None:
    """`first`, filled up with unknown experts to `count` rows, followed by `then`; None if both are None."""
    import numpy as np

    if first is None and then is None:
        return None
    like = then if first is None else first
    assert like is not None
    known = like[:0] if first is None else first[:count]
    rows = [known, unknown_experts(like, count - len(known)), like[:0] if then is None else then]
    return np.concatenate(rows)


def combine_calls(earlier: np.ndarray | None, later: np.ndarray | None, start: int) -> np.ndarray | None:
    """Experts of a row after a call whose first sampled token is at `start`.

    From row `start - 1` on, the later call's rows are used. Before that, the earlier rows are kept, as they were when
    their tokens were sampled; the later call only adds rows that no earlier call has.
    """
    import numpy as np

    if earlier is None or later is None:
        return earlier if later is None else later
    return np.concatenate([earlier[: start - 1], later[min(len(earlier), start - 1) :]])


# ---------------------------------------------------------------- partial outputs: join, cut, prepare for `resume_from`


def join_outputs(parts: Sequence[Output], prompt_length: int | None = None) -> Output:
    """Join consecutive parts of an output, in time linear in its length.

    `prompt_length`: the length of the prompt, if the parts begin with the first token of the output; tokens whose
    experts were not reported then get unknown experts.
    """
    if len(parts) == 1:
        return parts[0]
    joined = Output(
        [token for part in parts for token in part.token_ids],
        [value for part in parts for value in part.log_probs],
        [version for part in parts for version in part.versions],
    )
    for part in parts:
        joined.sampled_log_probs += part.sampled_log_probs
        if part is not parts[-1]:
            joined.sampled_log_probs += [math.nan] * (len(part.token_ids) - len(part.sampled_log_probs))
    joined.routed_experts = _joined_experts(parts, prompt_length)
    return joined


def _joined_experts(parts: Sequence[Output], prompt_length: int | None) -> np.ndarray | None:
    """Join the experts of the parts: [tokens, layers, k]; None if no part has any."""
    import numpy as np

    pieces: list[np.ndarray] = []
    tokens = rows = 0
    for part in parts:
        start = rows
        if prompt_length is not None:
            start = prompt_length + tokens - 1 if tokens else 0
        tokens += len(part.token_ids)
        if part.routed_experts is None:
            continue
        if rows != start:  # experts of earlier tokens are unknown, or reported twice
            known = join_pieces(np.concatenate(pieces) if pieces else None, start, part.routed_experts[:0])
            pieces = [] if known is None else [known]
        pieces.append(part.routed_experts)
        rows = start + len(part.routed_experts)
    return np.concatenate(pieces) if pieces else None


def output_since(output: Output, start: int, prompt_length: int) -> Output:
    """The part of an output from token `start` on."""
    part = Output(output.token_ids[start:], output.log_probs[start:], output.versions[start:])
    part.sampled_log_probs = output.sampled_log_probs[start:]
    if output.routed_experts is not None:
        part.routed_experts = output.routed_experts[0 if start == 0 else prompt_length + start - 1 :]
    return part


def unfinished_part(output: Output, params: SamplingParams) -> Output:
    """The part of a current output that can be resumed: without its last token if that may end the response."""
    ends = output.token_ids[-1] in params.end_token_ids or len(output.token_ids) >= params.max_new_tokens
    return resumable(output) if ends or params.stop or params.grammar is not None else output


def resumable(output: Output) -> Output:
    """A reported partial output without its last token, which is sampled again: it may have ended the response, and a
    finished output cannot be resumed."""
    kept = slice(0, max(0, len(output.token_ids) - 1))
    part = Output(output.token_ids[kept], output.log_probs[kept], output.versions[kept])
    part.sampled_log_probs = output.sampled_log_probs[kept]
    if output.routed_experts is not None and part.token_ids:
        part.routed_experts = output.routed_experts[:-1]
    return part


def output_to_resume(request: Request, reported: Output | None) -> Output:
    """The output from which a lost request resumes: its `resume_from`, then the reported tokens except the last, which
    may have ended the response."""
    parts = [resumable(reported or Output())]
    if request.resume_from is not None:
        parts.insert(0, request.resume_from)
    return join_outputs(parts, len(request.prompt_ids))


# ---------------------------------------------------------------- errors of rollout engines


class EngineDiedError(RuntimeError):
    """The engine's own process or server has ended, with all its state. `BaseRollout.restart_if_dead` restarts it,
    without weights."""


class EngineBrokenError(RuntimeError):
    """The engine failed inside a step and cannot be used any more. An engine in its own process then exits."""


class EngineLostError(RuntimeError):
    """The replica of this request was lost, or generation has ended: the request cannot be finished."""
