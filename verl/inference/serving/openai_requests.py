"""Requests of OpenAI clients, validated and converted to requests of the engine."""

from __future__ import annotations

import hashlib
import inspect
import secrets
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from verl.inference.constraints import check_compiles
from verl.inference.serving.api import ApiError
from verl.inference.serving.request_models import (
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    MessageToolCall,
    validate_request,
)
from verl.inference.serving.response_text import forced_call, response_grammar, strict_grammar
from verl.types.request import Request, SamplingParams
from verl.utils.counter_noise import sample_key
from verl.utils.http_server.json_body import parse_json
from verl.utils.tokenizer import text_length

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "HeavyRequest",
    "ModelInfo",
    "ParsedChatRequest",
    "ParsedRequest",
    "check_characters",
    "check_grammar",
    "check_length",
    "contains_program",
    "parse",
    "read_chat",
    "resolve_model_name",
    "template_errors",
    "template_messages",
    "tokenize_prompt",
]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_COMPLETION_TOKENS = 16
_NO_TEMPLATE = "this model has no chat template. Use /v1/completions."
_NO_CLIENT_TEMPLATE = (
    "chat_template: this server only uses the chat template of the model (see --allow-client-templates)."
)


class HeavyRequest(Exception):
    """A request contains a program (a chat template, a grammar) and was parsed without permission to run it."""


@dataclass(frozen=True)
class ModelInfo:
    """Properties of the model and limits that requests are checked against."""

    names: tuple[str, ...]
    """Accepted names of the model; the first is used in responses."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_responses: int
    """Maximum of prompts × n in one request."""
    client_templates: bool
    """Whether requests may contain chat templates."""
    longest_token: int
    """Characters of the longest token of the tokenizer."""

    @property
    def max_characters(self) -> int:
        """Maximum characters of a text: a longer one has more than `max_model_len` tokens and is not tokenised."""
        return self.max_model_len * self.longest_token


@dataclass(frozen=True)
class ParsedRequest:
    """A validated request: `n` responses to each prompt."""

    model: str
    prompts: list[list[int]]
    n: int
    params: SamplingParams
    seed: int | None
    stream: bool
    include_usage: bool
    log_probs: bool
    echoed: list[str] | None = None
    """Texts of the prompts, which precede the responses (`echo`)."""
    returns_prompt_log_probs: bool = False
    """Return log-probs of the prompts by token id (`prompt_logprobs`)."""
    scores_only: bool = False
    """Return the echoed prompts without responses: max_tokens is 0."""
    tools: bool = False
    """Parse tool calls in the responses."""
    forced_prefix: str = ""
    """Beginning of the response that is appended to the prompt to force a tool call."""

    def requests(self, max_model_len: int, adapter: str | None = None) -> list[Request]:
        """One engine request per response, grouped by prompt. The same seed gives the same responses to a prompt.

        `adapter`: name of the LoRA adapter.
        """
        seed = secrets.randbits(63) if self.seed is None else self.seed
        requests = []
        for prompt in self.prompts:
            digest = hashlib.blake2b(repr(prompt).encode(), digest_size=16).hexdigest()
            room = max_model_len - len(prompt)
            params = replace(self.params, max_new_tokens=min(self.params.max_new_tokens, room))
            group = uuid.uuid4().hex
            for index in range(self.n):
                keyed = params.with_key(sample_key(seed, 0, digest, index))
                requests.append(Request(f"{group}/{index}", prompt, keyed, group, adapter=adapter))
        return requests


@dataclass(frozen=True)
class ParsedChatRequest:
    """A validated chat request whose messages are not rendered yet."""

    generation: ParsedRequest
    """The request without prompts."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    options: dict[str, Any]
    """Keywords for the chat template."""


def parse(path: str, body: bytes, model_info: ModelInfo, tokenizer: Any, heavy: bool = True) -> ParsedRequest:
    """Parse, validate and tokenise a request to `path` (CHAT or COMPLETIONS); ApiError if it is invalid.

    Without `heavy`, raises HeavyRequest for a request that contains a program.
    """
    fields = parse_json(body)
    if not heavy and isinstance(fields, dict) and contains_program(fields):
        raise HeavyRequest
    parsed = (_parse_chat if path == CHAT else _parse_completion)(fields, model_info, tokenizer)
    check_grammar(parsed, tokenizer)
    return parsed


def contains_program(fields: dict[str, Any]) -> bool:
    """Whether a request contains a program: a chat template, options of a template, or the schema of a grammar."""
    options, form = fields.get("chat_template_kwargs"), fields.get("response_format")
    if fields.get("chat_template") is not None or (isinstance(options, dict) and not _are_booleans(options)):
        return True
    if form is not None and not (isinstance(form, dict) and form.get("type", "text") == "text"):
        return True
    tools = fields.get("tools") if fields.get("tool_choice") not in (None, "none", "auto") else None
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return any(isinstance(function, dict) and function.get("strict") is True for function in functions)


def _are_booleans(options: dict[str, Any]) -> bool:
    """Whether all options of a chat template are booleans. Other values may be the length of a loop, or a template."""
    return all(value is None or isinstance(value, bool) for value in options.values())


def check_grammar(parsed: ParsedRequest, tokenizer: Any) -> None:
    """Compile the grammar of a request, if any; ApiError if that fails.

    In a text worker, which limits time and memory: the engine's process does not.
    """
    if parsed.params.grammar is None:
        return
    try:
        check_compiles(tokenizer, parsed.params.eos_token_ids, parsed.params.grammar)
    except ValueError as error:
        raise ApiError(str(error), "tools" if parsed.forced_prefix else "response_format") from error


def _parse_completion(fields: Any, model_info: ModelInfo, tokenizer: Any) -> ParsedRequest:
    request = validate_request(CompletionRequest, fields)
    if request.max_tokens == 0 and not request.echo:
        raise ApiError("max_tokens: should be at least 1 (0 only with echo).", "max_tokens")
    if request.prompt_logprobs is not None and (request.echo or request.logprobs is not None or request.stream):
        raise ApiError("prompt_logprobs: cannot be combined with logprobs, echo or stream.", "prompt_logprobs")
    limit = _COMPLETION_TOKENS if request.max_tokens is None else max(1, request.max_tokens)
    parsed = _parse_common(request, model_info, len(request.prompt), limit, request.logprobs)
    prompts = [tokenize_prompt(prompt, model_info, tokenizer, "prompt") for prompt in request.prompt]
    parsed = replace(parsed, prompts=prompts)
    _check_max_tokens(request, parsed, model_info, "max_tokens" if request.max_tokens is not None else None)
    if request.prompt_logprobs is not None:
        params = replace(parsed.params, prompt_log_probs=True, top_log_probs=request.prompt_logprobs)
        return replace(parsed, params=params, returns_prompt_log_probs=True)
    if not request.echo:
        return parsed
    texts = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in request.prompt]
    params = replace(parsed.params, prompt_log_probs=parsed.log_probs)
    return replace(parsed, params=params, echoed=texts, scores_only=request.max_tokens == 0)


def _parse_chat(fields: Any, model_info: ModelInfo, tokenizer: Any) -> ParsedRequest:
    request, chat = _validate_chat(fields, model_info, tokenizer)
    prompt = _tokenize(
        _render(chat, tokenizer) + chat.generation.forced_prefix, model_info, tokenizer, "messages", special=False
    )
    parsed = replace(chat.generation, prompts=[prompt])
    # In order of precedence.
    names = [name for name in ("max_tokens", "max_completion_tokens") if getattr(request, name) is not None]
    _check_max_tokens(request, parsed, model_info, names[0] if names else None)
    return parsed


def read_chat(fields: Any, model_info: ModelInfo, tokenizer: Any) -> ParsedChatRequest:
    """Validate a chat request without rendering its messages."""
    return _validate_chat(fields, model_info, tokenizer)[1]


def _validate_chat(fields: Any, model_info: ModelInfo, tokenizer: Any) -> tuple[ChatRequest, ParsedChatRequest]:
    request = validate_request(ChatRequest, fields)
    if request.top_logprobs and not request.logprobs:
        raise ApiError("top_logprobs: needs logprobs to be true.", "top_logprobs")
    forced_prefix, offered = forced_call(request), request.tool_choice != "none"
    tools = list(fields["tools"]) if request.tools and offered else []
    limit = request.max_tokens or request.max_completion_tokens or model_info.max_model_len
    parsed = _parse_common(request, model_info, 1, limit, request.top_logprobs if request.logprobs else None)
    if forced_prefix:
        parsed = replace(parsed, params=_with_call_grammar(request, parsed.params))
    options = _template_options(request, model_info.client_templates, tokenizer)
    template = options.get("chat_template") or tokenizer.chat_template
    if not template:
        raise ApiError(_NO_TEMPLATE, "messages")
    if tools and "tools" not in str(template):
        raise ApiError("tools: the chat template of this model does not render them. Leave them out.", "tools")
    messages = template_messages(fields["messages"], request.messages)
    check_characters(text_length([messages, tools, options]), model_info, "messages")
    return request, ParsedChatRequest(
        replace(parsed, tools=bool(tools), forced_prefix=forced_prefix), messages, tools, options
    )


def _with_call_grammar(request: ChatRequest, params: SamplingParams) -> SamplingParams:
    if params.grammar is not None:
        raise ApiError("response_format: cannot be combined with a tool that must be called.", "response_format")
    grammar = strict_grammar(request)
    if grammar is not None and (request.min_tokens or request.ignore_eos):
        raise ApiError("tools: strict tools cannot be combined with min_tokens or ignore_eos.", "tools")
    return replace(params, grammar=grammar)


def _parse_common(
    request: GenerationRequest, model_info: ModelInfo, prompts: int, new_tokens: int, top: int | None
) -> ParsedRequest:
    """The fields that both APIs share, without prompts: these are tokenised last because that takes longest."""
    model, responses = resolve_model_name(request, model_info), prompts * request.n
    if responses > model_info.max_responses:
        raise ApiError(
            f"{prompts} prompts × n = {request.n} are {responses} responses; one request may have"
            f" {model_info.max_responses}. Send several requests, or start the server with a larger --max-answers.",
            "n",
        )
    return ParsedRequest(
        model,
        prompts=[],
        n=request.n,
        params=_sampling_params(request, model_info, new_tokens, top or 0),
        seed=request.seed,
        stream=request.stream,
        include_usage=request.stream_options.include_usage,
        log_probs=top is not None,
    )


def _check_max_tokens(
    request: GenerationRequest, parsed: ParsedRequest, model_info: ModelInfo, limited_by: str | None
) -> None:
    """Reject a token limit of the client that exceeds the context, like OpenAI and vLLM; a default is reduced.

    `limited_by`: the field with the client's limit; None: the limit is the default, and only min_tokens is checked.
    """
    longest = max(map(len, parsed.prompts))
    room = model_info.max_model_len - longest
    name, limit = "min_tokens", request.min_tokens
    if limited_by is not None:
        name, limit = limited_by, parsed.params.max_new_tokens
    if limit > room:
        raise ApiError(
            f"This model's maximum context length is {model_info.max_model_len} tokens. However, you requested"
            f" {longest + limit} tokens ({longest} in the prompt, {limit} in the completion). Set {name} to at most"
            f" {room}, leave it out, or start the server with a larger --max-model-len.",
            name,
            code="context_length_exceeded",
        )


def resolve_model_name(request: ApiRequest, model_info: ModelInfo) -> str:
    """The model's name to use in the response; ApiError (404) if the request names another model."""
    model = model_info.names[0] if request.model is None else request.model
    if model not in model_info.names:
        message = f"The model {model[:200]!r} does not exist; this server has {' = '.join(model_info.names)}."
        raise ApiError(message, "model", 404, "model_not_found")
    return model


def _sampling_params(request: GenerationRequest, model_info: ModelInfo, new_tokens: int, top: int) -> SamplingParams:
    if request.min_tokens > new_tokens:
        message = f"min_tokens: {request.min_tokens} is more than the {new_tokens} tokens that may be generated."
        raise ApiError(message, "min_tokens")
    biases = {int(token): float(bias) for token, bias in request.logit_bias.items()}
    if len(biases) < len(request.logit_bias):
        raise ApiError("logit_bias: each token id should occur once.", "logit_bias")
    _check_vocabulary("logit_bias", list(biases), model_info)
    _check_vocabulary("stop_token_ids", request.stop_token_ids, model_info)
    return SamplingParams(
        temperature=float(request.temperature),
        top_p=float(request.top_p),
        top_k=request.top_k,
        min_p=float(request.min_p),
        max_new_tokens=new_tokens,
        min_new_tokens=request.min_tokens,
        eos_token_ids=model_info.eos_token_ids,
        stop_token_ids=frozenset(request.stop_token_ids),
        stop=tuple(dict.fromkeys(request.stop)),
        ignore_eos=request.ignore_eos,
        presence_penalty=float(request.presence_penalty),
        frequency_penalty=float(request.frequency_penalty),
        repetition_penalty=float(request.repetition_penalty),
        logit_bias=tuple(biases.items()),
        grammar=response_grammar(request),
        top_log_probs=top,
    )


def _check_vocabulary(name: str, token_ids: Sequence[int], model_info: ModelInfo) -> None:
    if token_ids and max(token_ids) >= model_info.vocab_size:
        invalid = next(token for token in token_ids if token >= model_info.vocab_size)
        raise ApiError(f"{name}: there is no token {invalid}; ids are 0 to {model_info.vocab_size - 1}.", name)


# ---------------------------------------------------------------- prompts


def tokenize_prompt(
    prompt: str | list[int],
    model_info: ModelInfo,
    tokenizer: Any,
    name: str,
    room: int = 1,
    keep_last: int | None = None,
) -> list[int]:
    """Token ids of a prompt; `room` and `keep_last` as in `check_length`."""
    if isinstance(prompt, str):
        return _tokenize(prompt, model_info, tokenizer, name, True, room, keep_last)
    _check_vocabulary(name, prompt, model_info)
    return check_length(prompt, model_info, name, room, keep_last)


def _tokenize(
    text: str,
    model_info: ModelInfo,
    tokenizer: Any,
    name: str,
    special: bool,
    room: int = 1,
    keep_last: int | None = None,
) -> list[int]:
    if keep_last is None:
        check_characters(len(text), model_info, name)
    encoded = tokenizer(text, add_special_tokens=special, return_attention_mask=False)
    return check_length(encoded["input_ids"], model_info, name, room, keep_last)


def check_length(
    prompt: list[int], model_info: ModelInfo, name: str, room: int = 1, keep_last: int | None = None
) -> list[int]:
    """Return the prompt, cut to its last `keep_last` tokens.

    ApiError if it is empty, or leaves fewer than `room` tokens of the context for a response.
    """
    prompt = prompt if keep_last is None else prompt[-keep_last:]
    if not prompt:
        raise ApiError(f"{name}: is empty. Send at least one token.", name)
    if len(prompt) > model_info.max_model_len - room:
        raise _too_long(f"{len(prompt)} tokens", model_info, name)
    return prompt


def check_characters(count: int, model_info: ModelInfo, name: str) -> None:
    """Raise ApiError for a text with more characters than any tokenisation could fit into the context."""
    if count > model_info.max_characters:
        raise _too_long(f"{count} characters, of which at most {model_info.max_characters} can fit", model_info, name)


def _too_long(length: str, model_info: ModelInfo, name: str) -> ApiError:
    return ApiError(
        f"This model's maximum context length is {model_info.max_model_len} tokens. However, your prompt has {length}."
        " Shorten it, or start the server with a larger --max-model-len.",
        name,
        code="context_length_exceeded",
    )


def _template_options(request: ChatRequest, client_templates: bool, tokenizer: Any) -> dict[str, Any]:
    """Keywords for the chat template; `chat_template` is a template of the client."""
    options = dict(request.chat_template_kwargs)
    template = options.pop("chat_template", None) if request.chat_template is None else request.chat_template
    if template is not None and not (client_templates and isinstance(template, str)):
        raise ApiError(_NO_CLIENT_TEMPLATE, "chat_template")
    reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"documents", "kwargs"}
    if reserved & set(options):
        names = ", ".join(sorted(reserved & set(options)))
        raise ApiError(f"chat_template_kwargs: may not set {names}.", "chat_template_kwargs")
    return options if template is None else {**options, "chat_template": template}


def _render(chat: ParsedChatRequest, tokenizer: Any) -> str:
    """The conversation as text, with the generation prompt."""
    with template_errors():
        return tokenizer.apply_chat_template(
            chat.messages, tools=chat.tools or None, tokenize=False, add_generation_prompt=True, **chat.options
        )


@contextmanager
def template_errors() -> Iterator[None]:
    """Convert exceptions of a chat template to API errors."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: it may raise anything
        raise ApiError(
            f"the chat template rejects the messages ({type(error).__name__}: {error})."
            " Send them in the form that it expects.",
            "messages",
        ) from error


def template_messages(raw_messages: Sequence[dict[str, Any]], messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: content as text, arguments of calls as objects, no null fields.

    `raw_messages` are those of the client, with fields that only templates know; `messages` are the same, validated.
    """
    return [_template_message(*pair) for pair in zip(raw_messages, messages, strict=True)]


def _template_message(raw: dict[str, Any], message: Message) -> dict[str, Any]:
    fields = {name: value for name, value in raw.items() if value is not None}
    fields["content"] = message.text
    if message.tool_calls is not None:
        pairs = zip(raw["tool_calls"], message.tool_calls, strict=True)
        fields["tool_calls"] = [_template_call(raw_call, call) for raw_call, call in pairs]
    return fields


def _template_call(raw: dict[str, Any], call: MessageToolCall) -> dict[str, Any]:
    if not isinstance(raw["function"].get("arguments"), str):
        return raw
    return {**raw, "function": {**raw["function"], "arguments": call.function.arguments}}
