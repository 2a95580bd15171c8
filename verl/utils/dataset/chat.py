"""Messages and tools of data rows in the form that chat templates take, and prompts in tokens."""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.utils.exceptions import PicklableError

logger = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
# Messages -> the prompt's text, or its token ids.
ChatTemplate = Callable[[Messages], "str | list[int]"]


class PromptRejected(PicklableError, ValueError):
    """The chat template cannot render a prompt; `number` is its index in the batch."""

    def __init__(self, number: int, messages: Messages, cause: Exception) -> None:
        self.number = number
        roles = ", ".join(str(message.get("role")) for message in messages)
        super().__init__(
            f"the chat template rejects the prompt ({type(cause).__name__}: {cause}; roles: {roles}). Write the"
            " messages in the form that the model's template accepts, or pass your own template (chat_template_func)."
        )


def as_messages(value: str | Sequence[Mapping[str, Any]]) -> Messages:
    """Return a prompt as messages: a string is a user message; fields that are null in a columnar file are dropped.

    Content parts that are all text are joined: templates of text-only models would render the list itself.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [
        {name: _joined_text(item) if name == "content" else item for name, item in message.items() if item is not None}
        for message in value
    ]


def _joined_text(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(p, Mapping) and p.get("type") == "text" for p in value):
        return "".join(str(part["text"]) for part in value)
    return value


def prompt_digest(messages: Messages) -> bytes:
    """Return 16 bytes that depend only on the messages."""
    return hashlib.blake2b(json.dumps(messages, sort_keys=True, default=str).encode(), digest_size=16).digest()


class PromptEncoder:
    """Converts prompts to token ids with the tokenizer's chat template or a user's function.

    `system_prompt` is put before prompts without a system message.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any],
        chat_template_func: ChatTemplate | None = None,
        system_prompt: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.user_template = chat_template_func
        self._kwargs = dict(template_kwargs)
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        if chat_template_func is None and not self._template:
            logger.warning("the tokenizer has no chat template: prompts are the plain text of their messages")

    @property
    def _template(self) -> Any:
        """The template in `template_kwargs`, else the tokenizer's."""
        return self._kwargs.get("chat_template") or self.tokenizer.chat_template

    def messages(self, value: str | Sequence[Mapping[str, Any]]) -> Messages:
        """Return the messages of a row's prompt, with the system prompt."""
        messages = as_messages(value)
        return messages if any(message.get("role") == "system" for message in messages) else [*self._system, *messages]

    def encode(self, prompts: Sequence[Messages]) -> list[list[int]]:
        """Return the token ids of each prompt with the generation prompt; many at once are much faster."""
        return self.tokenize(self.render(prompts))

    def render(self, prompts: Sequence[Messages]) -> Sequence[str | list[int]]:
        """Return each prompt as text; as token ids if the user's template returns those."""
        try:
            return self._render(prompts)
        except Exception:  # a template is a program: it may raise anything
            for number, messages in enumerate(prompts):
                try:
                    self._render([messages])
                except Exception as cause:
                    raise PromptRejected(number, messages, cause) from cause
            raise

    def tokenize(self, rendered: Sequence[str | list[int]]) -> list[list[int]]:
        """Return the token ids of the result of `render`; the tokenizer uses all cores."""
        texts = [item for item in rendered if isinstance(item, str)]
        # A template writes the special tokens itself.
        plain = self.user_template is None and not self._template
        encoded = self.tokenizer(texts, add_special_tokens=plain, return_attention_mask=False) if texts else {}
        ids = iter(encoded.get("input_ids", ()))
        return [next(ids) if isinstance(item, str) else list(item) for item in rendered]

    def fingerprint(self) -> str | None:
        """Return a text that changes if the tokens of any prompt may change; None if that cannot be known."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if self.user_template is not None or backend is None:
            return None
        import transformers

        template = self._template
        # Some templates write the date.
        today = datetime.date.today().isoformat() if "strftime_now" in str(template) else None
        parts = [transformers.__version__, backend.to_str(), template, today, self._kwargs, self._system]
        parts.append(self.tokenizer.special_tokens_map)
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def _render(self, prompts: Sequence[Messages]) -> Sequence[str | list[int]]:
        if self.user_template is not None:
            return [self.user_template(messages) for messages in prompts]
        if not self._template:
            return ["\n".join(str(message["content"]) for message in messages) for messages in prompts]
        if not prompts:
            return []
        return self.tokenizer.apply_chat_template(
            list(prompts), tokenize=False, add_generation_prompt=True, **self._kwargs
        )


def as_tools(value: Any, key: str = "tools") -> list[dict[str, Any]] | None:
    """Return the tools of a row: a list of schemas or its JSON text, without nulls of a columnar file.

    The list may contain JSON texts, since schemas of different shapes do not fit into one column. ValueError names
    `key`.
    """
    value = _parse_json(value, repr(key))
    tools = [
        _parse_json(schema, f"schema {number} of {key!r}")
        for number, schema in enumerate(_require_list(value or [], repr(key)))
    ]
    invalid = next((number for number, schema in enumerate(tools) if not isinstance(schema, Mapping)), None)
    if invalid is not None:
        raise ValueError(
            f"schema {invalid} of {key!r} is a {type(tools[invalid]).__name__}. Write a list of JSON schemas."
        )
    return _without_nulls(tools) or None


def with_parsed_tool_calls(number: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return message `number` with the arguments of its tool calls as objects, without nulls of a columnar file."""
    changed = dict(message)
    where = f"'tool_calls' of message {number}"
    calls = _without_nulls(_require_list(_parse_json(changed.get("tool_calls") or [], where), where))
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, dict) or "name" not in function:
            raise ValueError(f"{where} must be a list of {{function: {{name, arguments}}}}. Correct them.")
        if isinstance(function.get("arguments"), str):
            function["arguments"] = _parse_json(function["arguments"] or "{}", f"the 'arguments' in {where}")
    return changed | {"tool_calls": calls} if calls else changed


def with_json_tool_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its tool calls as JSON text, which some templates take (DeepSeek's)."""
    changed = copy.deepcopy(dict(message))
    for call in changed.get("tool_calls", ()):
        function = call.get("function", call)
        function["arguments"] = json.dumps(function.get("arguments", {}), ensure_ascii=False)
    return changed


def _parse_json(value: Any, where: str) -> Any:
    """Parse a string as JSON; return any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: the text is not valid JSON ({error}). Correct it.") from error


def _require_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is a {type(value).__name__}. Write a list, or its JSON text.")
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
