"""ScoringEncoder: conversations in the tokens of a reward model, also with tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.utils.dataset.chat import Messages
from verl.utils.dataset.conversation import ConversationEncoder, ids_up_to_answer

__all__ = ["SCORED_AT_END", "ScoringEncoder"]

SCORED_AT_END = "scored_at_end_token"
"""Key in a tokenizer's configuration: the score is read at the end token of the answer, not after text that the
template adds. `verl.trainer.main_rm` trains such models."""
# Tokenizers without a known limit report a huge number.
_NO_LIMIT = 10**9

Message = Mapping[str, Any]

_NAME, _ARGUMENT, _RESULT = "probe_name", "probe_argument", "probe_result"
_CALL = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": json.dumps({"x": _ARGUMENT})}}
_PROBE: list[Message] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": _NAME, "content": _RESULT, "tool_call_id": "call00000"},
    {"role": "assistant", "content": "."},
]


class ScoringEncoder:
    """Encodes conversations whose last message is the answer to be scored, with `tokenizer`'s chat template.

    Without a template, a conversation is the pair (contents of the other messages, one per line; answer), as for
    classifiers of question and answer. Conversations longer than `max_tokens` (None: the tokenizer's limit) lose their
    beginning: the answer is what is scored. With `SCORED_AT_END`, conversations end with the end token, encoded as in
    `main_rm`, with or without a template.
    """

    def __init__(self, tokenizer: Any, max_tokens: int | None = None) -> None:
        self._tokenizer = tokenizer
        limit = getattr(tokenizer, "model_max_length", None) or _NO_LIMIT
        self._max_tokens = max_tokens or (limit if limit < _NO_LIMIT else None)

    def encode(self, conversations: Sequence[Sequence[Any]]) -> list[list[int]]:
        """Return the token ids of each conversation. ValueError: the template rejects one."""
        conversations = [_renderable_messages(self._tokenizer, messages) for messages in conversations]
        at_end = self._tokenizer.init_kwargs.get(SCORED_AT_END)
        if not (at_end or getattr(self._tokenizer, "chat_template", None)):
            return self._encode_pairs(conversations)
        if at_end:
            encoder = ConversationEncoder(self._tokenizer, {}, last_turn_only=True)
            encoded = [self._up_to_end(encoder, [dict(message) for message in messages]) for messages in conversations]
        else:
            # A template writes the special tokens itself.
            encoded = self._tokenizer(self._render(conversations), add_special_tokens=False)["input_ids"]
        return [ids if self._max_tokens is None else ids[-self._max_tokens :] for ids in encoded]

    def _up_to_end(self, encoder: ConversationEncoder, messages: Messages) -> list[int]:
        """Return the token ids up to the end of the answer.

        An answer that the template would reject in training is encoded, too: every answer of a policy is scored.
        """
        if messages[-1].get("role") != "assistant":
            raise ValueError(
                f"the last message has the role {messages[-1].get('role')}, but the model scores only the assistant's"
            )
        try:
            return ids_up_to_answer(encoder.rows(messages)[0])
        except ValueError:  # the template changes the answer: it is scored as rendered
            ids = self._tokenizer(self._render([messages]), add_special_tokens=False)["input_ids"][0]
            return ids[: encoder.sampled_length(ids)]

    def _encode_pairs(self, conversations: Sequence[Sequence[Any]]) -> list[list[int]]:
        contents = [[str(message["content"]) for message in messages] for messages in conversations]
        encoded = self._tokenizer(["\n".join(texts[:-1]) for texts in contents], [texts[-1] for texts in contents])
        rows = list(encoded["input_ids"])
        for row, ids in enumerate(rows):
            excess = 0 if self._max_tokens is None else len(ids) - self._max_tokens
            if excess > 0:
                # Drop tokens of the prompt first, then of the answer; special tokens (owner None) are kept.
                owners = encoded.sequence_ids(row)
                removable = [at for part in (0, 1) for at, owner in enumerate(owners) if owner == part]
                dropped = set(removable[:excess])
                rows[row] = [token for at, token in enumerate(ids) if at not in dropped]
        return rows

    def _render(self, conversations: Sequence[Sequence[Any]]) -> list[str]:
        try:
            return self._tokenizer.apply_chat_template([list(messages) for messages in conversations], tokenize=False)
        except Exception as cause:  # a template is a program: it may raise anything
            roles = sorted({", ".join(str(message.get("role")) for message in messages) for messages in conversations})
            raise ValueError(
                f"the chat template rejects a conversation ({type(cause).__name__}: {cause}; roles:"
                f" {' | '.join(roles)})"
            ) from cause


def _renderable_messages(tokenizer: Any, messages: Sequence[Message]) -> list[Message]:
    """The messages with tool calls and tool results in a form that the tokenizer's chat template renders.

    If the template rejects or omits them, calls become text of the assistant message, and results a user message.
    """
    if not any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        return list(messages)
    if getattr(tokenizer, "chat_template", None):
        for convert in (_parse_if_json, _as_json):
            probe = _try_render(tokenizer, _convert_tool_calls(_PROBE, convert))
            if not all(word in probe for word in (_NAME, _ARGUMENT, _RESULT)):
                continue
            converted = _convert_tool_calls(messages, convert)
            if _try_render(tokenizer, converted):
                return converted
    return _as_text(messages)


def _try_render(tokenizer: Any, messages: Sequence[Message]) -> str:
    """The rendered text; "" if the template rejects the messages."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False))
    except Exception:  # noqa: BLE001 - a template is a program: it may raise anything
        return ""


def _convert_tool_calls(messages: Sequence[Message], convert: Callable[[Any], Any]) -> list[Message]:
    return [
        {**message, "tool_calls": [_convert_arguments(call, convert) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _convert_arguments(call: Message, convert: Callable[[Any], Any]) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": convert(function["arguments"])}}


def _parse_if_json(arguments: Any) -> Any:
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_text(messages: Sequence[Message]) -> list[Message]:
    """Calls and results as text; consecutive results become one user message."""
    converted: list[dict[str, Any]] = []
    after_tool = False
    for message in messages:
        is_tool, content = message["role"] == "tool", str(message.get("content") or "")
        if is_tool:
            content = f"<tool_response>\n{content}\n</tool_response>"
        for call in message.get("tool_calls") or ():
            function = {"name": call["function"]["name"], "arguments": _parse_if_json(call["function"]["arguments"])}
            call_text = f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
            content = f"{content}\n{call_text}" if content else call_text
        if is_tool and after_tool:
            converted[-1]["content"] += f"\n{content}"
        else:
            converted.append({"role": "user" if is_tool else message["role"], "content": content})
        after_tool = is_tool
    return list(converted)
