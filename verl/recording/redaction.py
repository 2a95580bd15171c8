"""Redaction: replace matches of the patterns in `trainer.record.redact` before anything is written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["REPLACEMENT", "Redaction"]

REPLACEMENT = "[redacted]"


class Redaction:
    """Replaces every match of these regular expressions by `[redacted]`."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def text(self, text: str) -> str:
        """Return the text with all matches replaced."""
        for pattern in self._patterns:
            text = pattern.sub(REPLACEMENT, text)
        return text

    def value(self, value: Any) -> Any:
        """Return nested dicts and lists with all matches in their texts and keys replaced."""
        if not self._patterns:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value
