"""TextStream: incremental detokenisation without incomplete characters and without (parts of) stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["TextStream"]

# Written by decoders for an incomplete character.
_BROKEN = "\ufffd"


class TextStream:
    """The text of one response. `push` returns text that is final; the pieces add up to the whole text.

    `context` are the last tokens before the response: decoders drop the space in front of the first word they see.
    Special tokens are included only with `special`.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), context: Sequence[int] = (), special: bool = False
    ) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._stop = tuple(stop)
        self.stopped: str | None = None
        """The stop string that occurred: the text ends before it."""
        # Recent tokens; the text of those up to `_cut` is already emitted, and gives the decoder context.
        self._tokens = list(context)
        if self._decode(self._tokens).endswith(_BROKEN):
            self._tokens = []
        self._cut = len(self._tokens)
        self._pending = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        if not token_ids:
            return ""
        self._tokens.extend(token_ids)
        text = self._decode(self._tokens)
        return "" if text.endswith(_BROKEN) else self._emit(self._beyond_cut(text), last=False)

    def finish(self) -> str:
        """The text held back so far; call it once, at the end."""
        return self._emit(self._beyond_cut(self._decode(self._tokens)), last=True)

    def _beyond_cut(self, text: str) -> str:
        """The part of `text` (of all recent tokens) after the cut; moves the cut to its end."""
        known = len(self._decode(self._tokens[: self._cut]))
        del self._tokens[: self._cut]
        self._cut = len(self._tokens)
        return text[known:]

    def _emit(self, text: str, last: bool) -> str:
        if self.stopped:
            return ""
        self._pending += text
        found = [(place, stop) for stop in self._stop if (place := self._pending.find(stop)) >= 0]
        if found:
            place, self.stopped = min(found)
            return self._pending[:place]
        ready = len(self._pending) - (0 if last else self._begun_stop())
        text, self._pending = self._pending[:ready], self._pending[ready:]
        return text

    def _begun_stop(self) -> int:
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
