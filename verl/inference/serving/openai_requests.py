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
from verl.inference.serving.api_errors import ApiError
from verl.inference.serving.request_models import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    ServedRequest,
    ToolCall,
    validate_request,
)
from verl.inference.serving.response_format import response_grammar
from verl.inference.serving.tool_calls import forced_call, strict_grammar
from verl.types.request import Request, SamplingParams
from verl.utils.counter_noise import sample_keys
from verl.utils.http_server.json_body import parse_json
from verl.utils.text_workers import text_length

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "Ask",
    "ChatAsk",
    "HeavyRequest",
    "ModelFacts",
    "brings_program",
    "check_characters",
    "check_grammar",
    "checked_length",
    "checked_model",
    "parse",
    "read_chat",
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
class ModelFacts:
    """Properties of the model and limits that requests are checked against."""

    names: tuple[str, ...]
    """Accepted names of the model; the first is used in responses."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_answers: int
    """Prompts × n of one request."""
    client_templates: bool
    longest_token: int
    """Characters of the longest token of the tokenizer."""

    @property
    def max_characters(self) -> int:
        """Maximum characters of a text: a longer one has more than `max_model_len` tokens and is not tokenised."""
        return self.max_model_len * self.longest_token


@dataclass(frozen=True)
class Ask:
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
    tells_prompt: bool = False
    """Return log-probs of the prompts by token id (`prompt_logprobs`)."""
    scores_only: bool = False
    """Return only the prompts: max_tokens is 0."""
    tools: bool = False
    """Parse tool calls in the responses."""
    begun: str = ""
    """Beginning of the response that is appended to the prompt to force a tool call."""

    def requests(self, max_model_len: int) -> list[Request]:
        """One engine request per response, grouped by prompt. The same seed gives the same responses to a prompt."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        requests = []
        for prompt in self.prompts:
            digest = hashlib.blake2b(repr(prompt).encode(), digest_size=16).hexdigest()
            room = max_model_len - len(prompt)
            params = replace(self.params, max_new_tokens=min(self.params.max_new_tokens, room))
            group = uuid.uuid4().hex
            for index in range(self.n):
                keyed = params.with_key(sample_keys(seed, 0, digest, index))
                requests.append(Request(f"{group}/{index}", prompt, keyed, group))
        return requests


@dataclass(frozen=True)
class ChatAsk:
    """A validated chat request whose messages are not rendered yet."""

    ask: Ask
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    options: dict[str, Any]
    """Keywords for the chat template."""


def parse(path: str, body: bytes, facts: ModelFacts, tokenizer: Any, heavy: bool = True) -> Ask:
    """The request in a body sent to `path`. Without `heavy`, HeavyRequest for one that contains a program."""
    given = parse_json(body)
    if not heavy and isinstance(given, dict) and brings_program(given):
        raise HeavyRequest
    ask = (_chat if path == CHAT else _completion)(given, facts, tokenizer)
    check_grammar(ask, tokenizer)
    return ask


def brings_program(given: dict[str, Any]) -> bool:
    """Whether text of the client is executed: a chat template, options of the template, or the schema of a grammar."""
    options, form = given.get("chat_template_kwargs"), given.get("response_format")
    if given.get("chat_template") is not None or (isinstance(options, dict) and not _are_flags(options)):
        return True
    if form is not None and not (isinstance(form, dict) and form.get("type", "text") == "text"):
        return True
    tools = given.get("tools") if given.get("tool_choice") not in (None, "none", "auto") else None
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return any(isinstance(function, dict) and function.get("strict") is True for function in functions)


def _are_flags(options: dict[str, Any]) -> bool:
    """Whether options of a chat template are flags. Others may be the length of a loop, or a template."""
    return all(value is None or isinstance(value, bool) for value in options.values())


def check_grammar(ask: Ask, tokenizer: Any) -> None:
    """Compile the grammar, if there is one, under the limits of a text worker: the engine's process has none."""
    if ask.params.grammar is None:
        return
    try:
        check_compiles(tokenizer, ask.params.eos_token_ids, ask.params.grammar)
    except ValueError as error:
        raise ApiError(str(error), "tools" if ask.begun else "response_format") from error


def _completion(given: Any, facts: ModelFacts, tokenizer: Any) -> Ask:
    request = validate_request(CompletionRequest, given)
    if request.max_tokens == 0 and not request.echo:
        raise ApiError("max_tokens: should be at least 1 (0 only with echo).", "max_tokens")
    if request.prompt_logprobs is not None and (request.echo or request.logprobs is not None or request.stream):
        raise ApiError("prompt_logprobs: goes with neither logprobs, echo nor stream.", "prompt_logprobs")
    limit = _COMPLETION_TOKENS if request.max_tokens is None else max(1, request.max_tokens)
    ask = _ask(request, facts, len(request.prompt), limit, request.logprobs)
    prompts = [tokenize_prompt(prompt, facts, tokenizer, "prompt") for prompt in request.prompt]
    ask = replace(ask, prompts=prompts)
    _check_room(request, ask, facts, "max_tokens" if request.max_tokens is not None else None)
    if request.prompt_logprobs is not None:
        params = replace(ask.params, prompt_log_probs=True, top_log_probs=request.prompt_logprobs)
        return replace(ask, params=params, tells_prompt=True)
    if not request.echo:
        return ask
    texts = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in request.prompt]
    params = replace(ask.params, prompt_log_probs=ask.log_probs)
    return replace(ask, params=params, echoed=texts, scores_only=request.max_tokens == 0)


def _chat(given: Any, facts: ModelFacts, tokenizer: Any) -> Ask:
    request, chat = _validated_chat(given, facts, tokenizer)
    prompt = _tokens(_rendered(chat, tokenizer) + chat.ask.begun, facts, tokenizer, "messages", special=False)
    ask = replace(chat.ask, prompts=[prompt])
    # In order of precedence.
    names = [name for name in ("max_tokens", "max_completion_tokens") if getattr(request, name) is not None]
    _check_room(request, ask, facts, names[0] if names else None)
    return ask


def read_chat(given: Any, facts: ModelFacts, tokenizer: Any) -> ChatAsk:
    """The validated request; its messages are not rendered yet."""
    return _validated_chat(given, facts, tokenizer)[1]


def _validated_chat(given: Any, facts: ModelFacts, tokenizer: Any) -> tuple[ChatRequest, ChatAsk]:
    request = validate_request(ChatRequest, given)
    if request.top_logprobs and not request.logprobs:
        raise ApiError("top_logprobs: needs logprobs to be true.", "top_logprobs")
    begun, offered = forced_call(request), request.tool_choice != "none"
    tools = list(given["tools"]) if request.tools and offered else []
    limit = request.max_tokens or request.max_completion_tokens or facts.max_model_len
    ask = _ask(request, facts, 1, limit, request.top_logprobs if request.logprobs else None)
    if begun:
        ask = replace(ask, params=_with_call_grammar(request, ask.params))
    options = _template_options(request, facts.client_templates, tokenizer)
    template = options.get("chat_template") or tokenizer.chat_template
    if not template:
        raise ApiError(_NO_TEMPLATE, "messages")
    if tools and "tools" not in str(template):
        raise ApiError("tools: the chat template of this model does not render them. Leave them out.", "tools")
    messages = template_messages(given["messages"], request.messages)
    check_characters(text_length([messages, tools, options]), facts, "messages")
    return request, ChatAsk(replace(ask, tools=bool(tools), begun=begun), messages, tools, options)


def _with_call_grammar(request: ChatRequest, params: SamplingParams) -> SamplingParams:
    if params.grammar is not None:
        raise ApiError("response_format: does not go with a tool that must be called.", "response_format")
    grammar = strict_grammar(request)
    if grammar is not None and (request.min_tokens or request.ignore_eos):
        raise ApiError("tools: strict ones go with neither min_tokens nor ignore_eos.", "tools")
    return replace(params, grammar=grammar)


def _ask(request: GenerationRequest, facts: ModelFacts, prompts: int, new_tokens: int, top: int | None) -> Ask:
    """The part that both APIs share, without prompts, which are tokenised last because that takes longest."""
    model, answers = checked_model(request, facts), prompts * request.n
    if answers > facts.max_answers:
        raise ApiError(
            f"{prompts} prompts × n = {request.n} are {answers} answers; one request may ask for {facts.max_answers}."
            " Send several, or start the server with a larger --max-answers.",
            "n",
        )
    return Ask(
        model,
        prompts=[],
        n=request.n,
        params=_params(request, facts, new_tokens, top or 0),
        seed=request.seed,
        stream=request.stream,
        include_usage=request.stream_options.include_usage,
        log_probs=top is not None,
    )


def _check_room(request: GenerationRequest, ask: Ask, facts: ModelFacts, limited_by: str | None) -> None:
    """Reject a token limit that the context cannot hold, as OpenAI and vLLM do; the default is reduced instead."""
    longest, limit = max(map(len, ask.prompts)), ask.params.max_new_tokens
    room = facts.max_model_len - longest
    name = limited_by or "min_tokens"
    if (limit if limited_by is not None else request.min_tokens) > room:
        raise ApiError(
            f"This model's maximum context length is {facts.max_model_len} tokens. However, you requested"
            f" {longest + limit} tokens ({longest} in the prompt, {limit} in the completion). Set {name} to at most"
            f" {room}, leave it out, or start the server with a larger --max-model-len.",
            name,
            code="context_length_exceeded",
        )


def checked_model(request: ServedRequest, facts: ModelFacts) -> str:
    """The model's name in the request."""
    model = facts.names[0] if request.model is None else request.model
    if model not in facts.names:
        message = f"The model {model[:200]!r} does not exist; this server has {' = '.join(facts.names)}."
        raise ApiError(message, "model", 404, "model_not_found")
    return model


def _params(request: GenerationRequest, facts: ModelFacts, new_tokens: int, top: int) -> SamplingParams:
    if request.min_tokens > new_tokens:
        message = f"min_tokens: {request.min_tokens} is more than the {new_tokens} tokens that may be generated."
        raise ApiError(message, "min_tokens")
    biases = {int(token): float(bias) for token, bias in request.logit_bias.items()}
    if len(biases) < len(request.logit_bias):
        raise ApiError("logit_bias: each token id should occur once.", "logit_bias")
    _check_vocabulary("logit_bias", list(biases), facts)
    _check_vocabulary("stop_token_ids", request.stop_token_ids, facts)
    return SamplingParams(
        temperature=float(request.temperature),
        top_p=float(request.top_p),
        top_k=request.top_k,
        min_p=float(request.min_p),
        max_new_tokens=new_tokens,
        min_new_tokens=request.min_tokens,
        eos_token_ids=facts.eos_token_ids,
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


def _check_vocabulary(name: str, token_ids: Sequence[int], facts: ModelFacts) -> None:
    if token_ids and max(token_ids) >= facts.vocab_size:
        invalid = next(token for token in token_ids if token >= facts.vocab_size)
        raise ApiError(f"{name}: there is no token {invalid}; ids are 0 to {facts.vocab_size - 1}.", name)


# ---------------------------------------------------------------- prompts


def tokenize_prompt(
    prompt: str | list[int], facts: ModelFacts, tokenizer: Any, name: str, room: int = 1, kept: int | None = None
) -> list[int]:
    """Token ids of a text or of token ids; `room` and `kept` as of `checked_length`."""
    if isinstance(prompt, str):
        return _tokens(prompt, facts, tokenizer, name, True, room, kept)
    _check_vocabulary(name, prompt, facts)
    return checked_length(prompt, facts, name, room, kept)


def _tokens(
    text: str, facts: ModelFacts, tokenizer: Any, name: str, special: bool, room: int = 1, kept: int | None = None
) -> list[int]:
    if kept is None:
        check_characters(len(text), facts, name)
    encoded = tokenizer(text, add_special_tokens=special, return_attention_mask=False)
    return checked_length(encoded["input_ids"], facts, name, room, kept)


def checked_length(
    prompt: list[int], facts: ModelFacts, name: str, room: int = 1, kept: int | None = None
) -> list[int]:
    """The prompt, or the last `kept` tokens of it, if it leaves `room` for an answer."""
    prompt = prompt if kept is None else prompt[-kept:]
    if not prompt:
        raise ApiError(f"{name}: it is empty. Give at least one token.", name)
    if len(prompt) > facts.max_model_len - room:
        raise _too_long(f"{len(prompt)} tokens", facts, name)
    return prompt


def check_characters(count: int, facts: ModelFacts, name: str) -> None:
    """Raise ApiError for a text with more characters than any tokenisation could fit into the context."""
    if count > facts.max_characters:
        raise _too_long(f"{count} characters, of which at most {facts.max_characters} can fit", facts, name)


def _too_long(length: str, facts: ModelFacts, name: str) -> ApiError:
    return ApiError(
        f"This model's maximum context length is {facts.max_model_len} tokens. However, your prompt has {length}."
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


def _rendered(chat: ChatAsk, tokenizer: Any) -> str:
    """The conversation as text, ready to be continued."""
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
            f"the chat template refuses the messages ({type(error).__name__}: {error}). Write them as it wants them.",
            "messages",
        ) from error


def template_messages(given: Sequence[dict[str, Any]], messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: content as text, arguments of calls as objects, no null fields.

    `given` are those of the client, with fields that only templates know; `messages` are the same, validated.
    """
    return [_template_message(*pair) for pair in zip(given, messages, strict=True)]


def _template_message(given: dict[str, Any], message: Message) -> dict[str, Any]:
    fields = {name: value for name, value in given.items() if value is not None}
    fields["content"] = message.text
    if message.tool_calls is not None:
        pairs = zip(given["tool_calls"], message.tool_calls, strict=True)
        fields["tool_calls"] = [_template_call(raw, call) for raw, call in pairs]
    return fields


def _template_call(given: dict[str, Any], call: ToolCall) -> dict[str, Any]:
    if not isinstance(given["function"].get("arguments"), str):
        return given
    return {**given, "function": {**given["function"], "arguments": call.function.arguments}}
