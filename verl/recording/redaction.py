"""Redaction: replace matches of the patterns in `trainer.record.redact` before anything is written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

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

    def value(self, value: Any, keys: bool = False) -> Any:
        """Return nested dicts and lists with all matches in their texts replaced; with `keys`, also in keys of dicts.

        Keys are part of users' data, but names of fields, metrics and configuration keys must not change.
        """
        if not self._patterns:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.value(key) if keys else key: self.value(item, keys) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item, keys) for item in value]
        return value
