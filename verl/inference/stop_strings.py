"""Stop strings on token ids: found at the token that completes one, also when it spans tokens or splits a character."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["StopStrings"]

# What a decoder writes for bytes that are no whole character.
_BROKEN = "\ufffd"
# A token that stands for one byte: a run of them is decoded as a whole, or not at all where it is no text.
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class StopStrings:
    """Looks for some strings in generated text. Holds nothing of a sequence: one object serves all with these strings.

    Most tokens cannot complete a string, since they do not hold its last character; that is looked up. Only for the
    others the last few tokens are decoded.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        # A token is a byte at least. One token more in front: decoders treat the first one of a text differently.
        self._window = max(len(text.encode()) for text in stop) + 1
        self._may_complete: dict[int, bool] = {}
        self._byte: dict[int, bool] = {}

    def completed_by_last(self, token_ids: list[int]) -> bool:
        """Whether the last of the generated `token_ids` completes one of the strings."""
        last = token_ids[-1]
        possible = self._may_complete.get(last)
        if possible is None:
            possible = self._may_complete[last] = self._holds_an_end(last)
        if not possible:
            return False
        start = max(0, len(token_ids) - self._window)
        while start and self._is_byte(token_ids[start]):
            start -= 1
        window = token_ids[start:]
        text = self._decode(window)
        if not any(stop in text for stop in self._stop):
            return False
        # One that was there before (when the answer was still too short to end) is not completed now.
        before = self._decode(window[:-1])
        return any(text.rfind(stop) > before.rfind(stop) for stop in self._stop)

    def _holds_an_end(self, token: int) -> bool:
        text = self._decode([token])
        if _BROKEN in text:
            return True
        # A space at a token's edge may be missing when it is decoded alone.
        return any(stop[-1] in text or stop[-1].isspace() for stop in self._stop)

    def _is_byte(self, token: int) -> bool:
        found = self._byte.get(token)
        if found is None:
            name = self._tokenizer.convert_ids_to_tokens(token)
            found = self._byte[token] = isinstance(name, str) and _BYTE.fullmatch(name) is not None
        return found

    def _decode(self, token_ids: list[int]) -> str:
        # Special tokens count: their text may be the string that ends an answer.
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
