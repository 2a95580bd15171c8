"""What an OpenAI client asks, checked and turned into requests of the engine; every mistake has its own message."""

from __future__ import annotations

import difflib
import hashlib
import json
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from verl.types.request import Request, SamplingParams
from verl.utils.counter_noise import sample_keys
from verl.utils.dataset.chat import PromptEncoder
from verl.utils.exceptions import Travels

__all__ = ["ApiError", "Ask", "ModelFacts", "parse_chat", "parse_completion", "parse_json"]

_MOST_CHOICES = 128
_MOST_STOPS = 16
_COMPLETION_TOKENS = 16
# Fields of the API that this server does not do, with the values that ask for nothing.
_NOT_DONE: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
# Fields that change nothing in an answer.
_WITHOUT_EFFECT = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
_NO_TEMPLATE = "this model has no chat template. Use /v1/completions."


class ApiError(Travels):
    """A request that is refused, as the API words it."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        kinds = {401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.status = status
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class ModelFacts:
    """What requests are checked against."""

    tokenizer: Any
    names: tuple[str, ...]
    """What clients may call the model; the first is its name."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True)
class Ask:
    """A checked request: `n` answers to each prompt."""

    prompts: list[list[int]]
    n: int
    params: SamplingParams
    seed: int | None
    stream: bool
    include_usage: bool
    log_probs: bool

    def requests(self, max_model_len: int) -> list[Request]:
        """One per answer, those of a prompt in a row. The same seed gives the same answers to a prompt."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        made = []
        for prompt in self.prompts:
            words = hashlib.blake2b(repr(prompt).encode(), digest_size=16).hexdigest()
            room = max_model_len - len(prompt)
            params = replace(self.params, max_new_tokens=min(self.params.max_new_tokens, room))
            group = uuid.uuid4().hex
            for index in range(self.n):
                keyed = replace(params, key=sample_keys(seed, 0, words, index))
                made.append(Request(f"{group}/{index}", prompt, keyed, group))
        return made


def parse_json(content_type: str, body: bytes) -> dict[str, Any]:
    """The fields of a request."""
    # A page in somebody's browser can send a form to this address, but not JSON.
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(f"Content-Type is {content_type!r}. Send the request as application/json.")
    try:
        fields = json.loads(body, parse_constant=_no_number)
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise ApiError("the body is not a JSON object.")
    return fields


def parse_completion(given: dict[str, Any], facts: ModelFacts) -> Ask:
    """/v1/completions: a text, token ids, or a list of either."""
    fields = _Fields(given, ("prompt", "logprobs"))
    prompts = _prompts(given.get("prompt"), facts)
    if given.get("logprobs") not in (None, 0) or isinstance(given.get("logprobs"), bool):
        fields.refuse("logprobs", "is the number of likeliest tokens to list; only 0, the sampled token alone, is done")
    ask = _ask(fields, facts, prompts, _COMPLETION_TOKENS)
    return replace(ask, log_probs=given.get("logprobs") is not None)


def parse_chat(given: dict[str, Any], facts: ModelFacts) -> Ask:
    """/v1/chat/completions: messages, written by the model's chat template."""
    fields = _Fields(given, ("messages", "logprobs", "top_logprobs", "max_completion_tokens", "chat_template_kwargs"))
    log_probs = fields.boolean("logprobs", False)
    if given.get("top_logprobs") not in (None, 0):
        fields.refuse("top_logprobs", "is not done; 0, the sampled token alone, is")
    messages = _messages(given.get("messages"))
    template_kwargs = given.get("chat_template_kwargs") or {}
    if not isinstance(template_kwargs, dict):
        fields.refuse("chat_template_kwargs", "must be an object")
    if not facts.tokenizer.chat_template:
        raise ApiError(_NO_TEMPLATE, "messages")
    try:
        prompt = PromptEncoder(facts.tokenizer, template_kwargs).encode([messages])[0]
    except ValueError as error:
        raise ApiError(str(error), "messages") from error
    room = facts.max_model_len - len(prompt)
    limit = fields.integer("max_completion_tokens", None, low=1)
    return replace(_ask(fields, facts, [prompt], limit or max(1, room)), log_probs=log_probs)


class _Fields:
    """The fields of one request; null is the same as not given."""

    _COMMON = (
        "ignore_eos",
        "max_tokens",
        "min_p",
        "min_tokens",
        "model",
        "n",
        "seed",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_options",
        "temperature",
        "top_k",
        "top_p",
    )

    def __init__(self, given: Mapping[str, Any], own: Sequence[str]) -> None:
        self.given = {name: value for name, value in given.items() if value is not None}
        known = {*self._COMMON, *own, *_NOT_DONE, *_WITHOUT_EFFECT}
        for name, value in self.given.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise ApiError(f"Unrecognized request argument supplied: {name}.{hint}", name)
            if name in _NOT_DONE and value not in _NOT_DONE[name]:
                self.refuse(name, "is not done by this server. Leave it out")

    def refuse(self, name: str, why: str) -> NoReturn:
        shown = json.dumps(self.given.get(name), ensure_ascii=False)
        raise ApiError(f"{name}: {shown if len(shown) < 200 else shown[:200] + '…'} {why}.", name)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.given.get(name, default)
        return value if isinstance(value, bool) else self.refuse(name, "must be true or false")

    def integer(self, name: str, default: Any, low: int, high: int = 2**63 - 1) -> Any:
        value = self.given.get(name, default)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not default and not (whole and low <= value <= high):
            limits = f"from {low} to {high}" if high < 2**63 - 1 else f"of at least {low}"
            self.refuse(name, f"must be a whole number {limits}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.given.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(name, "must be a number")
        return float(value)


def _ask(fields: _Fields, facts: ModelFacts, prompts: list[list[int]], new_tokens: int) -> Ask:
    """What both kinds of request have in common."""
    _check_model(fields.given.get("model", facts.names[0]), facts)
    for prompt in prompts:
        _check_prompt(prompt, facts)
    options = fields.given.get("stream_options", {})
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        fields.refuse("stream_options", "must be an object such as {include_usage: true}")
    return Ask(
        prompts,
        n=fields.integer("n", 1, low=1, high=_MOST_CHOICES),
        params=_params(fields, facts, new_tokens),
        seed=fields.integer("seed", None, low=-(2**63)),
        stream=fields.boolean("stream", False),
        include_usage=options.get("include_usage", False),
        log_probs=False,
    )


def _params(fields: _Fields, facts: ModelFacts, new_tokens: int) -> SamplingParams:
    try:
        return SamplingParams(
            temperature=fields.number("temperature", 1.0),
            top_p=fields.number("top_p", 1.0),
            top_k=fields.integer("top_k", -1, low=-1),
            min_p=fields.number("min_p", 0.0),
            max_new_tokens=fields.integer("max_tokens", new_tokens, low=1),
            min_new_tokens=fields.integer("min_tokens", 0, low=0),
            eos_token_ids=facts.eos_token_ids,
            stop_token_ids=frozenset(_token_ids(fields, "stop_token_ids")),
            stop=_stop(fields),
            ignore_eos=fields.boolean("ignore_eos", False),
        )
    except ValueError as error:
        raise ApiError(str(error)) from error


def _stop(fields: _Fields) -> tuple[str, ...]:
    stop = fields.given.get("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or len(texts) > _MOST_STOPS or not all(isinstance(t, str) and t for t in texts):
        fields.refuse("stop", f"must be a text, or up to {_MOST_STOPS} of them, none of them empty")
    return tuple(dict.fromkeys(texts))


def _token_ids(fields: _Fields, name: str) -> list[int]:
    value = fields.given.get(name, [])
    if not _is_token_list(value):
        fields.refuse(name, "must be a list of token ids")
    return value


def _prompts(given: Any, facts: ModelFacts) -> list[list[int]]:
    several = isinstance(given, list) and given and all(isinstance(item, str | list) for item in given)
    prompts = []
    for item in given if several else [given]:
        if isinstance(item, str):
            prompts.append(facts.tokenizer(item, return_attention_mask=False)["input_ids"])
        elif _is_token_list(item):
            prompts.append(item)
        else:
            raise ApiError("prompt: must be a text, a list of token ids, or a list of either.", "prompt")
    return prompts


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise ApiError("messages: must be a list of {role, content}.", "messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(given)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(f"{where}: must be an object with a role and a content.", where)
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise ApiError(f"{where}.content: only parts of type text are read.", where)
        content = "".join(part for part in parts if part)
    if not isinstance(content, str):
        raise ApiError(f"{where}.content: must be a text.", where)
    # Fields that clients send along empty would read as set in a template.
    return {**{name: value for name, value in message.items() if value is not None}, "content": content}


def _check_model(name: Any, facts: ModelFacts) -> None:
    if name not in facts.names:
        message = f"The model {name!r} does not exist; this server has {' = '.join(facts.names)}."
        raise ApiError(message, "model", 404, "model_not_found")


def _check_prompt(prompt: list[int], facts: ModelFacts) -> None:
    if not prompt:
        raise ApiError("the prompt is empty. Give at least one token.", "prompt")
    if len(prompt) >= facts.max_model_len:
        raise ApiError(
            f"This model's maximum context length is {facts.max_model_len} tokens. However, your prompt has"
            f" {len(prompt)} tokens. Shorten it, or start the server with a larger --max-model-len.",
            "prompt",
            code="context_length_exceeded",
        )
    wrong = next((token for token in prompt if not 0 <= token < facts.vocab_size), None)
    if wrong is not None:
        raise ApiError(f"prompt: there is no token {wrong}; ids go from 0 to {facts.vocab_size - 1}.", "prompt")


def _is_token_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
