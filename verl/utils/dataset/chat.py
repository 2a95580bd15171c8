"""Conversations to tokens: the prompt that a model continues."""

from __future__ import annotations

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


class PromptRefused(PicklableError, ValueError):
    """A chat template cannot write a prompt; `number` is its place among those given."""

    def __init__(self, number: int, messages: Messages, cause: Exception) -> None:
        self.number = number
        roles = ", ".join(str(message.get("role")) for message in messages)
        super().__init__(
            f"the chat template refuses the prompt ({type(cause).__name__}: {cause}; roles: {roles}). Write the"
            " messages as the model's template wants them, or give a template of your own (chat_template_func)."
        )


def as_messages(value: str | Sequence[Mapping[str, Any]]) -> Messages:
    """A prompt as messages: text is what the user says; fields that a columnar file filled with null are dropped.

    Content in parts that are all text is that text: templates of models without images would write the list itself.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [
        {name: _content(item) if name == "content" else item for name, item in message.items() if item is not None}
        for message in value
    ]


def _content(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(p, Mapping) and p.get("type") == "text" for p in value):
        return "".join(str(part["text"]) for part in value)
    return value


def prompt_digest(messages: Messages) -> bytes:
    """16 bytes that the prompt's words alone decide."""
    return hashlib.blake2b(json.dumps(messages, sort_keys=True, default=str).encode(), digest_size=16).digest()


class PromptEncoder:
    """Turns prompts into token ids by the tokenizer's chat template, or by a function of the user.

    `system_prompt` is said first where a prompt brings no system message of its own.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any],
        chat_template_func: ChatTemplate | None = None,
        system_prompt: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.own_template = chat_template_func
        self._kwargs = dict(template_kwargs)
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        if chat_template_func is None and not self._template:
            logger.warning("the tokenizer has no chat template: prompts are the plain text of their messages")

    @property
    def _template(self) -> Any:
        """The one that is given, or the tokenizer's own."""
        return self._kwargs.get("chat_template") or self.tokenizer.chat_template

    def messages(self, value: str | Sequence[Mapping[str, Any]]) -> Messages:
        """The prompt of a row as it will be encoded, with the system prompt."""
        given = as_messages(value)
        return given if any(message.get("role") == "system" for message in given) else [*self._system, *given]

    def encode(self, prompts: Sequence[Messages]) -> list[list[int]]:
        """Token ids of each prompt, ready to be continued by the model; many at once is much faster."""
        return self.tokenised(self.written(prompts))

    def written(self, prompts: Sequence[Messages]) -> Sequence[str | list[int]]:
        """Each prompt as text; as token ids where the user's template says so."""
        try:
            return self._written(prompts)
        except Exception:  # a template is a program of the model's or the user's: it may raise anything
            for number, messages in enumerate(prompts):
                try:
                    self._written([messages])
                except Exception as cause:
                    raise PromptRefused(number, messages, cause) from cause
            raise

    def tokenised(self, written: Sequence[str | list[int]]) -> list[list[int]]:
        """Token ids of what `written` gave; the tokenizer uses all cores."""
        texts = [item for item in written if isinstance(item, str)]
        # A template has already written the special tokens it wants.
        plain = self.own_template is None and not self._template
        encoded = self.tokenizer(texts, add_special_tokens=plain, return_attention_mask=False) if texts else {}
        made = iter(encoded.get("input_ids", ()))
        return [next(made) if isinstance(item, str) else list(item) for item in written]

    def fingerprint(self) -> str | None:
        """Changes when the tokens of some prompt might; None where that cannot be known."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if self.own_template is not None or backend is None:
            return None
        import transformers

        template = self._template
        # Some templates write the day: the text of yesterday is not the text of today.
        today = datetime.date.today().isoformat() if "strftime_now" in str(template) else None
        parts = [transformers.__version__, backend.to_str(), template, today, self._kwargs, self._system]
        parts.append(self.tokenizer.special_tokens_map)
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def _written(self, prompts: Sequence[Messages]) -> Sequence[str | list[int]]:
        if self.own_template is not None:
            return [self.own_template(messages) for messages in prompts]
        if not self._template:
            return ["\n".join(str(message["content"]) for message in messages) for messages in prompts]
        if not prompts:
            return []
        return self.tokenizer.apply_chat_template(
            list(prompts), tokenize=False, add_generation_prompt=True, **self._kwargs
        )
