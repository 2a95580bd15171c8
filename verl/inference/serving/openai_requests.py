"""What an OpenAI client asks, checked and turned into requests of the engine."""

from __future__ import annotations

import hashlib
import inspect
import secrets
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from verl.inference.grammar import check_compiles
from verl.inference.serving.fields import ApiError, Fields, HeavyRequest, read_json
from verl.inference.serving.response_format import asked_grammar
from verl.inference.serving.tool_calls import asked_tools, strict_grammar, with_read_arguments
from verl.types.request import Request, SamplingParams
from verl.utils.counter_noise import sample_keys
from verl.utils.text_workers import text_length

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "Ask",
    "ChatAsk",
    "ModelFacts",
    "asked_model",
    "brings_program",
    "check_characters",
    "check_grammar",
    "checked_length",
    "parse",
    "read_chat",
    "read_messages",
    "read_prompt",
    "template_errors",
]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_MOST_CHOICES = 128
_MOST_STOPS = 16
_MOST_TOP = 20
_MOST_PROMPT_TOP = 1024
_COMPLETION_TOKENS = 16
# In order of precedence.
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")
_NO_TEMPLATE = "this model has no chat template. Use /v1/completions."
_NO_CLIENT_TEMPLATE = (
    "is not taken: this server writes chats by the model's own template (see --allow-client-templates)"
)


@dataclass(frozen=True)
class ModelFacts:
    """What requests are checked against."""

    names: tuple[str, ...]
    """What clients may call the model; the first is its name."""
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
        """Characters of a text beyond which it has more than `max_model_len` tokens: it is refused untokenised."""
        return self.max_model_len * self.longest_token


@dataclass(frozen=True)
class Ask:
    """A checked request: `n` answers to each prompt."""

    model: str
    prompts: list[list[int]]
    n: int
    params: SamplingParams
    seed: int | None
    stream: bool
    include_usage: bool
    log_probs: bool
    echoed: list[str] | None = None
    """Texts of the prompts, with which the answers begin."""
    tells_prompt: bool = False
    """Log-probs of the prompts are told by token id, beside the answers."""
    scores_only: bool = False
    """Only the prompts are told: max_tokens is 0."""
    tools: bool = False
    """Calls of tools are looked for in the answers."""
    begun: str = ""
    """The beginning of the answer that is part of the prompt, so that a tool is called."""

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


@dataclass(frozen=True)
class ChatAsk:
    """A checked request whose prompt is still a conversation."""

    ask: Ask
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    options: dict[str, Any]
    """Keywords for the chat template."""


def parse(path: str, body: bytes, facts: ModelFacts, tokenizer: Any, heavy: bool = True) -> Ask:
    """The request in a body sent to `path`. Without `heavy`, HeavyRequest for one that brings a program."""
    given = read_json(body)
    if not heavy and brings_program(given):
        raise HeavyRequest
    ask = (_chat if path == CHAT else _completion)(given, facts, tokenizer)
    check_grammar(ask, tokenizer)
    return ask


def brings_program(given: dict[str, Any]) -> bool:
    """Whether text of the client is executed: a chat template, or the schema of a grammar."""
    options, form = given.get("chat_template_kwargs"), given.get("response_format")
    if given.get("chat_template") is not None or (isinstance(options, dict) and options.get("chat_template")):
        return True
    if form is not None and not (isinstance(form, dict) and form.get("type", "text") == "text"):
        return True
    tools = given.get("tools") if given.get("tool_choice") not in (None, "none", "auto") else None
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return any(isinstance(function, dict) and function.get("strict") is True for function in functions)


def check_grammar(ask: Ask, tokenizer: Any) -> None:
    """Compile the grammar, if there is one, under the limits of a text worker: the engine's process has none."""
    if ask.params.grammar is None:
        return
    try:
        check_compiles(tokenizer, ask.params.eos_token_ids, ask.params.grammar)
    except ValueError as error:
        raise ApiError(str(error), "tools" if ask.begun else "response_format") from error


def _completion(given: dict[str, Any], facts: ModelFacts, tokenizer: Any) -> Ask:
    """A text, token ids, or a list of either."""
    fields = Fields(given, ("prompt", "echo", "prompt_logprobs"))
    prompt = fields.given.get("prompt")
    several = isinstance(prompt, list) and prompt and all(isinstance(item, str | list) for item in prompt)
    items: list[Any] = prompt if several and isinstance(prompt, list) else [prompt]
    echo, top = fields.boolean("echo", False), fields.integer("logprobs", None, 0, _MOST_TOP)
    ask = _ask(fields, facts, len(items), _COMPLETION_TOKENS, top, lowest=0 if echo else 1)
    likeliest = fields.integer("prompt_logprobs", None, 0, _MOST_PROMPT_TOP)
    if likeliest is not None and (echo or ask.log_probs or ask.stream):
        fields.refuse("prompt_logprobs", "goes with neither logprobs, echo nor stream")
    ask = replace(ask, prompts=[read_prompt(item, facts, tokenizer) for item in items])
    _check_limit(fields.given, ask, facts)
    if likeliest is not None:
        told = replace(ask.params, prompt_log_probs=True, top_log_probs=likeliest)
        return replace(ask, params=told, tells_prompt=True)
    if not echo:
        return ask
    texts = [item if isinstance(item, str) else tokenizer.decode(item) for item in items]
    params = replace(ask.params, prompt_log_probs=ask.log_probs)
    return replace(ask, params=params, echoed=texts, scores_only=fields.given.get("max_tokens") == 0)


def _chat(given: dict[str, Any], facts: ModelFacts, tokenizer: Any) -> Ask:
    """Messages, written by the model's chat template."""
    chat = read_chat(given, facts, tokenizer)
    prompt = _tokens(_written(chat, tokenizer) + chat.ask.begun, facts, tokenizer, "messages", special=False)
    ask = replace(chat.ask, prompts=[prompt])
    _check_limit(given, ask, facts)
    return ask


def read_chat(given: dict[str, Any], facts: ModelFacts, tokenizer: Any) -> ChatAsk:
    """The request for an answer to messages, checked; they are not written yet."""
    fields = Fields(
        given,
        (
            "chat_template",
            "chat_template_kwargs",
            "max_completion_tokens",
            "messages",
            "tool_choice",
            "tools",
            "top_logprobs",
        ),
    )
    log_probs, top = fields.boolean("logprobs", False), fields.integer("top_logprobs", 0, 0, _MOST_TOP)
    if top and not log_probs:
        fields.refuse("top_logprobs", "needs logprobs to be true")
    limit = fields.integer("max_completion_tokens", facts.max_model_len, low=1)
    tools, begun = asked_tools(fields)
    ask = _ask(fields, facts, 1, limit, top if log_probs else None)
    if begun and ask.params.grammar is not None:
        fields.refuse("response_format", "does not go with a tool that must be called")
    if begun:
        ask = replace(ask, params=replace(ask.params, grammar=strict_grammar(fields, tools, begun)))
    options = _template_options(fields, facts.client_templates, tokenizer)
    template = options.get("chat_template") or tokenizer.chat_template
    if not template:
        raise ApiError(_NO_TEMPLATE, "messages")
    if tools and "tools" not in str(template):
        fields.refuse("tools", "are not written by the chat template of this model. Leave them out")
    messages = read_messages(fields.given.get("messages"))
    check_characters(text_length([messages, tools, options]), facts, "messages")
    return ChatAsk(replace(ask, tools=bool(tools), begun=begun), messages, tools, options)


def _ask(fields: Fields, facts: ModelFacts, prompts: int, new_tokens: int, top: int | None, lowest: int = 1) -> Ask:
    """What both kinds of request have in common; the prompts are read last, as that takes longest."""
    model = asked_model(fields, facts)
    n = fields.integer("n", 1, low=1, high=_MOST_CHOICES)
    if prompts * n > facts.max_answers:
        raise ApiError(
            f"{prompts} prompts × n = {n} are {prompts * n} answers; one request may ask for {facts.max_answers}. Send"
            " several, or start the server with a larger --max-answers.",
            "n",
        )
    options = fields.mapping("stream_options")
    if not isinstance(options.get("include_usage", False), bool):
        fields.refuse("stream_options", "must be an object such as {include_usage: true}")
    return Ask(
        model,
        prompts=[],
        n=n,
        params=_params(fields, facts, max(1, fields.integer("max_tokens", new_tokens, low=lowest)), top or 0),
        seed=fields.integer("seed", None, low=-(2**63)),
        stream=fields.boolean("stream", False),
        include_usage=options.get("include_usage", False),
        log_probs=top is not None,
    )


def _check_limit(given: dict[str, Any], ask: Ask, facts: ModelFacts) -> None:
    """Refuse an explicit token limit that the context cannot hold, as OpenAI and vLLM do; a default is reduced."""
    name = next((name for name in _TOKEN_LIMITS if given.get(name) is not None), None)
    longest, limit = max(map(len, ask.prompts)), ask.params.max_new_tokens
    room = facts.max_model_len - longest
    if name is not None and limit > room:
        raise ApiError(
            f"This model's maximum context length is {facts.max_model_len} tokens. However, you requested"
            f" {longest + limit} tokens ({longest} in the prompt, {limit} in the completion). Set {name} to at most"
            f" {room}, leave it out, or start the server with a larger --max-model-len.",
            name,
            code="context_length_exceeded",
        )


def asked_model(fields: Fields, facts: ModelFacts) -> str:
    """What the request calls the model."""
    model = fields.given.get("model", facts.names[0])
    if model not in facts.names:
        message = f"The model {str(model)[:200]!r} does not exist; this server has {' = '.join(facts.names)}."
        raise ApiError(message, "model", 404, "model_not_found")
    return model


def _params(fields: Fields, facts: ModelFacts, new_tokens: int, top: int) -> SamplingParams:
    try:
        return SamplingParams(
            temperature=fields.number("temperature", 1.0),
            top_p=fields.number("top_p", 1.0),
            top_k=fields.integer("top_k", -1, low=-1),
            min_p=fields.number("min_p", 0.0),
            max_new_tokens=new_tokens,
            min_new_tokens=fields.integer("min_tokens", 0, low=0),
            eos_token_ids=facts.eos_token_ids,
            stop_token_ids=frozenset(fields.token_ids("stop_token_ids", facts.vocab_size)),
            stop=fields.texts("stop", _MOST_STOPS),
            ignore_eos=fields.boolean("ignore_eos", False),
            presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
            frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
            repetition_penalty=fields.number("repetition_penalty", 1.0),
            logit_bias=fields.biases("logit_bias", facts.vocab_size),
            grammar=asked_grammar(fields),
            top_log_probs=top,
        )
    except ValueError as error:
        raise ApiError(str(error)) from error


# ---------------------------------------------------------------- prompts


def read_prompt(
    item: Any, facts: ModelFacts, tokenizer: Any, name: str = "prompt", room: int = 1, kept: int | None = None
) -> list[int]:
    """Token ids of a text or of token ids; `room` and `kept` as of `checked_length`."""
    if isinstance(item, str):
        return _tokens(item, facts, tokenizer, name, True, room, kept)
    if not isinstance(item, list) or not all(isinstance(token, int) and not isinstance(token, bool) for token in item):
        raise ApiError(f"{name}: must be a text, a list of token ids, or a list of either.", name)
    wrong = next((token for token in item if not 0 <= token < facts.vocab_size), None)
    if wrong is not None:
        raise ApiError(f"{name}: there is no token {wrong}; ids go from 0 to {facts.vocab_size - 1}.", name)
    return checked_length(item, facts, name, room, kept)


def _tokens(
    text: str, facts: ModelFacts, tokenizer: Any, name: str, special: bool, room: int = 1, kept: int | None = None
) -> list[int]:
    if kept is None:
        check_characters(len(text), facts, name)
    made = tokenizer(text, add_special_tokens=special, return_attention_mask=False)
    return checked_length(made["input_ids"], facts, name, room, kept)


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
    """Raise ApiError for a text of so many characters that it cannot fit the context, however it is tokenised."""
    if count > facts.max_characters:
        raise _too_long(f"{count} characters, of which at most {facts.max_characters} can fit", facts, name)


def _too_long(length: str, facts: ModelFacts, name: str) -> ApiError:
    return ApiError(
        f"This model's maximum context length is {facts.max_model_len} tokens. However, your prompt has {length}."
        " Shorten it, or start the server with a larger --max-model-len.",
        name,
        code="context_length_exceeded",
    )


def _template_options(fields: Fields, client_templates: bool, tokenizer: Any) -> dict[str, Any]:
    """What the client wants of the template, or a template of its own."""
    options = dict(fields.mapping("chat_template_kwargs"))
    own = fields.given.get("chat_template", options.pop("chat_template", None))
    if own is not None and not (client_templates and isinstance(own, str)):
        fields.refuse("chat_template", _NO_CLIENT_TEMPLATE)
    reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"documents", "kwargs"}
    if reserved & set(options):
        fields.refuse("chat_template_kwargs", f"may not set {', '.join(sorted(reserved & set(options)))}")
    return options if own is None else {**options, "chat_template": own}


def _written(chat: ChatAsk, tokenizer: Any) -> str:
    """The conversation as its template writes it, ready to be continued."""
    with template_errors():
        return tokenizer.apply_chat_template(
            chat.messages, tools=chat.tools or None, tokenize=False, add_generation_prompt=True, **chat.options
        )


@contextmanager
def template_errors() -> Iterator[None]:
    """What a chat template raises, as the client is told."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: it may raise anything
        raise ApiError(
            f"the chat template refuses the messages ({type(error).__name__}: {error}). Write them as it wants them.",
            "messages",
        ) from error


def read_messages(given: Any) -> list[dict[str, Any]]:
    """A conversation as templates want it."""
    if not isinstance(given, list) or not given:
        raise ApiError("messages: must be a list of {role, content}.", "messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(given)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(f"{where}: must be an object with a role and a content.", where)
    # Fields that clients send along empty would read as set in a template.
    message = {name: value for name, value in message.items() if value is not None}
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise ApiError(f"{where}.content: only parts of type text are read.", where)
        content = "".join(part for part in parts if part)
    if not isinstance(content, str):
        raise ApiError(f"{where}.content: must be a text.", where)
    message["content"] = content
    return with_read_arguments(message, where) if "tool_calls" in message else message
