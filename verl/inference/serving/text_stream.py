"""TextStream: incremental detokenisation without incomplete characters and without (parts of) stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["TextStream"]

# Decoders output this character for an incomplete one.
_REPLACEMENT = "\ufffd"


class TextStream:
    """Detokenises one response. `push` returns text that is final; the concatenated pieces are the whole text.

    `context`: the last tokens before the response; decoders drop the space in front of the first word of a text.
    `special`: include special tokens.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), context: Sequence[int] = (), special: bool = False
    ) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._stop = tuple(stop)
        self.stopped: str | None = None
        """The stop string that occurred: the text ends before it."""
        # Recent tokens. The text of the first `_num_emitted` is already emitted; they are context for the decoder.
        self._tokens = list(context)
        if self._decode(self._tokens).endswith(_REPLACEMENT):
            self._tokens = []
        self._num_emitted = len(self._tokens)
        self._pending = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that is final now."""
        if not token_ids:
            return ""
        self._tokens.extend(token_ids)
        text = self._decode(self._tokens)
        return "" if text.endswith(_REPLACEMENT) else self._emit(self._new_text(text), last=False)

    def finish(self) -> str:
        """Return the text that was held back. Call it once, after the last token."""
        return self._emit(self._new_text(self._decode(self._tokens)), last=True)

    def _new_text(self, text: str) -> str:
        """The part of `text` (of all recent tokens) that is not emitted yet; marks all of it as emitted."""
        emitted = len(self._decode(self._tokens[: self._num_emitted]))
        del self._tokens[: self._num_emitted]
        self._num_emitted = len(self._tokens)
        return text[emitted:]

    def _emit(self, text: str, last: bool) -> str:
        if self.stopped:
            return ""
        self._pending += text
        matches = [(index, stop) for stop in self._stop if (index := self._pending.find(stop)) >= 0]
        if matches:
            index, self.stopped = min(matches)
            return self._pending[:index]
        ready = len(self._pending) - (0 if last else self._partial_stop_length())
        text, self._pending = self._pending[:ready], self._pending[ready:]
        return text

    def _partial_stop_length(self) -> int:
        """Number of characters at the end that may begin a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for count in range(min(longest, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-count:]) for stop in self._stop):
                return count
        return 0

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=not self._special, clean_up_tokenization_spaces=False
        )
