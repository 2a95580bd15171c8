"""The engine's question and answer: one request, one output, in token ids. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["Output", "Request", "SamplingParams", "TokenOutput", "TopLogProbs", "check_request"]

TopLogProbs = list[tuple[int, float]]
"""(token, log-prob) of the likeliest tokens of one position, the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one answer is sampled, and when it ends."""

    key: int = 0
    """Noise key of this sample (`counter_noise.sample_keys`)."""
    temperature: float = 1.0
    """0 is greedy; log-probs are then reported at temperature 1."""
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    do_sample: bool = True
    max_new_tokens: int = 16
    min_new_tokens: int = 0
    """Tokens that end an answer are not drawn before it has this many; stop strings do not end it before."""
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    stop: tuple[str, ...] = ()
    """Strings that end an answer, at the token that completes one of them."""
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the answer has already; `frequency_penalty` as often as it has it."""
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the answer are divided by it if positive, multiplied if negative."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)."""
    grammar: str | None = None
    """What the answer must be (`verl.inference.grammar`): other tokens are not drawn, and it ends when it is whole."""
    top_log_probs: int = 0
    """How many of the likeliest tokens are told beside each token."""
    prompt_log_probs: bool = False
    """The prompt's tokens get log-probs too; it is then computed whole, not found in the prefix cache."""

    def __post_init__(self) -> None:
        _require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= -1, "top_k", self.top_k, "-1 (all tokens), or how many to consider")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "more than 0; 1 is none")
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
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
            "none with min_new_tokens or ignore_eos: it says when an answer ends",
        )
        _require(
            isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop),
            "stop",
            self.stop,
            "a tuple of strings that are not empty",
        )

    def with_key(self, key: int) -> SamplingParams:
        """The same parameters with another noise key. Unlike `replace`, it does not check them again: a batch has
        thousands."""
        copy = object.__new__(SamplingParams)
        for name in _OTHER_THAN_KEY:
            object.__setattr__(copy, name, getattr(self, name))
        object.__setattr__(copy, "key", key)
        return copy

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Some tokens are never drawn."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalised(self) -> bool:
        """Tokens that are there already change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def reshaped(self) -> bool:
        """What is drawn from is not the whole distribution at the temperature: cut off, greedy, penalised …"""
        changed = self.truncated or self.min_new_tokens > 0 or self.penalised or bool(self.logit_bias)
        return self.greedy or changed or self.grammar is not None

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end this answer."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_token_ids


_OTHER_THAN_KEY = tuple(each.name for each in fields(SamplingParams) if each.name != "key")


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to be sampled."""

    id: str
    """Unique among the requests an engine is working on; what `abort` takes."""
    prompt_ids: Sequence[int]
    params: SamplingParams
    group: str = ""
    """The prompt this answers (uid): requests of one group share their prompt."""
    resume_from: Output | None = None
    """An earlier output of the same request; its tokens count as generated and are returned again, first."""


@dataclass(slots=True)
class Output:
    """What was sampled: one log-prob and one weight version per token."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Of the full distribution at the request's temperature: what training computes."""
    versions: list[int] = field(default_factory=list)
    finish_reason: str = "abort"
    """stop (an end token, or the token that completes a stop string, which is the last one here), length, or abort;
    an aborted output can be resumed from."""
    raw_log_probs: list[float] = field(default_factory=list)
    """At temperature 1, nothing cut off; empty from engines that do not know it."""
    sampled_log_probs: list[float] = field(default_factory=list)
    """Under the distribution really sampled from: temperature, penalties, top-k, top-p, min-p, bans. Empty if not
    known."""
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    """Per token, where asked for: the likeliest ones, at temperature 1."""
    prompt_log_probs: list[float] = field(default_factory=list)
    """Where asked for: of the prompt's tokens from the second on, at temperature 1; likewise the likeliest ones."""
    prompt_top_log_probs: list[TopLogProbs] = field(default_factory=list)
    cached_tokens: int = field(default=0, compare=False)
    """Of the prompt, those whose KV was there already."""
    preemptions: int = field(default=0, compare=False)
    """How often its KV made room for others' and was computed again; only the native engine tells."""
    routed_experts: Any = field(default=None, compare=False)
    """[prompt and response tokens but the last, layers, k]: experts of a mixture that each token went through when the
    token after it was sampled, as an array; None where the engine does not return them. Rows missing at the end
    are unknown. A part of a streamed output holds the rows that its own tokens added."""


@dataclass(slots=True)
class TokenOutput:
    """The result of a loop's `server_manager.generate`."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None
    """completed or aborted; the tokens of an aborted request are those sampled before the abort."""
    num_preempted: int = 0
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """`versions`: version of the weights, one per token; `finish_reason`: stop, length or abort."""


def check_request(request: Request, max_model_len: int, grammars: bool = False) -> None:
    """Raise ValueError for a request that no engine of this length can answer, if it has no `grammars` one with it."""
    if request.params.grammar is not None and not grammars:
        raise ValueError(f"request {request.id!r}: this engine knows no grammars. Leave it out, or use the native one.")
    if not request.prompt_ids:
        raise ValueError(f"request {request.id!r}: the prompt is empty. Give at least one token.")
    earlier = request.resume_from
    generated = len(earlier.token_ids) if earlier else 0
    if len(request.prompt_ids) + generated >= max_model_len:
        raise ValueError(
            f"request {request.id!r}: {len(request.prompt_ids)} prompt and {generated} generated tokens leave no room"
            f" in max_model_len={max_model_len}. Raise it, or shorten the prompt."
        )
    if earlier and (earlier.finish_reason == "stop" or generated >= request.params.max_new_tokens):
        raise ValueError(
            f"request {request.id!r}: resume_from is finished ({generated} tokens); nothing is left to do."
        )
    if earlier and not len(earlier.token_ids) == len(earlier.log_probs) == len(earlier.versions):
        raise ValueError(f"request {request.id!r}: resume_from needs one log-prob and one version per token.")


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"sampling {name}: {value!r} is impossible. Use {allowed}.")
