"""Search-R1's protocol (Jin et al., arXiv 2503.09516): what a turn asks for, and what it is told, in tokens.

A model thinks, asks with `<search> query </search>` and is told between information tags, until it gives its
`<answer>`. What it is told is tokenised once, by itself, and appended.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from verl.search.retriever import Hit
from verl.search.searcher import as_information
from verl.utils.text_workers import max_characters

__all__ = ["INVALID", "STOPS", "Action", "Information", "parse_action"]

STOPS = ("</search>", "</answer>")
INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I "
    "want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
FAILED = "The search failed. Answer without it, or try again."
NOTHING = "Nothing was found."
_OPENING = re.compile(r"<(search|answer)>")


class Action(NamedTuple):
    """What a turn does: a query, an answer, or neither."""

    kind: Literal["search", "answer", "invalid"]
    content: str = ""


def parse_action(text: str) -> Action:
    """The first whole action of a turn's text. An empty query asks for nothing."""
    last = {kind: text.rfind(f"</{kind}>") for kind in ("search", "answer")}
    # The first opening that is closed anywhere behind it: each end is looked up once, whatever the text.
    opening = next((mark for mark in _OPENING.finditer(text) if mark.end() <= last[mark[1]]), None)
    if opening is None:
        return Action("invalid")
    content = text[opening.end() : text.find(f"</{opening[1]}>", opening.end())].strip()
    if not content:
        return Action("invalid")
    return Action("search" if opening[1] == "search" else "answer", content)


@dataclass(frozen=True)
class Information:
    """How a model is told, in token ids. `most` bounds the ids of one turn, both markers included."""

    tokenizer: Any
    start: str
    end: str
    most: int

    def of(self, hits: Sequence[Hit]) -> list[int]:
        """Documents between the markers; what does not fit is cut off at their end."""
        return self.between(as_information(hits).rstrip() or NOTHING)

    def failed(self) -> list[int]:
        """Nobody answered: the turn is lost, not the trajectory."""
        return self.between(FAILED)

    def invalid(self) -> list[int]:
        """The turn was neither a search nor an answer."""
        return self._ids(INVALID)[: self.most]

    def between(self, text: str) -> list[int]:
        """A text between the markers."""
        before, after = self._ids(f"\n\n{self.start}"), self._ids(f"{self.end}\n\n")
        room = max(0, self.most - len(before) - len(after))
        return [*before, *self._ids(text[: max_characters(self.tokenizer, room)])[:room], *after]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
