"""gpt-oss (harmony): a message with a recipient, <|channel|>commentary to=functions.name<|message|>{…}<|call|>."""

from __future__ import annotations

import re

from verl.utils.tool_calls.call import Schemas, ToolCall, call_of

__all__ = ["OpenAIParser"]

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END = re.compile(r"<\|(?:end|call|return)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class OpenAIParser:
    def parse(self, text: str, schemas: Schemas = ()) -> tuple[str, list[ToolCall]]:
        """Said is what is not thought: the analysis channel is left out."""
        said, calls = [], []
        for message in text.split(_START):
            head, found, rest = message.partition(_MESSAGE)
            body = _END.split(rest if found else head, maxsplit=1)[0]
            recipient = _RECIPIENT.search(head) if found else None
            if recipient is not None:
                calls.append(call_of(recipient.group(1).removeprefix("functions."), body))
            elif not head.partition(_CHANNEL)[2].startswith("analysis"):
                said.append(body)
        return "".join(said), calls
